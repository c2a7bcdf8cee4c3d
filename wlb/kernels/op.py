"""attend: causal attention of many packed segments in one call, on any backend.

Query i of a segment with Lq queries and Lk keys attends to keys [0, Lk - Lq + i], or to the latest
of them (`Scores.sliding`), with scores scaled by 1 / sqrt(D). Query head h uses key/value head h //
(H / G). Shapes: T query rows, S key rows (or R rows of a buffer), H query heads, G key/value heads,
D head size.

From below: a `Backend` is one kernel; `forward` and `backward` call it by its name, for any number
of queries, and tell an observer; the custom ops wlb::attend and wlb::attend_backward make it
differentiable. torch.compile sees tensors and integers only and never looks into a backend, so one
compiled graph serves all lengths. `Segments.of` finds the offsets on the host again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wlb.kernels.segments import Segments
from wlb.plan import UserError

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
    """One attention kernel, called without autograd and with T > 0 (`forward`).

    Forward and backward are separate calls, so that the caller chooses which tensors are kept in
    between: `attend_op` keeps its inputs, context parallelism its local rows only.

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


BACKENDS: dict[str, Backend] = {}
"""Every backend by its name; `wlb.kernels.select` imports them all and enters them here."""


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


class AttentionObserver(Protocol):
    """Watches attention kernels, e.g. a clock."""

    def attention(self, *, is_backward: bool) -> AbstractContextManager[object]:
        """Entered around the call of a backend's kernel."""
        ...


# A module-level variable, because a custom op takes tensors and integers only, and its backward
# runs in autograd's own thread on CUDA, which context variables do not reach.
_observer: AttentionObserver | None = None
_NOBODY = nullcontext()


def observed(*, is_backward: bool) -> AbstractContextManager[object]:
    """The context that a kernel is called in."""
    return _NOBODY if _observer is None else _observer.attention(is_backward=is_backward)


@contextmanager
def observing(observer: AttentionObserver) -> Iterator[None]:
    """Make `observer` watch every kernel inside; RuntimeError if there already is one."""
    global _observer
    if _observer is not None:
        raise RuntimeError(f"attention is already observed by {_observer}; use one at a time")
    _observer = observer
    try:
        yield
    finally:
        _observer = None


def forward(
    backend: str, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Backend.forward, for any number of queries."""
    if q_THD.shape[0] == 0:
        return attention_like(q_THD)
    with observed(is_backward=False):
        return BACKENDS[backend].forward(q_THD, k_SGD, v_SGD, segments)


def backward(backend: str, grad_THD: Tensor, saved: SavedTensors, segments: Segments) -> Gradients:
    """Backend.backward, for any number of queries; without queries gradients are zero."""
    if grad_THD.shape[0] == 0:
        dq, dk, dv, *_ = (x.new_zeros(x.shape) for x in saved)
        return dq, dk, dv
    # Kernels need real strides, but the gradient of a sum, for example, is one expanded number.
    grad_THD = grad_THD.contiguous()
    with observed(is_backward=True):
        return BACKENDS[backend].backward(grad_THD, saved, segments)


def custom_op(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the custom op wlb::<name>. fake: makes its results, without values."""

    def register(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(f"wlb::{name}", function, mutates_args=())
        op.register_fake(fake)
        return op

    return register


def contiguous_like(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors of the same shapes, without values."""
    return [x.new_empty(x.shape) for x in tensors]


def attention_like(q_THD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, without values."""
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
    """Output [T, H, D] and log-sum-exp [H, T]; only the output is differentiable."""
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
    # Only the log-sum-exp was differentiated.
    if grad_THD is None:
        return (None,) * 10
    dq_dk_dv = attend_backward_op(grad_THD, *ctx.saved_tensors, *ctx.static)
    return *dq_dk_dv, *(None,) * 7


attend_op.register_autograd(_differentiate, setup_context=_keep)


def _check_rows(q_THD: Tensor, k_SGD: Tensor, segments: Segments) -> None:
    """Refuse offsets with which kernels would read out of bounds. The check is skipped if it would
    wait for the device.
    """
    if segments.host.offsets is None and q_THD.device.type != "cpu":
        return
    rows = (segments.num_queries, segments.num_keys)
    if rows != (q_THD.shape[0], k_SGD.shape[0]):
        raise UserError(
            f"segments have {rows[0]} queries and {rows[1]} keys, but q {tuple(q_THD.shape)}, "
            f"k {tuple(k_SGD.shape)}"
        )


def attend(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments, *, backend: str
) -> Tensor:
    """Attention output, shape [T, H, D]; differentiable in q, k and v."""
    if backend not in BACKENDS:
        raise UserError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    _check_inputs(q_THD, k_SGD, v_SGD, segments)
    out_THD, _ = attend_op(q_THD, k_SGD, v_SGD, *segments.arguments, backend)
    return out_THD


def _check_inputs(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, segments: Segments) -> None:
    """Check everything but the offsets, which `attend_op` compares with the rows."""
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


def _shapes(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> str:
    return f"q {tuple(q_THD.shape)}, k {tuple(k_SGD.shape)}, v {tuple(v_SGD.shape)}"
