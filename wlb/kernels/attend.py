"""attend: causal attention of many packed segments in one call, on any backend.

Query i of a segment with Lq queries and Lk keys attends to keys [0, Lk - Lq + i], or to the latest
of them (`Scores.sliding`), with scores scaled by 1 / sqrt(D). Query head h uses key/value head h //
(H / G). Shapes: `wlb.kernels.backend`.
"""

import torch

from wlb.kernels.op import BACKENDS, attend_op
from wlb.kernels.segments import Segments
from wlb.plan import UserError


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
        raise UserError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    _check(q_THD, k_SGD, v_SGD, segments)
    out_THD, _ = attend_op(q_THD, k_SGD, v_SGD, *segments.arguments, backend)
    return out_THD


def _check(
    q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, segments: Segments
) -> None:
    """Check everything but the offsets; `wlb.kernels.op` compares those with the rows."""
    if segments.key_rows is not None:
        raise UserError(
            "attend takes the keys of each segment; segments with key_rows are for Backend.forward"
        )
    tensors = (q_THD, k_SGD, v_SGD)
    if any(tensor.dim() != 3 for tensor in tensors) or k_SGD.shape != v_SGD.shape:
        raise UserError(f"attend takes q [T, H, D] and k, v [S, G, D], not {_shapes(*tensors)}")
    (_, num_heads, head_dim), (_, num_kv_heads, kv_head_dim) = q_THD.shape, k_SGD.shape
    if head_dim != kv_head_dim or num_kv_heads == 0 or num_heads % num_kv_heads:
        raise UserError(
            "query heads must be a multiple of key heads and all heads of one size: "
            f"{_shapes(*tensors)}"
        )
    is_one_kind = all(
        tensor.dtype == q_THD.dtype and tensor.device == q_THD.device for tensor in tensors
    )
    if not is_one_kind or not q_THD.is_floating_point():
        found = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise UserError(f"q, k and v must be of one floating dtype on one device, not {found}")
    if segments.cu_seqlens_q.device != q_THD.device:
        raise UserError(f"segments are on {segments.cu_seqlens_q.device}, q on {q_THD.device}")


def _shapes(q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor) -> str:
    return f"q {tuple(q_THD.shape)}, k {tuple(k_SGD.shape)}, v {tuple(v_SGD.shape)}"
