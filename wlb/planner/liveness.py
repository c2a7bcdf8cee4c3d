"""The address of a planner process, and how its clients notice that it was stopped or hangs."""

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
"""If a planner process gives no sign of life for this many seconds, clients raise PlannerLost."""
_LONGEST = 100
"""Most characters of a socket's path, a little less than the 107 bytes that Linux permits."""
_BAD_INPUT = f"{UserError.__module__}.{UserError.__qualname__}: "
"""The last line of a traceback begins with this if the error is a UserError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a planner process listens."""

    path: str  # path of the process's Unix socket
    key: bytes  # secret by which the process and its clients recognise each other

    @property
    def folder(self) -> Path:
        """Folder of the planner process's socket. Other users cannot read it."""
        return Path(self.path).parent

    @property
    def alive(self) -> Path:
        """A file with the planner's process id, which the planner touches as long as it runs."""
        return self.folder / "alive"

    @classmethod
    def new(cls, token: str = "", node: int = 0, folder: str = "") -> "Address":
        """Make the address of a node's planner process.

        Args:
            token: A random secret that all nodes of the run share. If it is empty, a new one is
                drawn.
            node: Index of the node.
            folder: Folder in which the process makes a folder for its socket. The caller removes
                `folder` when the run is over. If `folder` is empty, or the path too long for a
                socket, a temporary folder is used.
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
        """Make a PlanningError from the traceback that the planner process has sent.

        If the traceback ends in a UserError, the message of the PlanningError is the message of
        that error, and the traceback is added as a note. Otherwise the message is the traceback.
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
    processor time. If native code keeps the thread from running, the process still uses processor
    time.

    Args:
        address: Address of the process.
        silence_s: Seconds without a sign of life after which the process is considered stopped.
        pid: Id of the planner process. With 0 it is read from the file that the process touches.
            This file does not exist at first, so the parent of the process gives the id here.
    """

    def __init__(self, address: Address, silence_s: float = SILENCE_S, *, pid: int = 0) -> None:
        self._file, self.silence_s, self._known_pid = address.alive, silence_s, pid
        self._last: tuple[int, int] | None = None
        self._sign_s = self._looked_s = 0.0

    @property
    def look_s(self) -> float:
        """Seconds that a caller should let pass between two calls of `look`."""
        return min(1.0, self.silence_s / 10)

    def begin(self) -> None:
        """Begin to wait for the planner process: count its time without a sign of life from now."""
        self._sign_s = self._looked_s = time.monotonic()
        self._last = None

    def look(self) -> None:
        """Raise PlannerLost if there was no sign of life for `silence_s` seconds."""
        now_s, sign = time.monotonic(), self._sign()
        # If this call comes much later than the last one, this process itself was suspended, not
        # the planner's. Then count the time without a sign of life from now.
        if sign != self._last or now_s - self._looked_s > self.silence_s / 2:
            self._sign_s, self._last = now_s, sign
        self._looked_s = now_s
        if now_s - self._sign_s > self.silence_s:
            raise self.lost()

    def await_file(self, descriptor: int, event: int) -> None:
        """Wait until a pipe is ready or broken.

        Args:
            descriptor: File descriptor of the pipe.
            event: select.POLLIN to wait until the pipe can be read, select.POLLOUT to wait until
                it can be written.

        Raises:
            PlannerLost: If there was no sign of life for `silence_s` seconds.
        """
        waiting = select.poll()
        waiting.register(descriptor, event)
        while not waiting.poll(self.look_s * 1e3):
            self.look()

    def lost(self) -> PlannerLost:
        """Return the error that says that the planner process gave no sign of life."""
        pid, state = self._pid(), ""
        with contextlib.suppress(OSError, IndexError):
            state = f", state {process_status(pid)[0]}"
        return PlannerLost(
            f"the planner process of this node (process {pid} on {socket.gethostname()}{state}) "
            f"gave no sign of life for {self.silence_s:g} s, so it is considered stopped; resume "
            "from the last checkpoint with --resume"
        )

    def _sign(self) -> tuple[int, int]:
        """Return when the planner process touched its file, and the processor time it has used.

        These are its signs of life. The first is in ns and the second in clock ticks. Either is 0
        if it cannot be read.
        """
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
