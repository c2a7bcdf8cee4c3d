"""State and start time of processes on this machine, read from Linux's /proc."""

from enum import Enum
from pathlib import Path


class ProcessState(Enum):
    """What a process is doing, as far as it matters to another process that waits for it."""

    RUNS = "runs"
    STOPPED = "stopped"  # by a signal or a debugger; it answers nothing until it is continued
    AWAITS_DISK = "awaits disk"  # waits for a disk or a file server; it answers no signal meanwhile
    GONE = "gone"  # does not exist, or has ended and its parent has not collected it yet


_STATES = {
    "T": ProcessState.STOPPED,
    "t": ProcessState.STOPPED,
    "D": ProcessState.AWAITS_DISK,
    "Z": ProcessState.GONE,
    "X": ProcessState.GONE,
}


def process_state(pid: int) -> ProcessState:
    """Return what a process is doing; GONE if there is none of this id."""
    try:
        letter = process_status(pid)[0]
    except OSError:
        return ProcessState.GONE
    return _STATES.get(letter, ProcessState.RUNS)


def process_start(pid: int) -> float:
    """Return when a process started, in clock ticks since the machine started; 0 if there is none.

    Linux reuses process ids. Two processes with the same id differ in their start.
    """
    try:
        return float(process_status(pid)[19])
    except (OSError, IndexError, ValueError):
        return 0.0


def process_status(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat behind the process's name.

    Field 0 is the state (one letter), 11 and 12 are user and system time, 19 is the start time.
    """
    # The name stands in brackets and may itself have brackets and blanks.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
