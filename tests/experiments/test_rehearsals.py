"""Tests that the script of rehearsals goes on where it was interrupted, and tells of faults."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from experiments.rehearsals import __main__ as script
from experiments.rehearsals.__main__ import FORCED, KeptRows


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
    assert script.exit_status([["p", "wlb", "refused: too little memory"]]) == 1
    assert script.exit_status([["p", FORCED[0], "refused: too little memory"]]) == 0
    assert script.exit_status([["p", FORCED[0], "FAULT: x"]]) == 1


@pytest.mark.full
@pytest.mark.process
def test_the_quick_form_rehearses_one_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--quick"]) == 0
    assert "'4 of 32'" in capsys.readouterr().out
