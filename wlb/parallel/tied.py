"""Tied embeddings in a pipeline: keeps the head equal to the embedding, of which it is a copy.

The first pipeline rank has the embedding, and the last one has the head, a copy of it. After a
step's last backward pass the two ranks exchange their gradients, and both add them in the same
order. Equal optimisers then keep the two parameters equal to the bit. A model with one stage has
only one parameter and exchanges nothing.
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
    """Return the parameters, without the head if it is a copy of the embedding (tied embeddings).

    A sum over the parameters of all ranks then counts the shared weight once.
    """
    return {n: p for n, p in parameters.items() if not (model.tied_embeddings and n == HEAD)}


def add_tied_gradients(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
    """Set the gradients of the embedding and of the head, its copy, to the sum of both.

    Call it on all ranks once per step, after all other gradients are complete. Only the first and
    the last pipeline rank communicate.

    Args:
        parameters: This rank's parameters by name. The gradient of the embedding or head is changed
            in place, or created if it is missing.
        mesh: The ranks.
    """
    last = mesh.parallel.pp - 1
    if mesh.at.pp not in (0, last):
        return
    is_first = mesh.at.pp == 0
    parameter = parameters[EMBEDDING if is_first else HEAD]
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    local = local_tensor(parameter.grad).contiguous()
    received = _exchanged(local, mesh)
    # Add in the same order on both ranks: the embedding's gradient, then the head's.
    first, second = (local, received) if is_first else (received, local)
    _write(parameter.grad, first + second)


def _exchanged(local: Tensor, mesh: Mesh) -> Tensor:
    is_first, received = mesh.at.pp == 0, torch.empty_like(local)
    # The pipeline's links form a ring, in which the last rank precedes the first one.
    link = mesh.link_before if is_first else mesh.link_after
    peer = 1 - dist.get_rank(link)
    ops = [
        dist.P2POp(dist.isend, local, group=link, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=link, group_peer=peer),
    ]
    # Messages between two ranks are matched by their order. Therefore both ranks first list the
    # message that goes to the last rank.
    if not is_first:
        ops.reverse()
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


@torch.no_grad()
def _write(grad: Tensor, total: Tensor) -> None:
    (grad.to_local() if isinstance(grad, DTensor) else grad).copy_(total)
