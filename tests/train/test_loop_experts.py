"""Tests runs with experts: losses in every layout, balance, checkpoints into other EP degrees."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sets import full, nightly
from tests.train.case import Run, small_spec, train, write_corpus
from wlb.spec import RunSpec, apply, check

pytestmark = [pytest.mark.dist, pytest.mark.process]

# Layers 0 and 2 have none, so that with two virtual stages rank 0 of the pipeline has none.
EXPERTS = {"num": 8, "per_token": 2, "hidden_size": 32, "every": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "cp2-pp2-ep2": {"parallel": {"cp": 2, "pp": 2, "ep": 2}, "pp": {"virtual_stages": 2}},
    "cp2-dp2-ep4": {"parallel": {"cp": 2, "dp": 2, "ep": 4}},
    "tp2-cp2": {"parallel": {"tp": 2, "cp": 2}},
    "copies": {"parallel": {"cp": 2, "dp": 2, "ep": 2}, "fsdp": {"shard_size": 2}},
}


def spec_for(folder: Path, corpus: Path, layout: str, balance: str, **sections: Any) -> RunSpec:
    # At a rate of 0.02 rounding grows by a factor of ten a step.
    spec = small_spec(
        folder,
        corpus,
        model={"experts": EXPERTS | {"balance": balance, "aux_coefficient": 0.1}},
        checkpoint={"interval": 3},
        training={"learning_rate": 0.005},
        **sections,
    )
    return check(apply(spec, LAYOUTS[layout], source=layout))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("experts") / "corpus")


class Straight(dict[tuple[str, str], Run]):
    """Runs of six steps, made when they are asked for."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.corpus = folder, corpus

    def __missing__(self, key: tuple[str, str]) -> Run:
        named = {"name": "-".join(key)}
        self[key] = train(spec_for(self.folder, self.corpus, *key, run=named))[0]
        return self[key]


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    return Straight(tmp_path_factory.mktemp("runs"), corpus)


@pytest.mark.parametrize(
    ("layout", "balance"),
    [
        *full(("cp2-pp2-ep2", "bias"), ("cp2-dp2-ep4", "aux_loss")),
        *nightly(("copies", "bias"), ("cp2-pp2-ep2", "aux_loss"), ("tp2-cp2", "bias")),
    ],
)
def test_losses_do_not_depend_on_the_layout(straight: Straight, layout: str, balance: str) -> None:
    one, other = straight["one", balance], straight[layout, balance]
    assert other.losses == pytest.approx(one.losses, rel=1e-4)
    norms = [[s["measured"]["grad_norm"] for s in run.steps] for run in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    loads = [[s["measured"]["expert_load"] for s in run.steps] for run in (one, other)]
    assert loads[1] == pytest.approx(loads[0], rel=0.02)
    assert 1.0 < min(loads[0]) < max(loads[0]) < EXPERTS["num"]
    alone, divided = (run.steps[0]["measured"]["experts"] for run in (one, other))
    assert alone["layers"] == divided["layers"] == [1, 3]  # every second of four
    assert alone["rank"] == [1.0] * len(alone["layers"])
    assert divided["expert"] == pytest.approx(alone["expert"], rel=0.02)
    ep = LAYOUTS[layout]["parallel"].get("ep", 1)
    assert [len(alone["ranks"]), len(divided["ranks"])] == [1, ep]
    assert sum(divided["ranks"]) == pytest.approx(ep, abs=0.001)
    # Micro-batches and layers are less even than all of them together.
    waited = sum(divided["rank"]) / len(divided["rank"])
    assert waited >= max(divided["ranks"]) - 0.001
    assert (waited > 1.0) == (ep > 1)


@pytest.mark.full
def test_balance_changes_what_is_learned(straight: Straight) -> None:
    losses = [straight["one", balance].losses for balance in ("bias", "aux_loss")]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    assert losses[0][3:] != pytest.approx(losses[1][3:], rel=1e-5)


@pytest.mark.parametrize(
    ("saved", "resumed", "balance"),
    [
        *full(("cp2-pp2-ep2", "one", "bias")),
        *full(("one", "copies", "bias")),
        *nightly(("cp2-dp2-ep4", "one", "aux_loss"), ("copies", "cp2-pp2-ep2", "bias")),
        *nightly(("cp2-dp2-ep4", "cp2-pp2-ep2", "aux_loss")),
    ],
)
def test_a_checkpoint_loads_into_another_layout(
    straight: Straight, corpus: Path, tmp_path: Path, saved: str, resumed: str, balance: str
) -> None:
    """Biases of experts, and shares of the step before, are part of it."""
    whole = straight[saved, balance]
    begun = whole.folder / "checkpoints" / "step-00000003"
    spec = spec_for(tmp_path, corpus, resumed, balance)
    shutil.copytree(begun, tmp_path / "runs" / "small" / "checkpoints" / begun.name)
    again, _ = train(spec, resume=True)
    assert again.losses == pytest.approx(whole.losses[3:], rel=1e-4)


@pytest.mark.full
def test_other_experts_are_refused(straight: Straight, corpus: Path, tmp_path: Path) -> None:
    begun = straight["one", "bias"].folder
    spec = spec_for(tmp_path, corpus, "one", "bias")
    other = replace(spec.model.experts, num=4)
    spec = replace(
        spec,
        model=replace(spec.model, experts=other),
        checkpoint=replace(spec.checkpoint, init_from=str(begun)),
    )
    with pytest.raises(
        ValueError, match=r"has model\.experts\.num = 8, but this run has model\.experts\.num = 4"
    ):
        train(spec)
