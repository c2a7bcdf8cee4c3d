"""Attention with capped scores by plain matrix products, for devices whose kernels have no caps.

A cap replaces a score s by softcap * tanh(s / softcap), as in Gemma 2. Scores are computed in
float32 (float64 for float64 inputs). A batch of segments is processed in parts, so that at most
_MOST_SCORES scores are in memory at a time (or those of one segment, if these are more).
Shapes: B segments of Q queries and K keys, H heads, D head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from wlb.kernels.op import Gradients, SavedTensors, sum_dtype

_MOST_SCORES = 1 << 24


def capped_forward(
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention with capped scores: output [B, H, Q, D] and log-sum-exp [B, H, Q].

    Args:
        q_BHQD: Queries.
        k_BHKD: Keys, with as many heads as queries.
        v_BHKD: Values.
        mask: Values that are added to the capped scores, shape [B or 1, 1, Q, K]; None for no mask.
        is_causal: Whether query i attends only to the keys up to i.
        softcap: The cap on scores.
    """
    out_BHQD = torch.empty_like(q_BHQD)
    lse_BHQ = q_BHQD.new_empty(q_BHQD.shape[:3], dtype=sum_dtype(q_BHQD))
    for some in _parts(q_BHQD, k_BHKD):
        scores, _ = _scores(q_BHQD[some], k_BHKD[some], _of(mask, some), is_causal, softcap)
        lse_BHQ[some] = scores.logsumexp(-1)
        out_BHQD[some] = (scores.softmax(-1) @ v_BHKD[some].to(scores.dtype)).to(out_BHQD.dtype)
    return out_BHQD, lse_BHQ


def capped_backward(
    grad_BHQD: Tensor, saved: SavedTensors, mask: Tensor | None, is_causal: bool, softcap: float
) -> Gradients:
    """Return the gradients of q, k and v for `capped_forward`.

    Args:
        grad_BHQD: Gradient of the output.
        saved: Inputs and results of `capped_forward`.
        mask: As in `capped_forward`.
        is_causal: As in `capped_forward`.
        softcap: As in `capped_forward`.
    """
    q, k, v, out, lse = saved
    wide, scale = sum_dtype(q), q.shape[-1] ** -0.5
    delta_BHQ1 = (grad_BHQD.to(wide) * out).sum(-1, keepdim=True)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for some in _parts(q, k):
        scores, slope = _scores(q[some], k[some], _of(mask, some), is_causal, softcap)
        weights = (scores - lse[some][..., None]).exp()
        grad = grad_BHQD[some].to(wide)
        dv[some] = (weights.mT @ grad).to(dv.dtype)
        dscores = weights * (grad @ v[some].to(wide).mT - delta_BHQ1[some]) * slope * scale
        dq[some] = (dscores @ k[some].to(wide)).to(dq.dtype)
        dk[some] = (dscores.mT @ q[some].to(wide)).to(dk.dtype)
    return dq, dk, dv


def _parts(q_BHQD: Tensor, k_BHKD: Tensor) -> Iterator[slice]:
    each = q_BHQD.shape[1] * q_BHQD.shape[2] * k_BHKD.shape[2]
    step = max(1, _MOST_SCORES // max(1, each))
    return (slice(begin, begin + step) for begin in range(0, q_BHQD.shape[0], step))


def _of(mask: Tensor | None, some: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[0] == 1 else mask[some]


def _scores(
    q_BHQD: Tensor, k_BHKD: Tensor, mask: Tensor | None, is_causal: bool, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return the capped and masked scores, [B, H, Q, K], and the cap's derivative at each score.

    The arguments are those of `capped_forward`.
    """
    wide = sum_dtype(q_BHQD)
    scores = q_BHQD.to(wide) @ k_BHKD.to(wide).mT * q_BHQD.shape[-1] ** -0.5
    share = (scores / softcap).tanh()
    capped, slope = share * softcap, 1 - share * share
    if mask is not None:
        capped = capped + mask.to(wide)
    if is_causal:
        later = torch.ones(capped.shape[-2:], dtype=torch.bool, device=capped.device).triu(1)
        capped = capped.masked_fill(later, float("-inf"))
    return capped, slope
