"""Attention by torch's variable-length kernel (FlashAttention-2 inside torch), CUDA only.

It computes float16 and bfloat16 without padding. The public function varlen_attn can run backward
only through autograd, but we need a separate backward call. So we call the two operators that
varlen_attn uses. Their first ten arguments are the same in torch 2.11 to 2.13.
"""

import torch

# This import registers the operators of torch.ops.torch_attn.
import torch.nn.attention.varlen
from torch import Tensor

from wlb.kernels.flash_package import (
    DTYPES,
    before_ampere,
    compute_capability,
    wrong_head_size,
    wrong_tensors,
)
from wlb.kernels.op import Gradients, SavedTensors, fixed_order, kernel_name
from wlb.kernels.segments import PLAIN, Scores, Segments
from wlb.plan import UserError

MAX_HEAD_SIZE = 256
"""Largest head size of the kernel."""
# Windows around a query's position: keys to the left and to the right; -1 means unlimited.
_CAUSAL, _WITHOUT_MASK = [-1, 0], [-1, -1]


class TorchVarlenBackend:
    """torch's variable-length attention kernel.

    Args:
        deterministic: Whether backward adds up dQ in a fixed order, which needs several float32
            copies of dQ.
    """

    takes_key_rows = False  # see `wlb.kernels.op.Backend.takes_key_rows`

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self.name = kernel_name("torch_varlen", deterministic=deterministic)

    def why_not(
        self, *, device: torch.device, dtype: torch.dtype, head_size: int, scores: Scores = PLAIN
    ) -> str | None:
        """Return why this backend cannot compute a run, or None if it can.

        If torch sees no GPU on this machine, the run's GPU is assumed to be new enough.
        """
        if scores.softcap:
            return "torch's kernel does not support a cap on scores (model.attention_softcap)"
        if why := wrong_tensors(device, dtype) or wrong_head_size(head_size, MAX_HEAD_SIZE):
            return why
        capability = compute_capability(device)
        return None if capability is None else before_ampere(*capability)

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Return attention's output [T, H, D] and log-sum-exp [H, T]."""
        _check(q_THD)
        out_THD, lse_HT, _ = torch.ops.torch_attn._varlen_attn(
            q_THD, k_SGD, v_SGD, *segments.lengths, segments.is_causal, None, _window(segments)
        )
        return out_THD, lse_HT

    def backward(self, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients:
        """Return the gradients of q, k and v."""
        # Without dropout, forward returns an RNG state of zeros. Pass new zeros instead of saving
        # it.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=grad_THD.device)
        mask = (segments.is_causal, rng_state, None, _window(segments))
        with fixed_order(self.deterministic):
            dq_THD, dk_SGD, dv_SGD = torch.ops.torch_attn._varlen_attn_backward(
                grad_THD, *saved, *segments.lengths, *mask
            )
        return dq_THD, dk_SGD, dv_SGD


TORCH_VARLEN = TorchVarlenBackend()
TORCH_VARLEN_DETERMINISTIC = TorchVarlenBackend(deterministic=True)


def _window(segments: Segments) -> list[int]:
    if segments.scores.softcap:
        raise UserError(
            f"torch_varlen does not support a cap on scores (model.attention_softcap = "
            f"{segments.scores.softcap:g}); set kernels.attention = sdpa"
        )
    if segments.scores.sliding:
        return [segments.scores.sliding - 1, 0]
    return _CAUSAL if segments.is_causal else _WITHOUT_MASK


def _check(q_THD: Tensor) -> None:
    if q_THD.device.type != "cuda" or q_THD.dtype not in DTYPES:
        raise UserError(
            "torch_varlen supports only bfloat16 and float16 on CUDA, not "
            f"{q_THD.dtype} on {q_THD.device}; set kernels.attention = sdpa"
        )
    if why := wrong_head_size(q_THD.shape[-1], MAX_HEAD_SIZE):
        raise UserError(
            f"torch_varlen cannot compute this call: {why}; set kernels.attention = sdpa"
        )
