"""Code that two ranks run to test the probe of packed rows; it imports no trainer."""

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.adapters.context_models import SMALL, documents, taken_gradients, tiny
from wlb.adapters.collate import PaddedCollator, PaddingFreeCollator
from wlb.adapters.probe import check_documents_apart
from wlb.parallel.world import World
from wlb.plan import UserError


def wrapped(model: Any, how: str) -> Any:
    if how == "DDP":
        return DistributedDataParallel(model)
    for layer in model.get_decoder().layers:
        fully_shard(layer)
    return fully_shard(model)


def leaking() -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    options = {"num_local_experts": 4, "layer_types": ["full_attention"] * 2, "use_cache": False}
    config = CONFIG_MAPPING["gpt_oss"](**{**SMALL, **options})
    return AutoModelForCausalLM.from_config(config)


def step(model: Any) -> dict[str, Any]:
    """Runs forward and backward on one packed row and returns the gradients."""
    model(**PaddingFreeCollator()(documents((5, 9, 3)))).loss.backward()
    found: dict[str, Any] = taken_gradients(model)
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def asked(world: World) -> tuple[list[str], bool]:
    """Probes models under DDP and FSDP2 that separate packed documents, and models that do not.

    Rank 0 has a padded batch and rank 1 a packed one. Rank 0 must still take part in the probe's
    forward passes.

    Returns:
        The error message of each model, "" if the probe accepts it; and whether gradients after the
        probe equal those of a model that was not probed.
    """
    rows = documents((6, 7), seed=world.rank)
    collator = PaddingFreeCollator() if world.rank else PaddedCollator(pad_token_id=0)
    said, same = [], True
    for how in ("DDP", "FSDP2"):
        for make in (lambda: tiny("llama", use_cache=False), leaking):
            model = wrapped(make(), how).train()
            try:
                check_documents_apart(model, collator(rows))
            except UserError as error:
                said.append(str(error))
                continue
            said.append("")
            expected = step(wrapped(make(), how).train())
            found = step(model)
            same &= all(torch.equal(found[name], expected[name]) for name in expected)
    return said, same
