"""Check that all ranks see the same run folder: rank 0 writes a token that every rank looks for.

Rank 0 holds the token's lock as long as it is needed, which the kernel releases when rank 0 is
killed: the next start removes tokens that nobody holds.
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
    """Remove tokens in `directory` of processes that were killed. Where files cannot be locked
    their owners cannot be told, and they stay.
    """
    for path in directory.glob(".token-*"):
        if _TOKEN.fullmatch(path.name):
            with contextlib.suppress(OSError):
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if lock(descriptor):
            path.unlink()
    finally:
        os.close(descriptor)


def _made_and_held(path: Path) -> int:
    """Make a token and lock it for this process; closing the descriptor lets go of it."""
    for _ in attempts(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with contextlib.suppress(NoLocks):
            lock(descriptor, waits=True)
        # Another process may have taken it for left over before it was locked.
        if is_named(descriptor, path):
            return descriptor
        os.close(descriptor)
    raise AssertionError  # attempts has raised


def refuse_unshared(directory: Path, world: World, *, within_s: float = SEEN_WITHIN_S) -> None:
    """UserError on all ranks if one does not see rank 0's files in the run's folder within
    `within_s`: its shards of checkpoints would be lost. All ranks call it.
    """
    token: list[str] = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, src=0, group=host_group())
    path = directory / f".token-{token[0]}"
    problem: Exception | None = None
    held = -1
    try:
        if world.rank == 0:
            make_folder(directory)
            remove_left_tokens(directory)
            held = _made_and_held(path)
        end = time.monotonic() + within_s
        while not path.exists():
            if time.monotonic() >= end:
                raise UserError(
                    f"node {world.node_rank} ({socket.gethostname()}) does not see what rank 0 "
                    f"wrote to {directory.absolute()}; set run.output_dir to a folder that all "
                    f"nodes share"
                )
            time.sleep(0.05)
    except (OSError, UserError) as error:
        problem = error
    try:
        agree({"run.output_dir": token[0]}, problem, group=host_group())
    finally:
        if held >= 0:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(held)
