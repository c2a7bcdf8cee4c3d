"""Attention by torch's own variable-length kernel (FlashAttention-2 inside torch), CUDA only.

One kernel for all segments, without padding; float16 and bfloat16, deterministic backward. We call
the two operators below torch.nn.attention.varlen.varlen_attn, which has no backward without
autograd; their first ten arguments are the same in torch 2.11 to 2.13. Shapes: T query rows, S key
rows, H query heads, G key/value heads, D head size.
"""

import torch
import torch.nn.attention.varlen  # registers the operators
from torch import Tensor

from wlb.kernels.deterministic import deterministic
from wlb.kernels.segments import Segments
from wlb.plan import UserError

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
_CAUSAL = [-1, 0]


class TorchVarlenBackend:
    name = "torch_varlen"
    takes_key_rows = False

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        _check(q_THD)
        out_THD, lse_HT, _ = torch.ops.torch_attn._varlen_attn(
            q_THD,
            k_SGD,
            v_SGD,
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            segments.max_q,
            segments.max_k,
            True,
            None,
            _CAUSAL,
        )
        return out_THD, lse_HT

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        segments: Segments,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The RNG state of dropout: zeros, as forward returns them without dropout.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
        with deterministic():
            dq_THD, dk_SGD, dv_SGD = torch.ops.torch_attn._varlen_attn_backward(
                grad_THD,
                q_THD,
                k_SGD,
                v_SGD,
                out_THD,
                lse_HT,
                segments.cu_seqlens_q,
                segments.cu_seqlens_k,
                segments.max_q,
                segments.max_k,
                True,
                rng_state,
                None,
                _CAUSAL,
            )
        return dq_THD, dk_SGD, dv_SGD


TORCH_VARLEN = TorchVarlenBackend()


def _check(q_THD: Tensor) -> None:
    if q_THD.device.type != "cuda" or q_THD.dtype not in DTYPES:
        raise UserError(
            f"torch_varlen computes bfloat16 and float16 on CUDA, not {q_THD.dtype} on "
            f"{q_THD.device}; use sdpa there"
        )
    head_dim = q_THD.shape[-1]
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
        raise UserError(
            f"torch_varlen takes head sizes up to {MAX_HEAD_DIM} that are multiples of "
            f"{HEAD_DIM_STEP}, not {head_dim}; use sdpa"
        )
