"""Tests that the script of rehearsals goes on where it was interrupted, and tells of faults."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from experiments.rehearsals import __main__ as script
from experiments.rehearsals.__main__ import KeptRows


def test_rows_are_kept_for_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def rehearsed(preset: str, systems: list[str], *_: Any, **__: Any) -> list[list[object]]:
        calls.extend(systems)
        return [[preset, system, "passed"] for system in systems]

    monkeypatch.setattr(script, "rehearsed", rehearsed)
    options = Namespace(steps=2)

    def ask(commit: str, systems: list[str]) -> list[list[object]]:
        kept = KeptRows(tmp_path / "rows.jsonl", commit=commit)
        return kept.rows("550m_64k", systems, "0", layers=0, options=options)

    ask("a", ["wlb"])
    assert [row[1] for row in ask("a", ["paper", "wlb"])] == ["paper", "wlb"]
    assert calls == ["wlb", "paper"]
    ask("b", ["wlb"])
    assert calls == ["wlb", "paper", "wlb"]
    assert script.exit_status([["p", "s", "passed, 1 warning(s)"]]) == 0
    assert script.exit_status([["p", "s", "FAULT: x"], ["p", "s", "passed"]]) == 1
