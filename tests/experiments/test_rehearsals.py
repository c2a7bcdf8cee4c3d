"""Tests that the committed rehearsals cover all presets and systems, and found no fault."""

import csv
from pathlib import Path
from typing import Any

import pytest

from experiments import rehearsals
from experiments.rehearsals import __main__ as script
from experiments.rehearsals.__main__ import FORCED, LARGE, TABLE_1, KeptRows
from tests.rehearse.test_run_presets import LEAST
from wlb.spec import SYSTEMS

RESULTS = Path(rehearsals.__file__).parent / "results"


def rows_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_preset_ran_under_each_system() -> None:
    rows = rows_of("positions")
    wanted = {(p, s) for p in (*TABLE_1, LARGE) for s in (*SYSTEMS, *FORCED)}
    assert {(row["preset"], row["system"]) for row in rows} == wanted
    for row in rows:
        if row["verdict"].startswith("refused") and row["system"] in FORCED:
            continue  # memory leaves no room for this alternative, so no user gets it
        assert row["verdict"].startswith("passed"), row
        assert LEAST <= float(row["least peak / estimate"]) <= float(row["most"]) <= 1, row
        assert float(row["reserved (GiB)"]) <= float(row["may be reserved (GiB)"]), row


def test_all_ranks_of_table_1_were_proven() -> None:
    rows = {row["preset"]: row for row in rows_of("ranks")}
    assert set(rows) == {*TABLE_1, LARGE}
    for preset in TABLE_1:
        done, _, world = rows[preset]["ranks"].partition(" of ")
        assert done == world
    assert all(row["verdict"].startswith("passed") for row in rows.values())


def test_rows_are_kept_for_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def rehearsed(preset: str, systems: list[str], *_: Any, **__: Any) -> list[list[object]]:
        calls.extend(systems)
        return [[preset, system, "passed"] for system in systems]

    monkeypatch.setattr(script, "rehearsed", rehearsed)
    options = script.argparse.Namespace(steps=2)

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
