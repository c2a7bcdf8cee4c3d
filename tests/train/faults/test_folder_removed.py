"""Tests that a run ends with an error when its folder is removed or renamed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sets import full
from tests.train.case import small_spec, write_corpus
from tests.train.checkpoint.case import save_at_once
from tests.train.faults.test_recorded_rank_broken import broken_run
from wlb.cli.main import main
from wlb.parallel.execute import Executor
from wlb.spec import to_toml

STEP = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("renamed"))


def replace(folder: Path) -> None:
    """Puts an empty folder in its place, as a second run of the name may."""
    folder.rename(folder.with_name("renamed"))
    (folder / "checkpoints").mkdir(parents=True)


@pytest.mark.process
@pytest.mark.parametrize(("how", "step"), [(rename, STEP), *full((remove, 5), (replace, STEP))])
def test_a_folder_that_is_lost_ends_the_run(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: Callable[[Path], None],
    step: int,
) -> None:
    """Step 5 is the last one of six, after which the run saves."""
    save_at_once(monkeypatch)
    train_step, steps = Executor.train_step, list[int]()
    spec = small_spec(tmp_path, corpus, checkpoint={"interval": 1})
    folder = Path(spec.run.output_dir) / spec.run.name

    def losing(self: Executor, plan: Any, *args: Any, **options: Any) -> Any:
        steps.append(plan.step)
        if plan.step == step:
            how(folder)
        return train_step(self, plan, *args, **options)

    monkeypatch.setattr(Executor, "train_step", losing)
    (tmp_path / "run.toml").write_text(to_toml(spec))
    assert main(["train", str(tmp_path / "run.toml")]) == 1
    said = capsys.readouterr()
    assert (
        f"{folder}, the folder of this run, was removed or renamed after step {step + 1}"
        in said.err
    )
    assert "Traceback" not in said.err
    assert "token delay" not in said.out  # of the summary
    assert steps[-1] == step
    if how is replace:
        assert not any((folder / "checkpoints").iterdir())
    else:
        assert not folder.exists()


def lose() -> None:
    """Renames the folder of the run whose log this rank writes."""
    (log,) = [
        Path(target).parent
        for fd in os.listdir("/proc/self/fd")
        if (target := _target(fd)).endswith("/rank-0.log")
    ]
    log.parent.rename(log.parent.with_name("renamed"))


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # that of the listing itself
        return ""


@pytest.mark.full
@pytest.mark.dist
def test_a_folder_that_is_lost_ends_all_ranks(tmp_path: Path, corpus: Path) -> None:
    failure = broken_run(tmp_path, corpus, (0,), lose)
    assert failure.rank == 0
    assert "the folder of this run, was removed or renamed after step 3" in failure.error
    assert not (tmp_path / "runs" / "small").exists()
