"""Whether all ranks see the same run folder: rank 0 leaves a token in it, every rank reads it."""

import contextlib
import secrets
import socket
import time
from pathlib import Path

import torch.distributed as dist

from wlb.parallel.collectives import agree
from wlb.parallel.world import World
from wlb.train.checkpoint.folder import SEEN_WITHIN_S


def refuse_unshared(directory: Path, world: World, *, within_s: float = SEEN_WITHIN_S) -> None:
    """ValueError on all ranks if one does not see what rank 0 writes to the run's folder: its part
    of every checkpoint would lie where no one finds it. All ranks call it.

    within_s: how long a rank looks, as clients of a network file system may know of new files late.
    """
    token: list[str] = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, src=0)
    path = directory / f".token-{token[0]}"
    problem: Exception | None = None
    try:
        if world.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            path.touch()
        _await(path, world, within_s)
    except (OSError, ValueError) as error:
        problem = error
    try:
        agree({"run.output_dir": token[0]}, problem, group=dist.group.WORLD)
    finally:
        if world.rank == 0:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _await(path: Path, world: World, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not path.exists():
        if time.monotonic() >= end:
            raise ValueError(
                f"node {world.node_rank} ({socket.gethostname()}) does not see what rank 0 wrote "
                f"to {path.parent.absolute()}; set run.output_dir to a folder that all nodes share"
            )
        time.sleep(0.05)
