"""Where a planner process listens, and how its clients tell that it is gone or stopped."""

import contextlib
import secrets
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from wlb.data.leftovers import temporary_path
from wlb.plan import RunError, UserError
from wlb.plan.processes import process_status

SILENCE_S = 60.0
"""A planner process that gives no sign of life for this long counts as stopped."""
_LONGEST = 100
_BAD_INPUT = f"{UserError.__module__}.{UserError.__qualname__}: "
"""Beginning of the last line of a UserError's traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a planner process listens: a socket path and the key that clients must know."""

    path: str
    key: bytes

    @property
    def folder(self) -> Path:
        """Of the socket; nobody else can read it."""
        return Path(self.path).parent

    @property
    def alive(self) -> Path:
        """A file that has the number of the process, which touches it as long as it runs."""
        return self.folder / "alive"

    @classmethod
    def new(cls, token: str = "", node: int = 0, folder: str = "") -> "Address":
        """The address for a node of the run that drew `token` (empty = draw one here).

        folder: its owner removes it when the run is over, however the run ends.
        """
        token = token or secrets.token_hex(16)
        if folder and len(folder) < _LONGEST - len("/planner-9999/socket"):
            return cls(path=f"{folder}/planner-{node}/socket", key=token.encode())
        own = temporary_path(f"planner.{token[:16]}.{node}")
        return cls(path=str(own / "socket"), key=token.encode())


class PlanningError(RuntimeError):
    """A step could not be planned, or the process that plans is gone."""

    @classmethod
    def of(cls, trace: str) -> "PlanningError":
        """Return one line for bad input, with its traceback as a note; else the traceback."""
        last = trace.rstrip().rpartition("\n")[2]
        if not last.startswith(_BAD_INPUT):
            return cls(f"planning failed:\n{trace}")
        error = cls(f"planning failed: {last.removeprefix(_BAD_INPUT)}")
        error.add_note(trace)
        return error


class PlannerLost(PlanningError, RunError):
    """The process that plans has died or is stopped."""


class SignsOfLife:
    """Tells a planner process that computes for long from one that is stopped.

    Its thread touches a file; code outside of Python may hold that thread up, but takes processor
    time.

    Args:
        address: Of the process.
        silence_s: Without a sign for so long it counts as stopped.
        pid: Of the process, for a parent that watches before there is a file; 0 = as the file says.
    """

    def __init__(self, address: Address, silence_s: float = SILENCE_S, *, pid: int = 0) -> None:
        self._file, self.silence_s, self._known_pid = address.alive, silence_s, pid
        self._last: tuple[int, int] | None = None
        self._sign_s = self._looked_s = 0.0

    @property
    def look_s(self) -> float:
        """Seconds between two looks of one who waits."""
        return min(1.0, self.silence_s / 10)

    def begin(self) -> None:
        """Begin to wait for an answer."""
        self._sign_s = self._looked_s = time.monotonic()
        self._last = None

    def look(self) -> None:
        """PlannerLost if there was no sign for `silence_s`."""
        now_s, sign = time.monotonic(), self._sign()
        # A late look means that this process was suspended itself.
        if sign != self._last or now_s - self._looked_s > self.silence_s / 2:
            self._sign_s, self._last = now_s, sign
        self._looked_s = now_s
        if now_s - self._sign_s > self.silence_s:
            raise self.lost()

    def await_file(self, descriptor: int, event: int) -> None:
        """Wait until a pipe is ready, or broken. event: select.POLLIN or POLLOUT. PlannerLost as
        `look`.
        """
        waiting = select.poll()
        waiting.register(descriptor, event)
        while not waiting.poll(self.look_s * 1e3):
            self.look()

    def lost(self) -> PlannerLost:
        """The error of a planner process that is stopped."""
        pid, state = self._pid(), ""
        with contextlib.suppress(OSError, IndexError):
            state = f", state {process_status(pid)[0]}"
        return PlannerLost(
            f"the planner process of this node (process {pid} on {socket.gethostname()}{state}) "
            f"gave no sign of life for {self.silence_s:g} s: it is stopped; go on from the last "
            f"checkpoint with --resume"
        )

    def _sign(self) -> tuple[int, int]:
        """When the file was touched, and the processor time so far; 0 where it cannot be told."""
        touched_ns = ticks = 0
        with contextlib.suppress(OSError):
            touched_ns = self._file.stat().st_mtime_ns
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks = sum(map(int, process_status(self._pid())[11:13]))
        return touched_ns, ticks

    def _pid(self) -> str:
        if self._known_pid:
            return str(self._known_pid)
        try:
            return self._file.read_text() or "?"
        except OSError:
            return "?"
