"""Ends a run early on request: by Ctrl-C, SIGTERM or SIGUSR1 to any rank, or by a stop file.

While ranks train, a signal only sets a flag. All ranks learn of it from the all-reduce of the step,
finish the step, save a checkpoint and end. The exit status is 4, or 0 under torchrun and Slurm. A
second Ctrl-C aborts the run.

Before the first step there is nothing to save. In the blocks of `Signals.early`, where no other
rank waits for this process, a signal then raises `StoppedEarly`, so that the run ends at once.
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
"""Two SIGINTs within this many seconds count as one press of Ctrl-C.

A rank of torchrun or srun can get the signal twice: once from its terminal and once from its
launcher."""
BEGAN = "began"
"""Name of a file that local rank 0 creates when the first step begins.

The file is in the folder of `signal_file`. The process that launched the local ranks looks for
it."""
_CTRL_C_MESSAGE = (
    b"\nwlb train: Ctrl-C: the run saves a checkpoint and ends after its current step; "
    b"a second Ctrl-C aborts it\n"
)


class Stop(IntEnum):
    """What asks a run to stop. If ranks have noticed different requests, the largest counts."""

    NO = 0  # nothing: the run continues
    FILE = 1  # a stop file
    SIGNAL = 2  # a signal


class StoppedEarly(BaseException):
    """Raised if a signal arrives before there is anything to save.

    This class is not a subclass of Exception, as KeyboardInterrupt is not. So code with a handler
    for every Exception does not catch it.
    """


class Signals:
    """Context manager that handles SIGINT, SIGTERM and SIGUSR1 in the main thread.

    Inside `with early()`, a signal raises StoppedEarly. Elsewhere the first signal only sets the
    flag `came`. A second SIGINT raises KeyboardInterrupt, unless it comes within `SAME_PRESS_S` of
    the first one. A third SIGINT kills the process, in case the process runs code that Python
    cannot interrupt. In a process that has started local ranks, a second SIGTERM raises SystemExit.
    SIGINT stays ignored if it was ignored before, as in a job under nohup.

    Args:
        answers: Whether this process prints a message at the first SIGINT.

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
            # If SIGINT was ignored before, as in a job under nohup, keep ignoring it.
            caught = [s for s in SIGNALS if not (is_ignored and s == signal.SIGINT)]
            self._before = {kind: signal.signal(kind, self._note) for kind in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: set the flag `came`, and inside `with early()` raise StoppedEarly."""
        del frame
        self.came = True
        if number == signal.SIGINT:
            self._interrupted()
        if self._ends_at_once:
            raise StoppedEarly
        if self._signal_file is not None and number == signal.SIGTERM and self._is_terminated:
            # This is the second SIGTERM. End the launching process, and thereby its ranks.
            raise SystemExit(128 + number)
        self._is_terminated |= number == signal.SIGTERM
        if self._signal_file is not None:
            # The file's folder no longer exists if the ranks have ended already.
            with contextlib.suppress(FileNotFoundError):
                self._signal_file.touch()

    def _interrupted(self) -> None:
        """Handle a SIGINT. The first one prints a message, and a second one aborts the run."""
        now_s = time.monotonic()
        if self._interrupted_s is None:
            self._interrupted_s = now_s
            if self._answers and not self._ends_at_once:
                # Use os.write instead of print, because the signal may have interrupted a print,
                # and print must not be called again before it has returned.
                with contextlib.suppress(OSError, ValueError):
                    os.write(sys.stderr.fileno(), _CTRL_C_MESSAGE)
        elif now_s - self._interrupted_s > SAME_PRESS_S:
            # The next SIGINT kills the process without running Python code.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt

    @property
    def _ends_at_once(self) -> bool:
        """Whether a signal raises StoppedEarly: inside `with early()`, before the first step."""
        file = self._signal_file
        return self._is_early and not (file is not None and file.with_name(BEGAN).exists())

    @contextmanager
    def early(self) -> Iterator[None]:
        """Let signals raise StoppedEarly in this block, also a signal that came before the block.

        As soon as the first step begins, signals only set the flag `came` again, even inside the
        block. The first step begins when this process calls `steps_begin`, or when a local rank
        that this process launched creates the file `BEGAN`.
        """
        self._is_early = True
        try:
            self.check()
            yield
        finally:
            self._is_early = False

    def steps_begin(self) -> None:
        """From now on, let signals only set the flag `came`, so that the run finishes its step."""
        self._is_early = False

    def pass_on(self, file: Path) -> None:
        """From now on, tell the ranks that this process launches about signals, by creating `file`.

        If a signal came before this call, `file` is created now. Local rank 0 looks for the file
        (`StopRequest`). The signal itself is not forwarded, because it would kill a rank that has
        not installed its handler yet. A second SIGTERM or SIGINT ends this process and thereby its
        ranks.
        """
        self._signal_file = file
        if self.came:
            file.touch()

    def check(self) -> None:
        """Raise StoppedEarly if a signal has arrived."""
        if self.came:
            raise StoppedEarly


def by_hand(run: RunSection) -> Path:
    """Return the path of the stop file that a user can create to end a run.

    `touch OUTPUT_DIR/.stop-NAME` ends the run NAME after its current step, no matter how the run
    was started.
    """
    return Path(run.output_dir) / f".stop-{run.name}"


class StopRequest:
    """Notices on one rank that the run should stop. Rank 0 also looks for stop files.

    Args:
        run: The section [run] of the configuration, which names the stop files.
        rank: This rank's number.
        signals: The handler of signals; None for a rank that receives no signals.
        signal_file: The file that the launching process creates when it gets a signal; None if no
            process of wlb launched this rank.
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
        """From now on, let signals only set a flag, so that the run ends after its current step.

        Local rank 0 also creates the file `BEGAN`, so that the process that launched the local
        ranks handles signals in the same way.
        """
        self._signals.steps_begin()
        if self._signal_file is not None:
            self._signal_file.with_name(BEGAN).touch()

    @property
    def signalled(self) -> Stop:
        """`Stop.SIGNAL` if this rank or its launching process got a signal, else `Stop.NO`."""
        is_passed_on = self._signal_file is not None and self._signal_file.exists()
        return Stop.SIGNAL if self._signals.came or is_passed_on else Stop.NO

    def now(self) -> Stop:
        """Return what this rank has noticed: a signal, else a stop file, else `Stop.NO`."""
        if not self.signalled and self._seen:
            return Stop.FILE
        return self.signalled

    @property
    def words(self) -> dict[Stop, str]:
        """Words for each request to stop, for messages such as "stopped by ..."."""
        return {
            Stop.SIGNAL: "a signal (Ctrl-C, SIGTERM or SIGUSR1)",
            Stop.FILE: f"the stop file {', '.join(map(str, self._seen or self._files))}",
        }

    @property
    def _seen(self) -> list[Path]:
        """The stop files that exist now."""
        return [file for file in self._files if file.exists()]
