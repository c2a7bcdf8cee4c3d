"""Shared by tests of weights: small models, their logits, and Hugging Face folders."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from wlb.model import Llama, build_reference, capped, local_rows
from wlb.spec import ModelSpec, RopeScaling, apply
from wlb.train.checkpoint import saver
from wlb.weights.config import config_json

SPEC = ModelSpec(
    vocab_size=301,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    ffn_hidden_size=48,
    norm_eps=1e-6,
    init_std=0.1,
    rope_theta=5000.0,
    rope_scaling=RopeScaling(factor=8.0, turns=(1.0, 4.0), original_context=64),
)


def some_tokens(num: int, vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (num,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Llama, tokens_T: Tensor) -> Tensor:
    """Returns the float32 logits of one document without vocabulary padding, shape [T, V]."""
    rows = local_rows(model.spec, [0, tokens_T.shape[0]])
    found = (model.model(tokens_T, rows) @ model.head.weight.T)[:, : model.spec.vocab_size]
    return capped(found, model.spec.logit_softcap)


def model_of(folder: Path) -> Llama:
    """Loads the model of a checkpoint in this process, by the code that training runs use."""
    run = json.loads((folder / "run.json").read_text("utf-8"))
    model = Llama(apply(ModelSpec(), run["spec"]["model"], source=str(folder)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        saver.load_weights(folder, None, stages={0: model})
    return model


def hub_tensors(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns the tensors of a random model with Hugging Face's names and shapes."""
    found: dict[str, Tensor] = {}
    for name, value in build_reference(spec, dtype=dtype).named_parameters():
        has_vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
        found[name] = (value[: spec.vocab_size] if has_vocabulary else value).detach().clone()
    return found


def write_hub(
    folder: Path, *, spec: ModelSpec = SPEC, tensors: dict[str, Tensor] | None = None, **config: Any
) -> Path:
    """Writes a Hugging Face folder with one file of weights.

    Args:
        folder: Folder to make.
        spec: The model.
        tensors: Its weights. Defaults to random ones.
        **config: Overrides of config.json; the value ... removes a key.
    """
    folder.mkdir(parents=True)
    values = hub_tensors(spec) if tensors is None else tensors
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    made = config_json(spec, max_positions=512, bos_id=None, eos_ids=(), dtype="float32") | config
    kept = {name: value for name, value in made.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept), "utf-8")
    return folder
