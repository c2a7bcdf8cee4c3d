"""Attention of a span over its document's prefix, on CPU, without a mask.

The keys of a span [start, stop) are two parts: [0, start), which all its queries see, and the span
itself, which is square and causal. Each part is one call of torch's CPU flash kernel; the outputs
are merged by their log-sum-exps, and the backward kernel, given the merged output and
log-sum-exp, returns each part's exact share of the gradients. A mask of Lq * Lk values (1.5-2x the
time, and memory that grows with the square of a document) is never made.

Shapes: B segments, H heads, Q query and K key rows, D head size.
"""

from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Prefixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor) -> Tensor:
        prefix = k_BHKD.shape[2] - q_BHQD.shape[2]
        before, lse_before = _forward(q_BHQD, k_BHKD[:, :, :prefix], v_BHKD[:, :, :prefix])
        own, lse_own = _forward(
            q_BHQD, k_BHKD[:, :, prefix:], v_BHKD[:, :, prefix:], is_causal=True
        )
        lse = torch.logaddexp(lse_before, lse_own)
        share = (lse_before - lse).exp()[..., None].to(own.dtype)
        out = torch.lerp(own, before, share)
        ctx.save_for_backward(q_BHQD, k_BHKD, v_BHKD, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        prefix = k.shape[2] - q.shape[2]
        parts = [
            _backward(grads[0], q, k[:, :, rows], v[:, :, rows], out, lse, 0.0, is_causal)
            for rows, is_causal in ((slice(0, prefix), False), (slice(prefix, None), True))
        ]
        (dq, dk, dv), (dq_own, dk_own, dv_own) = parts
        return dq + dq_own, torch.cat([dk, dk_own], 2), torch.cat([dv, dv_own], 2)


def attend_prefixed(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> Tensor:
    """Causal attention aligned at the end, K > Q; key heads are repeated for grouped queries."""
    repeats = q_BHQD.shape[1] // k_BGKD.shape[1]
    if repeats > 1:
        k_BGKD, v_BGKD = (x.repeat_interleave(repeats, 1) for x in (k_BGKD, v_BGKD))
    out: Tensor = _Prefixed.apply(q_BHQD, k_BGKD, v_BGKD)  # pyright: ignore[reportAssignmentType]
    return out
