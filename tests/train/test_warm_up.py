"""Tests what happens once before the first step: communicators connect, garbage is frozen."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.case import small_spec, train, write_corpus
from wlb.train.warm_up import CollectGarbage


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records collections; restores the collector's state."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    yield calls  # type: ignore[misc]
    gc.unfreeze()
    gc.enable()


def test_garbage_is_collected_between_steps_and_nowhere_else(collected: list[str]) -> None:
    hook, run = CollectGarbage(3), SimpleNamespace()
    nothing: Any = run
    hook.begin(nothing)
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    when = []
    for step in range(1, 8):
        before = len(collected)
        hook.after_step(nothing, nothing)
        when += [step] * (len(collected) - before)
    assert when == [3, 6]
    hook.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_someone_else_turned_off_stays_off(collected: list[str]) -> None:
    nothing: Any = SimpleNamespace()
    gc.disable()
    hook = CollectGarbage(1)
    hook.begin(nothing)
    hook.close()
    assert not gc.isenabled()
    assert not collected


@pytest.mark.process
@pytest.mark.dist
@pytest.mark.full
def test_a_run_records_what_it_connected(tmp_path: Path) -> None:
    spec = small_spec(
        tmp_path,
        write_corpus(tmp_path / "texts"),
        parallel={"pp": 2, "dp": 1},
        training={"steps": 1, "gc_interval": 1},
    )
    run, _ = train(spec)
    (line,) = (line for line in run.lines if line["kind"] == "connected")
    assert (line["communicators"], line["neighbours"]) == (1, 1)
    kinds = [line["kind"] for line in run.lines]
    assert kinds.index("start") < kinds.index("connected") < kinds.index("step")
