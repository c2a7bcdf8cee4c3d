"""Use every communicator once before the first step, in an order that cannot deadlock.

NCCL connects the ranks of a communicator at the first call of each kind, which takes seconds. If
that happened in the middle of a schedule, other ranks would wait meanwhile. If two ranks connected
two communicators in different orders, they would deadlock. torch makes the communicators when the
mesh is built (`device_id` in `wlb.parallel.world.init`), but does not connect them. Over NCCL this
has run only with all ranks on one GPU.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.parallel import collectives
from wlb.parallel.mesh import EP, Mesh, used_groups

_ROWS = {"cpu": (1,), "cuda": (1, 1 << 21)}
"""Sizes of the test calls on each kind of device, as numbers of float64 values.

NCCL chooses its algorithm by size, and makes the connections that the algorithm needs. So a small
call (8 bytes) and a large one (16 MiB) are made.
"""


class Warmed(NamedTuple):
    """How many communicators `warm` has connected, and how long its calls took."""

    communicators: int  # number of this rank's communicators
    links: int  # how many of these are links to neighbours in the pipeline
    seconds: float  # time of all calls together


class BrokenCommunicator(RuntimeError):
    """A communicator delivered wrong values."""


def warm(mesh: Mesh, *, all_to_all: bool = False) -> Warmed:
    """Use every communicator of `mesh` once, and check the results. This is a collective call.

    All ranks use the communicators in the same order, so no two ranks can wait for each other.

    Args:
        mesh: The ranks.
        all_to_all: Whether CP ranks exchange keys by an all-to-all (`sharding.exchange =
            "needed"`).

    Raises:
        BrokenCommunicator: A sum is wrong, or the wrong value arrives from a neighbour.
    """
    begin = time.perf_counter()
    checks: list[tuple[str, Tensor, Tensor]] = []
    used = used_groups(mesh)
    for name, group in used:
        # Skip links between pipeline ranks, which never run collectives. `_exchange` checks them.
        if name not in mesh.links:
            checks += checked_collectives(name, group, mesh.device)
    if all_to_all and mesh.parallel.cp > 1:
        checks += checked_all_to_all("cp", mesh.group("cp"), mesh.device)
    if mesh.experts is not None and mesh.parallel.ep > 1:
        checks += checked_all_to_all(EP, mesh.experts.get_group(EP), mesh.device)
    exchanged = list(_exchange(mesh))
    checks += exchanged
    # Read all results from the device at once, after all calls have been issued.
    values = torch.stack([torch.stack(pair) for _, *pair in checks]).tolist() if checks else []
    wrong = [
        f"{name}: {found} instead of {due}"
        for (name, *_), (found, due) in zip(checks, values, strict=True)
        if found != due
    ]
    if wrong:
        raise BrokenCommunicator(
            f"rank {mesh.rank} received wrong values in test collectives "
            f"({'; '.join(wrong)}); check the links between GPUs, for example with "
            "nccl-tests"
        )
    return Warmed(len(used), len(exchanged), time.perf_counter() - begin)


def checked_collectives(
    name: str, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Run an all-reduce, an all-gather and a reduce-scatter, each with few and with many values.

    NCCL makes other connections for large calls than for small ones. `_ROWS` has the sizes.

    Args:
        name: Name of the group, for messages.
        group: The group.
        device: This rank's device.

    Yields:
        The call's name, its result and the expected result; both are float64 scalars on the device.
    """
    size, rank = group.size(), dist.get_rank(group)
    due = torch.tensor(size * (size - 1) / 2, dtype=torch.float64, device=device)
    for rows in _ROWS[device.type]:
        part = max(1, rows // size)
        own = torch.full((rows,), rank, dtype=torch.float64, device=device)
        yield f"all-reduce of {name}", collectives.all_reduce(own, group)[-1], due
        gathered = collectives.all_gather(own[:part], group).view(size, part)
        yield f"all-gather of {name}", gathered[:, -1].sum(), due
        whole = torch.full((size * part,), rank, dtype=torch.float64, device=device)
        yield f"reduce-scatter of {name}", collectives.reduce_scatter(whole, group)[-1], due


def checked_all_to_all(
    name: str, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Run all-to-alls with few and with many values, so that each pair of ranks is connected.

    NCCL makes other connections for large calls than for small ones. `_ROWS` has the sizes.

    Args:
        name: Name of the group, for messages.
        group: The group.
        device: This rank's device.

    Yields:
        The call's name, its result and the expected result; both are float64 scalars on the device.
    """
    size, rank = group.size(), dist.get_rank(group)
    due = torch.tensor(size * (size - 1) / 2, dtype=torch.float64, device=device)
    for rows in _ROWS[device.type]:
        parts = [max(1, rows // size)] * size
        own = torch.full((sum(parts),), rank, dtype=torch.float64, device=device)
        arrived = collectives.all_to_all(own, parts, parts, group).view(size, parts[0])
        yield f"all-to-all of {name}", arrived[:, -1].sum(), due


def _exchange(mesh: Mesh) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Exchange a value with each neighbour in the pipeline, in both directions.

    A rank has at most one link of each kind (`wlb.parallel.grid.LINKS`), and all ranks use the
    kinds in the same order. The send and the receive over a link are one batch, which NCCL starts
    as a whole.

    Yields:
        The transfer's name, the value received and the expected value; both are float64 scalars on
        the device.
    """
    for kind, link in mesh.links.items():
        if link.size() == 1:
            continue
        own = dist.get_rank(link)
        sent = torch.full((1,), own, dtype=torch.float64, device=mesh.device)
        arrived = torch.full_like(sent, -1)
        ops = [
            dist.P2POp(dist.isend, sent, group=link, group_peer=1 - own),
            dist.P2POp(dist.irecv, arrived, group=link, group_peer=1 - own),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        yield f"transfer over {kind}", arrived[0], torch.full_like(arrived[0], 1 - own)
