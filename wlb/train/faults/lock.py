"""Lock of a run's folder: two trainings at a time would mix their checkpoints.

The launching process, or rank 0 of ranks started by others, holds `.NAME.lock` beside the folder by
flock, which ends with the process; the file names the owner. An owner on another machine may be
gone with it: a file server then keeps the lock for a while, which a requeued job waits for.
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

from wlb.plan import UserError

SAME_MACHINE_S = 2.0
"""Time to wait for an owner on this machine, which may be ending."""
OTHER_MACHINE_S = 120.0
"""Time to wait for an owner elsewhere: NFSv4 servers keep locks of a lost client for 90 s by
default."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """Lock of the run in `directory`; `take` and `close` may be called repeatedly."""

    def __init__(self, directory: Path, console: Console) -> None:
        self.directory, self.console = directory, console
        self.path = directory.with_name(f".{directory.name}.lock")
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Wait for an owner that may be ending; UserError names the process that trains the run."""
        begin, is_said = time.monotonic(), False
        while self._file is None:
            if self._attempt():
                return
            owner = self._owner()
            is_here = owner.get("host") == socket.gethostname()
            words = f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}"
            if time.monotonic() - begin > (SAME_MACHINE_S if is_here else OTHER_MACHINE_S):
                raise UserError(
                    f"{self.directory} is being trained by {words} since {owner.get('since')}; end "
                    f"that process or set run.name (if its machine is gone, remove {self.path})"
                )
            if not (is_here or is_said):
                self.console.print(f"waiting for {self.path}, held by {words}")
                is_said = True
            time.sleep(0.1)

    def _attempt(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(self.path.open("a+", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file may have been removed between opening and locking it.
                if os.fstat(file.fileno()).st_ino != self.path.stat().st_ino:
                    return False
            except (BlockingIOError, FileNotFoundError):
                return False
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                self.console.print(
                    f"{self.path.parent} is on a file system without locks ({error.strerror}): "
                    f"make sure that no second process trains {self.directory.name} at the same "
                    f"time"
                )
            opened.pop_all()
        file.truncate(0)
        since = datetime.now().isoformat(timespec="seconds")
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        file.flush()
        self._file = file
        return True

    def _owner(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Remove the file and release the lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._file.close()
            self._file = None
