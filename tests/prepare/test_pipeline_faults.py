"""Tests that `prepare_store` survives a failure or a kill at each change of its files."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from tests.faults import BROKEN, FULL, Action, changes, is_short_of_memory
from tests.prepare.pipeline_case import options
from tests.sets import full, nightly
from wlb.prepare import PrepareOptions, prepare_store

STORE = ("x.bin", "x.idx", "x.json", "x-heldout.bin", "x-heldout.idx", "x-heldout.json", "x.lock")
SMALL = {"shard_bytes": 700, "heldout_fraction": 0.3}
ENDS = (OSError, ValueError, MemoryError)


def write_corpus(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "a.jsonl"
    texts = [f"document {i}\n" * (1 + i * 7 % 5) for i in range(24)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def asked(corpus: Path, folder: Path, *, overwrite: bool) -> PrepareOptions:
    seed = 4 if overwrite else 3
    return options(corpus, folder / "x", **SMALL, seed=seed, overwrite=overwrite)


def begin(corpus: Path, folder: Path, *, overwrite: bool) -> None:
    """Where the preparation overwrites, makes another store, and parts of a third one."""
    folder.mkdir()
    if overwrite:
        prepare_store(asked(corpus, folder, overwrite=False))
        with suppress(OSError), changes(folder, at=115, action=BROKEN):
            prepare_store(options(corpus, folder / "x", **SMALL, seed=5, overwrite=True))
        assert list((folder / "x.parts").glob("0*.idx"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def expected_of(corpus: Path, folder: Path, *, overwrite: bool) -> dict[str, bytes]:
    """Returns what a call that nothing disturbs makes of what is in `folder`/begun."""
    begin(corpus, folder / "begun", overwrite=overwrite)
    prepare_store(asked(corpus, folder / "reference", overwrite=overwrite))
    return contents(folder / "reference")


def check_all(corpus: Path, folder: Path, action: Action, *, overwrite: bool, every: int) -> int:
    """Lets each change fail, every-th ones alone, and prepares again; returns how many there are.

    A call that raises nothing has made the store.
    """
    expected = expected_of(corpus, folder, overwrite=overwrite)
    assert sorted(expected) == sorted(STORE)
    for at in count(1, every):
        out = folder / str(at)
        shutil.copytree(folder / "begun", out)
        told = asked(corpus, out, overwrite=overwrite)
        with changes(out, at=at, action=action) as seen, suppress(*ENDS):
            prepare_store(told)
            assert contents(out) == expected, seen.seen[at - 1]
        prepare_store(told)
        found = contents(out)
        assert found == expected, seen.seen[at - 1]
        assert not out.joinpath("x.parts").exists(), seen.seen[at - 1]
        if len(seen.seen) < at:
            return len(seen.seen)
    raise AssertionError


@pytest.mark.parametrize(
    ("action", "overwrite", "every"),
    [
        (FULL, False, 11),
        *full((FULL, True, 11), (BROKEN, False, 5), (is_short_of_memory, False, 11)),
        *nightly((FULL, True, 1), (FULL, False, 1), (BROKEN, False, 1)),
        *nightly((BROKEN, True, 1), (is_short_of_memory, False, 1)),
    ],
)
def test_any_change_may_fail(tmp_path: Path, action: Action, overwrite: bool, every: int) -> None:
    corpus = write_corpus(tmp_path / "in")
    assert check_all(corpus, tmp_path, action, overwrite=overwrite, every=every) > 50


@pytest.mark.process
@pytest.mark.parametrize(
    ("kinds", "overwrite"),
    [*full(("naming", False), ("naming", True)), *nightly(("all", False), ("all", True))],
)
def test_a_kill_at_any_change_is_survived(tmp_path: Path, kinds: str, overwrite: bool) -> None:
    command = [sys.executable, "-m", "tests.prepare.killed"]
    command += [str(tmp_path), kinds, str(int(overwrite))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["kills"] > 20
