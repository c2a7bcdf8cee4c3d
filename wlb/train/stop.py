"""Requests to stop: SIGTERM or SIGUSR1 to any rank, or a file that rank 0 sees.

Slurm and torchrun announce pre-emption by a signal, or the batch script by a file on the shared
file system. A request is only noted here; all ranks learn of it with the step's all-reduce, finish
that step, save and leave with exit status 0.
"""

import signal
import threading
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop(IntEnum):
    """Who asked, so that the largest of all ranks' says it."""

    NO = 0
    FILE = 1
    SIGNAL = 2


class StopRequest:
    """Of one rank. file: its existence is a request; "" for none, looked for on rank 0 alone."""

    def __init__(self, file: str, *, rank: int) -> None:
        self._file = Path(file) if file and rank == 0 else None
        self._signalled = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        """Signals are caught until the end of the block, in a process's main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = {kind: signal.signal(kind, self._note) for kind in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signalled = True

    def now(self) -> Stop:
        """What this rank has been asked so far."""
        if self._signalled:
            return Stop.SIGNAL
        if self._file is not None and self._file.exists():
            return Stop.FILE
        return Stop.NO

    @property
    def words(self) -> dict[Stop, str]:
        return {
            Stop.SIGNAL: "a signal (SIGTERM or SIGUSR1)",
            Stop.FILE: f"the stop file {self._file}",
        }
