"""Tests steps whose gradient norm is a finite spike: skipped, counted, and known after a resume."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.case import small_spec, train, write_corpus
from wlb.plan import PipelinePlan, StepPlan, UserError
from wlb.spec import OnNonfinite, RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.faults import nonfinite, spikes
from wlb.train.faults.nonfinite import NonfiniteSteps
from wlb.train.faults.spikes import LEAST, WINDOW, GradientNorms
from wlb.train.loop import Trainer
from wlb.train.reduce import StepSums


def test_a_norm_is_held_against_the_median_of_those_before_it() -> None:
    norms = GradientNorms(3.0)
    for _ in range(LEAST - 1):
        assert norms.spike_over(1.0) is None
    assert norms.spike_over(1e6) is None  # too few are known
    assert norms.spike_over(3.0) is None
    assert norms.spike_over(3.1) == 1.0
    assert norms.spike_over(1e9) == 1.0  # earlier spikes do not move a median
    # Of norms that stay high the median gets high too.
    later = [norms.spike_over(50.0) for _ in range(2 * WINDOW)]
    assert later[0] == 1.0
    assert later[-1] is None
    assert len(norms.to_json()) == WINDOW


def test_what_is_remembered_goes_on_from_a_checkpoint() -> None:
    norms = GradientNorms(2.0, [1.0] * LEAST)
    again = GradientNorms(2.0, json.loads(json.dumps(norms.to_json())))
    assert again.spike_over(2.5) == 1.0
    off = GradientNorms(0.0, [1.0] * LEAST)
    assert off.spike_over(1e9) is None
    assert off.to_json() == []
    nothing = GradientNorms(2.0, [0.0] * LEAST)
    assert nothing.spike_over(1.0) is None  # nothing to be held against


def test_spikes_and_norms_that_are_not_finite_count_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nonfinite, "MOST_SKIPPED", 2)
    steps = NonfiniteSteps(OnNonfinite.SKIP)
    steps.finite(1, norm=9.0, median=1.0)
    steps.decide(2, loss=1.0, norm=float("inf"), has_checkpoint=False)
    message = r"step 3: gradient norm 9 with a median of 1; 3 steps in a row were spikes or not fin"
    with pytest.raises(FloatingPointError, match=message):
        steps.finite(3, norm=9.0, median=1.0)
    assert steps.finite(4, norm=9.0, median=None) is None
    assert steps.finite(5, norm=9.0, median=1.0) == OnNonfinite.SKIP


@pytest.mark.parametrize("norms", [3, [1.0, -1.0], ["1"], [True], {"0": 1.0}])
def test_norms_of_a_checkpoint_that_are_none_are_refused(tmp_path: Path, norms: Any) -> None:
    run = {"step": 1, "spec": {"model": {}}, "norms": norms}
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match=r"run\.json: norms.* must be (a list|a number|gradient)"):
        checkpoint.saved_norms(tmp_path)


@pytest.fixture
def spike_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], None]:
    """Makes the gradient norms of these steps a thousand times longer; three norms suffice."""
    monkeypatch.setattr(spikes, "LEAST", 3)

    def arrange(steps: set[int]) -> None:
        compute = Trainer._compute

        def spiked(self: Trainer, plan: StepPlan, pipeline: PipelinePlan) -> StepSums:
            sums = compute(self, plan, pipeline)
            if plan.step in steps:
                return replace(sums, gradient_norm=1000 * sums.gradient_norm)
            return sums

        monkeypatch.setattr(Trainer, "_compute", spiked)

    return arrange


def spec_of(folder: Path, corpus: Path, *, steps: int = 6) -> RunSpec:
    training = {"skip_spikes": 20.0, "steps": steps}
    # A constant rate: runs of different lengths have the same steps.
    training |= {"min_learning_rate": 0.02}
    return small_spec(folder, corpus, training=training, checkpoint={"interval": 2, "keep": 9})


@pytest.mark.full
@pytest.mark.process
def test_a_spike_is_skipped_also_right_after_a_resume(
    tmp_path: Path, spike_at: Callable[[set[int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The spike is the first step after the resume."""
    corpus = write_corpus(tmp_path / "texts")
    spike_at({4})
    whole, _ = train(spec_of(tmp_path / "whole", corpus))
    assert [line["steps_done"] for line in whole.steps] == [1, 2, 3, 4, 4, 5, 6]
    assert [line["measured"]["loss"] is None for line in whole.steps] == [i == 4 for i in range(7)]
    (record,) = [line for line in whole.lines if line["kind"] == "spike"]
    assert (record["step"], record["steps_done"], record["action"]) == (4, 4, "skip")
    shown = capsys.readouterr().out
    assert "with a median of" in shown
    assert "1 skipped as spikes" in shown
    train(spec_of(tmp_path, corpus, steps=4))
    saved = tmp_path / "runs" / "small" / "checkpoints" / "step-00000004"
    assert len(checkpoint.saved_norms(saved)) == 4
    resumed, _ = train(spec_of(tmp_path, corpus), resume=True)
    assert resumed.losses == whole.losses


@pytest.mark.process
def test_many_spikes_in_a_row_stop_the_run(
    tmp_path: Path, spike_at: Callable[[set[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nonfinite, "MOST_SKIPPED", 1)
    spike_at({3, 4, 5})
    with pytest.raises(FloatingPointError, match=r"step 4: .*2 steps in a row.*the 1 that"):
        train(spec_of(tmp_path, write_corpus(tmp_path / "texts")))
