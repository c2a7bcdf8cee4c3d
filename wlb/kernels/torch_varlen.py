"""Attention by torch's own variable-length kernel (FlashAttention-2 inside torch), CUDA only.

One kernel for all segments, forward and backward; float16 and bfloat16. Nothing is padded.

Shapes: T query rows, S key rows, H query heads, G key/value heads, D head size.
"""

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from wlb.kernels.segments import Segments

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
_CAUSAL = (-1, 0)

# torch 2.11 takes fewer key heads without being asked and does not know the argument.
_KNOWS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_torch_varlen(
    q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, segments: Segments
) -> torch.Tensor:
    _check(q_THD)
    options: dict[str, Any] = {}
    if _KNOWS_GQA:
        options["enable_gqa"] = q_THD.shape[1] != k_SGD.shape[1]
    out = varlen_attn(
        q_THD,
        k_SGD,
        v_SGD,
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_q,
        segments.max_k,
        window_size=_CAUSAL,
        **options,
    )
    assert isinstance(out, torch.Tensor)
    return out


def _check(q_THD: torch.Tensor) -> None:
    if q_THD.device.type != "cuda" or q_THD.dtype not in DTYPES:
        raise ValueError(
            f"torch_varlen computes bfloat16 and float16 on CUDA, not {q_THD.dtype} on "
            f"{q_THD.device}; use sdpa there"
        )
    head_dim = q_THD.shape[-1]
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
        raise ValueError(
            f"torch_varlen takes head sizes up to {MAX_HEAD_DIM} that are multiples of "
            f"{HEAD_DIM_STEP}, not {head_dim}; use sdpa"
        )
