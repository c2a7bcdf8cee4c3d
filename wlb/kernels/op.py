"""The custom ops wlb::attend and wlb::attend_backward, and the registry of backends.

torch.compile sees tensors and integers only and never looks into a backend, so one compiled graph
serves all lengths. `Segments.of` finds the offsets on the host again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wlb.kernels.backend import Backend, Gradients, SavedTensors, empty_lse
from wlb.kernels.flash import DETERMINISTIC_FLASH_BACKENDS, FLASH_BACKENDS
from wlb.kernels.observe import observed
from wlb.kernels.reference import REFERENCE
from wlb.kernels.sdpa import SDPA, SDPA_DETERMINISTIC
from wlb.kernels.segments import Segments
from wlb.kernels.torch_varlen import TORCH_VARLEN, TORCH_VARLEN_DETERMINISTIC
from wlb.plan import UserError

_ALL: tuple[Backend, ...] = (
    *(SDPA, TORCH_VARLEN, *FLASH_BACKENDS),
    *(SDPA_DETERMINISTIC, TORCH_VARLEN_DETERMINISTIC, *DETERMINISTIC_FLASH_BACKENDS),
    REFERENCE,
)
BACKENDS = {backend.name: backend for backend in _ALL}


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
    wait for the device."""
    if segments.host.offsets is None and q_THD.device.type != "cpu":
        return
    rows = (segments.num_queries, segments.num_keys)
    if rows != (q_THD.shape[0], k_SGD.shape[0]):
        raise UserError(
            f"segments have {rows[0]} queries and {rows[1]} keys, but q {tuple(q_THD.shape)}, "
            f"k {tuple(k_SGD.shape)}"
        )
