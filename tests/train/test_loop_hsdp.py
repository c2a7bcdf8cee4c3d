"""Tests training with parameters sharded within groups of ranks: losses, norms, checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.sets import nightly
from tests.train.case import Run, small_spec, train, write_corpus

pytestmark = [pytest.mark.full, pytest.mark.dist]

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"parallel": {"dp": 4}},
    "groups": {"parallel": {"dp": 4}, "fsdp": {"shard_size": 2}},
    "tp groups": {"parallel": {"tp": 2, "dp": 2, "cp": 2}, "fsdp": {"shard_size": 2}},
    "dropped": {"parallel": {"dp": 2, "cp": 2}, "fsdp": {"reshard_after_forward": True}},
}


def run_of(folder: Path, corpus: Path, layout: str, *, resume: bool = False) -> Run:
    saved = {"interval": 3, "keep": 9}
    return train(small_spec(folder, corpus, checkpoint=saved, **LAYOUTS[layout]), resume=resume)[0]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("hsdp") / "corpus")


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("straight")
    return {name: run_of(folder / name, corpus, name) for name in ("plain", "groups")}


def norms(run: Run) -> list[float]:
    return [line["measured"]["grad_norm"] for line in run.steps]


def test_groups_train_as_all_ranks_together_do(straight: dict[str, Run]) -> None:
    plain, groups = straight["plain"], straight["groups"]
    assert len(plain.losses) == 6
    assert groups.losses == pytest.approx(plain.losses, rel=1e-5)
    assert norms(groups) == pytest.approx(norms(plain), rel=1e-4)
    assert [loss for _, loss in groups.evaluations] == pytest.approx(
        [loss for _, loss in plain.evaluations], rel=1e-5
    )


@pytest.mark.parametrize(
    ("first", "then"),
    [
        *(("plain", "groups"), ("groups", "dropped")),
        *nightly(("groups", "plain"), ("groups", "tp groups")),
    ],
)
def test_a_checkpoint_goes_on_under_another_sharding(
    straight: dict[str, Run], corpus: Path, tmp_path: Path, first: str, then: str
) -> None:
    before = straight[first]
    step = Path("checkpoints") / "step-00000003"
    shutil.copytree(before.folder / step, tmp_path / "runs" / "small" / step)
    again = run_of(tmp_path, corpus, then, resume=True)
    assert [line["steps_done"] for line in again.steps] == [4, 5, 6]
    assert again.losses == pytest.approx(before.losses[3:], rel=1e-4)
    assert norms(again) == pytest.approx(norms(before)[3:], rel=1e-3)
