"""Context attention in several calls: own keys first, then others', stage by stage, as they arrive.

wlb::attend_while_gathering and its backward take the place of wlb::context_attend's. Each call
hides the next stage's transfer; results are merged by their log-sum-exps, which is exact. Backward
takes own keys last, so that gradients travel while others compute. Shapes, besides those of
`context_op`: T2 query rows and K2 keys of a stage's call, K1 keys of the first.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wlb.kernels import Segments
from wlb.kernels.op import SavedTensors, attention_like, backward, custom_op, forward, sum_dtype
from wlb.parallel.context_op import (
    gathered_like,
    gradient_slot,
    gradients_by_row,
    reads_buffer,
    returned_rows,
    segment_keys,
    slots_again,
    start_gather,
    start_return,
)

_collectives = torch.ops._c10d_functional


class _Call(NamedTuple):
    """One of the calls. index: rows of K and V in the order of its keys. inverse: see
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


class _Stages(NamedTuple):
    """The calls over others' keys: lists of the ops' arguments."""

    query_rows: list[Tensor]
    index_K2: list[Tensor]
    inverse_UR: list[Tensor]
    cu_q: list[Tensor]
    cu_k: list[Tensor]
    max_q: list[int]
    max_k: list[int]
    softcap: float

    def of(self, s: int) -> tuple[Tensor, _Call]:
        """The query rows of stage s, and its call."""
        where = (self.cu_q[s], self.cu_k[s], self.max_q[s], self.max_k[s])
        segments = Segments.of(*where, 0, self.softcap, is_causal=False)
        return self.query_rows[s], _Call(segments, self.index_K2[s], self.inverse_UR[s])


def _merge(
    out_THD: Tensor, lse_HT: Tensor, other: tuple[Tensor, Tensor], query_rows: Tensor
) -> None:
    """Merge a later call's output and log-sum-exp into those so far, in place."""
    other_THD, other_HT = other
    own_HT = lse_HT.index_select(1, query_rows)
    both_HT = torch.logaddexp(own_HT, other_HT)
    share = (other_HT - both_HT).exp().t()[..., None]
    own_THD = out_THD.index_select(0, query_rows)
    merged = torch.lerp(own_THD.to(share.dtype), other_THD.to(share.dtype), share)
    out_THD.index_copy_(0, query_rows, merged.to(out_THD.dtype))
    lse_HT.index_copy_(1, query_rows, both_HT)


class _QueryGradient:
    """The sum of the calls' gradients of Q, rounded once.

    One later call's is kept as it is; those of several are added up in float32 as they come.
    """

    def __init__(self, q_THD: Tensor, num_stages: int) -> None:
        self.rows: Tensor | None = None
        self.later = None
        if num_stages > 1:
            self.later = q_THD.new_zeros(q_THD.shape, dtype=sum_dtype(q_THD))

    def add(self, dq: Tensor, query_rows: Tensor) -> None:
        if self.later is None:
            self.later, self.rows = dq, query_rows
        else:
            added = self.later.index_select(0, query_rows) + dq
            self.later.index_copy_(0, query_rows, added)

    def with_own(self, own_dq: Tensor) -> Tensor:
        """The sum of all, [T, H, D], in the dtype of own_dq."""
        assert self.later is not None
        dq_THD = own_dq.contiguous()
        if self.rows is None:
            return (dq_THD + self.later).to(dq_THD.dtype)
        added = dq_THD.index_select(0, self.rows).to(sum_dtype(dq_THD)) + self.later
        dq_THD.index_copy_(0, self.rows, added.to(dq_THD.dtype))
        return dq_THD


def _backward_of(
    rows: Tensor,
    call: _Call,
    kv_R2GD: Tensor,
    q_THD: Tensor,
    grad_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    backend: str,
    *,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """Wait for a stage's keys; `_Call.backward` of its queries, which are `rows` of the local
    ones."""
    q, grad, out = (x.index_select(0, rows) for x in (q_THD, grad_THD, out_THD))
    arrived = _collectives.wait_tensor(kv_R2GD)
    keys = segment_keys(arrived, call.index, call.segments, backend)
    saved = SavedTensors(q, *keys, out, lse_HT.index_select(1, rows))
    return call.backward(backend, grad, saved, fused=fused)


def _fake_attend(
    q: Tensor, k: Tensor, _v: Tensor, arriving: list[Tensor], *_: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return (*attention_like(q), [gradient_slot(k, x.shape[0], k.dtype) for x in arriving])


@custom_op("attend_while_gathering", fake=_fake_attend)
def attend_while_gathering(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    arriving: list[Tensor],
    slots: list[Tensor],
    own_slot: Tensor,
    own_index: Tensor,
    own_inverse: Tensor,
    own_cu_q: Tensor,
    own_cu_k: Tensor,
    query_rows: list[Tensor],
    index_K2: list[Tensor],
    inverse_UR: list[Tensor],
    cu_q: list[Tensor],
    cu_k: list[Tensor],
    sent_N: list[Tensor],
    splits: Tensor | None,
    own_max_q: int,
    own_max_k: int,
    max_q: list[int],
    max_k: list[int],
    softcap: float,
    backend: str,
    cp: int,
    group_name: str,
    keep_gathered: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output [T, H, D], log-sum-exp [H, T], and slots for the gather of backward, [R, 2, G, D].

    arriving, slots, own_slot: `gather_kv`'s. own_*, query_rows and so on: see `AttentionRows`. The
    output is differentiable in q and in the slots, whose gradients are those of k and v: travelling
    and not.
    """
    own = Segments.of(own_cu_q, own_cu_k, own_max_q, own_max_k, 0, softcap)
    both = torch.stack([k_TGD, v_TGD], 1)
    out, lse = forward(backend, q_THD, *segment_keys(both, own_index, own, backend), own)
    # Outputs of several merges are rounded once, at the end.
    merged_in = sum_dtype(out) if len(arriving) > 1 else out.dtype
    out_THD, lse_HT = out.to(merged_in).contiguous(), lse.contiguous()
    del both, out, lse
    stages = _Stages(query_rows, index_K2, inverse_UR, cu_q, cu_k, max_q, max_k, softcap)
    for s in range(len(query_rows)):
        rows, call = stages.of(s)
        kv_R2GD = _collectives.wait_tensor(arriving[s])
        k, v = segment_keys(kv_R2GD, call.index, call.segments, backend)
        other = forward(backend, q_THD.index_select(0, rows), k, v, call.segments)
        _merge(out_THD, lse_HT, other, rows)
        del kv_R2GD, k, v, other
    return out_THD.to(q_THD.dtype), lse_HT, slots_again(k_TGD, inverse_UR)


def _returned(arguments: tuple[Any, ...]) -> list[int]:
    inverse_UR, sent_N, cp = arguments[8], arguments[11], arguments[19]
    return returned_rows(inverse_UR, sent_N, cp)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, _v: Tensor, _g: list[Tensor], *arguments: Any
) -> tuple[Tensor, list[Tensor], Tensor]:
    *_, wire, _ = arguments
    returning = [gathered_like(k, n).to(wire) for n in _returned(arguments)]
    own = gathered_like(k, k.shape[0])
    return q.new_empty(q.shape), returning, own.to(sum_dtype(k))


@custom_op("attend_while_gathering_backward", fake=_fake_backward)
def attend_while_gathering_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    arriving: list[Tensor],
    out_THD: Tensor,
    lse_HT: Tensor,
    own_index: Tensor,
    own_inverse: Tensor,
    own_cu_q: Tensor,
    own_cu_k: Tensor,
    query_rows: list[Tensor],
    index_K2: list[Tensor],
    inverse_UR: list[Tensor],
    cu_q: list[Tensor],
    cu_k: list[Tensor],
    sent_N: list[Tensor],
    splits: Tensor | None,
    own_max_q: int,
    own_max_k: int,
    max_q: list[int],
    max_k: list[int],
    softcap: float,
    backend: str,
    cp: int,
    group_name: str,
    wire: torch.dtype,
    fused: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Gradients of q; of each stage those of the local K and V, of all [T, 2, G, D] or by need [N,
    2, G, D] in dtype `wire`, which only `receive_kv_gradient` may read; and those of this rank's
    own use, [T, 2, G, D]. arriving: empty to gather K and V again."""
    of_own = Segments.of(own_cu_q, own_cu_k, own_max_q, own_max_k, 0, softcap)
    own = _Call(of_own, own_index, own_inverse)
    where = (inverse_UR, sent_N, splits, cp, group_name)
    arriving = list(arriving or start_gather(k_TGD, v_TGD, *where))
    of_queries = _QueryGradient(q_THD, len(query_rows))
    stages = _Stages(query_rows, index_K2, inverse_UR, cu_q, cu_k, max_q, max_k, softcap)
    returning: list[Tensor] = []
    of_all = (q_THD, grad_THD, out_THD, lse_HT)
    for s, rows in enumerate(query_rows):
        # Autograd may hold the gather; all else of a stage is freed before the next call.
        kv_R2GD = arriving.pop(0)
        dq, dkv_R2GD = _backward_of(*stages.of(s), kv_R2GD, *of_all, backend, fused=fused)
        del kv_R2GD
        of_queries.add(dq, rows)
        returning.append(start_return(dkv_R2GD.to(wire), splits, s, cp, group_name))
        del dq, dkv_R2GD
    keys = segment_keys(torch.stack([k_TGD, v_TGD], 1), own_index, of_own, backend)
    saved = SavedTensors(q_THD, *keys, out_THD, lse_HT)
    own_dq, own_T2GD = own.backward(backend, grad_THD, saved, fused=fused)
    return of_queries.with_own(own_dq), returning, own_T2GD


_NUM_BEFORE = 10
"""Inputs of the op before its lists of stages: q, k, v, arriving, slots, own_slot and own_*."""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q_THD, k_TGD, v_TGD, arriving, slots, _, *own = inputs[:_NUM_BEFORE]
    lists, splits = inputs[_NUM_BEFORE : _NUM_BEFORE + 6], inputs[_NUM_BEFORE + 6]
    *static, keep_gathered, fused = inputs[_NUM_BEFORE + 7 :]
    ctx.static = (*static, slots[0].dtype, fused)
    ctx.num_arriving, ctx.keeps_gathered = len(arriving), keep_gathered
    kept = arriving if keep_gathered else []
    ctx.sizes = [len(kept), *(len(tensors) for tensors in lists)]
    out_THD, lse_HT, _ = output
    flat = [tensor for tensors in (kept, *lists) for tensor in tensors]
    ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_HT, *own, splits, *flat)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_THD: Tensor | None, _: Any, gathering: list[Tensor | None]
) -> tuple[Any, ...]:
    _, *sizes = ctx.sizes
    empty = [None] * ctx.num_arriving
    rest = (*(None,) * 4, *([None] * size for size in sizes), *(None,) * 11)
    # Only the log-sum-exp was differentiated.
    if grad_THD is None:
        return None, None, None, empty, empty, None, *rest
    q_THD, k_TGD, v_TGD, out_THD, lse_HT, *saved = ctx.saved_tensors
    own, splits, flat = saved[:4], saved[4], saved[5:]
    ends = [sum(ctx.sizes[: i + 1]) for i in range(len(ctx.sizes))]
    arriving, *lists = (flat[end - size : end] for end, size in zip(ends, ctx.sizes, strict=True))
    if gathering[0] is not None and not ctx.keeps_gathered:
        arriving = gathering
    dq_THD, returning, own_T2GD = attend_while_gathering_backward(
        *(grad_THD, q_THD, k_TGD, v_TGD, arriving, out_THD, lse_HT),
        *(*own, *lists, splits, *ctx.static),
    )
    return dq_THD, None, None, empty, returning, own_T2GD, *rest


attend_while_gathering.register_autograd(_differentiate, setup_context=_keep)
