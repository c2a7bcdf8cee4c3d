"""Tests what is told of a process that runs, is stopped, has ended or never was."""

import os
import signal
import time

import pytest

from wlb.plan.processes import ProcessState, process_start, process_state, process_status


def settled(pid: int, state: ProcessState) -> bool:
    """Whether the process comes to be in that state."""
    for _ in range(1000):
        if process_state(pid) == state:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.process
def test_states_of_a_process_from_its_start_to_its_end() -> None:
    child = os.fork()
    if not child:
        signal.pause()
    assert process_state(child) == ProcessState.RUNS
    assert process_start(child) >= process_start(os.getpid()) > 0
    os.kill(child, signal.SIGSTOP)
    assert settled(child, ProcessState.STOPPED)
    os.kill(child, signal.SIGKILL)
    # Nobody has read its end yet.
    assert settled(child, ProcessState.GONE)
    assert process_status(child)[0] == "Z"
    os.waitpid(child, 0)
    assert process_state(child) == ProcessState.GONE
    assert process_start(child) == 0.0
