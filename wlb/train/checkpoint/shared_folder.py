"""Check that all ranks see the same run folder: rank 0 writes a token that every rank looks for."""

import contextlib
import secrets
import socket
import time
from pathlib import Path

import torch.distributed as dist

from wlb.parallel.collectives import agree
from wlb.parallel.host import host_group
from wlb.parallel.world import World
from wlb.plan import UserError
from wlb.train.checkpoint.folder import SEEN_WITHIN_S


def refuse_unshared(directory: Path, world: World, *, within_s: float = SEEN_WITHIN_S) -> None:
    """UserError on all ranks if one does not see rank 0's files in the run's folder within
    `within_s`: its shards of checkpoints would be lost. All ranks call it."""
    token: list[str] = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, src=0, group=host_group())
    path = directory / f".token-{token[0]}"
    problem: Exception | None = None
    try:
        if world.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            path.touch()
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
        if world.rank == 0:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
