"""One training at a time in a run's folder: two would mix their checkpoints.

The process that starts a run's ranks, or rank 0 of given ones, holds `.NAME.lock` beside the folder
by flock, which ends with the process however that ends; the file says who holds it. A process of
this machine that holds it is alive. One of another machine may have gone with it: a file server
then holds the lock for its clients' lease, for which a requeued job waits.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from rich.console import Console

SAME_MACHINE_S = 2.0
"""For a process that is on its way out, as of a job that was just killed."""
OTHER_MACHINE_S = 120.0
"""NFSv4 servers keep the locks of a client that is gone for 90 s by default."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """Of the run in `directory`; `take` and `close` may come repeatedly."""

    def __init__(self, directory: Path, console: Console) -> None:
        self.directory, self.console = directory, console
        self.path = directory.with_name(f".{directory.name}.lock")
        self._file: IO[str] | None = None

    def take(self) -> None:
        """ValueError naming the process that trains the run already; OSError where no file can be
        written. Waits for one that is on its way out."""
        begin, is_said = time.monotonic(), False
        while self._file is None:
            if self._attempt():
                return
            owner = self._owner()
            is_here = owner.get("host") == socket.gethostname()
            words = f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}"
            if time.monotonic() - begin > (SAME_MACHINE_S if is_here else OTHER_MACHINE_S):
                raise ValueError(
                    f"{self.directory} is being trained by {words}, since {owner.get('since')}; "
                    f"end that one or set run.name (if that machine is gone, remove {self.path})"
                )
            if not (is_here or is_said):
                self.console.print(f"waiting for {self.path}, which is held by {words}")
                is_said = True
            time.sleep(0.1)

    def _attempt(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Someone may have removed the file between its opening and its locking.
            if os.fstat(file.fileno()).st_ino != self.path.stat().st_ino:
                file.close()
                return False
        except (BlockingIOError, FileNotFoundError):
            file.close()
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            self.console.print(
                f"{self.path.parent} is on a file system without locks ({error.strerror}): nothing "
                f"keeps a second process from training {self.directory.name} at the same time"
            )
        file.truncate(0)
        since = datetime.now().isoformat(timespec="seconds")
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        file.flush()
        self._file = file
        return True

    def _owner(self) -> dict[str, Any]:
        """What the file says; nothing where it is just being written."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Lets go, and removes the file, which is this process's until it is closed."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._file.close()
            self._file = None
