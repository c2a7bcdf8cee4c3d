"""Backend: how one kernel computes the attention of all segments, forward and backward.

The two are separate calls without autograd, so that the caller chooses which tensors are kept in
between: `wlb.kernels.op` keeps its inputs, context parallelism its local rows only. Shapes: T query
rows, S key rows (or R rows of a buffer), H query heads, G key/value heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from wlb.kernels.segments import Segments

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v, in their dtype."""


class SavedTensors(NamedTuple):
    """Inputs and results of a forward call, as its backward takes them."""

    q_THD: Tensor
    k_SGD: Tensor
    v_SGD: Tensor
    out_THD: Tensor
    lse_HT: Tensor


class Backend(Protocol):
    """One attention kernel, called without autograd and with T > 0 (`wlb.kernels.op.forward`).

    takes_key_rows: the backend reads keys of `Segments.key_rows` from a buffer and returns the
    gradients of the buffer's rows. For others, such as FlashAttention's varlen kernels, which
    overwrite dK and dV, the caller gathers keys and brings their gradients back: segments may share
    keys, and rows gathered from several ranks are in rank order.
    name: from `kernel_name`. A kernel whose additions may come in any order is registered twice.
    """

    @property
    def name(self) -> str: ...

    @property
    def takes_key_rows(self) -> bool: ...

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Output [T, H, D], and a tensor like `empty_lse(q_THD)` that its backward alone reads."""
        ...

    def backward(self, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients: ...


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which values of x are added: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def empty_lse(q_THD: Tensor) -> Tensor:
    """An uninitialised log-sum-exp [H, T]; float32 (float64 for float64 inputs)."""
    return q_THD.new_empty((q_THD.shape[1], q_THD.shape[0]), dtype=sum_dtype(q_THD))


def kernel_name(backend: str, *, deterministic: bool) -> str:
    """The name that custom ops take: a string, so that a compiled graph holds it as a constant."""
    return f"{backend}_deterministic" if deterministic else str(backend)


@contextmanager
def fixed_order(is_needed: bool) -> Iterator[None]:
    """If needed, make torch's operators deterministic inside, so that a step can be repeated bit by
    bit.

    torch.use_deterministic_algorithms would also change compiler settings, and torch would fill
    every new tensor with NaN, which costs time and protects from nothing here.
    """
    if not is_needed:
        yield
        return
    is_on = torch._C._get_deterministic_algorithms()
    is_warn_only = torch._C._get_deterministic_algorithms_warn_only()
    is_filling = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(is_on, warn_only=is_warn_only)
        torch._C._set_deterministic_fill_uninitialized_memory(is_filling)
