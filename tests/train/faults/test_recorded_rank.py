"""Tests a rank's log when the disk is full."""

import sys
from pathlib import Path

import pytest

from wlb.train.faults.recorded_rank import rank_log


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
