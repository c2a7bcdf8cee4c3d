"""The custom ops wlb::gather_kv, wlb::context_attend and wlb::context_attend_backward.

They contain their collectives, so that torch.compile sees tensors and integers only: one graph
serves all lengths, and the compiler cannot merge the gathers of forward and backward, which would
keep their result. Memory and the choice of float32 gradients: README.md of this room. Shapes: T
local rows, R = cp * T gathered rows, K keys of all segments, G key/value and H query heads of this
tp rank, D head size, U most uses of a row.
"""

from typing import Any

import torch
from torch import Tensor

from wlb.kernels import Segments
from wlb.kernels.backend import empty_lse, sum_dtype
from wlb.kernels.op import BACKENDS, backward, forward

_collectives = torch.ops._c10d_functional


def _start_gather(k_TGD: Tensor, v_TGD: Tensor, cp: int, group_name: str) -> Tensor:
    both = torch.stack([k_TGD, v_TGD], 1)
    return _collectives.all_gather_into_tensor(both, cp, group_name)


def segment_keys(
    kv_R2GD: Tensor, index_K: Tensor, segments: Segments, backend: str
) -> tuple[Tensor, Tensor]:
    """K and V as the backend takes them: the buffer's rows, or each segment's keys in order."""
    if not _reads_buffer(segments, backend):
        kv_R2GD = kv_R2GD.index_select(0, index_K)
    return kv_R2GD[:, 0], kv_R2GD[:, 1]


def _reads_buffer(segments: Segments, backend: str) -> bool:
    return BACKENDS[backend].takes_key_rows and segments.key_rows is not None


def gradients_by_row(dk_KGD: Tensor, dv_KGD: Tensor, inverse_UR: Tensor) -> Tensor:
    """Gradients of the gathered rows, [R, 2, G, D], from those of the segments' keys.

    One gather per use of a row, added in float32. Without atomics the sum is deterministic.
    """
    shape = (inverse_UR.shape[1], 2, *dk_KGD.shape[1:])
    total = dk_KGD.new_empty(shape, dtype=sum_dtype(dk_KGD))
    for i, grad_KGD in enumerate((dk_KGD, dv_KGD)):
        # Unused rows read one more row, of zeros.
        used = torch.cat([grad_KGD, grad_KGD.new_zeros((1, *grad_KGD.shape[1:]))])
        total[:, i] = used.index_select(0, inverse_UR[0])
        for index_R in inverse_UR[1:]:
            total[:, i] += used.index_select(0, index_R)
    return total


@torch.library.custom_op("wlb::gather_kv", mutates_args=())
def gather_kv(k_TGD: Tensor, v_TGD: Tensor, cp: int, group_name: str) -> Tensor:
    """Start gathering K and V of all ranks, [R, 2, G, D]; only context_attend may read it."""
    return _start_gather(k_TGD, v_TGD, cp, group_name)


@gather_kv.register_fake
def _(k_TGD: Tensor, v_TGD: Tensor, cp: int, group_name: str) -> Tensor:
    num_rows, *heads = k_TGD.shape
    return k_TGD.new_empty((cp * num_rows, 2, *heads))


@torch.library.custom_op("wlb::context_attend", mutates_args=())
def context_attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    kv_gather: Tensor,
    index_K: Tensor,
    inverse_UR: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    backend: str,
    cp: int,
    group_name: str,
    keep_gathered: bool,
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp. kv_gather: gather_kv(k_TGD, v_TGD).

    Only the output is differentiable, with respect to q, k and v.
    """
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    k, v = segment_keys(_collectives.wait_tensor(kv_gather), index_K, segments, backend)
    out_THD, lse = forward(backend, q_THD, k, v, segments)
    return out_THD.contiguous(), lse.contiguous()


@context_attend.register_fake
def _(q_THD: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q_THD.new_empty(q_THD.shape), empty_lse(q_THD)


@torch.library.custom_op("wlb::context_attend_backward", mutates_args=())
def context_attend_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor | None,
    v_TGD: Tensor | None,
    kv_gather: Tensor | None,
    out_THD: Tensor,
    lse: Tensor,
    index_K: Tensor,
    inverse_UR: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    backend: str,
    cp: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of the local K and V, [T, 2, G, D]. Give either k and v or kv_gather."""
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    if kv_gather is None:
        assert k_TGD is not None
        assert v_TGD is not None
        kv_gather = _start_gather(k_TGD, v_TGD, cp, group_name)
    k, v = segment_keys(_collectives.wait_tensor(kv_gather), index_K, segments, backend)
    dq, dk, dv = backward(backend, grad_THD, q_THD, k, v, out_THD, lse, segments)
    del k, v, kv_gather  # free their memory for the gradients below
    if _reads_buffer(segments, backend):
        dkv_R2GD = torch.stack([dk, dv], 1).to(sum_dtype(dk))
    else:
        dkv_R2GD = gradients_by_row(dk, dv, inverse_UR)
    scattering = _collectives.reduce_scatter_tensor(dkv_R2GD, "sum", cp, group_name)
    return dq.contiguous(), _collectives.wait_tensor(scattering).to(dq.dtype)


@context_attend_backward.register_fake
def _(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor | None,
    v_TGD: Tensor | None,
    kv_gather: Tensor | None,
    *args: Any,
) -> tuple[Tensor, Tensor]:
    like = k_TGD if kv_gather is None else kv_gather
    assert like is not None
    return q_THD.new_empty(q_THD.shape), like.new_empty((q_THD.shape[0], 2, *like.shape[-2:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_TGD, v_TGD, kv_gather, *indices = inputs[:8]
    *ctx.static, keep_gathered = inputs[8:]
    kept = (None, None, kv_gather) if keep_gathered else (k_TGD, v_TGD, None)
    ctx.save_for_backward(q_THD, *kept, *output, *indices)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_THD, _ = grads
    if grad_THD is None:  # only the log-sum-exp was differentiated
        return (None,) * 14
    dq_THD, dkv_T2GD = context_attend_backward(grad_THD, *ctx.saved_tensors, *ctx.static)
    return dq_THD, dkv_T2GD[:, 0], dkv_T2GD[:, 1], *([None] * 11)


context_attend.register_autograd(_differentiate, setup_context=_keep)
