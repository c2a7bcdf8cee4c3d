"""Trains runs whose attention kernel is slowed down, on all ranks or on one.

Tests of calibration and of stragglers use them.
"""

import time
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.train.case import job_of
from wlb.kernels import BACKENDS, Backend
from wlb.launch.local import run_local
from wlb.parallel.world import World
from wlb.spec import RunSpec
from wlb.train import start
from wlb.train.job import Job
from wlb.train.telemetry.calibrate import profile_path


@dataclass(frozen=True)
class Slowed:
    """An attention backend whose forward pass is slowed down."""

    inner: Backend  # the backend that computes
    factor: float  # CPU time of forward over the inner backend's

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def takes_key_rows(self) -> bool:
        return self.inner.takes_key_rows

    def forward(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        begin = time.thread_time_ns()
        out = self.inner.forward(*arguments)
        end = begin + self.factor * (time.thread_time_ns() - begin)
        while time.thread_time_ns() < end:
            pass
        return out

    def backward(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.inner.backward(*arguments)


def slowed_rank(world: World, job: Job, factor: float) -> None:
    BACKENDS["sdpa"] = Slowed(BACKENDS["sdpa"], factor)
    start.local_rank(world, job, "cpu")


def one_slowed_rank(world: World, job: Job, factor: float, rank: int, log: Path) -> None:
    if world.rank == rank:
        BACKENDS["sdpa"] = Slowed(BACKENDS["sdpa"], factor)
    with log.open("a", encoding="utf-8") as file, redirect_stdout(file):
        start.local_rank(world, job, "cpu")


def run_with_one_slow_rank(spec: RunSpec, *, factor: float, rank: int, log: Path) -> None:
    """Trains a run on local ranks, of which one is slow.

    Args:
        spec: The run.
        factor: Factor of the CPU time of attention's forward pass on the slow rank.
        rank: The slow rank.
        log: File for the output of all ranks.
    """
    world_size = spec.parallel.world_size
    run_local(one_slowed_rank, world_size, job_of(spec), factor, rank, log, timeout_s=600)


def calibrated(spec: RunSpec, *, name: str, factor: float = 1.0) -> Path:
    """Calibrates a profile on a run whose attention's forward is slower by `factor`.

    Returns the path of the profile.
    """
    spec = replace(spec, run=replace(spec.run, name=name))
    made = profile_path(name, priced_by="", folder=Path(spec.run.output_dir))
    job = replace(job_of(spec), calibrate=made)
    run_local(slowed_rank, spec.parallel.world_size, job, factor, timeout_s=600)
    return made
