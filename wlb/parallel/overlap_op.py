"""Context attention in two calls: keys that a rank holds while others' travel, then the others'.

wlb::attend_while_gathering and its backward take the place of wlb::context_attend's. The calls'
results are merged by their log-sum-exps, which is exact. In backward the call over others' keys
comes first, so that their gradients travel while the other computes. Shapes, besides those of
`context_op`: T2 query rows of the second call, K1 and K2 keys of either call.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wlb.kernels import Segments
from wlb.kernels.backend import SavedTensors, sum_dtype
from wlb.kernels.op import attention_like, backward, custom_op, forward
from wlb.parallel.context_op import (
    gathered_like,
    gradient_slot,
    gradients_by_row,
    num_returned,
    reads_buffer,
    segment_keys,
    start_gather,
    start_return,
)

_collectives = torch.ops._c10d_functional


class _Call(NamedTuple):
    """One of the two calls. index: rows of K and V in the order of its keys. inverse: see
    `gradients_by_row`."""

    segments: Segments
    index: Tensor
    inverse: Tensor

    def backward(
        self, backend: str, grad: Tensor, saved: SavedTensors, *, fused: bool
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the queries, and of the rows of K and V, [rows, 2, G, D]."""
        dq, dk, dv = backward(backend, grad, saved, self.segments)
        if reads_buffer(self.segments, backend):
            return dq, torch.stack([dk, dv], 1).to(sum_dtype(dk))
        return dq, gradients_by_row(dk, dv, self.inverse, fused=fused)


def _merge(
    out_THD: Tensor, lse_HT: Tensor, other: tuple[Tensor, Tensor], query_rows: Tensor
) -> None:
    """Merge the second call's output and log-sum-exp into the first's, in place."""
    other_THD, other_HT = other
    own_HT = lse_HT.index_select(1, query_rows)
    both_HT = torch.logaddexp(own_HT, other_HT)
    share = (other_HT - both_HT).exp().t()[..., None]
    own_THD = out_THD.index_select(0, query_rows)
    merged = torch.lerp(own_THD.to(share.dtype), other_THD.to(share.dtype), share)
    out_THD.index_copy_(0, query_rows, merged.to(out_THD.dtype))
    lse_HT.index_copy_(1, query_rows, both_HT)


def _fake_attend(
    q: Tensor, k: Tensor, _v: Tensor, gathered: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (*attention_like(q), gradient_slot(k, gathered.shape[0], k.dtype))


@custom_op("attend_while_gathering", fake=_fake_attend)
def attend_while_gathering(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    kv_gather: Tensor,
    slot: Tensor,
    own_slot: Tensor,
    query_rows: Tensor,
    own_index: Tensor,
    own_inverse: Tensor,
    index_K2: Tensor,
    inverse_UR: Tensor,
    sent_N: Tensor | None,
    splits: Tensor | None,
    own_cu_q: Tensor,
    own_cu_k: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    own_max_q: int,
    own_max_k: int,
    max_q: int,
    max_k: int,
    backend: str,
    cp: int,
    group_name: str,
    keep_gathered: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, H, D], log-sum-exp [H, T], and a slot for the gather of backward, [R, 2, G, D].

    kv_gather, slot, own_slot: `gather_kv`'s. query_rows, own_*: see `OwnRows`. The output is
    differentiable in q and in the slots, whose gradients are those of k and v: travelling and not.
    """
    own = Segments.of(own_cu_q, own_cu_k, own_max_q, own_max_k)
    others = Segments.of(cu_q, cu_k, max_q, max_k, is_causal=False)
    both = torch.stack([k_TGD, v_TGD], 1)
    out, lse = forward(backend, q_THD, *segment_keys(both, own_index, own, backend), own)
    out_THD, lse_HT = out.contiguous(), lse.contiguous()
    kv_R2GD = _collectives.wait_tensor(kv_gather)
    k, v = segment_keys(kv_R2GD, index_K2, others, backend)
    q_rows = q_THD.index_select(0, query_rows)
    _merge(out_THD, lse_HT, forward(backend, q_rows, k, v, others), query_rows)
    return out_THD, lse_HT, gradient_slot(k_TGD, kv_gather.shape[0], k_TGD.dtype)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, _v: Tensor, _g: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, wire, _ = arguments
    num_rows = num_returned(q, arguments[7])
    own = gathered_like(k, k.shape[0])
    return q.new_empty(q.shape), gathered_like(k, num_rows).to(wire), own.to(sum_dtype(k))


@custom_op("attend_while_gathering_backward", fake=_fake_backward)
def attend_while_gathering_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    kv_gather: Tensor | None,
    out_THD: Tensor,
    lse_HT: Tensor,
    query_rows: Tensor,
    own_index: Tensor,
    own_inverse: Tensor,
    index_K2: Tensor,
    inverse_UR: Tensor,
    sent_N: Tensor | None,
    splits: Tensor | None,
    own_cu_q: Tensor,
    own_cu_k: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    own_max_q: int,
    own_max_k: int,
    max_q: int,
    max_k: int,
    backend: str,
    cp: int,
    group_name: str,
    wire: torch.dtype,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q; of the local K and V, [T, 2, G, D] or by need [N, 2, G, D] in dtype `wire`,
    which only `receive_kv_gradient` may read; and those of this rank's own use, [T, 2, G, D]."""
    own = _Call(Segments.of(own_cu_q, own_cu_k, own_max_q, own_max_k), own_index, own_inverse)
    segments = Segments.of(cu_q, cu_k, max_q, max_k, is_causal=False)
    others = _Call(segments, index_K2, inverse_UR)
    if kv_gather is None:
        kv_gather = start_gather(k_TGD, v_TGD, sent_N, splits, cp, group_name)
    kv_R2GD = _collectives.wait_tensor(kv_gather)
    # Kernels need real strides, but the gradient of a sum, for example, is one expanded number.
    grad_THD = grad_THD.contiguous()
    q, grad, out = (x.index_select(0, query_rows) for x in (q_THD, grad_THD, out_THD))
    lse = lse_HT.index_select(1, query_rows)
    saved = SavedTensors(q, *segment_keys(kv_R2GD, index_K2, segments, backend), out, lse)
    dq, dkv_R2GD = others.backward(backend, grad, saved, fused=fused)
    # Autograd may hold the gather; all else is freed before the other call.
    del kv_gather, kv_R2GD, q, grad, out, lse, saved
    returning = start_return(dkv_R2GD.to(wire), splits, cp, group_name)
    del dkv_R2GD
    both = torch.stack([k_TGD, v_TGD], 1)
    keys = segment_keys(both, own_index, own.segments, backend)
    saved = SavedTensors(q_THD, *keys, out_THD, lse_HT)
    own_dq, own_T2GD = own.backward(backend, grad_THD, saved, fused=fused)
    dq_THD = own_dq.contiguous()
    added = dq_THD.index_select(0, query_rows).to(sum_dtype(dq)) + dq
    dq_THD.index_copy_(0, query_rows, added.to(dq_THD.dtype))
    return dq_THD, returning, own_T2GD


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q_THD, k_TGD, v_TGD, kv_gather, slot, _, *indices = inputs[:17]
    *static, keep_gathered, fused = inputs[17:]
    ctx.static = (*static, slot.dtype, fused)
    ctx.num_inputs, ctx.keeps_gathered = len(inputs), keep_gathered
    kept = kv_gather if keep_gathered else None
    out_THD, lse_HT, _ = output
    ctx.save_for_backward(q_THD, k_TGD, v_TGD, kept, out_THD, lse_HT, *indices)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_THD, _, gathering = grads
    none: list[None] = [None] * ctx.num_inputs
    # Only the log-sum-exp was differentiated.
    if grad_THD is None:
        return tuple(none)
    q_THD, k_TGD, v_TGD, kv_gather, *others = ctx.saved_tensors
    if gathering is not None and not ctx.keeps_gathered:
        kv_gather = gathering
    dq_THD, returning, own_T2GD = attend_while_gathering_backward(
        grad_THD, q_THD, k_TGD, v_TGD, kv_gather, *others, *ctx.static
    )
    return dq_THD, None, None, None, returning, own_T2GD, *none[6:]


attend_while_gathering.register_autograd(_differentiate, setup_context=_keep)
