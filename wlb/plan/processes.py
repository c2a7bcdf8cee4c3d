"""What Linux tells of a process of this machine."""

from enum import Enum
from pathlib import Path


class ProcessState(Enum):
    """What a process does, as far as it matters to who waits for it."""

    RUNS = "runs"
    STOPPED = "stopped"  # by a signal or a debugger; it answers nothing until it is continued
    AWAITS_DISK = "awaits disk"  # or a file server; it answers no signal meanwhile
    GONE = "gone"  # there is no such process, or nobody has read its end yet


_STATES = {
    "T": ProcessState.STOPPED,
    "t": ProcessState.STOPPED,
    "D": ProcessState.AWAITS_DISK,
    "Z": ProcessState.GONE,
    "X": ProcessState.GONE,
}


def process_state(pid: int) -> ProcessState:
    try:
        letter = process_status(pid)[0]
    except OSError:
        return ProcessState.GONE
    return _STATES.get(letter, ProcessState.RUNS)


def process_start(pid: int) -> float:
    """Clock ticks from the machine's start to that of a process; 0 if there is none. A number that
    was given to another process has another start.
    """
    try:
        return float(process_status(pid)[19])
    except (OSError, IndexError, ValueError):
        return 0.0


def process_status(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the state (one letter) on: 11 and 12 are user and system time,
    19 is when the process started.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
