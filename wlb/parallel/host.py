"""Communication between the ranks' hosts, over Gloo: CPU tensors and Python objects of all ranks.

NCCL groups have no Gloo side: a Gloo group that is split off one of NCCL would have torch's default
options (two workers, see `wlb.parallel.gloo`). Connections are made when they are first used, and
sums and tables run along a tree, so that a rank of 8,192 holds dozens of sockets; a full mesh would
take 8,191, and 4.4 TB of addresses from rank 0's store (`host_cost` computes both).
"""

import resource
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from wlb.plan import UserError

HOSTS = "hosts"
"""Description of the group of all ranks' hosts, by which it is found."""
MOST_TIMED = 64
"""Most ranks that send rank 0 their timelines, directly (`wlb.train.telemetry.ranks`)."""
_OPEN_ANYWAY = {"cpu": 128, "cuda": 512}
"""Files of a rank besides sockets to other ranks' hosts: logs, stores, and on CUDA the driver,
NCCL's bootstrap and its sockets within a node."""


def new_host_group(timeout_s: float) -> None:
    """Make the group that `host_group` finds, if the default group is not Gloo itself; all ranks
    call it, after `init_process_group`.
    """
    dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=HOSTS)


def destroy_gloo_groups() -> None:
    """Destroy this process's Gloo groups, and their threads, without waiting for other ranks."""
    for group in list(distributed_c10d._world.pg_map):
        if dist.get_backend(group) == dist.Backend.GLOO:
            dist.destroy_process_group(group)


def host_group() -> dist.ProcessGroup | None:
    """The group of all ranks for CPU tensors and objects; None without torch.distributed."""
    if not dist.is_initialized():
        return None
    groups = distributed_c10d._world.pg_map
    return next((group for group in groups if group.group_desc == HOSTS), dist.group.WORLD)


def all_reduce_hosts(x: Tensor, op: str = "sum") -> None:
    """Reduce a CPU tensor over all ranks, in place; op is "sum" or "max". Takes 2 * log2(ranks)
    messages in a row, where Gloo's own all-reduce, a ring, takes 2 * (ranks - 1).
    """
    group, rank, size = host_group(), dist.get_rank(), dist.get_world_size()
    step, theirs = 1, torch.empty_like(x)
    while step < size:
        if rank & step:
            dist.send(x, dst=rank - step, group=group)
            break
        if rank + step < size:
            dist.recv(theirs, src=rank + step, group=group)
            torch.maximum(x, theirs, out=x) if op == "max" else x.add_(theirs)
        step *= 2
    dist.broadcast(x, src=0, group=group)


def gather_rows(own: Tensor) -> Tensor | None:
    """CPU rows [W] of all ranks as [ranks, W] on rank 0, None elsewhere, along the same tree: the
    root of Gloo's own gather connects to every rank.
    """
    group, rank, size = host_group(), dist.get_rank(), dist.get_world_size()
    step, rows = 1, own[None].contiguous()
    while step < size:
        if rank & step:
            dist.send(rows, dst=rank - step, group=group)
            return None
        # The peer's rows are those of ranks rank + step ... rank + 2 * step - 1.
        if rank + step < size:
            theirs = rows.new_empty(min(step, size - rank - step), own.numel())
            dist.recv(theirs, src=rank + step, group=group)
            rows = torch.cat([rows, theirs])
        step *= 2
    return rows


class HostCost(NamedTuple):
    """Costs of a job's Gloo groups and rendezvous store. sockets, root_sockets: of a rank
    and of rank 0. messages: in a row for a sum over all ranks. store_requests, store_bytes: to rank
    0's store, by all ranks. full_mesh_*: of one Gloo group that connects everybody, for comparison.
    """

    sockets: int
    root_sockets: int
    messages: int
    store_requests: int
    store_bytes: int
    full_mesh_sockets: int
    full_mesh_bytes: int


_ADDRESS_BYTES, _PAIR_BYTES = 170, 8
"""Bytes of a rank's entry in the store, and of each of its pairs in a full mesh (measured)."""


def host_cost(world_size: int) -> HostCost:
    """The cost of a job of `world_size` ranks, whose rank 0 hosts the store.

    Two Gloo groups (hosts, checkpoints) each connect a rank with those 2^k before and after it: the
    ring, Gloo's barrier and broadcast, and the trees above; by two sockets for a moment where both
    sides connect at the same time. Rank 0 gathers checkpoints' plans from everybody in both groups
    (torch.distributed.checkpoint saves on one and loads on the other), hosts the store, and gets
    timelines.
    """
    n = world_size
    peers = {(sign * 2**k) % n for k in range((n - 1).bit_length()) for sign in (1, -1)} - {0}
    listener, store = 1, 1
    each = 2 * (2 * len(peers) + listener) + store
    gathered = n - 1 - len(peers)
    root = each + 2 * gathered + min(MOST_TIMED, n) + n + listener
    lookups = 2 * n * len(peers) + 2 * gathered
    return HostCost(
        sockets=each,
        root_sockets=root,
        messages=2 * (n - 1).bit_length(),
        # A rank sets keys, and waits for and gets the keys of others.
        store_requests=2 * (2 * n + 2 * lookups),
        store_bytes=(2 * n + lookups) * _ADDRESS_BYTES,
        full_mesh_sockets=n - 1 + listener,
        full_mesh_bytes=n * n * (_ADDRESS_BYTES + _PAIR_BYTES * n),
    )


def open_files_needed(rank: int, world_size: int, device: str) -> int:
    """Files and sockets that a rank on "cpu" or "cuda" may have open at once."""
    cost = host_cost(world_size)
    return (cost.sockets if rank else cost.root_sockets) + _OPEN_ANYWAY[device]


def allow_open_files(rank: int, world_size: int, device: str) -> None:
    """Raise this process's soft limit on open files to the hard one if the sockets to other ranks
    may exceed it (1,024 is usual); UserError if the hard one is too low as well.
    """
    needed = open_files_needed(rank, world_size, device)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"rank {rank} of {world_size} opens up to {needed} files and sockets, but may open "
            f"{hard} (ulimit -Hn); raise the hard limit on its node, such as by LimitNOFILE of "
            f"slurmd's systemd unit or in /etc/security/limits.conf"
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard)
    )
