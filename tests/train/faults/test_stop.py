"""Tests that runs asked to stop finish their step, save, exit with 4 and resume exactly."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.sets import nightly
from tests.train.case import Run, relaid, small_spec, train, write_corpus
from wlb.spec import RunSpec, to_toml
from wlb.spec.run import RunSection
from wlb.train import start
from wlb.train.faults import lock, stop
from wlb.train.faults.stop import Signals, Stop, StoppedEarly, StopRequest
from wlb.train.stores import Stores


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def test_a_request_is_a_signal_to_any_rank_or_a_file_that_rank_0_sees(tmp_path: Path) -> None:
    file, told = tmp_path / "stop", tmp_path / "told"
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        section = RunSection(stop_file=str(file))
        first = StopRequest(section, rank=0, signal_file=told)
        second = StopRequest(section, rank=1, signal_file=told, signals=signals)
        assert first.now() == second.now() == Stop.NO
        file.touch()
        assert (first.now(), second.now()) == (Stop.FILE, Stop.NO)
        assert first.signalled == Stop.NO
        signals.pass_on(told)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert second.now() == second.signalled == Stop.SIGNAL
        assert first.now() == first.signalled == Stop.SIGNAL  # by the file that was made for it
    assert signal.getsignal(signal.SIGTERM) == before
    assert str(file) in first.words[Stop.FILE]


def test_a_file_of_the_run_s_name_ends_it_beside_the_job_s_own_file(tmp_path: Path) -> None:
    section = RunSection(name="mine", output_dir=str(tmp_path), stop_file=str(tmp_path / "job"))
    asked = StopRequest(section, rank=0)
    other = StopRequest(replace(section, stop_file=str(tmp_path / "waits")), rank=0)
    (tmp_path / "waits").touch()
    assert (asked.now(), other.now()) == (Stop.NO, Stop.FILE)
    (tmp_path / ".stop-mine").touch()
    assert asked.now() == Stop.FILE
    assert asked.words[Stop.FILE] == f"the stop file {tmp_path}/.stop-mine"


@pytest.mark.process
def test_a_signal_before_there_are_ranks_is_passed_on_and_a_second_one_ends_them(
    tmp_path: Path,
) -> None:
    told = tmp_path / "told"
    with Signals() as signals:
        for _ in range(2):  # none of these is passed on yet
            os.kill(os.getpid(), signal.SIGUSR1)
        assert not told.exists()
        with pytest.raises(StoppedEarly):
            signals.check()
        signals.pass_on(told)
        assert told.exists()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as end:
            os.kill(os.getpid(), signal.SIGTERM)
        assert end.value.code == 128 + signal.SIGTERM
        told.unlink()
        tmp_path.rmdir()
        os.kill(os.getpid(), signal.SIGUSR1)  # after the ranks have ended


def test_the_first_ctrl_c_asks_and_the_second_aborts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(stop.time, "monotonic", lambda: now_s)
    with Signals(answers=True) as signals:
        request = StopRequest(RunSection(), rank=1, signals=signals)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.now() == Stop.SIGNAL
        assert (
            "saves a checkpoint and ends after its current step; a second Ctrl-C aborts it"
            in capfd.readouterr().err
        )
        os.kill(os.getpid(), signal.SIGINT)  # the same key, passed on by a launcher
        now_s += 2 * stop.SAME_PRESS_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # a third one kills
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert not signals.came
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.full
@pytest.mark.process
def test_a_stop_file_ends_a_run_after_its_step(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, _ = train(small_spec(tmp_path / "straight", corpus))
    file = tmp_path / "stop"
    file.touch()
    spec = small_spec(tmp_path, corpus, run={"stop_file": str(file)})
    for step in (1, 2):
        run, _ = train(spec, resume="auto")
        assert len(run.steps) == step
        assert f"step-{step:08d}" in run.checkpoints
        said = capsys.readouterr().out
        assert f"stopped after step {step} of 6 by the stop file {file}; saved" in said
        (stop,) = [line for line in run.lines if line["kind"] == "stop"][-1:]
        assert stop["steps_done"] == step
    # Nothing is evaluated on the way out: there may be seconds left.
    assert [step for step, _ in run.evaluations] == [0]
    file.unlink()
    # This one is of an earlier job, so that whoever takes the run's lock removes it.
    by_hand = Path(spec.run.output_dir) / f".stop-{spec.run.name}"
    by_hand.touch()
    run, _ = train(spec, resume="auto")
    assert not by_hand.exists()
    assert run.losses == straight.losses
    assert run.evaluations[-1] == straight.evaluations[-1]


@contextmanager
def started(spec: RunSpec, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts a run that is gone at the end, with its pipe.

    A test that fails and runs again must leave nothing.
    """
    toml = folder / "run.toml"
    toml.write_text(to_toml(spec), "utf-8")
    command = [sys.executable, "-m", "wlb", "train", str(toml), "--resume", "auto"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # A session of its own, whose process group a test can signal as a terminal does.
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def has_steps(run: Path, num: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and path.read_text().count('"kind": "step"') >= num


def endless(folder: Path, corpus: Path) -> RunSpec:
    """Returns a run of more steps than there is time for."""
    return small_spec(folder, corpus, training={"steps": 100_000}, data={"epochs": 0})


def wait_for_steps(process: subprocess.Popen[str], folder: Path, num: int) -> None:
    end = time.monotonic() + 600
    while not has_steps(folder, num) and time.monotonic() < end:
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Returns whether a process runs; one that waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (signal.SIGTERM, "one"),
        (signal.SIGINT, "dp2-tp2"),
        *nightly((signal.SIGUSR1, "one"), (signal.SIGINT, "one")),
        *nightly((signal.SIGTERM, "dp2-tp2"), (signal.SIGUSR1, "dp2-tp2")),
    ],
)
def test_a_signal_ends_a_run_after_its_step(
    corpus: Path, tmp_path: Path, kind: signal.Signals, layout: str
) -> None:
    spec = relaid(endless(tmp_path, corpus), layout)
    with started(spec, tmp_path) as process:
        wait_for_steps(process, tmp_path / "runs" / "small", 3)
        if kind == signal.SIGINT:
            # A terminal signals all processes of its job: launcher, forkserver, planner.
            os.killpg(process.pid, kind)
        else:
            process.send_signal(kind)
        said, _ = process.communicate(timeout=600)
    assert process.returncode == 4, said
    run = Run(spec)
    done = len(run.steps)
    assert 3 <= done < spec.training.steps
    by = "by a signal (Ctrl-C, SIGTERM or SIGUSR1); saved"
    assert f"stopped after step {done} of {spec.training.steps} {by}" in said
    assert f"step-{done:08d}" in run.checkpoints
    assert "Traceback" not in said


LAUNCHER = """
import os, sys, time
from pathlib import Path
from wlb.launch.local import run_local
from wlb.train.faults.stop import Signals

def rank(world, folder):
    Path(folder, f"pid-{world.rank}").write_text(str(os.getpid()))
    while not Path(folder, "told").exists():
        time.sleep(0.01)
    Path(folder, f"saving-{world.rank}").touch()
    time.sleep(600)

if __name__ == "__main__":
    with Signals(answers=True) as signals:
        signals.pass_on(Path(sys.argv[1], "told"))
        run_local(rank, 2, sys.argv[1])
"""


@pytest.mark.full
@pytest.mark.dist
def test_ranks_save_after_a_terminals_ctrl_c_until_a_second_one_aborts_them(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER, "utf-8")
    words = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            for waited_for in ("pid", "saving"):
                paths = [tmp_path / f"{waited_for}-{rank}" for rank in range(2)]
                while not all(path.exists() for path in paths):
                    assert process.poll() is None
                    time.sleep(0.01)
                if waited_for == "saving":
                    time.sleep(1.5 * stop.SAME_PRESS_S)
                # A terminal signals all processes of its job: the launcher, and the forkserver.
                os.killpg(process.pid, signal.SIGINT)
            said = process.communicate(timeout=600)[1]
        finally:
            process.kill()
    assert process.returncode in (130, -signal.SIGINT)
    assert said.count("a second Ctrl-C aborts it") == 1
    assert said.rstrip().endswith("KeyboardInterrupt")
    for rank in range(2):
        assert not alive(int((tmp_path / f"pid-{rank}").read_text()))


def test_an_early_signal_ends_what_waits_and_later_ones_are_noted(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Signals(answers=True) as signals:
        request = StopRequest(RunSection(), rank=0, signals=signals)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            # While it waits for a lock, makes a store for hours, or is in an endless loop.
            with pytest.raises(StoppedEarly), signals.early():
                signal.raise_signal(number)
        assert capfd.readouterr().err == ""  # nothing would be saved
        with pytest.raises(StoppedEarly), signals.early():
            pytest.fail("the signal came before")
        signals.came = False
        with signals.early():
            request.steps_begin()
            signal.raise_signal(signal.SIGTERM)
        assert request.now() == Stop.SIGNAL


def test_a_launching_process_ends_at_once_until_its_ranks_begin(tmp_path: Path) -> None:
    told = tmp_path / "told"
    with Signals() as signals:
        signals.pass_on(told)
        with pytest.raises(StoppedEarly), signals.early():
            signal.raise_signal(signal.SIGTERM)
        assert not told.exists()
        signals.came = False
        with signals.early():
            StopRequest(RunSection(), rank=1, signal_file=told).steps_begin()
            assert not list(tmp_path.iterdir())
            StopRequest(RunSection(), rank=0, signal_file=told).steps_begin()
            signal.raise_signal(signal.SIGUSR1)
        assert told.exists()


@pytest.mark.process
def test_a_signal_ends_a_run_that_waits_for_the_folder_of_another(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(tmp_path, corpus)
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(lock.time, "sleep", wait)
    monkeypatch.setattr(lock, "lock", lambda descriptor: False)
    out = StringIO()
    start.train(spec, resume=None, console=Console(file=out))
    assert waited
    assert "stopped by a signal before training began" in out.getvalue()


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("layout", ["one", *nightly("dp2-tp2")])
def test_a_signal_to_a_run_that_is_still_starting_ends_it_before_its_first_step(
    corpus: Path, tmp_path: Path, layout: str
) -> None:
    """It is sent when the run's folder appears: ranks start, or the model is being built."""
    train(small_spec(tmp_path / "first", corpus, training={"steps": 1}))  # makes the store
    spec = relaid(small_spec(tmp_path, corpus, training={"steps": 400}), layout)
    folder = tmp_path / "runs" / "small"
    with started(spec, tmp_path) as process:
        end = time.monotonic() + 600
        while not folder.exists() and time.monotonic() < end:
            assert process.poll() is None, process.stdout and process.stdout.read()
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=600)
    assert process.returncode == 4, said
    assert not has_steps(folder, 1)
    # Ranks that have begun meanwhile agree on the end of the run; others are ended at once.
    assert "stopped after step 0 of 400 by a signal" in said or "stopped by a signal before" in said
    assert "Summary" not in said


@pytest.mark.process
def test_a_signal_before_training_began_leaves_everything_as_it_was(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(tmp_path, corpus)
    older = tmp_path / "runs" / "small"
    older.mkdir(parents=True)
    (older / "metrics.jsonl").touch()
    opened = start.open_stores

    def slowly(*given: object) -> Stores:
        os.kill(os.getpid(), signal.SIGTERM)
        return opened(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(start, "open_stores", slowly)
    _, said = train(spec)
    assert "stopped by a signal before training began" in said
    assert [path.name for path in older.iterdir()] == ["metrics.jsonl"]
    assert not older.with_name("small.1").exists()
