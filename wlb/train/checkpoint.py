"""Checkpoints by torch.distributed.checkpoint: weights, optimiser, planner state, configuration.

A checkpoint is a folder `step-00000030` with DCP's files, `planner.json` (the state after the last
EXECUTED step: outlier queues, leftovers, read position; valid for another layout) and `run.json`.
It is written under another name and renamed when complete, so a crash never leaves a half one.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from wlb.model import Llama
from wlb.plan import PlannerState
from wlb.spec import RunSpec
from wlb.train.optimizer import Optimizers

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in directory.glob("step-*") if p.name[5:].isdigit())


def latest(directory: Path) -> Path:
    """The newest checkpoint; ValueError naming the folder where there is none."""
    found = complete(directory)
    if not found:
        raise ValueError(
            f"--resume: no checkpoint in {directory}; start without --resume, or set run.name and "
            f"run.output_dir to the run that is to go on"
        )
    return found[-1]


def to_begin_with(path: str) -> Path:
    """The checkpoint that `checkpoint.init_from` names: a checkpoint's folder or a run's newest."""
    folder = Path(path)
    if (folder / "run.json").is_file():
        return folder
    found = complete(folder / "checkpoints")
    if not found:
        raise ValueError(
            f"checkpoint.init_from = {path} is neither a checkpoint (a folder with run.json) nor a "
            f"run with checkpoints in it"
        )
    return found[-1]


def planner_state(checkpoint: Path) -> PlannerState:
    """Where planning goes on; data that had ended is asked again, as epochs may be more now."""
    text = (checkpoint / "planner.json").read_text("utf-8")
    return replace(PlannerState.from_json(json.loads(text)), exhausted=False)


def save(
    directory: Path,
    *,
    step: int,
    spec: RunSpec,
    stages: dict[int, Llama],
    optimizers: Optimizers,
    state: PlannerState,
) -> Path:
    """Save after `step` executed steps and drop old checkpoints; all ranks must call it."""
    final = folder_of(directory, step)
    partial = directory / f"partial-{step:08d}"
    is_writer = dist.get_rank() == 0
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state_dict_saver.save(_state_dict(stages, optimizers), checkpoint_id=partial)
    if is_writer:
        _write(partial / "planner.json", state.to_json())
        _write(partial / "run.json", {"step": step, "spec": spec.to_dict()})
        replaced = directory / f"replaced-{step:08d}"
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in complete(directory)[: -spec.checkpoint.keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load(checkpoint: Path, *, stages: dict[int, Llama], optimizers: Optimizers) -> int:
    """Load weights and optimiser state in place, from any layout; the number of executed steps."""
    state = _state_dict(stages, optimizers)
    state_dict_loader.load(state, checkpoint_id=checkpoint)
    _set_weights(stages, state["model"])
    for index, stage in stages.items():
        names = [name for name, _ in stage.named_parameters()]
        prefixes = tuple(f"{kind}.{n}." for n in names for kind in ("state", "param_groups"))
        own = {k: v for k, v in state["optimizer"].items() if k.startswith(prefixes)}
        set_optimizer_state_dict(stage, optimizers.by_stage[index], own, options=_FLAT)
    optimizers.configure()  # not the checkpoint's: --set on resume counts
    return int(json.loads((checkpoint / "run.json").read_text("utf-8"))["step"])


def load_weights(checkpoint: Path, *, stages: dict[int, Llama]) -> None:
    """Load weights alone, in place, from any layout; all ranks must call it."""
    model: dict[str, Any] = {}
    for stage in stages.values():
        model |= get_model_state_dict(stage)
    state_dict_loader.load({"model": model}, checkpoint_id=checkpoint)
    _set_weights(stages, model)


def _set_weights(stages: dict[int, Llama], weights: dict[str, Any]) -> None:
    for stage in stages.values():
        names = [name for name, _ in stage.named_parameters()]
        set_model_state_dict(stage, {n: weights[n] for n in names})


def _state_dict(stages: dict[int, Llama], optimizers: Optimizers) -> dict[str, dict[str, Any]]:
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for index, stage in stages.items():
        model |= get_model_state_dict(stage)
        optimizer |= get_optimizer_state_dict(stage, optimizers.by_stage[index], options=_FLAT)
    return {"model": model, "optimizer": optimizer}


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, default=_plain), "utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    raise TypeError(f"cannot write {type(value)} as JSON")
