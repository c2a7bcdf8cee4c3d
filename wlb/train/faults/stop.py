"""Requests to stop: Ctrl-C, SIGTERM or SIGUSR1 to any rank, or files that rank 0 sees.

A request (as a terminal, Slurm and torchrun make it) is only noted here; all ranks learn of it
from the all-reduce of the step, finish the step, save and exit with status 0. Signals are caught
long before ranks start; an early one ends the run before step 1. A second Ctrl-C aborts.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from wlb.spec.run import RunSection

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME_PRESS_S = 0.3
"""Two SIGINTs within this time are one press of Ctrl-C: a rank of torchrun or srun can get it from
its terminal and from its launcher."""
_TOLD = b"\nwlb train: Ctrl-C: the run saves and ends after its step; a second Ctrl-C aborts it\n"


class Stop(IntEnum):
    """Source of a request; the maximum over ranks counts."""

    NO = 0
    FILE = 1
    SIGNAL = 2


class StoppedEarly(Exception):
    """A signal arrived before there was anything to save."""


class Signals:
    """Context manager of the main thread that notes SIGINT, SIGTERM and SIGUSR1.

    The second SIGINT raises KeyboardInterrupt; a third one kills the process, for code that Python
    cannot interrupt. SIGINT stays ignored where it was, as in a job of nohup or of a launcher.
    answers: whether this process tells the user what the first SIGINT does.
    """

    def __init__(self, *, answers: bool = False) -> None:
        self.came = False
        self._answers = answers
        self._passed_on: Path | None = None
        self._is_terminated = False
        self._interrupted_s: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            caught = [s for s in SIGNALS if not (is_ignored and s == signal.SIGINT)]
            self._before = {kind: signal.signal(kind, self._note) for kind in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT:
            self._interrupted()
        if self._passed_on is not None and number == signal.SIGTERM and self._is_terminated:
            raise SystemExit(128 + number)
        self._is_terminated |= number == signal.SIGTERM
        self.came = True
        if self._passed_on is not None:
            # The file's folder is gone if the ranks have ended.
            with contextlib.suppress(FileNotFoundError):
                self._passed_on.touch()

    def _interrupted(self) -> None:
        now_s = time.monotonic()
        if self._interrupted_s is None:
            self._interrupted_s = now_s
            if self._answers:
                # A print could be reentrant here: the signal may have interrupted one.
                with contextlib.suppress(OSError, ValueError):
                    os.write(sys.stderr.fileno(), _TOLD)
        elif now_s - self._interrupted_s > SAME_PRESS_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt

    def pass_on(self, file: Path) -> None:
        """Create `file` on a signal, now or later, for `StopRequest` of the ranks that this process
        starts.

        Forwarding the signal would kill a rank that does not catch it yet. A second SIGTERM or
        SIGINT ends this process and thereby its ranks.
        """
        self._passed_on = file
        if self.came:
            file.touch()

    def check(self) -> None:
        """Raise StoppedEarly if a signal has arrived."""
        if self.came:
            raise StoppedEarly


def by_hand(run: RunSection) -> Path:
    """The file that ends a run whatever started it: `touch OUTPUT_DIR/.stop-NAME`."""
    return Path(run.output_dir) / f".stop-{run.name}"


class StopRequest:
    """Stop requests of one rank; files are looked for on rank 0: run.stop_file, the one made
    `by_hand`, and `told`, which the launching process creates on a signal."""

    def __init__(
        self,
        run: RunSection,
        *,
        rank: int,
        signals: Signals | None = None,
        told: Path | None = None,
    ) -> None:
        own = (Path(run.stop_file),) if run.stop_file else ()
        self._files = (*own, by_hand(run)) if rank == 0 else ()
        self._told = told if rank == 0 else None
        self._signals = signals or Signals()

    @property
    def signalled(self) -> Stop:
        """Request by signals so far."""
        is_told = self._told is not None and self._told.exists()
        return Stop.SIGNAL if self._signals.came or is_told else Stop.NO

    def now(self) -> Stop:
        """Return the request to this rank so far."""
        if not self.signalled and self._seen:
            return Stop.FILE
        return self.signalled

    @property
    def words(self) -> dict[Stop, str]:
        return {
            Stop.SIGNAL: "a signal (Ctrl-C, SIGTERM or SIGUSR1)",
            Stop.FILE: f"the stop file {', '.join(map(str, self._seen or self._files))}",
        }

    @property
    def _seen(self) -> list[Path]:
        return [file for file in self._files if file.exists()]
