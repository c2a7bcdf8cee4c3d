"""Tests ranks that die, stop, hang or raise in a step: all ranks end, with one report."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.sets import nightly
from tests.train.case import job_of, relaid, small_spec, train, write_corpus
from wlb.launch.failure import new_records, newest_records
from wlb.launch.local import RankFailure, run_local
from wlb.launch.report import compose_report, keep_report
from wlb.parallel.execute import Executor
from wlb.parallel.world import World
from wlb.spec import RunSpec, to_toml
from wlb.train import feed, start
from wlb.train.job import Job, directory_of

pytestmark = pytest.mark.dist

STEP = 2

SILENCE_S = 5.0
WAIT_S = 15.0


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ArithmeticError("something is wrong with this rank")


def hang() -> None:
    time.sleep(1000)


def child(name: bytes) -> int:
    """Returns the process with `name` in its command that this rank started."""
    children = Path(f"/proc/{os.getpid()}").glob("task/*/children")
    pids = [pid for each in children for pid in each.read_text().split()]
    (found,) = [pid for pid in pids if name in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(found)


def stop_planner() -> None:
    os.kill(child(b"wlb.planner.service"), signal.SIGSTOP)


def rank_main(world: World, job: Job, who: tuple[int, ...], how: Callable[[], None]) -> None:
    """Runs a rank that does `how` in step STEP if it is one of `who`, after it wrote 30 lines."""
    train_step = Executor.train_step

    def broken(self: Executor, plan: Any, *args: Any, **options: Any) -> Any:
        if plan.step == STEP and world.rank in who:
            for i in range(30):
                sys.stderr.write(f"line {i} of rank {world.rank}\n")
            how()
        return train_step(self, plan, *args, **options)

    feed.SILENCE_S = SILENCE_S  # type: ignore[misc]
    Executor.train_step = broken  # type: ignore[method-assign]
    start.local_rank(world, job, "cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def broken_run(
    folder: Path, corpus: Path, who: tuple[int, ...], how: Callable[[], None], **training: Any
) -> RankFailure:
    """Returns what the launcher of four ranks said."""
    spec = relaid(small_spec(folder, corpus, training=training), "cp2-pp2")
    job = job_of(spec)
    records = new_records(job.directory, job.started_s)
    with pytest.raises(RankFailure) as caught:
        run_local(rank_main, 4, job, who, how, timeout_s=600, records=records)
    if records.exists():
        # Whoever asks later is told the same, from the files alone, and it is written once.
        later = compose_report(job.directory)
        assert later is not None
        assert later.text == str(caught.value)
        keep_report(job.directory, later)
        assert (job.directory / "failure.txt").read_text().count(later.text) == 1
    return caught.value


def log_lines(rank: int) -> list[str]:
    return [f"line {i} of rank {rank}" for i in range(10, 30)]


@pytest.mark.full
@pytest.mark.parametrize("rank", [2, *nightly(0)])
def test_a_rank_that_is_killed(tmp_path: Path, corpus: Path, rank: int) -> None:
    failure = broken_run(tmp_path, corpus, (rank,), kill)
    text = str(failure)
    assert failure.rank == rank
    assert failure.error == "died from SIGKILL (exit code -9)"
    assert text.startswith(f"rank {rank} of 4 died from SIGKILL (exit code -9)\n")
    assert [line.strip() for line in text.splitlines() if " line " in line] == log_lines(rank)
    assert f"  last seen in step {STEP}: computing (since " in text
    assert f"pp {rank // 2}, dp 0; process" in text


@pytest.mark.full
@pytest.mark.parametrize("rank", [3, *nightly(0)])
def test_a_rank_that_is_stopped(tmp_path: Path, corpus: Path, rank: int) -> None:
    failure = broken_run(tmp_path, corpus, (rank,), stop, timeout_s=WAIT_S)
    text = str(failure)
    assert failure.rank == rank
    said = f"rank {rank} of 4 gave no sign of life (its process is stopped)\n"
    assert text.startswith(said)
    assert f"  last seen in step {STEP}: computing (since " in text
    assert [line.strip() for line in text.splitlines() if " line " in line] == log_lines(rank)
    assert re.search(
        rf"rank 1 (was running|then failed: .*) \(in step {STEP}, micro-batch \d \(\w+, stage \d\)",
        text,
    )


@pytest.mark.full
def test_a_rank_that_raises(tmp_path: Path, corpus: Path) -> None:
    failure = broken_run(tmp_path, corpus, (1,), fail)
    text = str(failure)
    assert failure.rank == 1
    assert failure.error == "ArithmeticError: something is wrong with this rank"
    assert text.startswith(f"rank 1 of 4 failed: {failure.error}\n  in step {STEP}: computing (")
    assert "in fail" in text  # its traceback


@pytest.mark.nightly
def test_a_planner_that_is_stopped_is_named(tmp_path: Path, corpus: Path) -> None:
    """Ranks wait for it, and none of them is to blame."""
    failure = broken_run(tmp_path, corpus, (0,), stop_planner)
    said = r"planner process of this node \(process \d+ on .*, state T\) gave no sign of life for"
    assert re.search(rf"{said} {SILENCE_S:g} s", failure.error)
    assert len(re.findall(said, str(failure))) <= 2  # first line, and the end of its traceback


@pytest.mark.full
def test_all_ranks_that_raise_alike_are_named_together(tmp_path: Path, corpus: Path) -> None:
    failure = broken_run(tmp_path, corpus, (0, 1, 2, 3), fail)
    assert len(re.findall("something is wrong", str(failure).partition("\n")[0])) == 1
    others = sorted({0, 1, 2, 3} - {failure.rank})
    (alike,) = [line for line in str(failure).splitlines() if line.startswith("the same error on")]
    assert sorted(map(int, re.findall(r"\d", alike))) == others


@pytest.mark.full
def test_a_rank_that_hangs_alive_is_named_and_not_those_that_wait(
    tmp_path: Path, corpus: Path
) -> None:
    failure = broken_run(tmp_path, corpus, (3,), hang, timeout_s=WAIT_S)
    text = str(failure)
    assert failure.rank == 3
    assert text.startswith("rank 3 of 4 has not joined the collective that others waited for\n")
    assert "in hang" in text  # its stack
    assert f"Timed out waiting {1000 * WAIT_S:.0f}ms" in text  # that of the mesh's groups


def test_a_single_rank_says_where_it_failed(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = Executor.train_step

    def broken(self: Executor, plan: Any, *args: Any, **options: Any) -> Any:
        loss = train_step(self, plan, *args, **options)
        if plan.step == STEP:
            fail()
        return loss

    monkeypatch.setattr(Executor, "train_step", broken)
    spec = small_spec(tmp_path, corpus)
    with pytest.raises(ArithmeticError) as caught:
        train(spec)
    assert caught.value.__notes__ == [
        f"in step {STEP}, micro-batch 3 (backward, stage 0): computing"
    ]
    report = compose_report(directory_of(spec))
    assert report is not None
    assert report.text.startswith("rank 0 of 1 failed: ArithmeticError: something is wrong with")
    assert f"  in step {STEP}, micro-batch 3 (backward, stage 0): computing (since" in report.text


def test_the_next_start_says_what_ended_the_last_one(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(tmp_path, corpus, checkpoint={"interval": 1})
    train_step = Executor.train_step

    def broken(self: Executor, plan: Any, *args: Any, **options: Any) -> Any:
        if plan.step == STEP:
            fail()
        return train_step(self, plan, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Executor, "train_step", broken)
        with pytest.raises(ArithmeticError):
            train(spec)
    _, said = train(spec, resume="auto")
    told = "the last start of this run failed: rank 0 of 1 failed: ArithmeticError: something"
    assert said.count(told) == 1
    kept = directory_of(spec) / "failure.txt"
    assert kept.read_text().count("rank 0 of 1 failed: ArithmeticError") == 1
    _, said = train(spec, resume="auto")
    assert "the last start" not in said
    assert compose_report(directory_of(spec)) is None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def given_ranks(folder: Path, spec: RunSpec, *, num_nodes: int) -> list[subprocess.Popen[str]]:
    """Starts processes as torchrun does, but without anybody who watches them. num_nodes: groups of
    processes that take each other for other machines.
    """
    (folder / "run.toml").write_text(to_toml(spec))
    port, size = free_port(), spec.parallel.world_size
    each = size // num_nodes
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(each), "MASTER_ADDR": "127.0.0.1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "wlb", "train", str(folder / "run.toml")],
            env={
                **os.environ,
                **common,
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % each),
                "GROUP_RANK": str(rank // each),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(size)
    ]


def wait_for_steps(metrics: Path, num: int) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if sum('"kind": "step"' in line for line in lines) >= num:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {num} steps in {metrics}")


@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "kind", "num_nodes"),
    [
        (1, signal.SIGKILL, 2),
        *nightly((1, signal.SIGSTOP, 1), (0, signal.SIGSTOP, 1), (0, signal.SIGKILL, 1)),
    ],
)
def test_processes_that_nobody_watches_end_and_say_who_failed(
    tmp_path: Path, corpus: Path, rank: int, kind: signal.Signals, num_nodes: int
) -> None:
    """A rank is lost, of two nodes with all that its node had: its planner goes with it."""
    training = {"steps": 100_000, "timeout_s": WAIT_S}
    spec = small_spec(tmp_path, corpus, training=training, parallel={"tp": 2, "dp": 1})
    directory = directory_of(spec)
    processes = given_ranks(tmp_path, spec, num_nodes=num_nodes)
    try:
        wait_for_steps(directory / "metrics.jsonl", 3)
        assert compose_report(directory, is_over=False) is None  # while it works
        os.killpg(processes[rank].pid, kind)
        if kind == signal.SIGKILL:
            processes[rank].wait(600)
        out, _ = processes[1 - rank].communicate(timeout=600)
        assert processes[1 - rank].returncode == 1
        assert out.count(f"wlb train: rank {1 - rank} of 2 failed: ") == 1
        report = compose_report(directory)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert report is not None
    assert report.rank == rank
    what = "ended without an error message: it was killed, ran out of memory, or its node was lost"
    if kind == signal.SIGSTOP:
        what = "gave no sign of life: its process is stopped"
    assert report.text.startswith(f"rank {rank} of 2 {what}\n  last seen in step ")
    assert re.search(rf"\nrank {1 - rank} then failed: .*\(in step \d+", report.text)
    files = list(newest_records(directory).glob("positions-*"))
    assert len(files) == num_nodes
