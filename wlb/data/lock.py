"""Locks of folders and files that hold for their inodes, whatever names lead to them.

They are flocks: the kernel releases one when its process ends, however it ends. A lock file is
opened without following links. After it was locked its name must still lead to it (`is_named`), as
another process could lock a newer file of that name. NFS locks files, but not folders.
"""

import errno
import fcntl
import os
import stat
from pathlib import Path

from wlb.plan import UserError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
"""Errors of file systems without locks; NFS wants a descriptor that can be written (EBADF), which a
folder's cannot."""
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


class NoLocks(OSError):
    """The file system cannot lock this."""


def lock(descriptor: int, *, waits: bool = False) -> bool:
    """Take the lock; False if another process holds it. waits: wait until it is free instead.
    NoLocks where the file system cannot lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocks(error.errno, error.strerror) from None
        raise
    return True


def open_lock_file(path: Path, folder: int) -> int:
    """A descriptor of the lock file `path`, made if it is absent. folder: a descriptor of its
    folder. UserError for a link or anything else but a file of its own: to write there would change
    something else.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path.name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise UserError(_refusal(path)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise UserError(_refusal(path))
    return descriptor


def _refusal(path: Path) -> str:
    return (
        f"{path} is a lock, but a link or no regular file: what it leads to would be overwritten; "
        f"see what it is and remove it"
    )


def is_named(descriptor: int, path: Path, folder: int | None = None) -> bool:
    """Whether `path` still leads to what is open. folder: a descriptor of the folder of a lock
    file, whose name is then looked up there without following links.
    """
    try:
        if folder is None:
            there = os.stat(path)
        else:
            there = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
