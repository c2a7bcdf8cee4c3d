"""The custom ops wlb::gather_kv, wlb::context_attend and wlb::context_attend_backward.

Opaque, with their collectives inside, so that torch.compile sees tensors and integers only: one
graph serves micro-batches of any lengths, and the compiler cannot see that the forward and the
backward pass gather the same rows, which it would merge into one gather whose result is kept.
wlb::gather_kv only starts; what it gives must not be read before wlb::context_attend has waited.

Kept for backward, in bytes, of T rows with b bytes a value:

    b * T * D * (2 * H + 2 * G) + 4 * H * T               q, output, k, v; log-sum-exp
    b * T * D * (2 * H + 2 * G * cp) + 4 * H * T          with keep_gathered: rows of all ranks

At work at a time: the gathered rows, 2 * b * cp * T * G * D, and for a backend that wants a
segment's keys one after the other their copy, (1 + 1 / (2 * cp)) as many (with a head and a tail
span of a document; index_K has the exact number). Backward besides: the gradients of either, and
their float32 sums by gathered row.

Gradients travel in float32, which costs a bfloat16 run 4 units of traffic instead of 3 (a gather is
1). In bfloat16 the sum over ranks rounds once a rank: root-mean-square errors of dK and dV were
1.1-1.5 (median) and up to 2.1 times those of one process at CP 2 to 8, growing with CP; in float32
they are 1.0-1.2 and up to 1.7, whatever CP is.

Shapes: T local rows, R = cp * T gathered rows, K keys of all segments, G key/value heads and H
query heads of this tp rank, D head size, U uses of a row at most.
"""

from typing import Any

import torch
from torch import Tensor

from wlb.kernels import Segments
from wlb.kernels.backend import empty_lse
from wlb.kernels.op import BACKENDS, backward, forward

_collectives = torch.ops._c10d_functional


def _start_gather(k_TGD: Tensor, v_TGD: Tensor, cp: int, group_name: str) -> Tensor:
    both = torch.stack([k_TGD, v_TGD], 1)
    return _collectives.all_gather_into_tensor(both, cp, group_name)


def _keys(
    kv_R2GD: Tensor, index_K: Tensor, segments: Segments, backend: str
) -> tuple[Tensor, Tensor]:
    """K and V as the backend takes them: rows of the buffer, or of the segments in order."""
    if not _reads_buffer(segments, backend):
        kv_R2GD = kv_R2GD.index_select(0, index_K)
    return kv_R2GD[:, 0], kv_R2GD[:, 1]


def _reads_buffer(segments: Segments, backend: str) -> bool:
    return BACKENDS[backend].takes_key_rows and segments.key_rows is not None


def _by_row(dk_KGD: Tensor, dv_KGD: Tensor, inverse_UR: Tensor) -> Tensor:
    """Gradients of the gathered rows, [R, 2, G, D], from those of the segments' keys.

    Gathers only, one for each use of a row, added in float32: nothing is atomic, so the sum is
    the same in every run.
    """
    shape = (inverse_UR.shape[1], 2, *dk_KGD.shape[1:])
    total = dk_KGD.new_empty(shape, dtype=_wide(dk_KGD))
    for i, grad_KGD in enumerate((dk_KGD, dv_KGD)):
        # One more row, of zeros: what unused rows read.
        used = torch.cat([grad_KGD, grad_KGD.new_zeros((1, *grad_KGD.shape[1:]))])
        total[:, i] = used.index_select(0, inverse_UR[0])
        for index_R in inverse_UR[1:]:
            total[:, i] += used.index_select(0, index_R)
    return total


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@torch.library.custom_op("wlb::gather_kv", mutates_args=())
def gather_kv(k_TGD: Tensor, v_TGD: Tensor, cp: int, group_name: str) -> Tensor:
    """Start to bring K and V of all ranks, [R, 2, G, D]: not to be read yet."""
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
    """Output [T, H, D] and log-sum-exp; kv_gather: gather_kv(k_TGD, v_TGD). Only the output has a
    gradient, for q, k and v."""
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    k, v = _keys(_collectives.wait_tensor(kv_gather), index_K, segments, backend)
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
    """Gradients of q and of the local rows' K and V, [T, 2, G, D]; either k and v or kv_gather."""
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    if kv_gather is None:
        assert k_TGD is not None
        assert v_TGD is not None
        kv_gather = _start_gather(k_TGD, v_TGD, cp, group_name)
    k, v = _keys(_collectives.wait_tensor(kv_gather), index_K, segments, backend)
    dq, dk, dv = backward(backend, grad_THD, q_THD, k, v, out_THD, lse, segments)
    del k, v, kv_gather  # their memory is needed for what follows
    if _reads_buffer(segments, backend):
        dkv_R2GD = torch.stack([dk, dv], 1).to(_wide(dk))
    else:
        dkv_R2GD = _by_row(dk, dv, inverse_UR)
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
    if grad_THD is None:  # somebody differentiated the log-sum-exp alone
        return (None,) * 14
    dq_THD, dkv_T2GD = context_attend_backward(grad_THD, *ctx.saved_tensors, *ctx.static)
    return dq_THD, dkv_T2GD[:, 0], dkv_T2GD[:, 1], *([None] * 11)


context_attend.register_autograd(_differentiate, setup_context=_keep)
