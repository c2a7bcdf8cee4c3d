"""Tests what a run says about its saves before its first step, and when it ends for want of one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.case import Run, train
from tests.train.checkpoint.case import save_at_once, spec_of
from tests.words import lacks
from wlb.spec import load
from wlb.train.checkpoint import saver, saves
from wlb.train.checkpoint.saver import CheckpointError
from wlb.train.checkpoint.saves import unsaved_remark


def test_a_run_without_interval_says_what_an_abort_would_lose(tmp_path: Path) -> None:
    spec = load("demo", ["training.steps=5000"])
    said = unsaved_remark(spec, None)
    assert lacks(said, "checkpoint.interval = 0", "Ctrl-C", "is killed", "up to 5,000") == []
    (tmp_path / "run.json").write_text(json.dumps({"step": 1200, "spec": {"model": {}}}), "utf-8")
    assert "after step 1,200 are lost (up to 3,800)" in unsaved_remark(spec, tmp_path)
    assert unsaved_remark(load("demo", ["checkpoint.interval=10"]), None) == ""


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize("at_once", [False, True])
def test_a_run_does_not_train_on_unsaved(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """The second failure in a row ends it, after step 5; the one of step 1 was followed by a
    success.
    """
    write, tried = saver.state_dict_saver.save, list[int]()

    def fails(*arguments: Any, **named: Any) -> Any:
        tried.append(len(tried) + 1)
        if tried[-1] in (1, 4, 5):
            raise OSError(5, "Input/output error")
        return write(*arguments, **named)

    monkeypatch.setattr(saver.state_dict_saver, "save", fails)
    monkeypatch.setattr(saves, "MOST_FAILED", 2)
    if at_once:
        save_at_once(monkeypatch)
    options = {"interval": 1}
    spec = spec_of(tmp_path, corpus, training={"steps": 9}, checkpoint=options)
    with pytest.raises(CheckpointError, match=r"2 saves in a row .* after step 5: .*I"):
        train(spec)
    run = Run(spec)
    assert len(run.steps) == 5
    assert run.checkpoints == ["step-00000002", "step-00000003"]


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize(("most", "steps"), [(1, 2), (3, 3)])
def test_a_run_ends_where_it_trains_unsaved(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, steps: int
) -> None:
    """One: saves stay asynchronous, so that a failure is known at the next save."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(saver.state_dict_saver, "save", fails)
    monkeypatch.setattr(saves, "MOST_FAILED", most)
    spec = spec_of(tmp_path, corpus, training={"steps": 3}, checkpoint={"interval": 1})
    with pytest.raises(
        CheckpointError, match="1 saves in a row" if most == 1 else "the last checkpoint"
    ):
        train(spec)
    assert len(Run(spec).steps) == steps
