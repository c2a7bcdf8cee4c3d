"""Tests whom the report of a failed run names, from files as ranks leave them."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from wlb.launch import failure as failures
from wlb.launch import position as positions
from wlb.launch.failure import (
    FailedRank,
    FailureKind,
    began_s,
    new_records,
    newest_records,
    stack_path,
    write_failure,
)
from wlb.launch.position import Position, SlotOwner
from wlb.launch.report import FailureReport, compose_report, keep_report
from wlb.plan import UserError

SIZE, EACH = 4, 2
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:7"
LATE = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 15000ms"
WAITS = '  File "wlb/train/reduce.py", line 78 in step\n  File "wlb/train/loop.py", line 9 in run'
READS = '  File "wlb/data/store.py", line 210 in read\n  File "wlb/train/loop.py", line 9 in run'


class Left:
    """Writes what ranks of the last start of a run in `directory` leave, on machines that are not
    this one.
    """

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory, self.patch = directory, patch
        self.records = new_records(directory, 100.0)

    def at(self, rank: int, *, size: int = SIZE, each: int = EACH, ended: bool = False) -> None:
        with self.patch.context() as patched:
            patched.setattr(positions.socket, "gethostname", lambda: f"n{rank // each}")
            place = SlotOwner(
                rank=rank,
                world_size=size,
                local_rank=rank % each,
                local_world_size=each,
                node_rank=rank // each,
                words=f"process 7 on n{rank // each}",
            )
            position = Position.opened(self.records, place)
        position.enter("computing", step=5)
        if ended:
            position.end()

    def failed(self, rank: int, error: str, time_s: float) -> None:
        failure = FailedRank(
            rank=rank,
            world_size=SIZE,
            kind=FailureKind.RAISED,
            error=error,
            time_s=time_s,
            traceback=[f"traceback of {rank}"],
        )
        write_failure(self.records, failure)

    def stack(self, rank: int, frames: str, *, fatal: str = "") -> None:
        other = 'Thread 0x2 (most recent call first):\n  File "threading.py", line 5 in wait\n\n'
        text = f"{other}Thread 0x1 (most recent call first):\n{frames}\n"
        if fatal:
            text = f"Fatal Python error: {fatal}\n\n{text}\nExtension modules: numpy\n"
        stack_path(self.records, rank).write_text(text)

    def report(self) -> FailureReport:
        report = compose_report(self.directory)
        assert report is not None
        return report


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Left:
    return Left(tmp_path, monkeypatch)


def lost_node(left: Left) -> None:
    """Ranks of the other node lose their connections."""
    left.failed(0, LOST, 1.0)
    left.failed(1, LOST, 2.0)


def raised_first(left: Left) -> None:
    """Slurm may kill the others before they write anything."""
    left.failed(3, "ValueError: wrong", 3.0)
    left.failed(0, LOST, 4.0)


def raised_last(left: Left) -> None:
    """Peers of a rank that is about to fail may notice first."""
    left.failed(0, LOST, 3.0)
    left.failed(3, "ValueError: wrong", 4.0)
    left.stack(1, WAITS)
    left.stack(2, WAITS)


def reads(left: Left) -> None:
    """One is stuck in a read, and others wait where they read a sum, as on CUDA."""
    for rank, frames in enumerate((WAITS, READS, WAITS, WAITS)):
        left.stack(rank, frames)
    left.failed(2, LATE, 1.0)


def aborted(left: Left) -> None:
    """NCCL's watchdog ends ranks that have waited for too long."""
    for rank, frames in enumerate((WAITS, READS, WAITS, WAITS)):
        left.stack(rank, frames, fatal="" if rank == 1 else "Aborted")


def crashed(left: Left) -> None:
    for rank in (0, 2, 3):
        left.failed(rank, LOST, 1.0)
    left.stack(1, READS, fatal="Segmentation fault")


def all_wait(left: Left) -> None:
    """Nobody is to blame more than who gave up first."""
    for rank in range(SIZE):
        left.stack(rank, WAITS)
    left.failed(2, LATE, 1.0)


NO_WORD = "ended without an error message: it was killed, ran out of memory, or its node was lost"


@pytest.mark.parametrize(
    ("leave", "rank", "what"),
    [
        (lost_node, 2, NO_WORD),
        (raised_first, 3, "failed: ValueError: wrong"),
        (raised_last, 3, "failed: ValueError: wrong"),
        (reads, 1, "has not joined the collective that others waited for"),
        (aborted, 1, "has not joined the collective that others waited for"),
        (crashed, 1, "died: Segmentation fault"),
        (all_wait, 2, f"failed: {LATE}"),
        (
            lambda _: None,
            0,
            "ended without an error message, as all ranks did: they or their launcher were",
        ),
    ],
)
def test_the_rank_that_failed_first_is_named(
    left: Left, leave: Callable[[Left], None], rank: int, what: str
) -> None:
    for each in range(SIZE):
        left.at(each)
    leave(left)
    report = left.report()
    assert report.text.startswith(f"rank {rank} of {SIZE} {what}")
    assert report.rank == rank
    said = [line for line in report.text.splitlines() if line.startswith(("rank", "the same"))]
    assert {int(digit) for line in said for digit in line if digit in "0123"} >= set(range(SIZE))
    assert "step 5: computing (since " in report.text


def test_all_ranks_of_a_lost_node_are_named(left: Left) -> None:
    for each in range(SIZE):
        left.at(each)
    lost_node(left)
    lines = left.report().text.splitlines()
    assert lines[1].startswith("  last seen in step 5: computing")
    assert lines[2] == "  process 7 on n1"
    assert "rank 3 as well" in lines
    assert f"rank 1 then failed: {LOST} (in step 5: computing)" in lines


def test_nothing_is_told_of_a_run_that_ended_or_works(left: Left) -> None:
    assert compose_report(left.directory / "none") is None
    for rank in range(2):
        left.at(rank, size=2, ended=True)
    assert compose_report(left.directory) is None
    left.at(0, size=2)
    assert compose_report(left.directory, is_over=False) is None  # another machine may work
    assert left.report().rank == 0


def test_ranks_that_never_began_are_named(left: Left) -> None:
    left.at(0)
    left.failed(0, "ValueError: wrong", 1.0)
    assert left.report().text.endswith("\nnot known what these ranks were doing: 1, 2, 3")


def test_where_nccls_last_operations_are(left: Left) -> None:
    left.at(0, size=1)
    left.failed(0, "ValueError: wrong", 1.0)
    record = left.directory / "logs" / "nccl-rank-0"
    assert str(record)[:-1] not in left.report().text
    record.parent.mkdir()
    record.touch()
    assert left.report().text.endswith(f"{str(record)[:-1]}* (torchfrtrace reads them)")


def test_a_report_of_very_many_ranks_stays_readable(left: Left) -> None:
    """Logs are read of the ranks that the report is about only."""
    (left.directory / "logs").mkdir()
    for rank in (3, 500):
        (left.directory / "logs" / f"rank-{rank}.log").write_text(f"said by {rank}\n")
    for rank in range(990):
        left.at(rank, size=1000, each=110)
        if rank >= 400:
            left.stack(rank, WAITS)
    left.failed(989, LATE, 1.0)
    text = left.report().text
    lines = text.splitlines()
    assert lines[0] == f"rank 0 of 1000 {NO_WORD}"
    assert "and 384 more ranks" in lines
    assert "and 574 more ranks" in lines
    assert (
        lines[-1]
        == f"not known what these ranks were doing: {', '.join(map(str, range(990, 1000)))}"
    )
    assert "said by 3" in text
    assert "said by 500" not in text
    assert len(lines) < 110


def written(left: Left, failure: FailedRank, *, torn: Sequence[str] = ()) -> None:
    for name in torn:
        (left.records / name).write_text('{"rank": 1, "kin')
    write_failure(left.records, failure)


def test_a_long_error_is_told_by_its_beginning(left: Left) -> None:
    left.at(0, size=1)
    error = RuntimeError("the compiler said " + "x" * 70_000)
    write_failure(left.records, FailedRank.of(error, 0, 1, position="step 5"))
    report = left.report()
    assert report.text.startswith("rank 0 of 1 failed: RuntimeError: the compiler said xxx")
    assert len(report.text) < 15_000


def test_the_first_failure_of_a_rank_stays_and_one_that_is_torn_is_left_out(left: Left) -> None:
    first = FailedRank.of(ValueError("wrong"), 0, 1)
    written(left, first, torn=["failure-1.json"])
    written(left, FailedRank.of(OSError("then this"), 0, 1))
    assert left.report().error == "ValueError: wrong"
    assert sorted(path.name for path in left.records.iterdir()) == [
        "failure-0.json",
        "failure-1.json",
    ]


def raised_from(error: Exception, cause: Exception) -> Exception:
    try:
        raise error from cause
    except Exception as raised:
        return raised


def test_a_failure_is_named_by_what_was_raised_unless_torch_wrapped_it() -> None:
    cause = KeyError("block")
    own = raised_from(ValueError("rank 1: no block; rank 3: no block"), cause)
    assert FailedRank.of(own, 0, 4).error == "ValueError: rank 1: no block; rank 3: no block"
    wrapped = raised_from(RuntimeError("\n  [Stage 1] failed to run forward:\n  args: ()"), own)
    assert FailedRank.of(wrapped, 0, 4).error == FailedRank.of(own, 0, 4).error
    assert "KeyError: 'block'" in FailedRank.of(wrapped, 0, 4).traceback
    refused = raised_from(UserError("give another folder"), cause)
    assert FailedRank.of(refused, 0, 4).error == "give another folder"


def test_the_error_of_a_backward_pass_is_the_one_inside_torchs_stage() -> None:
    """By torch's own function, whose words are not those of forward."""
    torch = pytest.importorskip("torch")
    from torch.distributed.pipelining._backward import stage_backward

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: Any) -> Any:
            raise RuntimeError("Connection closed by peer")

    x = torch.ones(1, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        stage_backward(Broken.apply(x), torch.ones(1), [x])
    assert "Connection closed by peer" not in str(caught.value)
    assert FailedRank.of(caught.value, 0, 2).error == "RuntimeError: Connection closed by peer"


def test_a_full_disk_keeps_no_report_and_ends_nothing(left: Left) -> None:
    """The launcher knows failures that could not be written."""
    (left.directory / "failure.txt").mkdir()
    left.records.rmdir()
    failure = FailedRank.of(ValueError("wrong"), 1, 2)
    write_failure(left.records, failure)
    report = compose_report(left.directory, known=[failure])
    assert report is not None
    assert report.text.startswith("rank 1 of 2 failed: ValueError: wrong")
    keep_report(left.directory, report)


def test_a_report_is_kept_once(left: Left) -> None:
    left.at(0, size=1)
    for _ in range(2):
        keep_report(left.directory, left.report())
    assert (left.directory / "failure.txt").read_text().count("rank 0 of 1") == 1


def test_a_death_long_after_an_exception_is_no_cause(left: Left) -> None:
    """NCCL's watchdog aborts a rank whose peer has left, also where it does not seem to wait."""
    left.at(0)
    left.at(3)
    left.failed(3, "KeyError: 'x'", 10.0)
    left.stack(0, READS, fatal="Aborted")
    os.utime(stack_path(left.records, 0), (30.0, 30.0))
    report = left.report()
    assert report.rank == 3
    assert "rank 0 then died: Aborted" in report.text


def test_a_death_that_a_launcher_notices_a_moment_later_is_the_cause(left: Left) -> None:
    left.at(0)
    left.at(3)
    left.failed(3, "KeyError: 'x'", 10.0)
    left.stack(0, READS, fatal="Segmentation fault")
    os.utime(stack_path(left.records, 0), (10.5, 10.5))
    assert left.report().rank == 0


@pytest.mark.parametrize(
    "waits", ["wlb/parallel/expert_exchange.py", "torch/distributed/distributed_c10d.py"]
)
def test_a_rank_that_waits_for_rows_of_others_is_no_cause(left: Left, waits: str) -> None:
    for rank in range(SIZE):
        left.at(rank)
    left.stack(0, f'  File "{waits}", line 206 in pull\n  File "wlb/train/loop.py", line 9 in run')
    shallow = '  File "wlb/model/llama.py", line 3 in forward\n'
    schedule = '  File "torch/distributed/pipelining/stage.py", line 7 in forward_one_chunk'
    left.stack(1, shallow + schedule)
    left.stack(3, WAITS)
    left.failed(2, LATE, 20.0)
    assert left.report().rank == 1


def test_where_a_rank_was_is_known_without_its_position(left: Left) -> None:
    failure = FailedRank(
        rank=1,
        world_size=SIZE,
        kind=FailureKind.RAISED,
        error="KeyError: 'x'",
        time_s=1.0,
        position="step 7: computing",
    )
    write_failure(left.records, failure)
    assert left.report().text.endswith("\n  in step 7: computing")


def test_a_folder_of_records_without_a_start_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "ranks" / "start-1.bak").mkdir(parents=True)
    assert compose_report(tmp_path) is None
    assert began_s(newest_records(tmp_path)) == 0.0


def test_records_of_another_start_are_told_if_asked_for(left: Left) -> None:
    left.at(0)
    left.failed(0, "KeyError: 'x'", 10.0)
    new_records(left.directory, 200.0)
    assert compose_report(left.directory) is None
    report = compose_report(left.directory, records=left.records)
    assert report is not None
    assert report.error == "KeyError: 'x'"


def test_a_report_with_names_that_are_not_utf8_is_kept(tmp_path: Path) -> None:
    report = FailureReport(rank=0, error="x", text="no file named \udcff")
    keep_report(tmp_path, report)
    assert "\\udcff" in (tmp_path / "failure.txt").read_text("utf-8")


def test_files_that_are_no_records_are_left_out(left: Left) -> None:
    left.at(1)
    left.failed(1, "KeyError: 'x'", 10.0)
    (left.records / "failure-0.json").write_text("{}")
    left.records.with_name(f"{left.records.name}.bak").mkdir()
    assert left.report().rank == 1


def test_a_failure_is_written_where_there_are_no_hard_links(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(failures.os, "link", link)
    left.at(1)
    left.failed(1, "KeyError: 'x'", 10.0)
    left.failed(1, "KeyError: 'later'", 11.0)
    assert left.report().error == "KeyError: 'x'"


def test_the_records_of_one_start_before_are_kept(tmp_path: Path) -> None:
    for started_s in (5.0, 10.0, 15.5):
        new_records(tmp_path, started_s)
    assert sorted(p.name for p in (tmp_path / "ranks").iterdir()) == [
        "start-10.000",
        "start-15.500",
    ]
