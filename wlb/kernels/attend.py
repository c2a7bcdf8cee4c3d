"""attend: causal attention of many packed segments in one call, on any backend.

Query i of a segment with Lq queries and Lk keys sees keys [0, Lk - Lq + i]. Scores are scaled by
1 / sqrt(D). Query head h uses key/value head h // (H / G).

Shapes: T query rows, S key rows, H query heads, G key/value heads, D head size.
"""

from collections.abc import Callable

import torch

from wlb.kernels.reference import attend_reference
from wlb.kernels.sdpa import attend_sdpa
from wlb.kernels.segments import Segments
from wlb.kernels.torch_varlen import DTYPES as VARLEN_DTYPES
from wlb.kernels.torch_varlen import HEAD_DIM_STEP, MAX_HEAD_DIM, attend_torch_varlen
from wlb.spec.run import AttentionBackend

Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments], torch.Tensor]

BACKENDS: dict[str, Backend] = {
    "sdpa": attend_sdpa,
    "torch_varlen": attend_torch_varlen,
    "reference": attend_reference,
}


def select_backend(
    requested: AttentionBackend, *, device: torch.device, dtype: torch.dtype, head_size: int
) -> AttentionBackend:
    """The backend that will compute; an explicit choice is refused, never replaced."""
    fits = head_size <= MAX_HEAD_DIM and head_size % HEAD_DIM_STEP == 0
    varlen_works = device.type == "cuda" and dtype in VARLEN_DTYPES and fits
    if requested == AttentionBackend.AUTO:
        return AttentionBackend.TORCH_VARLEN if varlen_works else AttentionBackend.SDPA
    if requested == AttentionBackend.TORCH_VARLEN and not varlen_works:
        raise ValueError(
            f"kernels.attention = torch_varlen computes bfloat16 and float16 on CUDA, heads up to "
            f"{MAX_HEAD_DIM} in steps of {HEAD_DIM_STEP}, but the run is {dtype} on {device.type} "
            f"with heads of {head_size}; set kernels.attention = auto or sdpa, or "
            "training.dtype = bfloat16 on a GPU"
        )
    return requested


def attend(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    segments: Segments,
    *,
    backend: str,
) -> torch.Tensor:
    """Attention output, shape [T, H, D]; differentiable in q, k and v."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    _check(q_THD, k_SGD, v_SGD, segments)
    if segments.num_queries == 0:
        return q_THD + 0 * (k_SGD.sum() + v_SGD.sum())  # no rows, but a gradient for all three
    return BACKENDS[backend](q_THD, k_SGD, v_SGD, segments)


def _check(
    q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, segments: Segments
) -> None:
    tensors = (q_THD, k_SGD, v_SGD)
    shapes = ", ".join(
        f"{name} {tuple(tensor.shape)}" for name, tensor in zip("qkv", tensors, strict=True)
    )
    if any(tensor.dim() != 3 for tensor in tensors) or k_SGD.shape != v_SGD.shape:
        raise ValueError(f"attend takes q [T, H, D] and k, v [S, G, D], not {shapes}")
    (_, num_heads, head_dim), (_, num_kv_heads, kv_head_dim) = q_THD.shape, k_SGD.shape
    if head_dim != kv_head_dim or num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"query heads must be a multiple of key heads and all heads of one size: {shapes}"
        )
    rows = (segments.num_queries, segments.num_keys)
    if rows != (q_THD.shape[0], k_SGD.shape[0]):
        raise ValueError(f"segments have {rows[0]} queries and {rows[1]} keys, but {shapes}")
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1 or not q_THD.is_floating_point():
        found = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise ValueError(f"q, k and v must be of one floating dtype on one device, not {found}")
    if segments.cu_seqlens_q.device != q_THD.device:
        raise ValueError(f"segments are on {segments.cu_seqlens_q.device}, q on {q_THD.device}")
