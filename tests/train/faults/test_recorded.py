"""Tests a rank's log and its last report when the disk is full."""

import sys
from pathlib import Path

import pytest
from wlb.train.faults.watched import rank_log

from wlb.launch.failure import FailureReport
from wlb.train.faults import watched


def test_a_log_that_cannot_be_written_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-1.log").symlink_to("/dev/full")
    with rank_log(tmp_path, 1, "here"):
        sys.stdout.write("said on stdout\n")
        sys.stderr.write("said on stderr\n")
    said = capfd.readouterr()
    assert said.out == "said on stdout\n"
    assert said.err.endswith("said on stderr\n")
    assert said.err.count("rank-1.log cannot be written ([Errno 28] No space left") == 1


def test_a_report_that_cannot_be_written_is_said_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failure.txt").symlink_to("/dev/full")
    ended: list[int] = []
    monkeypatch.setattr(watched.os, "_exit", ended.append)
    watched._end(FailureReport(rank=1, error="died", text="rank 1 of 2 died"), tmp_path)
    assert ended == [1]
    assert capsys.readouterr().err == "wlb train: rank 1 of 2 died\n"
