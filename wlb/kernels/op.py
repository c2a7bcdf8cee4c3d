"""`attend`: causal attention of many packed segments in one call, by any attention kernel.

Query i of a segment with Lq queries and Lk keys attends to the keys 0 to Lk - Lq + i, or with a
sliding window only to the last few of them. Scores are scaled by 1 / sqrt(D). Query head h uses
key/value head h // (H / G).

This file has four layers, each of which uses the one before it:

1. A `Backend` is one attention kernel, without autograd.
2. `forward` and `backward` call a backend by its name, for any number of queries, and notify an
   observer.
3. The custom ops wlb::attend and wlb::attend_backward make these calls differentiable.
   torch.compile sees only the ops' arguments, which are tensors and numbers, and never looks
   inside. So one compiled graph serves all lengths.
4. `attend` checks its inputs and calls the op.

Shapes: T query rows, S key rows (or R rows of a buffer), H query heads, G key/value heads, D head
size.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wlb.kernels.segments import Segments
from wlb.plan import UserError

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v, each in its tensor's dtype."""


class SavedTensors(NamedTuple):
    """The inputs and results of a forward call that the backward call needs."""

    q_THD: Tensor
    k_SGD: Tensor
    v_SGD: Tensor
    out_THD: Tensor
    lse_HT: Tensor


class Backend(Protocol):
    """One attention kernel, without autograd; it is only called with at least one query.

    Forward and backward are separate calls, so the caller chooses which tensors it keeps in
    between: `attend_op` keeps all inputs, and context parallelism keeps only the local rows.
    """

    @property
    def name(self) -> str:
        """The backend's key in `BACKENDS`, made by `kernel_name`.

        A kernel that can run with and without deterministic sums is registered under two names.
        """
        ...

    @property
    def takes_key_rows(self) -> bool:
        """Whether the backend looks up keys in a larger buffer of rows (`Segments.key_rows`).

        Such a backend returns the gradients of the buffer's rows. For other backends, such as
        FlashAttention's varlen kernels, the caller copies the keys of each segment out of the
        buffer. The caller also adds up the gradients of keys that were copied from the same row,
        because segments may share rows.
        """
        ...

    def forward(
        self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Return the output [T, H, D] and the log-sum-exp [H, T] of each query's scores.

        Backends that do not compute the log-sum-exp return any tensor like `empty_lse(q_THD)`,
        which only their own backward reads.
        """
        ...

    def backward(self, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients:
        """Return the gradients of q, k and v, from the output's gradient and `saved` tensors."""
        ...


BACKENDS: dict[str, Backend] = {}
"""All attention backends by name. `wlb.kernels.select` registers them."""


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for sums of x's values: float32, or float64 if x is float64."""
    return torch.promote_types(x.dtype, torch.float32)


def empty_lse(q_THD: Tensor) -> Tensor:
    """Allocate a log-sum-exp [H, T], in float32 (float64 for float64 inputs)."""
    return q_THD.new_empty((q_THD.shape[1], q_THD.shape[0]), dtype=sum_dtype(q_THD))


def kernel_name(backend: str, *, deterministic: bool) -> str:
    """Return the key in `BACKENDS` of a backend, with or without deterministic sums.

    Custom ops take this key as an argument. The key is a string, so a compiled graph contains it as
    a constant.

    Args:
        backend: Name of the backend without its variants, such as "sdpa".
        deterministic: Whether backward adds up gradients in a fixed order.
    """
    return f"{backend}_deterministic" if deterministic else str(backend)


@contextmanager
def fixed_order(is_needed: bool) -> Iterator[None]:
    """Make torch's operators in the block deterministic, if `is_needed`; else do nothing.

    torch.use_deterministic_algorithms would also change compiler settings, and would make torch
    fill every new tensor with NaN, which costs time.
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


class AttentionObserver(Protocol):
    """Observes calls of attention kernels, for example to measure their time."""

    def attention(self, *, is_backward: bool) -> AbstractContextManager[object]:
        """Return a context manager that surrounds one call of a backend's forward or backward."""
        ...


# This is module-level state because a custom op cannot take an observer, and context variables do
# not reach the thread in which autograd runs backward on CUDA.
_observer: AttentionObserver | None = None
_NOBODY = nullcontext()


def observed(*, is_backward: bool) -> AbstractContextManager[object]:
    """Return the context in which to call an attention kernel, so that it can be timed.

    It is the context of the observer that `observing` has set; without one it does nothing.
    """
    return _NOBODY if _observer is None else _observer.attention(is_backward=is_backward)


@contextmanager
def observing(observer: AttentionObserver) -> Iterator[None]:
    """Let `observer` observe every attention kernel that is called in the block.

    Raises:
        RuntimeError: There already is an observer.
    """
    global _observer
    if _observer is not None:
        raise RuntimeError(
            f"attention calls are already observed by {_observer}; use only one observer at a time"
        )
    _observer = observer
    try:
        yield
    finally:
        _observer = None


def forward(
    backend: str, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Call the forward of the backend with this name; without queries the results are empty."""
    if q_THD.shape[0] == 0:
        return attention_like(q_THD)
    with observed(is_backward=False):
        return BACKENDS[backend].forward(q_THD, k_SGD, v_SGD, segments)


def backward(backend: str, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients:
    """Call the backward of the backend with this name; without queries all gradients are zero."""
    if grad_THD.shape[0] == 0:
        dq, dk, dv, *_ = (x.new_zeros(x.shape) for x in saved)
        return dq, dk, dv
    # Kernels do not accept strides of 0, which for example the gradient of a sum has.
    grad_THD = grad_THD.contiguous()
    with observed(is_backward=True):
        return BACKENDS[backend].backward(grad_THD, saved, segments)


def custom_op(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the custom op wlb::<name>.

    Args:
        name: Name of the op.
        fake: Allocates tensors like the op's results without computing them, for tracing.
    """

    def register(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(f"wlb::{name}", function, mutates_args=())
        op.register_fake(fake)
        return op

    return register


def contiguous_like(*tensors: Tensor) -> list[Tensor]:
    """Allocate contiguous tensors with the shapes and dtypes of the given ones."""
    return [x.new_empty(x.shape) for x in tensors]


def attention_like(q_THD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocate attention's output and log-sum-exp for these queries."""
    return q_THD.new_empty(q_THD.shape), empty_lse(q_THD)


@custom_op("attend", fake=attention_like)
def attend_op(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    sliding: int,
    softcap: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return attention's output [T, H, D] and log-sum-exp [H, T] (not differentiable).

    Args:
        q_THD: Queries of all segments.
        k_SGD: Keys of all segments.
        v_SGD: Values of all segments.
        cu_seqlens_q: Offsets of queries, `Segments.cu_seqlens_q`.
        cu_seqlens_k: Offsets of keys, `Segments.cu_seqlens_k`.
        max_q: Number of queries of the segment that has most.
        max_k: Number of keys of the segment that has most.
        sliding: Size of the sliding window (`Scores.sliding`), 0 for none.
        softcap: Cap on scores (`Scores.softcap`), 0 for none.
        backend: Name of the attention kernel, a key of `BACKENDS`.
    """
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k, sliding, softcap)
    _check_rows(q_THD, k_SGD, segments)
    out_THD, lse_HT = forward(backend, q_THD, k_SGD, v_SGD, segments)
    return out_THD.contiguous(), lse_HT.contiguous()


@custom_op("attend_backward", fake=lambda grad, q, k, v, *_: tuple(contiguous_like(q, k, v)))
def attend_backward_op(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    sliding: int,
    softcap: float,
    backend: str,
) -> Gradients:
    """Return the gradients of q, k and v, given the gradient of the output of `attend_op`.

    The arguments after `grad_THD` are the inputs and results of `attend_op`.
    """
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k, sliding, softcap)
    saved = SavedTensors(q_THD, k_SGD, v_SGD, out_THD, lse_HT)
    dq, dk, dv = backward(backend, grad_THD, saved, segments)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_SGD, v_SGD, cu_seqlens_q, cu_seqlens_k, *static = inputs
    ctx.save_for_backward(q_THD, k_SGD, v_SGD, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.static = static
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_THD, _ = grads
    # The output was not part of the loss, so there are no gradients. (The log-sum-exp is not
    # differentiable.)
    if grad_THD is None:
        return (None,) * 10
    dq_dk_dv = attend_backward_op(grad_THD, *ctx.saved_tensors, *ctx.static)
    return *dq_dk_dv, *(None,) * 7


attend_op.register_autograd(_differentiate, setup_context=_keep)


def _check_rows(q_THD: Tensor, k_SGD: Tensor, segments: Segments) -> None:
    """Raise UserError if the segments do not have as many queries and keys as q and k have rows.

    Kernels would otherwise read out of bounds. The check is skipped if the offsets are only on the
    device, because reading them would make the host wait for the device.
    """
    if segments.host.offsets is None and q_THD.device.type != "cpu":
        return
    rows = (segments.num_queries, segments.num_keys)
    if rows != (q_THD.shape[0], k_SGD.shape[0]):
        raise UserError(
            f"segments have {rows[0]} queries and {rows[1]} keys, but q has {q_THD.shape[0]} "
            f"rows and k has {k_SGD.shape[0]}; q needs one row for each query, and k one row "
            "for each key"
        )


def attend(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments, *, backend: str
) -> Tensor:
    """Compute causal attention of all segments, [T, H, D]; differentiable in q, k and v.

    Args:
        q_THD: Queries of all segments: T rows, and H heads of size D.
        k_SGD: Keys of all segments: S rows, and G key/value heads.
        v_SGD: Values of all segments.
        segments: Where segments begin and end.
        backend: Name of the attention kernel, a key of `BACKENDS`.
    """
    if backend not in BACKENDS:
        raise UserError(f"backend = {backend!r} must be one of {', '.join(BACKENDS)}")
    _check_inputs(q_THD, k_SGD, v_SGD, segments)
    out_THD, _ = attend_op(q_THD, k_SGD, v_SGD, *segments.arguments, backend)
    return out_THD


def _check_inputs(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments) -> None:
    """Raise UserError if shapes, dtypes or devices do not fit; `attend_op` checks the offsets."""
    if segments.key_rows is not None:
        raise UserError(
            "attend does not support segments with key_rows (indices of keys in a larger buffer); "
            "make them without key_rows, or call the forward of a backend with takes_key_rows"
        )
    tensors = (q_THD, k_SGD, v_SGD)
    if any(tensor.dim() != 3 for tensor in tensors) or k_SGD.shape != v_SGD.shape:
        raise UserError(
            "attend needs q of shape [T, H, D] and k and v of equal shapes [S, G, D], "
            f"not {_shapes(*tensors)}"
        )
    (_, num_heads, head_dim), (_, num_kv_heads, kv_head_dim) = q_THD.shape, k_SGD.shape
    if head_dim != kv_head_dim or num_kv_heads == 0 or num_heads % num_kv_heads:
        raise UserError(
            "all heads must have the same size, and q's number of heads must be a multiple of k's, "
            f"but the shapes are {_shapes(*tensors)}"
        )
    is_one_kind = all(
        tensor.dtype == q_THD.dtype and tensor.device == q_THD.device for tensor in tensors
    )
    if not is_one_kind or not q_THD.is_floating_point():
        found = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise UserError(
            "q, k and v must have the same floating-point dtype and be on the same device, but are "
            f"{found}"
        )
    if segments.cu_seqlens_q.device != q_THD.device:
        raise UserError(
            "segments and q must be on one device, but segments are on "
            f"{segments.cu_seqlens_q.device} and q is on {q_THD.device}"
        )


def _shapes(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> str:
    return f"q {tuple(q_THD.shape)}, k {tuple(k_SGD.shape)}, v {tuple(v_SGD.shape)}"
