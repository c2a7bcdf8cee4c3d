"""The address of a planner process, and how its clients notice that it has died or hangs."""

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
"""A planner process that gives no sign of life for this many seconds is considered stopped."""
_LONGEST = 100
"""Most characters of a socket's path. Linux permits 107 bytes."""
_BAD_INPUT = f"{UserError.__module__}.{UserError.__qualname__}: "
"""How the last line of a UserError's traceback begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a planner process listens."""

    path: str  # path of its Unix socket
    key: bytes  # secret by which it and its clients recognise each other

    @property
    def folder(self) -> Path:
        """Folder of the socket, which other users cannot read."""
        return Path(self.path).parent

    @property
    def alive(self) -> Path:
        """A file with the id of the process, which the process touches as long as it runs."""
        return self.folder / "alive"

    @classmethod
    def new(cls, token: str = "", node: int = 0, folder: str = "") -> "Address":
        """Make the address of a node's planner process.

        Args:
            token: A random token that all nodes of the run share. Empty draws one here.
            node: Index of the node.
            folder: Where to put the socket: a folder that its owner removes when the run is over,
                however it ends. If it is empty, or its path too long, a temporary folder is used.
        """
        token = token or secrets.token_hex(16)
        if folder and len(folder) < _LONGEST - len("/planner-9999/socket"):
            return cls(path=f"{folder}/planner-{node}/socket", key=token.encode())
        own = temporary_path(f"planner.{token[:16]}.{node}")
        return cls(path=str(own / "socket"), key=token.encode())


class PlanningError(RuntimeError):
    """A step could not be planned, or the planner process is gone."""

    @classmethod
    def of(cls, trace: str) -> "PlanningError":
        """Make the error of a traceback from the planner process.

        For a UserError its message is one line, with the traceback as a note. For any other error
        it is the traceback.
        """
        last = trace.rstrip().rpartition("\n")[2]
        if not last.startswith(_BAD_INPUT):
            return cls(f"planning failed:\n{trace}")
        error = cls(f"planning failed: {last.removeprefix(_BAD_INPUT)}")
        error.add_note(trace)
        return error


class PlannerLost(PlanningError, RunError):
    """The planner process has died or is stopped."""


class SignsOfLife:
    """Distinguishes a planner process that computes for a long time from one that is stopped.

    There are two signs of life: a thread of the process touches a file, and the process uses
    processor time. Native code may block the thread, but then it uses processor time.

    Args:
        address: Address of the process.
        silence_s: Seconds without a sign after which the process is considered stopped.
        pid: Id of the process, for its parent, which watches before the file exists. 0 reads it
            from the file.
    """

    def __init__(self, address: Address, silence_s: float = SILENCE_S, *, pid: int = 0) -> None:
        self._file, self.silence_s, self._known_pid = address.alive, silence_s, pid
        self._last: tuple[int, int] | None = None
        self._sign_s = self._looked_s = 0.0

    @property
    def look_s(self) -> float:
        """Seconds between two calls of `look`."""
        return min(1.0, self.silence_s / 10)

    def begin(self) -> None:
        """Start to wait for an answer."""
        self._sign_s = self._looked_s = time.monotonic()
        self._last = None

    def look(self) -> None:
        """Raise PlannerLost if there was no sign of life for `silence_s` seconds."""
        now_s, sign = time.monotonic(), self._sign()
        # If this call comes late, this process was suspended too, so start waiting from now.
        if sign != self._last or now_s - self._looked_s > self.silence_s / 2:
            self._sign_s, self._last = now_s, sign
        self._looked_s = now_s
        if now_s - self._sign_s > self.silence_s:
            raise self.lost()

    def await_file(self, descriptor: int, event: int) -> None:
        """Wait until a pipe is ready or broken.

        Args:
            descriptor: File descriptor of the pipe.
            event: select.POLLIN or select.POLLOUT.

        Raises:
            PlannerLost: If there was no sign of life for `silence_s` seconds.
        """
        waiting = select.poll()
        waiting.register(descriptor, event)
        while not waiting.poll(self.look_s * 1e3):
            self.look()

    def lost(self) -> PlannerLost:
        """Return the error that says that the planner process is stopped."""
        pid, state = self._pid(), ""
        with contextlib.suppress(OSError, IndexError):
            state = f", state {process_status(pid)[0]}"
        return PlannerLost(
            f"the planner process of this node (process {pid} on {socket.gethostname()}{state}) "
            f"gave no sign of life for {self.silence_s:g} s: it is stopped; continue from the last "
            f"checkpoint with --resume"
        )

    def _sign(self) -> tuple[int, int]:
        """Return when the file was touched, and the processor time so far; 0 if unknown."""
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
