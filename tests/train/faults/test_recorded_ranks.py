"""Tests ranks that die, stop, hang or raise in a step: all ranks end, with one report."""

import json
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
from wlb.launch.reporter import Reporter

from tests.sets import full, nightly
from tests.train.case import job_of, relaid, small_spec, train, write_corpus
from wlb.launch import watch
from wlb.launch.local import RankFailure, run_local
from wlb.parallel.execute import Executor
from wlb.parallel.world import World
from wlb.spec import RunSpec, to_toml
from wlb.train import start
from wlb.train.job import Job

pytestmark = pytest.mark.dist

STEP = 2

HEARTBEAT_S = 5.0
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


def kill_watch() -> None:
    """Kills the aggregator that this rank started, then waits."""
    os.kill(child(b"aggregator"), signal.SIGKILL)
    hang()


def stop_planner() -> None:
    os.kill(child(b"wlb.planner.service"), signal.SIGSTOP)


class HeardReporter(Reporter):
    """Notes the last step that this rank's aggregator has acknowledged."""

    sent_step = heard_step = -1

    def _send(self, update: dict[str, Any]) -> None:
        super()._send(update)
        if "at" in update:
            HeardReporter.sent_step = update["at"].step

    def _update(self) -> dict[str, Any]:
        if self._told.unanswered <= 0:
            HeardReporter.heard_step = self.sent_step
        return super()._update()


def wait_until_heard() -> None:
    """Waits until the watch knows that this rank is in step STEP."""
    end = time.monotonic() + 300
    while HeardReporter.heard_step < STEP:
        assert time.monotonic() < end, "the watch was not told of the step"
        time.sleep(0.01)


def rank_main(world: World, job: Job, who: tuple[int, ...], how: Callable[[], None]) -> None:
    """Runs a rank that does `how` in step STEP if it is one of `who`, after it wrote 30 lines."""
    train_step = Executor.train_step

    def broken(self: Executor, plan: Any, *args: Any, **options: Any) -> Any:
        if plan.step == STEP and world.rank in who:
            for i in range(30):
                sys.stderr.write(f"line {i} of rank {world.rank}\n")
            if job.spec.training.heartbeat_s:
                wait_until_heard()
            how()
        return train_step(self, plan, *args, **options)

    watch.Reporter = HeardReporter  # type: ignore[misc]
    Executor.train_step = broken  # type: ignore[method-assign]
    start.local_rank(world, job, "cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def broken_run(
    folder: Path, corpus: Path, who: tuple[int, ...], how: Callable[[], None], **training: Any
) -> RankFailure:
    """Returns what the launcher of four ranks said."""
    told = {"heartbeat_s": HEARTBEAT_S, **training}
    spec = relaid(small_spec(folder, corpus, training=told), "cp2-pp2")
    job = job_of(spec)
    with pytest.raises(RankFailure) as caught:
        run_local(rank_main, 4, job, who, how, timeout_s=600, awaits_report=True)
    return caught.value


def log_lines(rank: int) -> list[str]:
    return [f"line {i} of rank {rank}" for i in range(10, 30)]


@pytest.mark.full
@pytest.mark.parametrize("rank", [2, *full(0)])
def test_a_rank_that_is_killed(tmp_path: Path, corpus: Path, rank: int) -> None:
    failure = broken_run(tmp_path, corpus, (rank,), kill)
    text = str(failure)
    assert failure.rank == rank
    assert f"rank {rank} died from SIGKILL (exit code -9)" in text
    assert f"rank {rank} of 4 died" in text
    assert [line.strip() for line in text.splitlines() if " line " in line] == log_lines(rank)
    if rank:
        assert f"  last message from step {STEP}: computing\n" in text
        assert "pp 1, dp 0; process" in text


@pytest.mark.full
@pytest.mark.parametrize("rank", [3, *nightly(0)])
def test_a_rank_that_is_stopped(tmp_path: Path, corpus: Path, rank: int) -> None:
    failure = broken_run(tmp_path, corpus, (rank,), stop)
    text = str(failure)
    assert failure.rank == rank
    assert f"rank {rank} of 4 gave no sign of life for {HEARTBEAT_S:g} s" in text
    assert [line.strip() for line in text.splitlines() if " line " in line] == log_lines(rank)
    assert re.search(
        rf"rank 1 was running \(in step {STEP}, micro-batch \d \(\w+, stage \d\)", text
    )


@pytest.mark.full
def test_a_rank_that_raises(tmp_path: Path, corpus: Path) -> None:
    failure = broken_run(tmp_path, corpus, (1,), fail)
    text = str(failure)
    assert failure.rank == 1
    assert failure.error == "ArithmeticError: something is wrong with this rank"
    assert text.startswith(f"rank 1 of 4 failed: {failure.error}\n  in step {STEP}: computing\n")
    assert "in fail" in text  # its traceback
    (written,) = (tmp_path / "runs" / "small").glob("failure.txt")
    assert text in written.read_text()


@pytest.mark.full
def test_a_watch_that_is_killed(tmp_path: Path, corpus: Path) -> None:
    """Ranks of a single node have no other watch: one reports, and all end."""
    failure = broken_run(tmp_path, corpus, (0,), kill_watch)
    assert re.match(r"the watch of rank 0, 1, 2, 3 \(.*\) died; rank \d reports it", str(failure))
    (written,) = (tmp_path / "runs" / "small").glob("failure.txt")
    assert written.read_text().count("the watch of rank 0, 1, 2, 3") == 1


@pytest.mark.nightly
def test_a_planner_that_is_stopped_is_named(tmp_path: Path, corpus: Path) -> None:
    """Ranks wait for it, and none of them is to blame."""
    failure = broken_run(tmp_path, corpus, (0,), stop_planner)
    said = r"planner process of this node \(process \d+ on .*, state T\) gave no sign of life for"
    assert re.search(rf"{said} {HEARTBEAT_S:g} s", failure.error)
    assert len(re.findall(said, str(failure))) <= 2  # first line, and the end of its traceback


@pytest.mark.full
def test_all_ranks_that_raise_alike_are_named_together(tmp_path: Path, corpus: Path) -> None:
    failure = broken_run(tmp_path, corpus, (0, 1, 2, 3), fail)
    assert len(re.findall("something is wrong", str(failure).partition("\n")[0])) == 1
    others = sorted({0, 1, 2, 3} - {failure.rank})
    (alike,) = [line for line in str(failure).splitlines() if line.startswith("the same on")]
    assert sorted(map(int, re.findall(r"\d", alike))) == others


@pytest.mark.full
def test_a_rank_that_hangs_alive_is_named_and_not_those_that_wait(
    tmp_path: Path, corpus: Path
) -> None:
    failure = broken_run(tmp_path, corpus, (3,), hang, timeout_s=WAIT_S)
    text = str(failure)
    assert failure.rank == 3
    assert text.startswith(
        f"rank 3 of 4 has not joined the collective that others have waited for ({WAIT_S:g} s)"
    )
    assert "time.sleep(1000)" in text  # its stack


@pytest.mark.nightly
def test_without_a_watch_groups_of_the_mesh_run_out_of_time(tmp_path: Path, corpus: Path) -> None:
    failure = broken_run(tmp_path, corpus, (3,), hang, timeout_s=WAIT_S, heartbeat_s=0.0)
    assert f"Timed out waiting {1000 * WAIT_S:.0f}ms" in str(failure)


@pytest.mark.nightly
def test_without_a_watch_the_launcher_still_reports(tmp_path: Path, corpus: Path) -> None:
    failure = broken_run(tmp_path, corpus, (2,), kill, heartbeat_s=0.0)
    assert failure.rank == 2
    assert "died from SIGKILL" in str(failure)


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
    with pytest.raises(ArithmeticError) as caught:
        train(small_spec(tmp_path, corpus))
    assert caught.value.__notes__ == [
        f"in step {STEP}, micro-batch 3 (backward, stage 0): computing"
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def given_ranks(folder: Path, spec: RunSpec) -> list[subprocess.Popen[str]]:
    """Starts processes as torchrun does, but without anybody who watches them."""
    (folder / "run.toml").write_text(to_toml(spec))
    port, size = free_port(), spec.parallel.world_size
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "wlb", "train", str(folder / "run.toml")],
            env={
                **os.environ,
                **common,
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
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
    ("rank", "kind"), [(1, signal.SIGKILL), *nightly((1, signal.SIGSTOP), (0, signal.SIGSTOP))]
)
def test_processes_that_nobody_watches_end_each_other(
    tmp_path: Path, corpus: Path, rank: int, kind: signal.Signals
) -> None:
    training = {"steps": 100_000, "heartbeat_s": HEARTBEAT_S}
    spec = small_spec(tmp_path, corpus, training=training, parallel={"tp": 2, "dp": 1})
    processes = given_ranks(tmp_path, spec)
    try:
        wait_for_steps(tmp_path / "runs" / "small" / "metrics.jsonl", 3)
        processes[rank].send_signal(kind)
        out, _ = processes[1 - rank].communicate(timeout=600)
        assert processes[1 - rank].returncode == 1
        what = "died" if kind == signal.SIGKILL else f"gave no sign of life for {HEARTBEAT_S:g} s"
        assert out.count(f"wlb train: rank {rank} of 2 {what}") == 1
        if rank:
            assert re.search(r"  last message from step \d+", out)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()
    assert "of 2" in (tmp_path / "runs" / "small" / "failure.txt").read_text()
    json.loads((tmp_path / "runs" / "small" / "metrics.jsonl").read_text().splitlines()[-1])
