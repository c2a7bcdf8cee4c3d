"""Tests prices learned in whole runs: when they change, all ranks alike, resumed, rolled back."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.sets import full, nightly
from tests.train.case import Run, job_of, relaid, small_spec, train, write_corpus
from tests.train.telemetry.test_meter import MODEL, first_step, ms
from wlb.cost import (
    RankVote,
    StageLayers,
    ballot,
    counted_votes,
    stage_times,
    without_collectives,
    workload_for,
)
from wlb.launch.local import run_local
from wlb.parallel.mesh import Coordinates
from wlb.parallel.observe import Cell, Part, Pass
from wlb.parallel.world import World
from wlb.plan import NO_CHANGES, TERMS, PriceChange, PriceFactors, PriceSchedule
from wlb.plan.prices import UNIT
from wlb.report import read_run
from wlb.spec import ExpertsSpec, ParallelSpec, Recompute, RunSpec, check
from wlb.train import start
from wlb.train.job import Job
from wlb.train.loop import Trainer
from wlb.train.telemetry import meter
from wlb.train.telemetry.clock import StepTimes
from wlb.train.telemetry.prices import LearnPrices, PriceMeter, first_step_unseen
from wlb.validation.recorded import simulate_recorded

pytestmark = pytest.mark.dist

TRUE = dict(zip(TERMS, (3.0, 2.5, 1.0, 1.2), strict=True))
FIRST_DECISION, INTERVAL = 3, 3
"""Steps 1 to 3 are measured (step 0 is warm-up), so the first decision comes with step 3."""
HELD_FROM = FIRST_DECISION + 2 + 2 + 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("prices") / "corpus", num_files=200)


def learning(folder: Path, corpus: Path, *, steps: int = 14, **sections: Any) -> RunSpec:
    """Returns a run that decides on prices after steps 4, 7, 10, ..., on plans from step 10 on."""
    common: dict[str, Any] = {
        "training": {"steps": steps},
        "eval": {"steps": 0},
        "telemetry": {"warmup_steps": 1},
        "planner": {"ahead": 2},
        "packing": {"policy": "bounded", "s_max": 2.0, "step_tokens": 1.5, "queue_thresholds": []},
        "cost": {"online": True, "online_interval": INTERVAL, "online_max_change": 9.0},
        "checkpoint": {"interval": 5, "keep": 9},
    }
    return small_spec(folder, corpus, **(common | sections))


def says(self: PriceMeter) -> np.ndarray:
    """Stands in for a rank's ballot, so that runs of known votes can be compared."""
    self.clear()
    return ballot(RankVote(TRUE, (0.0, 0.0)))


@pytest.fixture
def known_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks vote for `TRUE`, whatever they measure."""
    monkeypatch.setattr(PriceMeter, "ballot", says)


def held(run: Run) -> list[Any]:
    return [line.get("prices") for line in run.steps]


def plans_of(run: Run) -> list[dict[str, Any]]:
    return [line["predicted"] for line in run.steps]


@pytest.mark.usefixtures("known_votes")
def test_prices_hold_from_a_stated_step_on(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = learning(tmp_path, corpus)
    assert first_step_unseen(spec, FIRST_DECISION) == HELD_FROM
    run, _ = train(spec)
    decisions = [line for line in run.lines if line["kind"] == "prices"]
    assert [line["step"] for line in decisions] == [3, 6, 9, 12]
    assert [line["change"] and line["change"]["step"] for line in decisions] == [
        HELD_FROM,
        None,
        None,
        None,
    ]
    assert [line["votes"] for line in decisions] == [1] * 4
    made = PriceFactors.from_json(decisions[0]["change"]["prices"])
    assert made.by_term == pytest.approx(TRUE, rel=0.02)
    assert held(run) == [None] * HELD_FROM + [made.to_json()] * (14 - HELD_FROM)
    shown = capsys.readouterr().out
    assert (
        "prices learned by step 4, over those of cpu sdpa and relative to linear forward" in shown
    )
    assert f"plans use them from step {HELD_FROM + 1} on" in " ".join(shown.split())
    # Plans of coming steps are priced as recorded, and predictions of passes as well.
    at_work = [line["predicted"]["mean_workload_ns"] for line in run.steps]
    tokens = [line["predicted"]["num_tokens"] for line in run.steps]
    per_token = np.array(at_work) / tokens
    assert per_token[HELD_FROM:].min() > 1.05 * per_token[:HELD_FROM].max()
    terms = [line["measured"]["telemetry"]["terms"] for line in run.steps]
    factors = [
        terms[i]["attention_forward"]["predicted_s"] / terms[i]["linear_forward"]["predicted_s"]
        for i in (HELD_FROM - 1, HELD_FROM)
    ]
    assert factors[1] > 1.5 * factors[0]


@pytest.mark.full
@pytest.mark.usefixtures("known_votes")
def test_learning_takes_no_collective_of_its_own(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes ride on the sums of a record, where they are due; other records have none."""
    sizes: list[int] = []
    reduce = meter.all_reduce_hosts

    def counted(x: torch.Tensor, op: str = "sum") -> None:
        sizes.append(x.numel())
        reduce(x, op)

    monkeypatch.setattr(meter, "all_reduce_hosts", counted)
    train(learning(tmp_path, corpus, steps=7, cost={"online": False}))
    plain = list(sizes)
    sizes.clear()
    train(learning(tmp_path, corpus, steps=7, run={"name": "learning"}))
    assert len(sizes) == len(plain) == 2 * 7
    more = [a - b for a, b in zip(sizes, plain, strict=True)]
    votes = ballot(None).size
    # Two calls a step; votes are due after step 4 (index 3) and step 7.
    assert more == [votes if i in (2 * 3, 2 * 6) else 0 for i in range(14)]


@pytest.mark.full
@pytest.mark.usefixtures("known_votes")
@pytest.mark.parametrize("saved", [5, *nightly(10)])
def test_a_resumed_run_plans_as_the_uninterrupted_one(
    corpus: Path, tmp_path: Path, saved: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 5 is between the decision and the step from which the prices hold."""
    whole, _ = train(learning(tmp_path, corpus, run={"name": "whole"}))
    name = f"step-{saved:08d}"
    spec = learning(tmp_path, corpus, run={"name": "again"})
    target = tmp_path / "runs" / "again" / "checkpoints" / name
    shutil.copytree(whole.folder / "checkpoints" / name, target)
    (change,) = whole.state(saved).prices.changes
    assert change.step == HELD_FROM
    again, said = train(spec, resume=True)
    assert f"prices go on as learned by {name}, relative to linear forward" in said
    assert held(again) == held(whole)[saved:]
    assert plans_of(again) == plans_of(whole)[saved:]
    assert again.state(14).to_json() == whole.state(14).to_json()
    assert again.losses == whole.losses[saved:]
    capsys.readouterr()


@pytest.mark.full
@pytest.mark.usefixtures("known_votes")
def test_prices_of_another_kernel_profile_do_not_go_on(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = learning(tmp_path, corpus, steps=10)
    run, _ = train(spec)
    assert run.state(10).prices.changes
    more = replace(spec, training=replace(spec.training, steps=12))
    other, said = train(replace(more, cost=replace(spec.cost, profile="h100")), resume=True)
    assert "are factors of cpu sdpa; this run is priced by h100 " in said
    assert held(other)[10:] == [None, None]
    # What was learned stays where the run goes on without learning.
    (tmp_path / "off").mkdir()
    fixed = replace(more, cost=replace(spec.cost, online=False))
    shutil.rmtree(other.folder / "checkpoints" / "step-00000012")
    kept, said = train(fixed, resume=True)
    assert "prices go on as learned by step-00000010" in said
    (change,) = run.state(10).prices.changes
    assert held(kept)[-2:] == [change.prices.to_json()] * 2
    capsys.readouterr()


@pytest.mark.full
@pytest.mark.usefixtures("known_votes")
def test_a_rollback_takes_prices_back_that_were_learned_since(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes back from step 4 to the checkpoint after step 3, and learns them again."""
    compute, failed = Trainer._compute, list[int]()

    def broken(self: Trainer, plan: Any, pipeline: Any) -> Any:
        sums = compute(self, plan, pipeline)
        if plan.step == 5 and not failed:
            failed.append(len(self.context.prices.changes))
            return replace(sums, loss=math.nan)
        return sums

    monkeypatch.setattr(Trainer, "_compute", broken)
    training = {"steps": 14, "on_nonfinite": "rollback"}
    spec = learning(tmp_path, corpus, checkpoint={"interval": 3}, training=training)
    run, _ = train(spec)
    assert failed == [1]
    decisions = [line for line in run.lines if line["kind"] == "prices"]
    # What was measured before the rollback is forgotten: steps 3 to 5 are measured anew.
    found = [(line["step"], bool(line["change"])) for line in decisions]
    assert found[:2] == [(3, True), (5, True)]
    second = first_step_unseen(spec, 5)
    assert next(line["step"] for line in run.steps if "prices" in line) == second
    assert [c.step for c in read_run(run.folder).prices.changes] == [second]


@pytest.mark.full
@pytest.mark.usefixtures("known_votes")
def test_a_run_that_learned_is_planned_again_from_its_records(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = train(learning(tmp_path, corpus))
    again = simulate_recorded(run.folder, skip=0)
    assert len(again.measured) == 14
    # Before the change and after it.
    costs = [simulation.simulator.cost for simulation in again.simulations]
    assert len(costs) == 2
    assert costs[1].profile.name == costs[0].profile.name
    (ratio,) = costs[1].attention_ns([128]) / costs[0].attention_ns([128])
    assert ratio > 2.4
    text = (run.folder / "metrics.jsonl").read_text("utf-8")
    kept = [line for line in text.splitlines() if json.loads(line)["kind"] != "prices"]
    (run.folder / "metrics.jsonl").write_text("\n".join(kept), "utf-8")
    (only,) = simulate_recorded(run.folder, skip=0).simulations  # at the profile's own prices
    assert only.simulator.cost.attention_ns([128]) == costs[0].attention_ns([128])
    capsys.readouterr()


def rank_that_votes(world: World, job: Job) -> None:
    """A rank whose vote is known, and twice as large on rank 0 as it should be."""
    true = TRUE if world.rank else {name: 2 * factor for name, factor in TRUE.items()}

    def says_so(self: PriceMeter) -> np.ndarray:
        self.clear()
        return ballot(RankVote(true, (0.0, 0.0)))

    PriceMeter.ballot = says_so  # type: ignore[method-assign]
    start.local_rank(world, job, "cpu")


@pytest.mark.parametrize("layout", [*full("cp2-pp2"), *nightly("tp2-pp2-v2", "dp2-tp2")])
def test_all_ranks_change_prices_together(corpus: Path, tmp_path: Path, layout: str) -> None:
    """Digests of plans are compared two steps ahead; a mismatch would end the run."""
    spec = relaid(learning(tmp_path, corpus), layout)
    run_local(rank_that_votes, spec.parallel.world_size, job_of(spec), timeout_s=600)
    run = Run(spec)
    assert len(run.steps) == 14
    (change,) = read_run(run.folder).prices.changes
    assert change.step == HELD_FROM
    assert change.prices.by_term == pytest.approx(TRUE, rel=0.02)
    assert held(run)[HELD_FROM] == change.prices.to_json()


@pytest.mark.full
def test_ranks_plan_with_the_load_of_experts_that_they_counted(
    corpus: Path, tmp_path: Path
) -> None:
    spec = relaid(learning(tmp_path, corpus), "cp2-pp2")
    moe = ExpertsSpec(num=8, per_token=2, hidden_size=32)
    model, parallel = replace(spec.model, experts=moe), replace(spec.parallel, ep=2)
    spec = check(replace(spec, model=model, parallel=parallel))
    run_local(rank_that_votes, spec.parallel.world_size, job_of(spec), timeout_s=600)
    run = Run(spec)
    loads = [line["measured"]["experts"]["rank"] for line in run.steps[: FIRST_DECISION + 1]]
    counted = np.mean(loads)
    assert counted > 1.01
    first = read_run(run.folder).prices.changes[0]
    assert first.step == HELD_FROM
    assert first.prices.expert_load / UNIT == pytest.approx(counted, abs=1e-4)
    assert first.prices.by_term == pytest.approx(TRUE, rel=0.02)
    assert held(run)[HELD_FROM] == first.prices.to_json()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["cp2-pp2", *nightly("dp2-tp2")])
def test_a_real_run_learns_its_own_prices(corpus: Path, tmp_path: Path, layout: str) -> None:
    """The CPU's profile does not fit such small matrices; the ranks agree on what does."""
    spec = learning(tmp_path, corpus, steps=24)
    spec = relaid(replace(spec, cost=replace(spec.cost, profile="h100")), layout)
    run, _ = train(spec)
    assert len(run.steps) == 24
    changes = read_run(run.folder).prices.changes
    assert changes
    assert held(run)[-1] is not None
    first, last = (
        [abs(math.log(term["ratio"])) for term in line["measured"]["telemetry"]["terms"].values()]
        for line in (run.steps[2], run.steps[-1])
    )
    assert max(last) < max(first)


class RankPlace:
    """A rank's place, without processes."""

    def __init__(self, device: str, cp: int, fsdp_size: int = 1) -> None:
        self.at = Coordinates(tp=0, cp=cp, pp=0, dp=0)
        self.device, self.fsdp_size = torch.device(device), fsdp_size


@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_measures_terms_apart_from_waits_and_recomputing(
    device: str, recompute: Recompute
) -> None:
    """Passes take TRUE times the profile's times, 1.2 times as long on this rank, and more: the
    wait for CP rank 1, and forward work that backward runs again."""
    spec = RunSpec(parallel=ParallelSpec(cp=2))
    spec = replace(
        spec,
        model=MODEL,
        training=replace(spec.training, recompute=recompute),
        data=replace(spec.data, context_window=64, num_windows=4),
    )
    cost = workload_for(spec, device)
    timed = cost if device == "cuda" else without_collectives(cost)
    once = replace(timed, recompute=Recompute.NONE)
    plan, votes = first_step(0), []
    for cp in range(2):
        mesh: Any = RankPlace(device, cp)
        prices = PriceMeter(spec, mesh, cost)
        base = stage_times(plan, once, StageLayers(layers=4))
        full_times = stage_times(plan, timed, StageLayers(layers=4))
        parts: dict[tuple[Cell, Part], int] = {}
        for i in range(len(plan.micro_batches)):
            forward_wait = 0.0
            for kind, end in ((Pass.FORWARD, "forward"), (Pass.BACKWARD, "backward")):
                attention = getattr(base, f"attention_{end}_ns")[i] * TRUE[f"attention_{end}"] * 1.2
                linear = getattr(base, f"linear_{end}_ns")[i] * TRUE[f"linear_{end}"] * 1.2
                wait = (attention.max() - attention[cp]) * (device == "cuda")
                forward_wait = wait if end == "forward" else forward_wait
                parts[Cell(kind, 0, i), Part.ATTENTION] = round(attention[cp])
                parts[Cell(kind, 0, i), Part.LAYERS] = round(linear + wait)
            again = full_times.linear_backward_ns[i] - base.linear_backward_ns[i]
            took = again * TRUE["linear_forward"] * 1.2
            if recompute == Recompute.FULL and device == "cuda":
                took += forward_wait
            parts[Cell(Pass.BACKWARD, 0, i), Part.LAYERS] += round(took)
            parts[Cell(Pass.BACKWARD, 0, i), Part.RECOMPUTE] = ms(9)
        for _ in range(3):
            prices.add(plan, StepTimes(parts, wall_ns=1))
        assert prices.num_steps == 3
        votes.append(prices.ballot())
        assert prices.num_steps == 0
    measured = counted_votes(np.sum(votes, axis=0))
    assert measured is not None
    assert measured.num_votes == 2
    expected = {name: factor / TRUE["linear_forward"] for name, factor in TRUE.items()}
    assert measured.factors == pytest.approx(expected, rel=0.02)


def test_decisions_count_the_votes_of_several_intervals() -> None:
    """One interval of wrong votes among right ones changes nothing; two out of four do."""
    learn = LearnPrices(RunSpec(), workload_for(RunSpec(), "cpu"))
    right = ballot(RankVote(dict.fromkeys(TERMS, 1.0), (0.0, 0.0)))
    wrong = ballot(RankVote(TRUE, (0.0, 0.0)))
    known, found = NO_CHANGES, []
    for step, votes in enumerate([right, right, right, wrong, right, right, right]):
        _, change = learn.decide(votes, known, step)
        found.append(change)
    assert found == [None] * 7
    assert learn.decide(wrong, known, 30)[1] is None
    _, change = learn.decide(wrong, known, 40)
    assert change is not None
    assert change.step == first_step_unseen(RunSpec(), 40)
    known = PriceSchedule(base="cpu", changes=(PriceChange(step=90, prices=PriceFactors()),))
    _, later = learn.decide(wrong, known, 41)
    assert later is not None
    assert later.step == 91  # after the one that is still to come
    assert learn.decide(np.zeros_like(wrong), known, 42)[0] is not None  # the others still count


def test_nobody_votes_and_nothing_changes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PriceMeter, "ballot", lambda self: ballot(None))
    run, _ = train(learning(tmp_path, corpus, steps=6))
    (line,) = [line for line in run.lines if line["kind"] == "prices"][:1]
    assert (line["votes"], line["measured"], line["change"]) == (0, None, None)
    assert held(run) == [None] * 6
