"""Tests the step clock on CUDA events: it sees every chunk and does not wait for the device."""

import pytest
import torch

from tests.parity.case import Case, Reader, packing, pipeline_plan, spec_of
from wlb.launch.local import run_local
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.observe import Part, Pass
from wlb.parallel.world import World
from wlb.train.telemetry.clock import EventMarks, StepClock

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU: none here"),
]


def chunk(clock: StepClock, x: torch.Tensor, repeat: int) -> None:
    with clock.step(), clock.chunk(Pass.FORWARD, stage=0, micro_batch=0):
        for _ in range(repeat):
            x = x @ x
        with clock.attention(is_backward=False):
            x.sin()


def test_events_are_recorded_without_a_wait_and_used_again() -> None:
    clock = StepClock(EventMarks())
    x = torch.eye(2048, device="cuda")
    chunk(clock, x, 1)  # makes the events
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk(clock, x, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    times = clock.take()
    assert times.total_ns(Part.LAYERS) > times.total_ns(Part.ATTENTION) > 0
    assert times.compute_ns <= times.wall_ns


def one_rank(world: World) -> dict[str, int]:
    spec = spec_of(Case(head_dim=16))
    mesh = build_mesh(spec.parallel, torch.device("cuda", 0))
    clock = StepClock.of(mesh.device)
    executor = Executor(spec, mesh, timer=clock)
    plan = pipeline_plan(packing(4), spec, 0, "per_document")
    for _ in range(2):
        executor.train_step(plan, Reader(), loss_scale=1.0)
    torch.cuda.synchronize()
    times = clock.take()
    return {str(part): times.total_ns(part) for part in Part} | {"wall": times.wall_ns}


def test_backward_in_autograds_thread_is_timed_too() -> None:
    (found,) = run_local(one_rank, 1, device="cuda", start_group=True, timeout_s=600)
    assert found.pop("recompute") == 0
    wall = found.pop("wall")
    assert all(ns > 0 for ns in found.values())
    assert sum(found.values()) <= wall * 1.01  # events have a resolution of half a microsecond
