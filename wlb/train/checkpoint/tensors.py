"""The tensors of a rank's checkpoint files: gathered, copied to the host, and put back.

Weights are named `model.<name>`, the optimiser's state `optimizer.state.<name>.<moment>`, states of
random generators `rng.<rank>.<device>`.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor

from wlb.model import Llama
from wlb.model.expert_layer import BALANCE
from wlb.model.llama import EMBEDDING, HEAD
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.optimizer import Optimizers

_FLAT = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
_STATE = "state."

Stages = dict[int, Llama]


def weights(stages: Stages) -> dict[str, Any]:
    """Return `model.<name>` of this rank's stages, shards as DTensors."""
    return {
        f"model.{name}": tensor
        for stage in stages.values()
        for name, tensor in state_dict.get_model_state_dict(stage).items()
    }


def all_tensors(stages: Stages, optimizers: Optimizers) -> dict[str, Any]:
    """Return weights and `optimizer.state.<name>.<moment>`, without hyper-parameters."""
    out = weights(stages)
    for index, stage in stages.items():
        state = state_dict.get_optimizer_state_dict(
            stage, optimizers.by_stage[index], options=_FLAT
        )
        out |= {f"optimizer.{n}": t for n, t in state.items() if n.startswith(_STATE)}
    return out


def _has_copy(stages: Stages) -> bool:
    """Whether the head here is a copy of another rank's embedding (`wlb.parallel.tied`)."""
    return any(s.spec.tied_embeddings and s.lm_head is not None for s in stages.values())


def without_copies(stages: Stages, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors to save: a tied head is saved once, as the embedding."""
    if not _has_copy(stages):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if HEAD not in name}


def _by_file_names(stages: Stages, tensors: dict[str, Any]) -> dict[str, Any]:
    """The same tensors by the names that they have in files: a tied head's is the embedding's."""
    if not _has_copy(stages):
        return tensors
    return {name.replace(HEAD, EMBEDDING): tensor for name, tensor in tensors.items()}


def asked_of(saved_in: Path, stages: Stages, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors to read from a checkpoint, by their names there. The state of experts' balance is
    left out, and begins anew, if the checkpoint has another `model.experts.balance`.
    """
    named = _by_file_names(stages, tensors)
    saved = checkpoint.read_run(saved_in)["spec"]["model"].get("experts", {}).get("balance")
    if all(stage.spec.experts.balance == saved for stage in stages.values()):
        return named
    return {name: tensor for name, tensor in named.items() if not name.endswith(BALANCE)}


def set_weights(stages: Stages, tensors: dict[str, Any]) -> None:
    for stage in stages.values():
        names = [name for name, _ in (*stage.named_parameters(), *stage.named_buffers())]
        state_dict.set_model_state_dict(stage, {n: tensors[f"model.{n}"] for n in names})


def set_optimizers(stages: Stages, optimizers: Optimizers, tensors: dict[str, Any]) -> None:
    for index, stage in stages.items():
        optimizer = optimizers.by_stage[index]
        state = state_dict.get_optimizer_state_dict(stage, optimizer, options=_FLAT)
        state |= {n: tensors[f"optimizer.{n}"] for n in state if n.startswith(_STATE)}
        state_dict.set_optimizer_state_dict(stage, optimizer, state, options=_FLAT)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying to the host, of a DTensor its local part: the first `to` of each kind of
    DTensor takes 2 ms, and torch's stagers deepcopy, which FSDP's parameters do not support.

    From a GPU torch copies to pinned memory, and the copy is complete once the current stream has
    reached it; later work of the stream may overwrite the tensor. torch keeps pinned memory for the
    next save and rounds each tensor's up to a power of two. It has not run on a GPU.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True, non_blocking=True)
    local = tensor._local_tensor.detach().to("cpu", copy=True, non_blocking=True)
    return DTensor(local, tensor._spec, requires_grad=False)


def rng_states(rank: int) -> dict[str, torch.Tensor]:
    """Return the states of this rank's generators, uint8."""
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng(states: dict[str, torch.Tensor], rank: int) -> None:
    for device, set_state in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if f"rng.{rank}.{device}" in states:
            set_state(states[f"rng.{rank}.{device}"])
