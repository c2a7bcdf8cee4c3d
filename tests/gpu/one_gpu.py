"""Runs several ranks over NCCL on one GPU.

NCCL refuses two ranks of one machine on the same GPU. It identifies machines by NCCL_HOSTID, so
ranks with different values may share a GPU. They then transfer data through sockets of the loopback
interface, and the GPU computes for one process at a time. The ranks compute the same as ranks of a
cluster, with NCCL's communicators, streams and order. Only the times are meaningless.
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
"""NCCL's settings for ranks that share a GPU: sockets, and little memory per communicator."""


def run_on_one_gpu(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Runs fn(world, *args) on ranks that share GPU 0 and returns the results of all ranks."""
    return run_local(_as_own_host, world_size, fn, args, timeout_s=600)


def _as_own_host(world: World, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(ENVIRONMENT, NCCL_HOSTID=f"host-of-rank-{world.rank}")
    alone = replace(world, one_gpu_each=True)
    with in_group(alone, rank_device(alone, "cuda"), timeout_s=300):
        return fn(alone, *args)
