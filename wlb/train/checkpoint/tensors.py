"""Collects the tensors that a rank saves, copies them to host memory, and restores them.

Tensors have these names in a checkpoint's files: `model.<name>` for weights,
`optimizer.state.<name>.<moment>` for the optimiser, and `rng.<rank>.<device>` for the states of
random generators.
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

Stages = dict[int, Llama]  # this rank's parts of the model, by stage number


def weights(stages: Stages) -> dict[str, Any]:
    """Return this rank's weights, by the names of `all_tensors`. Sharded weights are DTensors."""
    return {
        f"model.{name}": tensor
        for stage in stages.values()
        for name, tensor in state_dict.get_model_state_dict(stage).items()
    }


def all_tensors(stages: Stages, optimizers: Optimizers) -> dict[str, Any]:
    """Return this rank's weights and its optimisers' moments, by name.

    The names are those in checkpoint files, except that a tied output head has a name of its own
    (`_by_file_names`). Hyper-parameters of the optimisers are left out.
    """
    out = weights(stages)
    for index, stage in stages.items():
        state = state_dict.get_optimizer_state_dict(
            stage, optimizers.by_stage[index], options=_FLAT
        )
        out |= {f"optimizer.{n}": t for n, t in state.items() if n.startswith(_STATE)}
    return out


def _has_copy(stages: Stages) -> bool:
    """Return whether this rank has an output head that is a copy of another rank's embedding.

    The last stage has such a copy if embeddings are tied and the first stage is on another rank
    (`wlb.parallel.tied`).
    """
    return any(s.spec.tied_embeddings and s.lm_head is not None for s in stages.values())


def without_copies(stages: Stages, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return those of this rank's tensors that this rank saves.

    An output head that is a copy of the embedding is left out, because the rank that has the
    embedding saves it.

    Args:
        stages: This rank's parts of the model, by stage number.
        tensors: All tensors of this rank, by name (`all_tensors`).
    """
    if not _has_copy(stages):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if HEAD not in name}


def _by_file_names(stages: Stages, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's tensors by their names in checkpoint files.

    If this rank's output head is a copy of the embedding, it gets the embedding's name, because
    files have only the embedding. `tensors` has the names of `all_tensors`.
    """
    if not _has_copy(stages):
        return tensors
    return {name.replace(HEAD, EMBEDDING): tensor for name, tensor in tensors.items()}


def tensors_to_read(saved_in: Path, stages: Stages, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors to read from a checkpoint, by their names in its files.

    If the checkpoint was saved with another `model.experts.balance`, the tensors that balance the
    load of experts are left out. They keep their initial values.

    Args:
        saved_in: The checkpoint.
        stages: This rank's parts of the model, by stage number.
        tensors: This rank's tensors, by the names of `all_tensors`. They are returned as they are,
            so that reading overwrites their values.
    """
    named = _by_file_names(stages, tensors)
    saved = checkpoint.read_run(saved_in)["spec"]["model"].get("experts", {}).get("balance")
    if all(stage.spec.experts.balance == saved for stage in stages.values()):
        return named
    return {name: tensor for name, tensor in named.items() if not name.endswith(BALANCE)}


def set_weights(stages: Stages, tensors: dict[str, Any]) -> None:
    """Set this rank's weights and buffers from `tensors`, which have the names of `all_tensors`."""
    for stage in stages.values():
        names = [name for name, _ in (*stage.named_parameters(), *stage.named_buffers())]
        state_dict.set_model_state_dict(stage, {n: tensors[f"model.{n}"] for n in names})


def set_optimizers(stages: Stages, optimizers: Optimizers, tensors: dict[str, Any]) -> None:
    """Set the moments of this rank's optimisers from `tensors` (names of `all_tensors`)."""
    for index, stage in stages.items():
        optimizer = optimizers.by_stage[index]
        state = state_dict.get_optimizer_state_dict(stage, optimizer, options=_FLAT)
        state |= {n: tensors[f"optimizer.{n}"] for n in state if n.startswith(_STATE)}
        state_dict.set_optimizer_state_dict(stage, optimizer, state, options=_FLAT)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor to host memory. For a DTensor, only its local part is copied.

    From a GPU, torch copies asynchronously to pinned memory, in the current stream. So the caller
    must wait for the stream before it reads the copy. Kernels that are submitted to the stream
    later may overwrite the tensor. torch keeps the pinned memory for the next save, and rounds the
    size of each tensor up to a power of two. Runs on one H100 and on one H200 were saved
    and resumed with it.

    torch.distributed.checkpoint's own stagers are not used, because they call deepcopy, which
    FSDP's parameters do not support. `DTensor.to` is not used, because its first call for each
    placement takes 2 ms.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True, non_blocking=True)
    local = tensor._local_tensor.detach().to("cpu", copy=True, non_blocking=True)
    return DTensor(local, tensor._spec, requires_grad=False)


def rng_states(rank: int) -> dict[str, torch.Tensor]:
    """Return the states of this rank's random generators, by their names in a checkpoint."""
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng(states: dict[str, torch.Tensor], rank: int) -> None:
    """Restore this rank's random generators from `states`, which `rng_states` returned.

    A device's generator is left unchanged if it has no saved state.
    """
    for device, set_state in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if f"rng.{rank}.{device}" in states:
            set_state(states[f"rng.{rank}.{device}"])
