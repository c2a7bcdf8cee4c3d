"""Locks a run's folder, because two processes that train the same run would mix their checkpoints.

The process that launches local ranks, or rank 0 under torchrun or Slurm, takes two locks (flock).
One lock is on the folder itself, so that processes which reach the folder by different paths share
it. The other is on the file `.lock` in the folder, which names the owner of the lock. NFS cannot
lock folders, so only the file is locked there. The operating system releases both locks when the
process ends.

If the owner's machine has died, a file server keeps the lock for a while. So a job that Slurm
starts again on another machine waits for the lock.
"""

import contextlib
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from wlb.data.folder import make_and_open
from wlb.data.lock import NoLocks, is_named, lock, open_lock_file
from wlb.plan import UserError

NAME = ".lock"
SAME_MACHINE_S = 2.0
"""Seconds to wait for a lock whose owner is on this machine, because that process may be ending."""
OTHER_MACHINE_S = 120.0
"""Seconds to wait for a lock whose owner is on another machine.

The machine may have died, and NFSv4 servers keep the locks of a lost client for 90 s by default."""


class _Held(NamedTuple):
    """Open file descriptors of a locked folder and its lock file."""

    folder: int  # descriptor of the run's folder
    file: int  # descriptor of the lock file in it

    def release(self) -> None:
        """Remove the lock file, and close both descriptors, which releases their locks."""
        with contextlib.suppress(OSError):
            os.unlink(NAME, dir_fd=self.folder)
        os.close(self.file)
        os.close(self.folder)


class RunLock:
    """The lock of the run's folder `directory`.

    `take` does nothing while this object has the lock, and `close` does nothing without the lock.
    """

    def __init__(self, directory: Path, console: Console) -> None:
        self.directory, self.console = directory, console
        self.path = directory / NAME
        self._held: _Held | None = None
        self._said: set[str] = set()
        self._remedy = ""

    def take(self) -> None:
        """Lock the folder, which is created if it does not exist.

        If another process has the lock, wait for it: up to `SAME_MACHINE_S` if that process is on
        this machine, else up to `OTHER_MACHINE_S`.

        Raises:
            UserError: If another process still has the lock. The message names that process.
        """
        begin = time.monotonic()
        while self._held is None:
            if self._attempt():
                return
            owner = self._owner()
            # An owner on this machine that does not end within a short time is still training. An
            # owner on another machine may have died with its machine, and the file server then
            # keeps the lock for longer.
            is_here = owner.get("host") == socket.gethostname()
            words = f"process {owner.get('pid', '?')} on {owner.get('host', 'another machine')}"
            if time.monotonic() - begin > (SAME_MACHINE_S if is_here else OTHER_MACHINE_S):
                raise UserError(
                    f"{self.directory} is in use: {words} has trained a run there "
                    f"since {owner.get('since', 'an unknown time')}. End that process, "
                    "or set another run.name. If the machine of that process no longer runs, "
                    f"{self._remedy}"
                )
            if not is_here:
                self._say(f"waiting for {self.path}, which is locked by {words}")
            time.sleep(0.1)

    def take_next(self) -> None:
        """Lock a new folder at the same path, after the locked folder was moved aside.

        The lock of the old folder is released only when the new folder is locked.
        """
        moved, self._held = self._held, None
        try:
            self.take()
        finally:
            if moved is not None:
                moved.release()

    def close(self) -> None:
        """Unlock the run's folder, and remove the lock file in it."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _attempt(self) -> bool:
        """Try once, without waiting, to lock the run's folder and the lock file in it.

        Returns:
            Whether both are locked now, as far as the file system supports these locks.
        """
        with contextlib.ExitStack() as opened:
            try:
                folder = make_and_open(self.directory)
                opened.callback(os.close, folder)
                file = open_lock_file(self.path, folder)
                opened.callback(os.close, file)
            except FileNotFoundError:
                # Another process moved the folder aside or removed it after it was opened here.
                return False
            if not self._lock_both(folder, file):
                return False
            # Another process may have replaced the folder or the file before it was locked here.
            if not (is_named(folder, self.directory) and is_named(file, self.path, folder)):
                return False
            since = datetime.now().isoformat(timespec="seconds")
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(owner).encode(), 0)
            opened.pop_all()
        self._held = _Held(folder, file)
        return True

    def _lock_both(self, folder: int, file: int) -> bool:
        """Lock the folder and the lock file, as far as the file system supports these locks.

        A message is printed if the file system does not support both locks.

        Args:
            folder: Descriptor of the run's folder.
            file: Descriptor of the lock file.

        Returns:
            False if another process has one of the locks, else True.
        """
        problem = ""
        try:
            self._remedy = "copy the folder and train in the copy, which is not locked"
            if not lock(folder):
                return False
        except NoLocks as error:
            self._remedy = f"remove {self.path}"
            problem = (
                f"{self.directory} is on a file system that can lock files but not "
                f"folders, such as NFS ({error.strerror}), so only {self.path} is locked: do not "
                "remove this file while the run trains"
            )
        try:
            if not lock(file):
                return False
        except NoLocks as error:
            problem = (
                f"{self.directory} is on a file system without locks "
                f"({error.strerror}): make sure that no second process trains "
                f"{self.directory.name} at the same time"
            )
        if problem:
            self._say(problem)
        return True

    def _say(self, text: str) -> None:
        """Print a text, unless the same text was printed before."""
        if text not in self._said:
            self._said.add(text)
            self.console.print(text)

    def _owner(self) -> dict[str, Any]:
        """Read from the lock file who has the lock ("pid" and "host"), and "since" when.

        The dictionary is empty if the file cannot be read.
        """
        try:
            with open(self.path, encoding="utf-8", opener=_open_no_link) as file:
                found = json.load(file)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
