"""Tests tables of ranks, who is called a straggler, timelines of passes, a rank that is slow."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.case import Run, small_spec, train, write_corpus
from tests.train.slow import run_with_one_slow_rank
from tests.train.telemetry.test_meter import heavy_spec, spec_of_ranks
from tests.words import lacks
from wlb.launch.local import run_local
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.plan import MeasuredTimeline, Place, RankTable, TimedPass, places_from_json, places_to_json
from wlb.spec import ParallelSpec, RunSpec, apply
from wlb.train.telemetry import ranks
from wlb.train.telemetry.clock import Cell, Pass, StepSpans
from wlb.train.telemetry.ranks import (
    RankMeter,
    StragglerWatch,
    gather_places,
    timed_ranks,
    timeline_of,
)

PLACES = tuple(Place(f"host{rank // 2}", rank // 2) for rank in range(4))


def table(measured: list[int], predicted: list[int] | None = None, steps: int = 10) -> RankTable:
    count = len(measured)
    return RankTable(
        step=9,
        steps_done=10,
        num_steps=steps,
        measured_us=np.array(measured),
        predicted_us=np.array(predicted or [100] * count),
        **{name: np.zeros(count, np.int64) for name in ("compute_us", "bubble_us", "loading_us")},
    )


def watch() -> StragglerWatch:
    return StragglerWatch(spec_of_ranks(cp=2, pp=2, dp=1), PLACES)


def test_over_the_median_leaves_work_and_a_common_factor_out() -> None:
    # All prices are half of what is measured, rank 1 has three times the work, rank 3 none.
    made = table([200, 600, 300, 0], [100, 300, 100, 0])
    assert made.over_median.tolist() == [1.0, 1.0, 1.5, 1.0]
    assert table([0, 0], [0, 0]).over_median.tolist() == [1.0, 1.0]
    back = RankTable.from_json({"kind": "ranks", **made.to_json()})
    assert back.to_json() == made.to_json()


def test_a_rank_is_named_after_three_tables_in_a_row_with_its_place() -> None:
    seen = watch()
    slow, even = table([100, 100, 120, 100]), table([100, 100, 114, 100])
    assert seen.update(slow) == seen.update(slow) == ()
    assert seen.update(even) == ()  # and it begins anew
    assert [len(seen.update(slow)) for _ in range(3)] == [0, 0, 1]
    (named,) = seen.update(slow)
    assert (named.rank, named.host, named.node) == (2, "host1", 1)
    assert (named.tp, named.cp, named.pp, named.dp) == (0, 0, 1, 0)
    assert named.over == pytest.approx(1.2)
    place = "rank 2 on host1 (node 1; tp 0, cp 0, pp 1, dp 0)"
    assert lacks(named.text, place, "1.20 times", "median rank") == []
    # A short last table says nothing either way.
    assert seen.update(table([100] * 4, steps=2)) == (named,)
    assert seen.update(even) == ()


def test_the_slowest_straggler_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STRAGGLER_TABLES", 1)
    seen = watch()
    assert [s.rank for s in seen.update(table([130, 100, 100, 100, 100, 160][:4]))] == [0]
    assert [s.rank for s in seen.update(table([130, 100, 100, 190]))] == [3]  # median 115
    assert [s.rank for s in watch().update(table([160, 100, 300, 100]))] == [2, 0]


def test_few_ranks_are_drawn_whatever_the_layout() -> None:
    assert timed_ranks(ParallelSpec(tp=2, cp=2, pp=2, dp=1)) == (0, 4, 2, 6)
    assert timed_ranks(ParallelSpec(tp=8, cp=2, pp=4, dp=128)) == tuple(
        dp * 64 + pp * 16 + cp * 8 for dp in range(8) for cp in range(2) for pp in range(4)
    )
    assert len(timed_ranks(ParallelSpec(tp=8, cp=16, pp=16, dp=4))) == 64
    assert len(timed_ranks(ParallelSpec(tp=1, cp=1, pp=126, dp=4))) == 126


def test_timelines_begin_with_the_first_rank_unless_clocks_disagree() -> None:
    def rows(began_ms: int) -> np.ndarray:
        return np.array([[began_ms * 10**6, 50_000, -1, -1, -1], [1, 2, 0, 7, 9], [-1] * 5])

    near = timeline_of({0: rows(1000), 4: rows(1003)}, step=1, steps_done=2, has_common_clock=True)
    assert near.wall_us == (50_000, 53_000)
    assert near.passes[1] == (TimedPass("backward", 2, 0, 3007, 9),)
    for far, is_common in ((2000, True), (1003, False)):
        made = timeline_of(
            {0: rows(1000), 4: rows(far)}, step=1, steps_done=2, has_common_clock=is_common
        )
        assert made.wall_us == (50_000, 50_000)
    assert MeasuredTimeline.from_json(near.to_json()) == near
    assert places_from_json(places_to_json(PLACES)) == PLACES


def gathered(world: World) -> tuple[RankTable | None, MeasuredTimeline | None]:
    spec = spec_of_ranks(cp=2, dp=2)
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    meter = RankMeter(spec, mesh, gather_places(mesh, world))
    assert not meter.is_table_due(is_last=True)
    for _ in range(2):
        meter.add(np.array([1, 2, 3, 4, 5]) * 1000 * (world.rank + 1), 5)
    assert meter.is_table_due(is_last=False)
    made = meter.table(9, 10)
    assert not meter.is_table_due(is_last=True)
    spans = ((Cell(Pass.FORWARD, 0, 1), world.rank * 1000, 2000),)
    return made, meter.timeline(StepSpans(10**18, 5000, spans), 9, 10)


@pytest.mark.dist
@pytest.mark.full
def test_what_four_ranks_gather() -> None:
    (made, timeline), *others = run_local(gathered, 4, start_group=True, timeout_s=600)
    assert others == [(None, None)] * 3
    assert made.measured_us.tolist() == [2, 4, 6, 8]
    assert made.loading_us.tolist() == [10, 20, 30, 40]
    assert (made.step, made.steps_done, made.num_steps) == (9, 10, 10)
    assert timeline.ranks == (0, 1, 2, 3)
    assert timeline.passes == tuple((TimedPass("forward", 0, 1, r, 2),) for r in range(4))


def tables_of(run: Run) -> list[RankTable]:
    return [RankTable.from_json(line) for line in run.lines if line["kind"] == "ranks"]


@pytest.mark.full
@pytest.mark.dist
def test_tables_and_timelines_come_at_their_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "RANKS_INTERVAL", 2)
    monkeypatch.setattr(ranks, "TIMELINE_INTERVAL", 4)
    corpus = write_corpus(tmp_path / "corpus")
    telemetry = {"warmup_steps": 1}
    run, _ = train(small_spec(tmp_path, corpus, eval={"steps": 0}, telemetry=telemetry))
    assert [(t.steps_done, t.num_steps) for t in tables_of(run)] == [(3, 2), (5, 2), (6, 1)]
    found = [MeasuredTimeline.from_json(x) for x in run.lines if x["kind"] == "timeline"]
    assert [t.steps_done for t in found] == [4, 6]
    for made in found:
        assert made.ranks == (0,)
        (passes,) = made.passes
        assert [(p.kind, p.micro_batch) for p in passes] == [
            (kind, i) for i in range(4) for kind in ("forward", "backward")
        ]
        ends = [p.begin_us + p.time_us for p in passes]
        assert all(end <= p.begin_us + 1 for end, p in zip(ends, passes[1:], strict=False))
        assert ends[-1] <= made.wall_us[0] + 1


@pytest.mark.nightly
@pytest.mark.dist
def test_a_slow_rank_is_named_in_log_summary_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention's forward pass burns four times its CPU time on rank 2 of four."""
    monkeypatch.setattr(ranks, "RANKS_INTERVAL", 2)
    spec: RunSpec = heavy_spec(tmp_path)
    spec = apply(
        spec,
        {
            "parallel": {"cp": 2, "pp": 2},
            "training": {"steps": 10},
            "telemetry": {"warmup_steps": 2},
        },
        source="test",
    )
    run_with_one_slow_rank(spec, factor=4.0, rank=2, log=tmp_path / "log")
    tables = tables_of(Run(spec))
    assert [[s.rank for s in t.stragglers] for t in tables] == [[], [], [2], [2]]
    (named,) = tables[-1].stragglers
    assert (named.tp, named.cp, named.pp, named.dp) == (0, 0, 1, 0)
    assert named.host
    shown = (tmp_path / "log").read_text("utf-8")
    (line,) = re.findall(r"^straggler: rank 2 on .*$", shown, re.MULTILINE)
    assert line.endswith("(step 8)")
    assert re.search(r"stragglers +│ rank 2 on ", shown)
