"""Tests the ranks' watch: long messages, open files, and whom a report names."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from wlb.launch.failure import AggregatorLoss, FailureReport, RankStatus, compose_report
from wlb.launch.local import run_local
from wlb.launch.position import Position
from wlb.launch.watch import Watch, WatchOptions, check_files
from wlb.parallel.world import World


def long_failure(world: World, logs: Path) -> str:
    """Returns what is reported of an error of 70,000 characters; asyncio reads lines of 65,536."""
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
    """As on CUDA, three ranks wait where they read a sum, and one is stuck in a read."""
    doing = ["a sum", "a read", "a sum", "a sum"]
    seen = [
        RankStatus(rank=rank, place=f"node {rank}", stack=STACKS[what].splitlines())
        for rank, what in enumerate(doing)
    ]
    report = compose_report(seen, 4, silence_s=4.0, stuck_s=60.0)
    assert report.rank == 1
    assert "has not joined the collective" in report.text


def test_a_report_of_very_many_ranks_stays_readable(tmp_path: Path) -> None:
    """Logs are read of the ranks that the report is about only."""
    for rank in (3, 5000):
        (tmp_path / f"rank-{rank}.log").write_text(f"said by {rank}\n")
    seen = [RankStatus(rank=r, place="a node", is_dead=r < 4000) for r in range(9990)]
    report = compose_report(seen, 10_000, silence_s=4.0, stuck_s=60.0, logs=tmp_path)
    lines = report.text.splitlines()
    assert lines[0] == "rank 0 of 10000 died"
    assert "and 3984 more ranks" in lines
    assert "and 5974 more ranks" in lines
    assert lines[-1].startswith("no message ever from rank 9990, 9991")
    assert "said by 3" in report.text
    assert "said by 5000" not in report.text
    assert len(lines) < 100


def test_a_lost_watch_is_the_cause_only_if_no_rank_is() -> None:
    loss = AggregatorLoss(ranks=(2, 3), name="process 7 on n1", is_silent=False)
    ranks = [RankStatus(rank=rank, place="here") for rank in range(4)]
    report = compose_report(ranks, 4, silence_s=4.0, stuck_s=60.0, losses=[loss])
    assert (report.rank, report.error) == (2, "the watch of rank 2, 3 (process 7 on n1) died")
    ranks[3].failure, ranks[3].order = "ValueError: wrong", 1
    report = compose_report(ranks, 4, silence_s=4.0, stuck_s=60.0, losses=[loss])
    assert (report.rank, report.error) == (3, "ValueError: wrong")
    assert loss.describe(4.0) in report.text.splitlines()


def test_open_files_are_counted_before_the_watch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1200))
    check_files(1128, 8, 0)
    check_files(1250, 8, 2)  # neither the root nor its standby
    with pytest.raises(
        OSError, match=r"1250 nodes needs 1322 open files, and .* is 1200: raise it"
    ):
        check_files(1250, 8, 1)


@pytest.mark.process
def test_an_aggregator_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, wlb.launch.aggregator; print({'torch', 'numpy'} & sys.modules.keys())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"
