"""Tests runs of models with linear layers: losses in every layout, checkpoints into others."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.sets import full, nightly
from tests.train.case import Run, small_spec, train, write_corpus
from wlb.spec import RunSpec, apply, check

pytestmark = [pytest.mark.dist, pytest.mark.process]

HYBRID = {
    "full_every": 2,
    "attention_gate": True,
    "linear": {"num_value_heads": 4, "num_key_heads": 2, "key_head_dim": 8, "value_head_dim": 8},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "cp2-tp2": {"parallel": {"cp": 2, "tp": 2}},
    "cp2-pp2": {"parallel": {"cp": 2, "pp": 2}, "pp": {"virtual_stages": 2}},
    "dp2-cp2": {"parallel": {"dp": 2, "cp": 2}},
}


def spec_for(folder: Path, corpus: Path, layout: str, **sections: Any) -> RunSpec:
    # A small rate, because rounding grows from step to step by a factor that rises with it.
    spec = small_spec(
        folder,
        corpus,
        model=HYBRID,
        checkpoint={"interval": 3},
        training={"learning_rate": 0.005},
        **sections,
    )
    return check(apply(spec, LAYOUTS[layout], source=layout))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("hybrid") / "corpus")


class Straight(dict[str, Run]):
    """Runs of six steps by layout, made when they are asked for."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.corpus = folder, corpus

    def __missing__(self, layout: str) -> Run:
        self[layout] = train(spec_for(self.folder, self.corpus, layout, run={"name": layout}))[0]
        return self[layout]


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    return Straight(tmp_path_factory.mktemp("runs"), corpus)


@pytest.mark.parametrize("layout", [*full("cp2-pp2"), *nightly("cp2-tp2", "dp2-cp2")])
def test_losses_do_not_depend_on_the_layout(straight: Straight, layout: str) -> None:
    one, other = straight["one"], straight[layout]
    assert other.losses == pytest.approx(one.losses, rel=1e-4)
    norms = [[s["measured"]["grad_norm"] for s in run.steps] for run in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        *full(("cp2-pp2", "one")),
        *nightly(("one", "cp2-tp2"), ("cp2-tp2", "dp2-cp2"), ("dp2-cp2", "cp2-pp2")),
    ],
)
def test_a_checkpoint_loads_into_another_layout(
    straight: Straight, corpus: Path, tmp_path: Path, saved: str, resumed: str
) -> None:
    whole = straight[saved]
    begun = whole.folder / "checkpoints" / "step-00000003"
    spec = spec_for(tmp_path, corpus, resumed)
    shutil.copytree(begun, tmp_path / "runs" / "small" / "checkpoints" / begun.name)
    again, _ = train(spec, resume=True)
    assert again.losses == pytest.approx(whole.losses[3:], rel=1e-4)
