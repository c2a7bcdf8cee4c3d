"""Lock files and folders between processes.

Locks are made with flock. A lock belongs to the inode, whatever path was used to open the file, and
the kernel releases it when the process ends, even if the process is killed. After this process
opened a file, another process may replace the file and lock the new one. So after locking, check
that the path still leads to the locked inode (`is_named`). Lock files are opened without following
links.
NFS can lock files, but not folders.
"""

import errno
import fcntl
import os
import stat
from pathlib import Path

from wlb.plan import UserError

# Errors of flock on file systems that cannot lock. NFS reports EBADF for a folder, because it locks
# only descriptors that are open for writing and a folder's descriptor never is.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
# Errors of open if the path is a link, a folder, or a device or pipe that nobody reads.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


class NoLocks(OSError):
    """The file system does not support locks for this file or folder."""


def lock(descriptor: int, *, waits: bool = False) -> bool:
    """Lock an open file or folder with flock.

    Args:
        descriptor: File descriptor of the file or folder. Closing it releases the lock.
        waits: Whether to wait while another process has the lock.

    Returns:
        Whether this process has the lock now. False means that another process has it.

    Raises:
        NoLocks: The file system does not support locks.
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
    """Open a lock file, creating it if it is absent, and return its file descriptor.

    Args:
        path: The lock file.
        folder: File descriptor of its folder.

    Raises:
        UserError: The path is a link, has several hard links, or is not a regular file. Writing to
            it could change a file elsewhere.
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
        f"wlb needs {path} as its lock file, but that path is a link, has several hard links or is "
        f"not a regular file, so opening it might change a file elsewhere; look what it is, and "
        f"remove it"
    )


def is_named(descriptor: int, path: Path, folder: int | None = None) -> bool:
    """Return whether `path` still leads to the file or folder behind an open descriptor.

    Args:
        descriptor: File descriptor of the file or folder.
        path: The path that was opened.
        folder: For a lock file, the file descriptor of its folder, in which the name is then looked
            up without following links. None means that `path` itself is looked up.
    """
    try:
        if folder is None:
            there = os.stat(path)
        else:
            there = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
