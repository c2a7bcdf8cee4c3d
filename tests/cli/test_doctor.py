"""Tests `wlb doctor`: its table, its JSON, its exit status and bad input."""

import json
import re
from pathlib import Path

import pytest

from wlb.cli import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_with_remedies_and_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--quick", "--set", "run.device=cpu", "--json", "found.json"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "wlb doctor demo_single" in printed
    first = " ".join(printed.split())
    assert re.match(
        r"demo_single can run here(: no check failed or gave a warning|, but may be slow or close "
        r"to a limit: .+); checks that do not apply to this machine or layout: \d+\.",
        first,
    )
    assert "file descriptors" in printed
    found = json.loads((here / "found.json").read_text("utf-8"))
    assert found["verdict"] == "pass"
    assert found["command"] == "wlb " + " ".join(words)
    assert sum(found["counts"].values()) == len(found["findings"])
    assert found["counts"]["fail"] == 0


def test_a_fail_is_status_1_and_names_the_remedy(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "runs").touch()
    assert main(["doctor", "demo_single", "--quick", "--set", "run.device=cpu"]) == 3
    printed = capsys.readouterr().out
    assert "-> set run.output_dir to a folder" in printed
    assert re.match(
        r"demo_single cannot run here, because these checks failed: shared folder\. First set "
        r"run\.output_dir to a",
        " ".join(printed.split()),
    )
    assert "1 fail" in printed
    assert main(["doctor", "--quick", "--set", "run.device=cpu", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "fail"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none_such"], "none_such"),
        (["--timeout", "0"], "--timeout = 0 must be above 0"),
        (["--set", "training.stesp=3"], "did you mean 'training.steps'?"),
        (["--json", "missing/found.json"], "cannot be written"),
        (["--system", "best"], "unknown system 'best'"),
    ],
)
def test_bad_input_is_one_line(words, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
