"""Converts weights of transformers' gated delta nets to wlb's names and shapes."""

from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from wlb.model import Ops, initial_weight
from wlb.model.delta_net import GatedDeltaNet
from wlb.spec import LinearSpec, ModelSpec

SPEC = ModelSpec(
    hidden_size=32,
    norm_eps=1e-6,
    full_every=4,
    linear=LinearSpec(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=12),
)
SHAPE = SPEC.linear
FAMILIES = {"qwen3_next": "Qwen3NextGatedDeltaNet", "qwen3_5_text": "Qwen3_5GatedDeltaNet"}


def theirs(family: str) -> torch.nn.Module:
    """Returns a layer of transformers with all weights moved away from their initial values."""
    config = CONFIG_MAPPING[family](
        hidden_size=SPEC.hidden_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=SHAPE.num_key_heads,
        linear_num_value_heads=SHAPE.num_value_heads,
        linear_key_head_dim=SHAPE.key_head_dim,
        linear_value_head_dim=SHAPE.value_head_dim,
        linear_conv_kernel_dim=SHAPE.conv_kernel_dim,
    )
    module = f"transformers.models.{family.removesuffix('_text')}"
    torch.manual_seed(1)
    made = getattr(_modeling(module), FAMILIES[family])(config, 0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def _modeling(module: str) -> Any:
    import importlib

    return importlib.import_module(f"{module}.modeling_{module.rsplit('.', 1)[1]}")


def ours_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts weights of a transformers layer to ours, by name.

    Each of ours is a part of one of theirs, so gradients can be converted in the same way.
    """
    s = SHAPE
    conv = tensors["conv1d.weight"][:, 0].split([s.key_dim, s.key_dim, s.value_dim])
    out = dict(zip(("q_conv", "k_conv", "v_conv"), conv, strict=True))
    out |= {name: tensors[name] for name in ("A_log", "dt_bias")}
    out |= {"norm.weight": tensors["norm.weight"], "o_proj.weight": tensors["out_proj.weight"]}
    if "in_proj_qkv.weight" in tensors:
        parts = tensors["in_proj_qkv.weight"].split([s.key_dim, s.key_dim, s.value_dim])
        out |= dict(zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), parts, strict=True))
        return out | {f"{x}_proj.weight": tensors[f"in_proj_{x}.weight"] for x in "zba"}
    # Qwen3-Next stores q, k, v and z of each key head together, and b and a of its value heads.
    group = s.num_value_heads // s.num_key_heads
    by_head = tensors["in_proj_qkvz.weight"].view(s.num_key_heads, -1, SPEC.hidden_size)
    sizes = [s.key_head_dim, s.key_head_dim, group * s.value_head_dim, group * s.value_head_dim]
    for name, part in zip("qkvz", by_head.split(sizes, 1), strict=True):
        out[f"{name}_proj.weight"] = part.reshape(-1, SPEC.hidden_size)
    by_head = tensors["in_proj_ba.weight"].view(s.num_key_heads, -1, SPEC.hidden_size)
    for name, part in zip("ba", by_head.split([group, group], 1), strict=True):
        out[f"{name}_proj.weight"] = part.reshape(-1, SPEC.hidden_size)
    return out


def fresh(spec: ModelSpec = SPEC) -> GatedDeltaNet:
    """Returns a layer with wlb's initial weights, but projections ten times as large."""
    layer = GatedDeltaNet(spec, Ops())
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = initial_weight(f"linear_attn.{name}", parameter.shape, spec, seed=0)
            parameter.copy_(value * 10 if name.endswith("proj.weight") else value)
    return layer
