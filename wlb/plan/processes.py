"""State and start time of processes on this machine, read from Linux's /proc."""

from enum import Enum
from pathlib import Path


class ProcessState(Enum):
    """Whether a process runs, and if not, why it does not answer."""

    RUNS = "runs"
    STOPPED = "stopped"  # paused by a signal or a debugger until it receives SIGCONT
    AWAITS_DISK = "awaits disk"  # waits for a disk or a file server and cannot be interrupted
    GONE = "gone"  # does not exist, or is a zombie: it has ended but its parent has not waited


_STATES = {
    "T": ProcessState.STOPPED,
    "t": ProcessState.STOPPED,
    "D": ProcessState.AWAITS_DISK,
    "Z": ProcessState.GONE,
    "X": ProcessState.GONE,
}


def process_state(pid: int) -> ProcessState:
    """Return the state of the process with this id; GONE if there is no such process."""
    try:
        letter = process_status(pid)[0]
    except OSError:
        return ProcessState.GONE
    return _STATES.get(letter, ProcessState.RUNS)


def process_start(pid: int) -> float:
    """Return when a process started, in clock ticks since the machine was started.

    Linux reuses process ids. If a process with a known id has another start time, it is another
    process. The result is 0 if there is no process with this id.
    """
    try:
        return float(process_status(pid)[19])
    except (OSError, IndexError, ValueError):
        return 0.0


def process_status(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name of the process.

    Of the returned fields, 0 is the state (one letter), 11 and 12 are user and system time, and 19
    is the start time.
    """
    # Split at the last bracket, because the name before it may itself contain brackets and spaces.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
