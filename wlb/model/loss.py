"""The output head and cross-entropy in one function, which processes a chunk of rows at a time.

The logits of a whole micro-batch are never in memory together. For each chunk, forward computes the
logits, the summed loss, and already the gradients of the rows and of the head. This is possible
because the loss is a plain sum: its gradients are known up to one factor, and backward only
multiplies them by that factor. The cost is the head's gradient in float32, kept until backward.

Shapes: T rows, C channels, V vocabulary entries of this shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wlb.plan import IGNORE


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """This process's part of the vocabulary, which is all of it without tensor parallelism."""

    offset: int = 0  # number of the shard's first entry
    # These functions communicate among the n processes that divide the vocabulary. The defaults,
    # for one process, return their argument.
    gather: Callable[[Tensor], Tensor] = _same  # all-gather of rows, [T / n, C] -> [T, C]
    scatter: Callable[[Tensor], Tensor] = _same  # reduce-scatter of gradients, [T, C] -> [T / n, C]
    all_max: Callable[[Tensor], Tensor] = _same  # all-reduce (maximum) of shape [T]
    all_sum: Callable[[Tensor], Tensor] = _same  # all-reduce (sum) of shape [2, T]


WHOLE = VocabularyShard()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: Tensor,
        weight_VC: Tensor,
        labels_T: Tensor,
        vocab_size: int,
        chunk: int,
        vocabulary: VocabularyShard,
        softcap: float,
        wants_grad: bool,
    ) -> Tensor:
        x = vocabulary.gather(x_TC)
        dx = torch.empty_like(x) if wants_grad else None
        dweight = torch.zeros_like(weight_VC, dtype=torch.float32) if wants_grad else None
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for begin in range(0, x.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            part, dlogits = _chunk(
                x[rows], weight_VC, labels_T[rows], vocab_size, vocabulary, softcap
            )
            loss = loss + part
            if dx is not None and dweight is not None:
                dlogits = dlogits.to(x.dtype)
                torch.mm(dlogits, weight_VC, out=dx[rows])
                dweight += dlogits.t() @ x[rows]
            # Free this chunk's gradient before the next chunk's logits are allocated.
            del dlogits
        if dx is not None and dweight is not None:
            ctx.save_for_backward(vocabulary.scatter(dx), dweight)
            ctx.dtype = weight_VC.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = grads
        dx, dweight = ctx.saved_tensors
        dweight = (dweight * factor).to(ctx.dtype)
        return (dx * factor).to(dx.dtype), dweight, *(None,) * 6


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Return softcap * tanh(logits / softcap), or the logits unchanged if softcap is 0."""
    return (logits / softcap).tanh() * softcap if softcap else logits


def _chunk(
    x_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    vocab_size: int,
    vocabulary: VocabularyShard,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a chunk of rows, float32, and the gradient of its logits, [T, V].

    Args:
        x_TC: Rows of the chunk.
        weight_VC: This process's shard of the head.
        labels_T: Target of each row; rows with IGNORE do not count.
        vocab_size: Number of vocabulary entries without padding.
        vocabulary: The part of the vocabulary that `weight_VC` has.
        softcap: Cap on logits, 0 for none.
    """
    logits = (x_TC @ weight_VC.t()).float()
    size, share = logits.shape[1], None
    if softcap:
        share = (logits / softcap).tanh()
        torch.mul(share, softcap, out=logits)
    # Set the logits of entries that only pad the vocabulary to -inf, so that their probability is
    # zero.
    real = max(0, min(size, vocab_size - vocabulary.offset))
    logits[:, real:] = float("-inf")
    # Compute cross-entropy over all shards of the vocabulary. Each shard has its part of the sum of
    # exponentials, and one shard has the logit of a row's target.
    peak = vocabulary.all_max(logits.amax(-1))
    logits -= peak[:, None]
    local = labels_T - vocabulary.offset
    here = (local >= 0) & (local < size)
    index = local.clamp(0, size - 1)[:, None]
    target = torch.where(here, logits.gather(1, index)[:, 0], 0.0)
    exponents = logits.exp_()
    total, target = vocabulary.all_sum(torch.stack([exponents.sum(-1), target]))
    valid = labels_T != IGNORE
    loss = torch.where(valid, total.log() - target, 0.0).sum()
    # The gradient is the softmax minus the one-hot target, times the derivative of the cap.
    dlogits = exponents.mul_((valid / total)[:, None])
    dlogits.scatter_add_(1, index, -(here & valid).to(dlogits.dtype)[:, None])
    if share is not None:
        dlogits.mul_(share.square_().neg_().add_(1.0))
    return loss, dlogits


def head_loss(
    x_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int,
    chunk: int,
    vocabulary: VocabularyShard = WHOLE,
    softcap: float = 0.0,
) -> Tensor:
    """Compute the summed cross-entropy of the rows, a float32 scalar.

    Args:
        x_TC: This process's rows, after the final norm.
        weight_VC: This process's shard of the head.
        labels_T: Target of each row; rows with IGNORE do not count.
        vocab_size: Number of vocabulary entries without padding.
        chunk: Number of rows whose logits are in memory at a time.
        vocabulary: The part of the vocabulary that `weight_VC` has.
        softcap: Cap on logits, see `capped`. 0 means none.
    """
    wants_grad = torch.is_grad_enabled() and (x_TC.requires_grad or weight_VC.requires_grad)
    loss: Tensor = _HeadLoss.apply(  # pyright: ignore[reportAssignmentType]
        x_TC, weight_VC, labels_T, vocab_size, chunk, vocabulary, softcap, wants_grad
    )
    return loss
