"""Backend: how one kernel computes the attention of all segments, forward and backward.

The two are separate calls without autograd, so that the caller chooses what is kept in between:
`wlb.kernels.op` keeps its inputs, context parallelism its local rows only. Shapes: T query rows, S
key rows (or R rows of a buffer), H query heads, G key/value heads, D head size.
"""

from typing import Protocol

import torch
from torch import Tensor

from wlb.kernels.segments import Segments


class Backend(Protocol):
    """One attention kernel, called without autograd and with T > 0 (`wlb.kernels.op.forward`).

    takes_key_rows: the backend reads keys of `Segments.key_rows` from a buffer and returns the
    gradients of the buffer's rows. For other backends the caller gathers keys and brings their
    gradients back. FlashAttention's varlen kernels need that: they overwrite dK and dV, so segments
    sharing keys (head and tail of a document) would lose gradients, and rows gathered from several
    ranks are in rank order, where a document is not contiguous.
    """

    @property
    def name(self) -> str: ...

    @property
    def takes_key_rows(self) -> bool: ...

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Output [T, H, D], and a tensor like `empty_lse(q_THD)` for backward.

        Usually the log-sum-exp of each row, but only this backend's backward reads it.
        """
        ...

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
        """Gradients of q, k and v, in their dtype."""
        ...


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which values of x are added: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def empty_lse(q_THD: Tensor) -> Tensor:
    """An uninitialised log-sum-exp [H, T]; float32 (float64 for float64 inputs)."""
    return q_THD.new_empty((q_THD.shape[1], q_THD.shape[0]), dtype=sum_dtype(q_THD))
