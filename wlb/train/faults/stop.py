"""Requests to stop: Ctrl-C, SIGTERM or SIGUSR1 to any rank, or files that rank 0 sees.

While ranks train, a signal is only noted. All ranks learn of it from the all-reduce of the step,
finish the step, save and end, with exit status 4 (0 under torchrun and Slurm). A second Ctrl-C
aborts.

Before the first step there is nothing to save. If no other rank waits for this process, a signal
then raises `StoppedEarly` in the code that it interrupts.
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
"""Two SIGINTs within this time count as one press of Ctrl-C.

A rank of torchrun or srun can get the signal from its terminal and from its launcher."""
BEGAN = "began"
"""Name of a file beside `signal_file`, which local rank 0 creates when steps begin."""
_CTRL_C_MESSAGE = (
    b"\nwlb train: Ctrl-C: the run saves and ends after its step; a second Ctrl-C aborts it\n"
)


class Stop(IntEnum):
    """Source of a request to stop. If ranks have noticed different ones, the largest counts."""

    NO = 0
    FILE = 1
    SIGNAL = 2


class StoppedEarly(BaseException):
    """A signal arrived before there was anything to save.

    Like KeyboardInterrupt it is not an Exception, so that interrupted code does not handle it as an
    error of its configured.
    """


class Signals:
    """Context manager that notes SIGINT, SIGTERM and SIGUSR1. For the main thread.

    In a block of `early` they raise StoppedEarly. Otherwise the second SIGINT raises
    KeyboardInterrupt. A third one kills the process, in case it runs code that Python cannot
    interrupt. SIGINT stays ignored if it was ignored before, as in a job under nohup.

    Args:
        answers: Whether this process prints what the first SIGINT does.

    Attributes:
        came: Whether a signal has arrived.
    """

    def __init__(self, *, answers: bool = False) -> None:
        self.came = False
        self._answers = answers
        self._is_early = False
        self._signal_file: Path | None = None
        self._is_terminated = False
        self._interrupted_s: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            # A job under nohup, or of a launcher, ignores Ctrl-C on purpose.
            caught = [s for s in SIGNALS if not (is_ignored and s == signal.SIGINT)]
            self._before = {kind: signal.signal(kind, self._note) for kind in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note it, or end the process if no step has begun."""
        del frame
        self.came = True
        if number == signal.SIGINT:
            self._interrupted()
        if self._ends_at_once:
            raise StoppedEarly
        if self._signal_file is not None and number == signal.SIGTERM and self._is_terminated:
            # The second SIGTERM: end the launcher, and with it its ranks.
            raise SystemExit(128 + number)
        self._is_terminated |= number == signal.SIGTERM
        if self._signal_file is not None:
            # If the ranks have ended, the file's folder is gone.
            with contextlib.suppress(FileNotFoundError):
                self._signal_file.touch()

    def _interrupted(self) -> None:
        """Handle a SIGINT: the first one prints a message, a second one aborts."""
        now_s = time.monotonic()
        if self._interrupted_s is None:
            self._interrupted_s = now_s
            if self._answers and not self._ends_at_once:
                # os.write instead of print, because the signal may have interrupted a print, which
                # is not reentrant.
                with contextlib.suppress(OSError, ValueError):
                    os.write(sys.stderr.fileno(), _CTRL_C_MESSAGE)
        elif now_s - self._interrupted_s > SAME_PRESS_S:
            # The next SIGINT kills the process without running Python code.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt

    @property
    def _ends_at_once(self) -> bool:
        """Whether a signal may end this process at once, because no step has begun."""
        file = self._signal_file
        return self._is_early and not (file is not None and file.with_name(BEGAN).exists())

    @contextmanager
    def early(self) -> Iterator[None]:
        """Let a signal raise StoppedEarly in this block, also a signal that came before it.

        This ends when steps begin: in this process (`steps_begin`), or on a local rank to which
        signals are passed on.
        """
        self._is_early = True
        try:
            self.check()
            yield
        finally:
            self._is_early = False

    def steps_begin(self) -> None:
        """From now on only note signals, for the end of the step."""
        self._is_early = False

    def pass_on(self, file: Path) -> None:
        """Pass signals on to ranks that this process starts, by creating `file`.

        It is created at a signal, now or later, and the `StopRequest` of these ranks looks for it.
        Forwarding the signal itself would kill a rank that has not installed its handler yet. A
        second SIGTERM or SIGINT ends this process and thereby its ranks.
        """
        self._signal_file = file
        if self.came:
            file.touch()

    def check(self) -> None:
        """Raise StoppedEarly if a signal has arrived."""
        if self.came:
            raise StoppedEarly


def by_hand(run: RunSection) -> Path:
    """Return the path of the file with which anybody can end a run, however it was started.

    `touch OUTPUT_DIR/.stop-NAME` ends the run NAME after its step.
    """
    return Path(run.output_dir) / f".stop-{run.name}"


class StopRequest:
    """Requests to stop on one rank: signals, and on rank 0 also files.

    Args:
        run: The [run] section, which names the stop files.
        rank: This rank's number.
        signals: The handler of signals; None for a rank that gets none.
        signal_file: The file that the launching process creates when it gets a signal.
    """

    def __init__(
        self,
        run: RunSection,
        *,
        rank: int,
        signals: Signals | None = None,
        signal_file: Path | None = None,
    ) -> None:
        configured = (Path(run.stop_file),) if run.stop_file else ()
        self._files = (*configured, by_hand(run)) if rank == 0 else ()
        self._signal_file = signal_file if rank == 0 else None
        self._signals = signals or Signals()

    def steps_begin(self) -> None:
        """Note signals from now on, for the end of a step.

        The launching process learns of it by the file `BEGAN`, so it does the same.
        """
        self._signals.steps_begin()
        if self._signal_file is not None:
            self._signal_file.with_name(BEGAN).touch()

    @property
    def signalled(self) -> Stop:
        """The request by signals so far; files are not considered."""
        is_passed_on = self._signal_file is not None and self._signal_file.exists()
        return Stop.SIGNAL if self._signals.came or is_passed_on else Stop.NO

    def now(self) -> Stop:
        """Return the request to this rank so far, by signals or files."""
        if not self.signalled and self._seen:
            return Stop.FILE
        return self.signalled

    @property
    def words(self) -> dict[Stop, str]:
        """Each source of a request in words, for messages."""
        return {
            Stop.SIGNAL: "a signal (Ctrl-C, SIGTERM or SIGUSR1)",
            Stop.FILE: f"the stop file {', '.join(map(str, self._seen or self._files))}",
        }

    @property
    def _seen(self) -> list[Path]:
        """The stop files that exist."""
        return [file for file in self._files if file.exists()]
