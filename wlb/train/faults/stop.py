"""Requests to stop: SIGTERM or SIGUSR1 to any rank, or a file that rank 0 sees.

Slurm and torchrun announce pre-emption by a signal, or the batch script by a file on the shared
file system. A request is only noted here; all ranks learn of it with the step's all-reduce, finish
that step, save and leave with exit status 0. Signals are caught from a process's first moments on,
long before there are ranks: one that comes until then ends the run before its first step.
"""

import contextlib
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


class StoppedEarly(Exception):
    """A signal came before there was anything to save."""


class Signals:
    """Notes SIGTERM and SIGUSR1 to this process, in a block of its main thread."""

    def __init__(self) -> None:
        self.came = False
        self._passed_on: Path | None = None
        self._is_terminated = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {kind: signal.signal(kind, self._note) for kind in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._passed_on is not None and number == signal.SIGTERM and self._is_terminated:
            raise SystemExit(128 + number)
        self._is_terminated |= number == signal.SIGTERM
        self.came = True
        if self._passed_on is not None:
            with contextlib.suppress(FileNotFoundError):  # the ranks and its folder are gone
                self._passed_on.touch()

    def pass_on(self, file: Path) -> None:
        """What has come, or comes, makes `file`, which the ranks that this process starts look for
        (`StopRequest`): a signal sent to one of them before it catches any would kill it. A second
        SIGTERM ends this process, and so its ranks."""
        self._passed_on = file
        if self.came:
            file.touch()

    def check(self) -> None:
        """StoppedEarly if a signal has come."""
        if self.came:
            raise StoppedEarly


class StopRequest:
    """Of one rank. file: its existence is a request; "" for none, looked for on rank 0 alone, as
    told: the file that the process that started the ranks makes when it gets a signal."""

    def __init__(
        self, file: str, *, rank: int, signals: Signals | None = None, told: Path | None = None
    ) -> None:
        self._file = Path(file) if file and rank == 0 else None
        self._told = told if rank == 0 else None
        self._signals = signals or Signals()

    @property
    def signalled(self) -> Stop:
        """What signals asked of this rank so far."""
        is_told = self._told is not None and self._told.exists()
        return Stop.SIGNAL if self._signals.came or is_told else Stop.NO

    def now(self) -> Stop:
        """What this rank has been asked so far."""
        if not self.signalled and self._file is not None and self._file.exists():
            return Stop.FILE
        return self.signalled

    @property
    def words(self) -> dict[Stop, str]:
        return {
            Stop.SIGNAL: "a signal (SIGTERM or SIGUSR1)",
            Stop.FILE: f"the stop file {self._file}",
        }
