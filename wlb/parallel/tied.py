"""Tied embeddings over a pipeline: the embedding and its copy, the head, stay equal.

The first and the last pipeline rank hold the same shard each. After a step's last backward pass
they exchange their gradients and both add them in the same order, so that equal optimisers keep the
two equal to the bit. A model with one stage has one parameter and nothing to exchange.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wlb.model.llama import EMBEDDING, HEAD
from wlb.parallel.mesh import Mesh
from wlb.parallel.tensor import local_tensor
from wlb.spec import ModelSpec


def without_copy(
    parameters: Mapping[str, nn.Parameter], model: ModelSpec
) -> dict[str, nn.Parameter]:
    """Parameters by name, less a tied head: what a sum over all ranks counts once."""
    return {n: p for n, p in parameters.items() if not (model.tied_embeddings and n == HEAD)}


def add_tied_gradients(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
    """Give the embedding and its copy the sum of both gradients; once a step, after all others are
    complete. parameters: of this rank, by name; gradients are changed in place or made.
    """
    last = mesh.parallel.pp - 1
    if mesh.at.pp not in (0, last):
        return
    is_first = mesh.at.pp == 0
    parameter = parameters[EMBEDDING if is_first else HEAD]
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    own = local_tensor(parameter.grad).contiguous()
    theirs = _exchanged(own, mesh)
    first, second = (own, theirs) if is_first else (theirs, own)
    _write(parameter.grad, first + second)


def _exchanged(own: Tensor, mesh: Mesh) -> Tensor:
    is_first, theirs = mesh.at.pp == 0, torch.empty_like(own)
    # The last rank is before the first one in the ring that links join.
    link = mesh.link_before if is_first else mesh.link_after
    peer = 1 - dist.get_rank(link)
    ops = [
        dist.P2POp(dist.isend, own, group=link, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=link, group_peer=peer),
    ]
    # Both list what goes to the last rank first: messages between two ranks pair up by order.
    if not is_first:
        ops.reverse()
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return theirs


@torch.no_grad()
def _write(grad: Tensor, total: Tensor) -> None:
    (grad.to_local() if isinstance(grad, DTensor) else grad).copy_(total)
