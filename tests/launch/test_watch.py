"""The ranks' watch by itself: long messages, and who is named where collectives are only posted."""

from pathlib import Path

import pytest

from wlb.launch.failure import FailureReport, RankStatus, compose_report
from wlb.launch.local import run_local
from wlb.launch.position import Position
from wlb.launch.watch import Watch, WatchOptions
from wlb.parallel.world import World


def long_failure(world: World, logs: Path) -> str:
    """What is reported of an error of 70,000 characters; asyncio reads lines of 65,536."""
    reports: list[FailureReport | None] = []
    options = WatchOptions(silence_s=4.0, stuck_s=60.0, logs=logs, place="here")
    watch = Watch(world, Position(), options, reports.append)
    watch.raised(RuntimeError("the compiler said " + "x" * 70_000))
    (report,) = {r.text for r in reports if r is not None}
    return report


@pytest.mark.dist
def test_a_long_error_is_told_by_its_beginning(tmp_path: Path) -> None:
    (text,) = run_local(long_failure, 1, tmp_path, start_group=True, timeout_s=600)
    assert text.startswith("rank 0 of 1 failed: RuntimeError: the compiler said xxx")
    assert len(text) < 10_000


STACKS = {
    "a sum": '  File "wlb/train/reduce.py", line 78, in step\n    total = vector.tolist()',
    "a read": '  File "wlb/data/store.py", line 210, in read\n    return self._tokens[a:b]',
}


def test_who_waits_for_a_posted_collective_is_not_the_cause() -> None:
    """As on CUDA: three ranks wait where they read a sum, one is stuck in a read."""
    doing = ["a sum", "a read", "a sum", "a sum"]
    seen = [
        RankStatus(rank=rank, place=f"node {rank}", stack=STACKS[what].splitlines())
        for rank, what in enumerate(doing)
    ]
    report = compose_report(seen, 4, silence_s=4.0, stuck_s=60.0)
    assert report.rank == 1
    assert "has not joined the collective" in report.text
