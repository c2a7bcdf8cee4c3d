"""Tests the tables of several runs: figures of each, keys that differ, refusals."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.report.run.lines import start, step, whole_run, write
from wlb.cli import main
from wlb.report.run.compare import differences, figures_of, run_names
from wlb.report.run.records import read_run


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page)))


def changed(lines: list[dict[str, Any]], **keys: Any) -> list[dict[str, Any]]:
    """Returns the lines of a run with another configuration of training."""
    out = json.loads(json.dumps(lines))
    for line in out:
        if line["kind"] == "start":
            line["spec"]["training"] |= keys
    return out


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    lines = whole_run()
    seconds = {"start-up": 10.0, "steps": 30.5}
    write(tmp_path / "one", lines)
    write(
        tmp_path / "b" / "two",
        [*changed(lines, learning_rate=0.5), {"kind": "wall", "seconds": seconds}],
    )
    return [str(tmp_path / "one"), str(tmp_path / "b" / "two")]


def test_tables_have_figures_of_each_run_and_keys_that_differ(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *folders]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    runs = [read_run(Path(folder)) for folder in folders]
    for name, value in figures_of(runs[0]).items():
        other = figures_of(runs[1])[name]
        assert f"{name} {value} {other}" in text
    assert figures_of(runs[1])["wall time, last start (s)"] == "40.5"
    assert figures_of(runs[0])["wall time, last start (s)"] == "-"
    before = runs[0].spec.training.learning_rate
    assert f"training.learning_rate {before!r} 0.5" in text
    assert main(["report", folders[0], folders[0]]) == 0
    assert "Configuration keys that differ" not in capsys.readouterr().out


def test_equal_names_get_their_folders(tmp_path: Path) -> None:
    lines = [start(), step(1)]
    paths = [write(tmp_path / at, lines) for at in ("a/run", "b/run", "c/own")]
    assert run_names([read_run(path) for path in paths]) == [str(paths[0]), str(paths[1]), "own"]


def test_names_of_runs_are_no_difference() -> None:
    one = {"run": {"name": "a", "seed": 0}, "model": {"rope_scaling": {"factor": 1.0}}}
    two = {"run": {"name": "b", "seed": 1}, "model": {"rope_scaling": {"factor": 2.0}}}
    assert differences([one, two]) == [
        ("run.seed", ["0", "1"]),
        ("model.rope_scaling.factor", ["1.0", "2.0"]),
    ]
    assert differences([one, one]) == []


@pytest.mark.parametrize("words", [["--step", "3"], ["--out", "page.html"]])
def test_options_of_a_page_are_refused_for_several_runs(
    words: list[str], folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *folders, *words]) == 2
    assert f"{words[0]} applies only to the page of one run" in capsys.readouterr().err


def test_the_page_of_one_run_says_where_its_time_went(folders: list[str]) -> None:
    assert main(["report", folders[1]]) == 0
    page = (Path(folders[1]) / "report.html").read_text("utf-8")
    assert "Wall time of the last start: 40.5 s: start-up 10.0, steps 30.5." in text_of(page)
