"""Tests steps whose loss or gradient is not finite: stop, skip, roll back, all counted."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.case import Run, job_of, small_spec, train, write_corpus
from wlb.launch.local import run_local
from wlb.parallel.world import World
from wlb.plan import PipelinePlan, StepPlan
from wlb.plan.tally import Tally
from wlb.spec import OnNonfinite, RunSpec
from wlb.train import start
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint.saver import CheckpointSaver, Saved
from wlb.train.checkpoint.saves import SaveCheckpoints
from wlb.train.faults import nonfinite
from wlb.train.faults.nonfinite import NonfiniteSteps
from wlb.train.hooks import RunContext
from wlb.train.job import Job
from wlb.train.loop import Trainer
from wlb.train.reduce import StepSums


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Makes the sums of `step` NaN the first `times` times; returns a list of the computed
    steps.
    """

    def arrange(failing: set[int], times: int) -> list[int]:
        computed: list[int] = []
        compute = Trainer._compute

        def broken(self: Trainer, plan: StepPlan, pipeline: PipelinePlan) -> StepSums:
            computed.append(plan.step)
            sums = compute(self, plan, pipeline)
            if plan.step in failing and computed.count(plan.step) <= times:
                return replace(sums, loss=math.nan)
            return sums

        monkeypatch.setattr(Trainer, "_compute", broken)
        return computed

    return arrange


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Tally]:
    """The totals of each run that has ended."""
    tallies: list[Tally] = []
    run_it = Trainer.run

    def kept(trainer: Trainer) -> Tally:
        tallies.append(run_it(trainer))
        return tallies[-1]

    monkeypatch.setattr(Trainer, "run", kept)
    return tallies


def spec_of(folder: Path, corpus: Path, action: str) -> RunSpec:
    training = {"on_nonfinite": action}
    return small_spec(folder, corpus, training=training, checkpoint={"interval": 2})


@pytest.mark.process
def test_skip_leaves_a_step_out(
    corpus: Path,
    tmp_path: Path,
    fail_at: Callable[..., list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    computed = fail_at({2}, 9)
    run, _ = train(spec_of(tmp_path, corpus, "skip"))
    assert computed == [0, 1, 2, 3, 4, 5, 6]  # six updates all the same
    assert [line["measured"]["loss"] is None for line in run.steps] == [i == 2 for i in range(7)]
    (record,) = [line for line in run.lines if line["kind"] == "nonfinite"]
    assert (record["step"], record["action"]) == (2, "skip")
    assert [line["steps_done"] for line in run.steps] == [1, 2, 2, 3, 4, 5, 6]
    shown = capsys.readouterr().out
    assert "is not finite: loss nan, gradient norm" in " ".join(shown.split())
    assert "steps: 1 skipped" in shown


@pytest.mark.full
@pytest.mark.process
def test_a_step_that_is_skipped_is_neither_trained_nor_the_end_of_an_evaluation(
    corpus: Path,
    tmp_path: Path,
    fail_at: Callable[..., list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The evaluation comes after the next step."""
    spec = spec_of(tmp_path, corpus, "skip")
    spec = replace(spec, eval=replace(spec.eval, interval_tokens=700))
    whole, _ = train(replace(spec, run=replace(spec.run, name="whole")))
    tokens = [line["measured"]["num_tokens"] for line in whole.steps]
    done = [sum(tokens[: i + 1]) for i in range(6)]
    crossing = next(i for i in range(1, 4) if done[i] // 700 > done[i - 1] // 700)
    capsys.readouterr()
    fail_at({crossing}, 9)
    run, _ = train(spec)
    found = [line["num_tokens"] for line in run.lines if line["kind"] == "evaluation"]
    assert done[crossing] not in found
    assert done[crossing + 1] in found
    trained = sum(line["measured"]["num_tokens"] for line in run.steps) - tokens[crossing]
    assert f"{trained:,} tokens at" in capsys.readouterr().out


@pytest.mark.process
def test_many_in_a_row_stop_the_run(
    corpus: Path, tmp_path: Path, fail_at: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nonfinite, "MOST_SKIPPED", 3)
    fail_at({2, 3, 4, 5}, 9)
    with pytest.raises(
        FloatingPointError, match=r"step 5: loss nan.*4 steps in a row.*at most 3 in a row"
    ):
        train(spec_of(tmp_path, corpus, "skip"))


@pytest.mark.full
@pytest.mark.process
def test_rollback_of_a_passing_fault_changes_nothing(
    corpus: Path, tmp_path: Path, fail_at: Callable[..., list[int]], ended: list[Tally]
) -> None:
    straight, _ = train(spec_of(tmp_path / "straight", corpus, "stop"))
    computed = fail_at({3}, 1)
    run, _ = train(spec_of(tmp_path, corpus, "rollback"))
    once, again = ended
    # What the summary says is of the steps that count.
    for name in ("ours", "plain", "losses", "heldout", "token_delays", "padding", "held"):
        assert getattr(again, name) == getattr(once, name), name
    assert (again.refused, len(again.saves.stall_s)) == ({"rollback": 1}, 3)
    assert computed == [0, 1, 2, 3, 2, 3, 4, 5]
    starts = [line["resumed_from"] for line in run.lines if line["kind"] == "start"]
    assert starts[0] is None
    assert starts[1].endswith("step-00000002")
    assert run.losses[:3] == straight.losses[:3]
    assert run.losses[3:] == straight.losses[2:]
    assert run.evaluations[-1] == straight.evaluations[-1]


@pytest.mark.full
@pytest.mark.process
def test_rollback_goes_further_back_if_the_newest_checkpoint_is_damaged(
    corpus: Path,
    tmp_path: Path,
    fail_at: Callable[..., list[int]],
    ended: list[Tally],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of(tmp_path, corpus, "rollback")
    train(replace(spec, training=replace(spec.training, steps=2)))
    newest = SaveCheckpoints.newest

    def damaging(hook: SaveCheckpoints, run: RunContext) -> Path | None:
        found = newest(hook, run)
        assert found is not None
        assert found.name == "step-00000004"
        shard = next(found.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-10])
        return found

    monkeypatch.setattr(SaveCheckpoints, "newest", damaging)
    computed = fail_at({5}, 1)
    run, _ = train(spec, resume="auto")
    assert computed == [2, 3, 4, 5, 2, 3, 4, 5]
    starts = [line["resumed_from"] for line in run.lines if line["kind"] == "start"]
    assert [Path(start).name for start in starts[1:]] == ["step-00000002", "step-00000002"]
    assert run.losses[-4:-1] == run.losses[2:5]
    assert ended[-1].losses == run.losses[-4:]


@pytest.mark.full
@pytest.mark.process
def test_rollback_to_a_checkpoint_whose_first_save_failed_counts_all_steps(
    corpus: Path, tmp_path: Path, ended: list[Tally], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    compute, write = Trainer._compute, CheckpointSaver._write
    saved: list[int] = []

    def broken(self: Trainer, plan: StepPlan, pipeline: PipelinePlan) -> StepSums:
        computed.append(plan.step)
        sums = compute(self, plan, pipeline)
        fails = (plan.step, computed.count(plan.step)) in {(5, 1), (4, 2)}
        return replace(sums, loss=math.nan) if fails else sums

    def full_disk(self: CheckpointSaver, task: Any) -> Saved:
        saved.append(task.step)
        if saved == [2, 4]:
            return Saved(step=4, stall_s=0.0, write_s=0.0, num_bytes=0, error="no space")
        return write(self, task)

    monkeypatch.setattr(Trainer, "_compute", broken)
    monkeypatch.setattr(CheckpointSaver, "_write", full_disk)
    run, _ = train(spec_of(tmp_path, corpus, "rollback"))
    assert computed == [0, 1, 2, 3, 4, 5, 2, 3, 4, 4, 5]
    starts = [line["resumed_from"] for line in run.lines if line["kind"] == "start"]
    assert [Path(start).name for start in starts[1:]] == ["step-00000002", "step-00000004"]
    assert len(ended[-1].losses) == 6


@pytest.mark.full
@pytest.mark.process
def test_rollback_skips_a_step_that_fails_again(
    corpus: Path, tmp_path: Path, fail_at: Callable[..., list[int]]
) -> None:
    fail_at({3}, 9)
    reference, _ = train(spec_of(tmp_path / "skip", corpus, "skip"))
    computed = fail_at({3}, 9)
    run, _ = train(spec_of(tmp_path, corpus, "rollback"))
    assert computed == [0, 1, 2, 3, 2, 3, 4, 5, 6]
    assert run.evaluations[-1] == reference.evaluations[-1]


@pytest.mark.process
def test_without_a_checkpoint_a_step_is_skipped(
    corpus: Path, tmp_path: Path, fail_at: Callable[..., list[int]]
) -> None:
    computed = fail_at({0}, 9)
    run, _ = train(spec_of(tmp_path, corpus, "rollback"))
    assert computed == [0, 1, 2, 3, 4, 5, 6]
    (record,) = [line for line in run.lines if line["kind"] == "nonfinite"]
    assert record["action"] == "skip"


def rank_with_an_old_listing(world: World, job: Job) -> None:
    """Makes step 3 fail once; the file system shows rank 1 no checkpoint."""
    compute, failed = Trainer._compute, set[int]()

    def broken(self: Trainer, plan: StepPlan, pipeline: PipelinePlan) -> StepSums:
        sums = compute(self, plan, pipeline)
        if plan.step == 3 and not failed:
            failed.add(plan.step)
            return replace(sums, loss=math.nan)
        return sums

    Trainer._compute = broken
    if world.rank:
        checkpoint.list_complete = lambda directory: []
    start.local_rank(world, job, "cpu")


@pytest.mark.full
@pytest.mark.dist
def test_all_ranks_go_back_to_the_checkpoint_that_rank_0_sees(corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, corpus, "rollback")
    spec = replace(spec, parallel=replace(spec.parallel, dp=2))
    run_local(rank_with_an_old_listing, 2, job_of(spec), timeout_s=600)
    starts = [line["resumed_from"] for line in Run(spec).lines if line["kind"] == "start"]
    assert starts[1].endswith("step-00000002")


def test_what_follows_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "MOST_SKIPPED", 2)
    steps = NonfiniteSteps(OnNonfinite.ROLLBACK)

    def decide(step: int) -> OnNonfinite:
        return steps.decide(step, loss=math.inf, norm=1.0, has_checkpoint=True)

    assert decide(4) == OnNonfinite.ROLLBACK
    assert decide(4) == OnNonfinite.SKIP
    steps.finite()
    assert decide(9) == OnNonfinite.ROLLBACK
    assert decide(9) == OnNonfinite.SKIP
    assert decide(4) == OnNonfinite.SKIP
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        decide(4)
