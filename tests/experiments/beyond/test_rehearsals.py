"""Tests that the script of rehearsals goes on where it was interrupted, and tells of faults."""

import csv
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from experiments.beyond.rehearsals import __main__ as script
from experiments.beyond.rehearsals.__main__ import FORCED, LARGE, TABLE_1, KeptRows
from wlb.spec import SYSTEMS


def test_rows_are_kept_for_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def rehearsed(preset: str, systems: list[str], *_: Any, **__: Any) -> list[list[object]]:
        calls.extend(systems)
        return [[preset, system, "passed"] for system in systems]

    monkeypatch.setattr(script, "rehearsed", rehearsed)
    options = Namespace(steps=2, kept=False)

    def ask(commit: str, systems: list[str]) -> list[list[object]]:
        kept = KeptRows(tmp_path / "rows.jsonl", commit=commit)
        rows = kept.rows("550m_64k", systems, "0", layers=0, options=options)
        assert kept.missing == ["550m_64k paper, ranks 0"] * (len(rows) < len(systems))
        return rows

    ask("a", ["wlb"])
    assert [row[1] for row in ask("a", ["paper", "wlb"])] == ["paper", "wlb"]
    assert calls == ["wlb", "paper"]
    ask("b", ["wlb"])
    assert calls == ["wlb", "paper", "wlb"]
    options.kept = True  # what is missing is left out
    assert [row[1] for row in ask("b", ["paper", "wlb"])] == ["wlb"]
    assert calls == ["wlb", "paper", "wlb"]
    assert script.exit_status([["p", "s", "passed, 1 warning(s)"]]) == 0
    assert script.exit_status([["p", "s", "FAULT: x"], ["p", "s", "passed"]]) == 1
    assert script.exit_status([["p", "wlb", "refused: too little memory"]]) == 1
    assert script.exit_status([["p", FORCED[0], "refused: too little memory"]]) == 0
    assert script.exit_status([["p", FORCED[0], "FAULT: x"]]) == 1


@pytest.mark.nightly
@pytest.mark.process
def test_the_quick_form_rehearses_one_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--quick"]) == 0
    assert "'4 of 32'" in capsys.readouterr().out


def test_presets_and_systems_passed_in_the_committed_results() -> None:
    """The contract of memory: peaks lie at most 12% below the estimate, never above it."""
    rows = read_csv(Path(script.__file__).parent / "results" / "positions.csv")
    found = {(row["preset"], row["system"]) for row in rows}
    assert found == set(product((*TABLE_1, LARGE), (*SYSTEMS, *FORCED)))
    for row in rows:
        assert row["verdict"].startswith("passed"), row
        least, most = float(row["least peak / estimate"]), float(row["most"])
        assert 0.88 <= least <= most <= 1.0, row
        assert float(row["reserved (GiB)"]) <= float(row["may be reserved (GiB)"]), row


def test_all_ranks_of_the_papers_table_passed_in_the_committed_results() -> None:
    rows = read_csv(Path(script.__file__).parent / "results" / "ranks.csv")
    assert [row["preset"] for row in rows] == [*TABLE_1, LARGE]
    for row in rows:
        assert row["verdict"].startswith("passed"), row
        rehearsed, world = map(int, row["ranks"].split(" of "))
        assert rehearsed == world or row["preset"] == LARGE
        assert int(row["collectives"]) > 0 < int(row["transfers"])
        assert (int(row["whole communicators"]) > 0) == (rehearsed == world)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
