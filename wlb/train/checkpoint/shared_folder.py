"""Check that all ranks see the same run folder: rank 0 writes a token that every rank looks for."""

import contextlib
import secrets
import socket
import time
from pathlib import Path

import torch.distributed as dist

from wlb.parallel.collectives import agree
from wlb.parallel.world import World
from wlb.plan import UserError
from wlb.train.checkpoint.folder import SEEN_WITHIN_S


def refuse_unshared(directory: Path, world: World, *, within_s: float = SEEN_WITHIN_S) -> None:
    """UserError on all ranks if one of them does not see rank 0's files in the run's folder: its
    shards of checkpoints would be lost. All ranks call it.

    within_s: how long a rank looks; clients of a network file system may see new files late.
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
    except (OSError, UserError) as error:
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
            raise UserError(
                f"node {world.node_rank} ({socket.gethostname()}) does not see what rank 0 wrote "
                f"to {path.parent.absolute()}; set run.output_dir to a folder that all nodes share"
            )
        time.sleep(0.05)
