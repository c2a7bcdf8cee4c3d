"""Provides runs whose attention kernel is slower than it was, on all ranks or on one.

Tests of calibration and of stragglers use it.
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
    """Slows `inner`: its forward pass takes `factor` times the CPU time."""

    inner: Backend
    factor: float

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
    """Trains `spec` on local ranks, one of which is slow.

    Attention's forward pass takes `factor` times its CPU time on `rank`.

    log: a file for what they say
    """
    world_size = spec.parallel.world_size
    run_local(one_slowed_rank, world_size, job_of(spec), factor, rank, log, timeout_s=600)


def calibrated(spec: RunSpec, *, name: str, factor: float = 1.0) -> Path:
    """Returns the profile that a run of `spec` wrote, its attention's forward slowed by
    `factor`.
    """
    spec = replace(spec, run=replace(spec.run, name=name))
    made = profile_path(name, priced_by="", folder=Path(spec.run.output_dir))
    job = replace(job_of(spec), calibrate=made)
    run_local(slowed_rank, spec.parallel.world_size, job, factor, timeout_s=600)
    return made
