"""Use every communicator once before the first step, in an order that cannot deadlock.

NCCL connects ranks at the first call of each kind, which takes seconds; in the middle of a
schedule, other ranks wait meanwhile, and two communicators that connect in different orders on two
ranks deadlock. With `device_id` (`wlb.parallel.world.init`) torch splits the mesh's groups off the
world's communicator when they are made, but connects none. This has not run on a GPU.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.parallel import collectives
from wlb.parallel.mesh import EP, NEAR, Mesh, used_groups

_ROWS = {"cpu": (1,), "cuda": (1, 1 << 21)}
"""Float64 values of a call: NCCL chooses its algorithm, and connects for it, by size (8 bytes and
16 MiB)."""


class Warmed(NamedTuple):
    """communicators: that this rank used. neighbours: pipeline ranks before and after it, with
    which it exchanged values in both directions. seconds: of the whole."""

    communicators: int
    neighbours: int
    seconds: float


class BrokenCommunicator(RuntimeError):
    """A communicator that carries wrong values."""


def warm(mesh: Mesh, *, wraps: bool, all_to_all: bool = False) -> Warmed:
    """Use the communicators of `mesh` once and wait for them; all ranks call it together.

    wraps: the pipeline's last rank sends to its first one (virtual stages). all_to_all: CP ranks
    send each other rows (`sharding.exchange`); ranks with different experts always do. All ranks
    take the axes in one order, so that no two communicators can wait for each other.
    BrokenCommunicator if a sum is wrong or a neighbour's rank does not arrive.
    """
    begin = time.perf_counter()
    checks: list[tuple[str, Tensor, Tensor]] = []
    used = used_groups(mesh)
    for name, group in used:
        # The pipeline's communicator carries transfers only, which `_exchange` covers, unless it is
        # also the world's.
        if name != "pp" or group is dist.group.WORLD:
            checks += checked_collectives(name, group, mesh.device)
    if all_to_all and mesh.parallel.cp > 1:
        checks += checked_all_to_all("cp", mesh.group("cp"), mesh.device)
        if mesh.near is not None:
            checks += checked_all_to_all(NEAR, mesh.near, mesh.device)
    if mesh.experts is not None and mesh.parallel.ep > 1:
        checks += checked_all_to_all(EP, mesh.experts.get_group(EP), mesh.device)
    neighbours = 0
    if mesh.parallel.pp > 1:
        exchanged = list(_exchange(mesh, wraps=wraps))
        neighbours = len(exchanged)
        checks += exchanged
    # One transfer and one wait for the device, after everything was issued.
    values = torch.stack([torch.stack(pair) for _, *pair in checks]).tolist() if checks else []
    wrong = [
        f"{name}: {found} for {due}"
        for (name, *_), (found, due) in zip(checks, values, strict=True)
        if found != due
    ]
    if wrong:
        raise BrokenCommunicator(
            f"rank {mesh.rank}: communicators carry wrong values ({'; '.join(wrong)}); check the "
            f"links between GPUs, such as with nccl-tests"
        )
    return Warmed(len(used), neighbours, time.perf_counter() - begin)


def checked_collectives(
    name: str, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Run each kind of collective at the sizes of `_ROWS`; yields its name, its result and the
    expected result, float64 scalars on the device."""
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
    """Connect each pair of ranks, as `checked_collectives` does for collectives."""
    size, rank = group.size(), dist.get_rank(group)
    due = torch.tensor(size * (size - 1) / 2, dtype=torch.float64, device=device)
    for rows in _ROWS[device.type]:
        parts = [max(1, rows // size)] * size
        own = torch.full((sum(parts),), rank, dtype=torch.float64, device=device)
        arrived = collectives.all_to_all(own, parts, parts, group).view(size, parts[0])
        yield f"all-to-all of {name}", arrived[:, -1].sum(), due


def _exchange(mesh: Mesh, *, wraps: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Exchange ranks with the pipeline's neighbours as activations and gradients travel.

    One batch, which NCCL starts as a whole, so that the order of its parts cannot deadlock. With
    `device_id` all transfers of a pipeline, batched or not, use the communicator of its group.
    """
    group, own, size = mesh.group("pp"), mesh.at.pp, mesh.parallel.pp
    before = (own - 1) % size if own or wraps else None
    after = (own + 1) % size if own < size - 1 or wraps else None
    ops: list[dist.P2POp] = []
    arrived: list[tuple[str, Tensor, int]] = []

    def receive(peer: int) -> None:
        buffer = torch.full((1,), -1, dtype=torch.float64, device=mesh.device)
        ops.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer))
        arrived.append((f"transfer from pp {peer}", buffer, peer))

    def send(peer: int) -> None:
        at = torch.full((1,), own, dtype=torch.float64, device=mesh.device)
        ops.append(dist.P2POp(dist.isend, at, group=group, group_peer=peer))

    # NCCL pairs messages between two ranks by order. With two pipeline ranks both neighbours are
    # the same rank, so every rank lists activations first and then gradients.
    if before is not None:
        receive(before)
    if after is not None:
        send(after)
        receive(after)
    if before is not None:
        send(before)
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for name, buffer, peer in arrived:
        yield name, buffer[0], torch.full_like(buffer[0], peer)
