"""Output head and cross-entropy in one, a chunk of rows at a time.

The logits of a micro-batch never exist as a whole. For each chunk, forward computes logits, summed
loss and the gradients of rows and head, which are known up to one factor since the loss is a plain
sum; backward multiplies by that factor. Costs one float32 copy of the head's gradient until then.
Shapes: T rows, C width, V vocabulary entries of this shard.
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
    """The vocabulary entries of this process: all, unless tensor parallelism divides them.

    offset: first entry. gather: [T / n, C] -> [T, C], rows of all n processes that share the
    vocabulary. scatter: its adjoint, a sum over them. all_max ([T]), all_sum ([2, T]): over them.
    """

    offset: int = 0
    gather: Callable[[Tensor], Tensor] = _same
    scatter: Callable[[Tensor], Tensor] = _same
    all_max: Callable[[Tensor], Tensor] = _same
    all_sum: Callable[[Tensor], Tensor] = _same


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
            # The next chunk's logits would otherwise exist beside this chunk's gradient.
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
    """Softcap * tanh(logits / softcap), or the logits where softcap is 0."""
    return (logits / softcap).tanh() * softcap if softcap else logits


def _chunk(
    x_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    vocab_size: int,
    vocabulary: VocabularyShard,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Summed loss of the rows, float32, and its gradient for the logits, [T, V]."""
    logits = (x_TC @ weight_VC.t()).float()
    size, share = logits.shape[1], None
    if softcap:
        share = (logits / softcap).tanh()
        torch.mul(share, softcap, out=logits)
    # Entries that pad the vocabulary get probability zero, so that they never change the loss.
    real = max(0, min(size, vocab_size - vocabulary.offset))
    logits[:, real:] = float("-inf")
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
    """Summed cross-entropy of the rows against `labels_T` (IGNORE = not trained), float32 scalar.

    x_TC: this process's rows after the final norm. weight_VC: its shard of the head. vocab_size:
    entries without padding. chunk: rows of logits in memory at a time. softcap: see `capped`.
    """
    wants_grad = torch.is_grad_enabled() and (x_TC.requires_grad or weight_VC.requires_grad)
    loss: Tensor = _HeadLoss.apply(  # pyright: ignore[reportAssignmentType]
        x_TC, weight_VC, labels_T, vocab_size, chunk, vocabulary, softcap, wants_grad
    )
    return loss
