"""Tests what the summary adds up."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from wlb.parallel.mesh import Coordinates
from wlb.plan import ExpertLoad
from wlb.plan.tally import Share, Tally
from wlb.spec import ParallelSpec
from wlb.train.telemetry.measure import MeasureSteps, expert_tokens


def test_filler_is_on_top_of_the_tokens() -> None:
    assert Tally(padding=50, ours=Share(tokens=200)).padding_share == 0.25
    assert Tally().padding_share == 0.0


def test_steps_that_were_undone_leave_the_tally_and_what_happened_stays() -> None:
    saved = Tally(losses=[3.0], padding=1)
    saved.saves.add(1, 0.5, "")
    now = Tally(losses=[3.0, 2.0], padding=3)
    now.saves.add(2, 0.1, "full")
    now.refused["rollback"] += 1
    back = now.rolled_back(saved)
    assert (back.losses, back.padding) == ([3.0], 1)
    assert (back.saves.failed, back.refused) == ({2}, {"rollback": 1})
    back.losses.append(1.0)
    assert saved.losses == [3.0]  # it may be gone back to again


def test_a_step_holds_the_waits_before_it_and_its_own_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s come before a step that took 5 s, of which it waited 3 s for plans."""
    hook: Any = object.__new__(MeasureSteps)
    hook.clock = SimpleNamespace(marks_ns=0)
    run: Any = SimpleNamespace(
        inputs=SimpleNamespace(exposed_ns=0),
        feed=SimpleNamespace(waited_ns=5_000_000_000),
        records_ns=0,
    )
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    exposed = hook._exposed(run, SimpleNamespace(began_s=95.0, waited_ns=2_000_000_000))
    assert exposed.step_ns == pytest.approx(7e9)
    assert exposed.planning_ns == 5_000_000_000
    assert run.feed.waited_ns == 0


ROWS = np.array([10, 20, 30, 40, 50, 60, 70, 80])


def executed(load: ExpertLoad | None, pipelines: list[list[int]]) -> Any:
    return SimpleNamespace(
        sums=SimpleNamespace(experts=load),
        plan=SimpleNamespace(packing=SimpleNamespace(rows=ROWS), pipelines=np.array(pipelines)),
    )


def place(device: str, parallel: ParallelSpec, *, ep: int, **at: int) -> Any:
    """Returns a rank's place, without processes."""
    return SimpleNamespace(
        parallel=parallel,
        experts=SimpleNamespace(get_local_rank=lambda axis: ep),
        at=Coordinates(**{"tp": 0, "cp": 0, "pp": 0, "dp": 0, **at}),
        device=torch.device(device),
    )


def test_pipelines_that_meet_have_their_mean_tokens_at_experts() -> None:
    mesh = place("cuda", ParallelSpec(dp=4, ep=2), ep=1, dp=3)
    load = ExpertLoad(layers=(0,), expert=(2.0,), rank=(1.5,), ranks=(1.0, 1.0))
    step = executed(load, [[0, 1], [2, 3], [4, 7], [6, 5]])
    assert expert_tokens(step, mesh) == pytest.approx([1.5 * 60, 1.5 * 70])
    step.sums.experts = None
    assert expert_tokens(step, mesh) is None


@pytest.mark.parametrize(("device", "ratios"), [("cpu", (0.4, 1.6)), ("cuda", (1.6, 1.6))])
def test_experts_compute_a_ranks_own_rows_and_on_gpus_it_waits_for_the_most_loaded(
    device: str, ratios: tuple[float, float]
) -> None:
    load = ExpertLoad(layers=(0,), expert=(2.0,), rank=(1.6,), ranks=(0.4, 1.6))
    step = executed(load, [list(range(8))])
    for ep, ratio in enumerate(ratios):
        mesh = place(device, ParallelSpec(cp=2, ep=2), ep=ep, cp=ep)
        assert expert_tokens(step, mesh) == pytest.approx(ratio * ROWS)
