"""Tests that a signal ends a process that waits where no handler of Python's runs."""

import signal
import subprocess
import sys

import pytest

from wlb.parallel.wait_signals import ended_by_signals

WAITING = """
import ctypes, signal, sys
from wlb.parallel import wait_signals

wait_signals.ANSWER_S = 0.1
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: None)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
with wait_signals.ended_by_signals(was_asked=sys.argv[1] == "before"):
    print("waiting", flush=True)
    libc.pthread_mutex_lock(mutex)  # as torch waits for a peer: in C, also after a signal
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (None, 143)]
)
def test_a_signal_ends_a_process_that_waits_in_c(sent: signal.Signals | None, status: int) -> None:
    words = [sys.executable, "-c", WAITING, "before" if sent is None else "now"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            if sent is not None:
                process.send_signal(sent)
            said = process.communicate(timeout=600)[1]
        finally:
            process.kill()
    assert process.returncode == status
    assert "ended by a signal while it waited for other ranks" in said


def test_signals_are_python_s_again_after_the_wait() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)
