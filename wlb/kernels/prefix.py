"""Attention of a span over its document's prefix, on CPU, without a mask.

The keys of a span [start, stop) are two parts: [0, start), which all its queries see, and the span
itself, which is causal. Each is one call of torch's CPU flash kernel. Outputs are merged by their
log-sum-exps; backward, given the merged output and log-sum-exp, returns each part's exact share of
the gradients. It saves a mask of Lq * Lk values, which takes 1.5-2x the time. Shapes: B segments, H
heads, Q query and K > Q key rows, D head size.
"""

import torch
from torch import Tensor

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def prefixed_forward(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, D] and log-sum-exp [B, H, Q] of bottom-right causal attention."""
    prefix = k_BHKD.shape[2] - q_BHQD.shape[2]
    before, lse_before = flash_forward(q_BHQD, k_BHKD[:, :, :prefix], v_BHKD[:, :, :prefix])
    own, lse_own = flash_forward(
        q_BHQD, k_BHKD[:, :, prefix:], v_BHKD[:, :, prefix:], is_causal=True
    )
    lse = torch.logaddexp(lse_before, lse_own)
    share = (lse_before - lse).exp()[..., None].to(own.dtype)
    return torch.lerp(own, before, share), lse


def prefixed_backward(
    grad_BHQD: Tensor,
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    prefix = k_BHKD.shape[2] - q_BHQD.shape[2]
    (dq, dk, dv), (dq_own, dk_own, dv_own) = (
        flash_backward(
            grad_BHQD,
            q_BHQD,
            k_BHKD[:, :, rows],
            v_BHKD[:, :, rows],
            out_BHQD,
            lse_BHQ,
            0.0,
            is_causal,
        )
        for rows, is_causal in ((slice(0, prefix), False), (slice(prefix, None), True))
    )
    return dq + dq_own, torch.cat([dk, dk_own], 2), torch.cat([dv, dv_own], 2)
