"""Tests learning rates of every schedule, runs resumed with more steps, weight-decay groups."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.case import Case, spec_of
from tests.train.case import small_spec, train, write_corpus
from tests.words import lacks
from wlb.launch.local import run_local
from wlb.model import Llama
from wlb.parallel.build import build_stages
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.spec import RunSpec, apply, check
from wlb.train.optimizer import Optimizers, learning_rate, peak_missed, rate_change

pytestmark = pytest.mark.process


def spec(**training: Any) -> RunSpec:
    """Returns 10 steps, 2 of them warm-up, from 1 down to 0."""
    keys = {"steps": 10, "warmup_steps": 2, "learning_rate": 1.0, "min_learning_rate": 0.0}
    return check(apply(RunSpec(), {"training": {**keys, **training}}, source="test"))


def rates(**training: Any) -> list[float]:
    made = spec(**training)
    return [learning_rate(made, step) for step in range(made.training.steps + 1)]


WARM = [0.5, 1.0]
SCHEDULES: list[tuple[dict[str, Any], list[float]]] = [
    ({"schedule": "constant"}, [*WARM, *[1.0] * 9]),
    ({"schedule": "linear"}, [*WARM, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]),
    (
        {"schedule": "cosine"},
        [*WARM, 1, 0.96194, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.03806, 0],
    ),
    ({"schedule": "wsd", "decay_steps": 4}, [*WARM, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
]


@pytest.mark.parametrize(("training", "expected"), SCHEDULES)
def test_literal_rates(training: dict[str, Any], expected: list[float]) -> None:
    assert rates(**training) == pytest.approx(expected, abs=1e-6)


def test_the_cosine_is_the_default_and_ends_at_the_minimum() -> None:
    assert rates() == rates(schedule="cosine")
    assert rates(min_learning_rate=0.2)[-1] == pytest.approx(0.2)
    assert rates(min_learning_rate=0.2, schedule="constant")[-1] == 1.0


def test_a_decay_as_long_as_the_run_is_the_linear_schedule() -> None:
    decay = rates(schedule="wsd", decay_steps=8)
    assert decay == pytest.approx(rates(schedule="linear"), abs=1e-12)


def test_more_steps_prolong_the_stable_part() -> None:
    short, long = (rates(schedule="wsd", decay_steps=4, steps=n) for n in (10, 16))
    assert long[:7] == short[:7]
    assert long[6:13] == [1.0] * 7
    assert long[12:] == short[6:]


def test_a_rate_that_jumps_on_resume_is_told() -> None:
    wsd: dict[str, Any] = {"schedule": "wsd", "decay_steps": 4}
    longer = spec(**wsd, steps=16)
    before = spec(**wsd).training
    assert rate_change(longer, before, 6) == ""  # the stable part went on until here
    told = rate_change(longer, before, 8)
    assert lacks(told, "step 9", "is 1", 0.5, "step 6", "--resume STEP") == []
    told = rate_change(spec(steps=20), spec().training, 5)
    assert lacks(told, "step 6", "is 0.933", 0.691) == []
    assert "--resume" not in told


def test_a_run_that_ends_within_its_warm_up_is_told() -> None:
    assert peak_missed(spec(steps=2)) == ""  # its last step has the peak
    assert rates(steps=2)[1] == 1.0
    told = peak_missed(spec(steps=2, warmup_steps=8))
    assert lacks(told, "training.warmup_steps = 8", "training.steps = 2", 0.25) == []
    assert lacks(told, "training.learning_rate = 1") == []


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.mark.full
def test_a_wsd_run_that_goes_on_is_the_longer_run(corpus: Path, tmp_path: Path) -> None:
    """A run of 6 steps goes on from the last checkpoint of its stable part to 9.

    Rates and losses are those of 9 at once, to the bit.
    """

    def wsd(folder: str, steps: int) -> RunSpec:
        training = {"steps": steps, "warmup_steps": 1, "schedule": "wsd", "decay_steps": 2}
        saved = {"interval": 2, "keep": 9}
        return small_spec(tmp_path / folder, corpus, training=training, checkpoint=saved)

    whole, _ = train(wsd("whole", 9))
    short, _ = train(wsd("short", 6))
    lasting = [0.02] * 8 + [0.011]
    assert [line["learning_rate"] for line in whole.steps] == pytest.approx(lasting)
    assert [line["learning_rate"] for line in short.steps] == pytest.approx([0.02] * 5 + [0.011])
    again, said = train(wsd("short", 9), resume="4")
    assert "the learning rate of step" not in said
    assert [line["steps_done"] for line in again.steps[-5:]] == [5, 6, 7, 8, 9]
    assert again.losses[-5:] == whole.losses[4:]
    assert [line["learning_rate"] for line in again.steps[-5:]] == pytest.approx(lasting[4:])


@pytest.mark.full
def test_resuming_a_decayed_run_says_that_the_rate_rises(corpus: Path, tmp_path: Path) -> None:
    training = {"schedule": "wsd", "decay_steps": 2, "warmup_steps": 1}
    train(small_spec(tmp_path, corpus, training={**training, "steps": 3}))
    spec = small_spec(tmp_path, corpus, training={**training, "steps": 6})
    _, said = train(spec, resume=True)
    said = " ".join(said.split())  # the console wraps long lines
    assert (
        "the learning rate of step 4 is 0.02, but was 0.002 "
        "with the configuration in the checkpoint" in said
    )
    assert "resume from step 1 or before with --resume STEP" in said


def kind(name: str) -> str:
    """Returns the kind of parameter that a name stands for, independent of its shape."""
    if "norm" in name:
        return "norm"
    return "end" if "embed" in name or "lm_head" in name else "linear"


DECAYED = {"end", "linear"}


def shrunk(stages: dict[int, Llama], spec: RunSpec) -> dict[str, float]:
    """Returns what is left of each weight after a step with zero gradients, by its decay alone."""
    optimizers = Optimizers(spec, dict(stages))
    named = {n: p for stage in stages.values() for n, p in stage.named_parameters()}
    before = {}
    for name, parameter in named.items():
        parameter.grad = torch.zeros_like(parameter)
        before[name] = parameter.detach().clone()
    optimizers.step(0, norm=0.0)
    out: dict[str, float] = {}
    for name, parameter in named.items():
        ratio = parameter.detach() / before[name]
        local = ratio.to_local() if hasattr(ratio, "to_local") else ratio
        # A rank may hold no row of a small parameter.
        out[name] = float(local.nanmean()) if local.numel() else float("nan")
    return out


def decay_spec(case: Case) -> RunSpec:
    made = spec_of(case)
    training = replace(made.training, weight_decay=0.5, learning_rate=0.1, warmup_steps=0)
    return replace(made, training=training)


def shrunk_on_rank(world: World, case: Case) -> dict[str, float]:
    spec = decay_spec(case)
    return shrunk(build_stages(spec, build_mesh(spec.parallel, torch.device("cpu"))), spec)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    [
        Case(layers=2),
        Case(tp=2, dp=2, layers=2),
        Case(pp=2, layers=2, stage_layers=(2, 0)),  # the last stage has a norm and the head
    ],
    ids=["one", "tp2-fsdp2", "head-alone"],
)
def test_what_decays(case: Case) -> None:
    found = run_local(shrunk_on_rank, case.world, case, start_group=True, timeout_s=600)
    names = {name for rank in found for name in rank}
    assert {kind(name) for name in names} == {"norm", "end", "linear"}
    for rank in found:
        for name, left in rank.items():
            expected = 0.95 if kind(name) in DECAYED else 1.0
            assert left == pytest.approx(expected, rel=1e-5, nan_ok=True), name
    # Every parameter was seen by some rank.
    assert names == {name for rank in found for name, left in rank.items() if left == left}
