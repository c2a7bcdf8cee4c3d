"""Tests inputs loaded ahead: the same as those loaded when due, failures, waits counted."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity.case import Case, Reader, packing, pipeline_plan, spec_of
from wlb.launch.local import run_local
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World, rank_device
from wlb.train.prefetch import InputPrefetcher

pytestmark = pytest.mark.process


class Slow:
    """Stands in an executor's place: loading takes `seconds` of the clock that it sets."""

    def __init__(self, seconds: float) -> None:
        self.mesh = SimpleNamespace(device=torch.device("cpu"))
        self.seconds, self.loaded = seconds, list[tuple[int, str]]()
        self.now_ns, self.all_loaded = 0, threading.Event()

    def load(self, plan: Any, reader: Any, *, loss_scale: float) -> Any:
        self.now_ns += round(self.seconds * 1e9)
        if plan.step == 13:
            raise ValueError("no such document")
        self.loaded.append((plan.step, threading.current_thread().name))
        if len(self.loaded) == 3:
            self.all_loaded.set()
        return SimpleNamespace(step=plan.step, tensors=[], loss_scale=loss_scale)


def plan(step: int) -> Any:
    return SimpleNamespace(step=step)


def test_what_was_loaded_ahead_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    executor: Any = Slow(0.1)
    clock = SimpleNamespace(perf_counter_ns=lambda: executor.now_ns)
    monkeypatch.setattr("wlb.train.prefetch.time", clock)
    monkeypatch.setattr("wlb.train.prefetch.STEPS_LOADED", 2)
    inputs = InputPrefetcher(executor, Reader())
    first: Any = inputs.take(plan(0), loss_scale=0.5)
    assert first.step == 0
    assert inputs.exposed_ns == 100_000_000
    for step in (1, 2, 3):
        inputs.start(plan(step), loss_scale=0.25)  # the third is one too many
    assert executor.all_loaded.wait(600)
    found: Any = inputs.take(plan(1), loss_scale=0.25)
    assert (found.step, found.loss_scale) == (1, 0.25)
    assert inputs.exposed_ns == 0
    inputs.close()
    assert [step for step, _ in executor.loaded] == [0, 1, 2]
    assert [name.startswith("inputs") for _, name in executor.loaded] == [False, True, True]


def test_a_failure_in_the_thread_is_raised_when_the_step_is_taken() -> None:
    executor: Any = Slow(0.0)
    inputs = InputPrefetcher(executor, Reader())
    inputs.start(plan(13), loss_scale=1.0)
    with pytest.raises(ValueError, match="no such document"):
        inputs.take(plan(13), loss_scale=1.0)
    inputs.close()


def same_loss(world: World, case: Case) -> list[float]:
    """Returns the losses of a step with inputs loaded in the thread, and with those loaded by
    itself.
    """
    spec = spec_of(case)
    mesh = build_mesh(spec.parallel, rank_device(world, "cpu"))
    executor = Executor(spec, mesh)
    mine = pipeline_plan(packing(4), spec, mesh.at.dp, case.strategy)
    inputs = InputPrefetcher(executor, Reader())
    inputs.start(mine, loss_scale=0.5)
    made = inputs.take(mine, loss_scale=0.5)
    ahead = executor.train_step(mine, Reader(), loss_scale=0.5, inputs=made)
    direct = executor.train_step(mine, Reader(), loss_scale=0.5)
    inputs.close()
    return [float(ahead), float(direct)]


@pytest.mark.full
@pytest.mark.dist
def test_steps_are_the_same() -> None:
    case = Case(cp=2, pp=2, v=2)
    for ahead, direct in run_local(same_loss, case.world, case, start_group=True):
        assert ahead == direct
