"""Requests to stop: Ctrl-C, SIGTERM or SIGUSR1 to any rank, or files that rank 0 sees.

While ranks train, a request (as a terminal, Slurm and torchrun make it) is only noted here; all
ranks learn of it from the all-reduce of the step, finish the step, save and end (status 4; 0 under
torchrun and Slurm). A second Ctrl-C aborts. Before the first step there is nothing to save: where
no other rank waits for this process, a signal raises `StoppedEarly` from whatever code it
interrupts.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from wlb.spec.run import RunSection

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAME_PRESS_S = 0.3
"""Two SIGINTs within this time are one press of Ctrl-C: a rank of torchrun or srun can get it from
its terminal and from its launcher."""
BEGAN = "began"
"""A file that rank 0 of local ranks makes beside `told` when steps begin."""
_TOLD = b"\nwlb train: Ctrl-C: the run saves and ends after its step; a second Ctrl-C aborts it\n"


class Stop(IntEnum):
    """Source of a request; the maximum over ranks counts."""

    NO = 0
    FILE = 1
    SIGNAL = 2


class StoppedEarly(BaseException):
    """A signal arrived before there was anything to save.

    No Exception, as KeyboardInterrupt is none: code that it interrupts must not take it for an
    error of its own.
    """


class Signals:
    """Context manager of the main thread that notes SIGINT, SIGTERM and SIGUSR1.

    In a block of `early` they raise StoppedEarly. Otherwise the second SIGINT raises
    KeyboardInterrupt; a third one kills the process, for code that Python cannot interrupt. SIGINT
    stays ignored where it was, as in a job of nohup or of a launcher.
    answers: whether this process tells the user what the first SIGINT does.
    """

    def __init__(self, *, answers: bool = False) -> None:
        self.came = False
        self._answers = answers
        self._is_early = False
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
        self.came = True
        if number == signal.SIGINT:
            self._interrupted()
        if self._ends_at_once:
            raise StoppedEarly
        if self._passed_on is not None and number == signal.SIGTERM and self._is_terminated:
            raise SystemExit(128 + number)
        self._is_terminated |= number == signal.SIGTERM
        if self._passed_on is not None:
            # The file's folder is gone if the ranks have ended.
            with contextlib.suppress(FileNotFoundError):
                self._passed_on.touch()

    def _interrupted(self) -> None:
        now_s = time.monotonic()
        if self._interrupted_s is None:
            self._interrupted_s = now_s
            if self._answers and not self._ends_at_once:
                # A print could be reentrant here: the signal may have interrupted one.
                with contextlib.suppress(OSError, ValueError):
                    os.write(sys.stderr.fileno(), _TOLD)
        elif now_s - self._interrupted_s > SAME_PRESS_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt

    @property
    def _ends_at_once(self) -> bool:
        """Whether no rank has begun a step, and none but those of this process waits for it."""
        ranks = self._passed_on
        return self._is_early and not (ranks is not None and ranks.with_name(BEGAN).exists())

    @contextmanager
    def early(self) -> Iterator[None]:
        """A signal in this block, or one that came before, raises StoppedEarly until steps begin:
        in this process (`steps_begin`), or on a rank that requests are passed on to.
        """
        self._is_early = True
        try:
            self.check()
            yield
        finally:
            self._is_early = False

    def steps_begin(self) -> None:
        """From now on a signal is noted, for the end of the step."""
        self._is_early = False

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
    `by_hand`, and `told`, which the launching process creates on a signal.
    """

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

    def steps_begin(self) -> None:
        """Signals are noted from now on, for the end of a step; the launching process learns it."""
        self._signals.steps_begin()
        if self._told is not None:
            self._told.with_name(BEGAN).touch()

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
