"""Tests all commands: warnings and user errors take one line on stderr, bugs keep a traceback."""

from pathlib import Path

import pytest

from tests.words import lacks
from wlb.cli import main, report
from wlb.plan import UserError

PLAN = ["plan", "--synthetic", "wlb_paper", "--steps", "2", "--json", "-"]


@pytest.mark.filterwarnings("default")
def test_a_renamed_key_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--set", "data.num_micro_batches=4"]) == 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert lacks(told, "wlb plan: warning: ", "data.num_micro_batches=4", "data.num_windows") == []


def test_a_users_error_is_one_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path / "absent.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wlb plan: ")
    assert "absent.toml' is neither a preset" in error
    assert error.count("\n") == 1


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        raise ValueError(f"an invariant does not hold in {folder.name}")

    monkeypatch.setattr(report, "read_run", broken)
    with pytest.raises(ValueError, match="an invariant does not hold") as raised:
        main(["report", str(tmp_path)])
    assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize("command", [["simulate", "--timeline"], ["tune", "packing", "--plot"]])
def test_a_format_of_pictures_that_is_none_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "step.xyz", "demo", "--synthetic", "wlb_paper"]) == 2
    assert "step.xyz: xyz is no format of pictures; use .png" in capsys.readouterr().err
