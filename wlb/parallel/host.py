"""Communication of CPU tensors and Python objects among all ranks, over Gloo.

NCCL groups cannot carry CPU tensors, and a Gloo group that is split off an NCCL group would have
torch's default options (two workers, see `wlb.parallel.gloo`). So there is one Gloo group of all
ranks. This group connects two ranks when they first communicate. `all_reduce_hosts` and
`gather_rows` send along a tree, so with 8,192 ranks each rank needs only dozens of sockets. If all
pairs of ranks were connected, a rank would need 8,191 sockets, and the store on rank 0 would send
4.4 TB of addresses (`host_cost` computes both).
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
"""The `group_desc` of the Gloo group of all ranks, by which `host_group` finds the group."""
MOST_TIMED = 64
"""Most ranks that send the timeline of their steps to rank 0 (`wlb.train.telemetry.ranks`).

Each of them takes a socket of rank 0.
"""
_OTHER_FILES = {"cpu": 128, "cuda": 512}
"""How many files a rank may have open besides its Gloo sockets, by device.

These are logs and token stores, and on CUDA also files of the driver and sockets of NCCL.
"""


def new_host_group(timeout_s: float) -> None:
    """Make a Gloo group of all ranks for CPU tensors and objects, which `host_group` returns.

    All ranks call this after `init_process_group` if the default group uses NCCL. `timeout_s` is
    the number of seconds that a collective may wait for other ranks.
    """
    dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=HOSTS)


def destroy_gloo_groups() -> None:
    """Destroy this process's Gloo groups and their threads, without waiting for other ranks."""
    for group in list(distributed_c10d._world.pg_map):
        if dist.get_backend(group) == dist.Backend.GLOO:
            dist.destroy_process_group(group)


def host_group() -> dist.ProcessGroup | None:
    """Return the Gloo group of all ranks, for CPU tensors and objects.

    This is the group that `new_host_group` made, or else the default group. Returns None if
    torch.distributed is not running.
    """
    if not dist.is_initialized():
        return None
    groups = distributed_c10d._world.pg_map
    return next((group for group in groups if group.group_desc == HOSTS), dist.group.WORLD)


def all_reduce_hosts(x: Tensor, op: str = "sum") -> None:
    """Reduce a CPU tensor over all ranks, in place.

    The longest chain of messages that wait for each other has 2 * log2(ranks) messages. In Gloo's
    all-reduce, which is a ring, the longest chain would have 2 * (ranks - 1) messages.

    Args:
        x: Tensor with the same shape on all ranks.
        op: "sum" or "max".
    """
    group, rank, size = host_group(), dist.get_rank(), dist.get_world_size()
    step, theirs = 1, torch.empty_like(x)
    # In round k, each remaining rank whose number has bit k set sends its result so far to the rank
    # lower by 2^k, and takes no part in later rounds.
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
    """Gather a CPU tensor of shape [n] from every rank; returns [ranks, n] on rank 0, else None.

    The values travel along a tree, because in Gloo's gather the root connects to every rank.
    """
    group, rank, size = host_group(), dist.get_rank(), dist.get_world_size()
    step, rows = 1, own[None].contiguous()
    while step < size:
        if rank & step:
            dist.send(rows, dst=rank - step, group=group)
            return None
        # The peer has collected the rows of ranks rank + step, ..., rank + 2 * step - 1.
        if rank + step < size:
            theirs = rows.new_empty(min(step, size - rank - step), own.numel())
            dist.recv(theirs, src=rank + step, group=group)
            rows = torch.cat([rows, theirs])
        step *= 2
    return rows


class HostCost(NamedTuple):
    """Cost of a job's Gloo groups and of the rendezvous store, which rank 0 hosts."""

    sockets: int  # sockets of a rank other than 0
    root_sockets: int  # sockets of rank 0
    # Messages in the longest chain of a sum over all ranks. In a chain, every message waits for the
    # message before it.
    messages: int
    store_requests: int  # requests that all ranks send to the store
    store_bytes: int  # bytes of the rank addresses that those requests carry
    full_mesh_sockets: int  # for comparison: sockets of a rank if one group connected all pairs
    full_mesh_bytes: int  # for comparison: bytes of the store's requests in that case


_ADDRESS_BYTES, _PAIR_BYTES = 170, 8
"""Measured sizes in the rendezvous store: bytes of a rank's entry, and of each pair of ranks.

Entries for pairs exist only if a group connects all pairs of ranks at once.
"""


def host_cost(world_size: int) -> HostCost:
    """Compute how many sockets, messages and bytes the Gloo groups and the store of a job need.

    There are two Gloo groups: one for CPU tensors and one for checkpoints. Each connects a rank
    with the ranks whose numbers differ by a power of two, because Gloo's barrier and broadcast, its
    rings and the trees in this file need no other connections. A pair may briefly have two sockets
    if both sides connect at the same time. In addition, rank 0 gathers the plans of checkpoints
    from every rank in both groups (torch.distributed.checkpoint saves with one group and loads with
    the other), hosts the store, and receives timelines of steps.
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
        # Each rank writes its keys to the store. To look up another rank's key, a rank sends two
        # requests: it waits until the key exists, and reads it.
        store_requests=2 * (2 * n + 2 * lookups),
        store_bytes=(2 * n + lookups) * _ADDRESS_BYTES,
        full_mesh_sockets=n - 1 + listener,
        full_mesh_bytes=n * n * (_ADDRESS_BYTES + _PAIR_BYTES * n),
    )


def open_files_needed(rank: int, world_size: int, device: str) -> int:
    """Return the most files and sockets that a rank has open at once; device is "cpu" or "cuda"."""
    cost = host_cost(world_size)
    return (cost.sockets if rank else cost.root_sockets) + _OTHER_FILES[device]


def allow_open_files(rank: int, world_size: int, device: str) -> None:
    """Raise this process's soft limit on open files (usually 1,024) if the rank may need more.

    Args:
        rank: This rank.
        world_size: Number of all ranks.
        device: "cpu" or "cuda".

    Raises:
        UserError: The hard limit is too low.
    """
    needed = open_files_needed(rank, world_size, device)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"rank {rank} of {world_size} needs up to {needed} open files and sockets, "
            f"but this process may open only {hard} (ulimit -Hn). Raise the hard limit on this "
            "node, for example with LimitNOFILE of slurmd's systemd unit or in "
            "/etc/security/limits.conf"
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard)
    )
