"""Tests what `wlb report` says of a run that failed."""

from pathlib import Path

import pytest

from wlb.cli import main
from wlb.launch.failure import FailedRank, new_records, write_failure


def test_a_run_that_failed_is_explained_without_its_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--failure", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path}: no rank recorded a failure; see logs/ in this folder\n"
    )
    write_failure(new_records(tmp_path, 86400.0), FailedRank.of(ValueError("wrong"), 3, 4))
    assert main(["report", "--failure", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{tmp_path}, started 1970-01-0")
    assert ": rank 3 of 4 failed: ValueError: wrong\n" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["ranks"]


def test_a_folder_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--failure", str(tmp_path / "no")]) == 2
    assert "is not a folder; give the folder of a run" in capsys.readouterr().err
