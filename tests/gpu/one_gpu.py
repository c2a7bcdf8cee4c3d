"""Runs several ranks over NCCL on one GPU.

NCCL refuses two ranks of one machine on the same GPU. It tells machines apart by NCCL_HOSTID, so
ranks that name different hosts may share a GPU. They then move data through sockets of the loopback
interface, and the GPU computes for one process at a time. What they compute is what a cluster's
ranks compute, with NCCL's own communicators, streams and order; how long it takes means nothing.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wlb.launch.local import run_local
from wlb.parallel.world import World, in_group, rank_device

ENVIRONMENT = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_BUFFSIZE": str(1 << 20),
}
"""Settings of NCCL for ranks that share a GPU. Each communicator takes little of its memory."""


def run_on_one_gpu(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Returns the results of fn(world, *args) on ranks that share GPU 0, as `run_local` does."""
    return run_local(_as_own_host, world_size, fn, args, timeout_s=600)


def _as_own_host(world: World, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(ENVIRONMENT, NCCL_HOSTID=f"host-of-rank-{world.rank}")
    alone = replace(world, one_gpu_each=True)
    with in_group(alone, rank_device(alone, "cuda"), timeout_s=300):
        return fn(alone, *args)
