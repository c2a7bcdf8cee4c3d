"""Checks that all ranks see the same run folder.

Rank 0 creates an empty marker file with a random name, and every rank looks for this file. Rank 0
keeps the file locked until all ranks have looked. If rank 0 is killed, the operating system
releases the lock, and the next start of the run removes marker files that are not locked.
"""

import contextlib
import os
import re
import secrets
import socket
import time
from pathlib import Path

import torch.distributed as dist

from wlb.data.folder import attempts, make_folder
from wlb.data.lock import NoLocks, is_named, lock
from wlb.parallel.collectives import agree
from wlb.parallel.host import host_group
from wlb.parallel.world import World
from wlb.plan import UserError
from wlb.train.checkpoint.folder import SEEN_WITHIN_S

_TOKEN = re.compile(r"\.token-[0-9a-f]{16}")


def remove_left_tokens(directory: Path) -> None:
    """Remove marker files of `refuse_unshared` that killed processes have left in `directory`.

    Files that another process has locked are in use and stay. On a file system without locks all of
    them stay, because it is unknown which are in use.
    """
    for path in directory.glob(".token-*"):
        if _TOKEN.fullmatch(path.name):
            with contextlib.suppress(OSError):
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    """Remove a file that `_make_locked_token` created, unless another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if lock(descriptor):
            path.unlink()
    finally:
        os.close(descriptor)


def _make_locked_token(path: Path) -> int:
    """Create the empty marker file for which all ranks look, lock it, and return its descriptor.

    Closing the descriptor releases the lock.
    """
    for _ in attempts(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with contextlib.suppress(NoLocks):
            lock(descriptor, waits=True)
        # Before the lock was taken, another process may have removed the file, because an unlocked
        # file looks unused. Try again in that case.
        if is_named(descriptor, path):
            return descriptor
        os.close(descriptor)
    raise AssertionError  # not reached, because `attempts` raises an error when it gives up


def refuse_unshared(directory: Path, world: World, *, within_s: float = SEEN_WITHIN_S) -> None:
    """Check that every rank sees a file that rank 0 writes to the run's folder. A collective call.

    A rank that does not see the file would write its parts of checkpoints to another folder.

    Args:
        directory: The run's folder. It is created if it does not exist.
        world: This rank's place among the processes of the launcher.
        within_s: Seconds to wait at most until the file appears.

    Raises:
        UserError: If a rank does not see the file, or if rank 0 cannot write it. All ranks raise
            it.
    """
    token: list[str] = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, src=0, group=host_group())
    path = directory / f".token-{token[0]}"
    problem: Exception | None = None
    descriptor = -1
    try:
        if world.rank == 0:
            make_folder(directory)
            remove_left_tokens(directory)
            descriptor = _make_locked_token(path)
        end = time.monotonic() + within_s
        while not path.exists():
            if time.monotonic() >= end:
                raise UserError(
                    f"node {world.node_rank} ({socket.gethostname()}) does not see the "
                    f"file that rank 0 wrote to {directory.absolute()}; set "
                    "run.output_dir to a folder that all nodes share"
                )
            time.sleep(0.05)
    except (OSError, UserError) as error:
        problem = error
    try:
        agree({"run.output_dir": token[0]}, problem, group=host_group())
    finally:
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(descriptor)
