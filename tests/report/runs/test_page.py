"""Tests the page of several runs: figures of each, keys that differ, refusals."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.report.run.lines import start, step, whole_run, write
from wlb.cli import main
from wlb.report import read_run
from wlb.report.runs.page import differences, figures_of, run_names


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


def test_a_page_has_figures_of_each_run_and_keys_that_differ(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert main(["report", *folders, "--out", str(out)]) == 0
    assert f"written: {out}" in capsys.readouterr().out
    page = out.read_text("utf-8")
    text = text_of(page)
    runs = [read_run(Path(folder)) for folder in folders]
    for name, value in figures_of(runs[0]).items():
        other = figures_of(runs[1])[name]
        assert f"{name} {value} {other}" in text
    assert figures_of(runs[1])["wall time, last start (s)"] == "40.5"
    assert figures_of(runs[0])["wall time, last start (s)"] == "-"
    before = runs[0].spec.training.learning_rate
    assert f"key one two training.learning_rate {before!r} 0.5" in text
    assert page.count("<svg") == 2
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]+"', "", page)
    assert f"wlb report {folders[0]}" in text


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


def test_what_cannot_be_on_one_page_is_refused(
    folders: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert main(["report", *folders, "--step", "3"]) == 2
    assert "--step draws a step of one run" in capsys.readouterr().err
    assert main(["report", *(folders * 4)]) == 2
    assert "8 runs are too many for one page" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["report", *folders]) == 0
    assert "written: runs.html" in capsys.readouterr().out


def test_the_page_of_one_run_says_where_its_time_went(folders: list[str]) -> None:
    assert main(["report", folders[1]]) == 0
    page = (Path(folders[1]) / "report.html").read_text("utf-8")
    assert "Wall time of the last start: 40.5 s: start-up 10.0, steps 30.5." in text_of(page)
