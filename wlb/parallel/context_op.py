"""The custom ops of context attention: wlb::gather_kv, wlb::context_attend and their backward.

They contain their collectives, so that one compiled graph serves all lengths and the compiler
cannot merge the exchanges of forward and backward, which would keep their result. `slot`s, tensors
of the right shape without memory, bring as gradients what backward receives while it computes.
Without `sent` and `splits` the exchange is an all-gather. Lists have an entry for each stage of the
exchange. Shapes, besides those of `context`: R rows that arrive, N rows sent by need, K keys of
segments, U uses of a row, W receivers of a row.
"""

from typing import Any

import torch
from torch import Tensor

from wlb.kernels import Segments
from wlb.kernels.fused import fused_sum_uses
from wlb.kernels.op import (
    BACKENDS,
    SavedTensors,
    attention_like,
    backward,
    custom_op,
    forward,
    sum_dtype,
)

_collectives = torch.ops._c10d_functional


def start_gather(
    k_TGD: Tensor,
    v_TGD: Tensor,
    inverse_UR: list[Tensor],
    sent_N: list[Tensor],
    splits: Tensor | None,
    cp: int,
    group_name: str,
) -> list[Tensor]:
    """Start bringing K and V of other ranks here, [R, 2, G, D] in each stage. splits: see
    `SentRows`; it is on the host, so that nothing waits for the device."""
    both = torch.stack([k_TGD, v_TGD], 1)
    if splits is None:
        parts = both.split(returned_rows(inverse_UR, sent_N, cp))
        return [_collectives.all_gather_into_tensor(x, cp, group_name) for x in parts]
    return [
        _collectives.all_to_all_single(both.index_select(0, index), received, sent, group_name)
        for index, (received, sent) in zip(sent_N, splits.tolist(), strict=True)
    ]


def start_return(
    dkv_R2GD: Tensor, splits: Tensor | None, stage: int, cp: int, group_name: str
) -> Tensor:
    """Start bringing a stage's gradients to the ranks of their rows: [T, 2, G, D], added up over
    ranks, or with an exchange by need [N, 2, G, D], those of each receiver after the other's."""
    if splits is None:
        return _collectives.reduce_scatter_tensor(dkv_R2GD, "sum", cp, group_name)
    received, sent = splits[stage].tolist()
    return _collectives.all_to_all_single(dkv_R2GD, sent, received, group_name)


def segment_keys(
    kv_R2GD: Tensor, index_K: Tensor, segments: Segments, backend: str
) -> tuple[Tensor, Tensor]:
    """K and V as the backend takes them: the buffer's rows, or each segment's keys in order."""
    if not reads_buffer(segments, backend):
        kv_R2GD = kv_R2GD.index_select(0, index_K)
    return kv_R2GD[:, 0], kv_R2GD[:, 1]


def reads_buffer(segments: Segments, backend: str) -> bool:
    return BACKENDS[backend].takes_key_rows and segments.key_rows is not None


def gradients_by_row(
    dk_KGD: Tensor, dv_KGD: Tensor, inverse_UR: Tensor, *, fused: bool = False
) -> Tensor:
    """Gradients of the gathered rows, [R, 2, G, D]: a gather per use, added in float32. fused: in
    one kernel, without copies, bit-equal."""
    if fused:
        return fused_sum_uses(dk_KGD, dv_KGD, inverse_UR)
    shape = (inverse_UR.shape[1], 2, *dk_KGD.shape[1:])
    total = dk_KGD.new_empty(shape, dtype=sum_dtype(dk_KGD))
    for i, grad_KGD in enumerate((dk_KGD, dv_KGD)):
        # Rows without a use read an appended row of zeros.
        used = torch.cat([grad_KGD, grad_KGD.new_zeros((1, *grad_KGD.shape[1:]))])
        total[:, i] = used.index_select(0, inverse_UR[0])
        for index_R in inverse_UR[1:]:
            total[:, i] += used.index_select(0, index_R)
    return total


def gathered_like(x_TGD: Tensor, num_rows: int) -> Tensor:
    """A buffer for `num_rows` rows of K and V, [num_rows, 2, G, D], without values."""
    return x_TGD.new_empty((num_rows, 2, *x_TGD.shape[-2:]))


def gradient_slot(x_TGD: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory, [num_rows, 2, G, D], of which only the gradient is used."""
    return x_TGD.new_empty((), dtype=dtype).expand(num_rows, 2, *x_TGD.shape[-2:])


def gathered_rows(like: Tensor, inverse_UR: list[Tensor]) -> list[Tensor]:
    """Buffers for the rows that arrive, without values."""
    return [gathered_like(like, inverse.shape[1]) for inverse in inverse_UR]


def slots_again(k_TGD: Tensor, inverse_UR: list[Tensor]) -> list[Tensor]:
    """Slots for the gather of backward, [R, 2, G, D] each."""
    return [gradient_slot(k_TGD, inverse.shape[1], k_TGD.dtype) for inverse in inverse_UR]


def returned_rows(inverse_UR: list[Tensor], sent_N: list[Tensor], cp: int) -> list[int]:
    """Rows of gradients that come back in each stage: of the own rows that this rank sent. Read
    from shapes, because len() would make each number a constant with a graph of its own."""
    if sent_N:
        return [index.shape[0] for index in sent_N]
    return [inverse.shape[1] // cp for inverse in inverse_UR]


def _fake_gather(
    k_TGD: Tensor,
    v_TGD: Tensor,
    inverse_UR: list[Tensor],
    sent_N: list[Tensor],
    returned_WT: Tensor | None,
    splits: Tensor | None,
    cp: int,
    group_name: str,
    wire: torch.dtype,
    fused: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    slots = _gradient_slots(k_TGD, returned_rows(inverse_UR, sent_N, cp), wire)
    return gathered_rows(k_TGD, inverse_UR), *slots


@custom_op("gather_kv", fake=_fake_gather)
def gather_kv(
    k_TGD: Tensor,
    v_TGD: Tensor,
    inverse_UR: list[Tensor],
    sent_N: list[Tensor],
    returned_WT: Tensor | None,
    splits: Tensor | None,
    cp: int,
    group_name: str,
    wire: torch.dtype,
    fused: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Start bringing K and V of other ranks here, [R, 2, G, D] in each stage; only attention's ops
    may read it.

    The second result is the slots for the gradients of the local K and V, of the stages' rows
    together [T, 2, G, D], or [N, 2, G, D] before they are added up, which travel in dtype `wire`.
    Backward waits for them: autograd runs it after the nodes of q, which are made later. The third
    is a slot for gradients that do not travel (`overlap_op`), [T, 2, G, D]. inverse_UR is read
    for R only.
    """
    slots = _gradient_slots(k_TGD, returned_rows(inverse_UR, sent_N, cp), wire)
    group = (cp, group_name)
    return start_gather(k_TGD, v_TGD, inverse_UR, sent_N, splits, *group), *slots


def _gradient_slots(
    k_TGD: Tensor, returned: list[int], wire: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    slots = [gradient_slot(k_TGD, rows, wire) for rows in returned]
    return slots, gradient_slot(k_TGD, k_TGD.shape[0], sum_dtype(k_TGD))


def _fake_receive(
    returning: list[Tensor],
    own_T2GD: Tensor | None,
    returned_WT: Tensor | None,
    dtype: torch.dtype,
    fused: bool,
) -> Tensor:
    by_stage = sum(x.shape[0] for x in returning)
    num_rows = by_stage if returned_WT is None else returned_WT.shape[1]
    return gathered_like(returning[0], num_rows).to(dtype)


@custom_op("receive_kv_gradient", fake=_fake_receive)
def receive_kv_gradient(
    returning: list[Tensor],
    own_T2GD: Tensor | None,
    returned_WT: Tensor | None,
    dtype: torch.dtype,
    fused: bool,
) -> Tensor:
    """Wait for gradients that attention's backward sent, [T, 2, G, D] in `dtype`. By need, those of
    a row's receivers are added here, in the order of stages and ranks, in float32. own_T2GD:
    gradients that did not travel, added last."""
    stages = [_collectives.wait_tensor(x) for x in returning]
    arrived = torch.cat(stages) if len(stages) > 1 else stages[0]
    if returned_WT is not None:
        arrived = gradients_by_row(arrived[:, 0], arrived[:, 1], returned_WT, fused=fused)
    if own_T2GD is not None:
        return (arrived + own_T2GD).to(dtype)
    return arrived.to(dtype, copy=True)


def _keep_dtype(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.dtype, ctx.fused = inputs[0].dtype, inputs[-1]
    ctx.num_stages, ctx.num_sent = len(inputs[2]), len(inputs[3])
    ctx.save_for_backward(inputs[4])
    ctx.set_materialize_grads(False)


def _receive(
    ctx: Any, _: Any, returning: list[Tensor | None], own_T2GD: Tensor | None
) -> tuple[Any, ...]:
    none = ([None] * ctx.num_stages, [None] * ctx.num_sent, *(None,) * 6)
    if returning[0] is None:
        return None, None, *none
    dkv_T2GD = receive_kv_gradient(returning, own_T2GD, *ctx.saved_tensors, ctx.dtype, ctx.fused)
    return dkv_T2GD[:, 0], dkv_T2GD[:, 1], *none


gather_kv.register_autograd(_receive, setup_context=_keep_dtype)


def _fake_gather_again(
    _: Tensor, k_TGD: Tensor, _v: Tensor, inverse_UR: list[Tensor], *_arguments: Any
) -> list[Tensor]:
    return gathered_rows(k_TGD, inverse_UR)


@custom_op("gather_kv_again", fake=_fake_gather_again)
def gather_kv_again(
    grad_SC: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    inverse_UR: list[Tensor],
    sent_N: list[Tensor],
    splits: Tensor | None,
    cp: int,
    group_name: str,
) -> list[Tensor]:
    """Start the gather of backward. grad_SC is not read: it ties the gather to the backward pass,
    or the compiler would run it in forward and keep its result."""
    group = (cp, group_name)
    return start_gather(k_TGD, v_TGD, inverse_UR, sent_N, splits, *group)


class AddAndGatherAgain(torch.autograd.Function):
    """x + y, the end of a layer; backward first starts gathering the layer's K and V again.

    Its arguments are x_SC, y_SC, k_TGD, v_TGD, splits, cp, group_name, num_stages and tensors.
    The tensors are, of every stage, context_attend's slot, whose gradient brings the gather to its
    backward, so that the MLP's and o_proj's products lie between its start and its wait; then the
    stages' inverse_UR and sent_N. `forward` unpacks them itself, because torch.compile (2.13) drops
    the first argument of a forward that is called with as many arguments as it has parameters.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x_SC, y_SC, k_TGD, v_TGD, splits, cp, group_name, num_stages, *tensors = arguments
        ctx.group, ctx.num_stages = (cp, group_name), num_stages
        ctx.save_for_backward(k_TGD, v_TGD, splits, *tensors[num_stages:])
        return x_SC + y_SC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_SC,) = grads
        k_TGD, v_TGD, splits, *rest = ctx.saved_tensors
        gathering: list[Tensor | None] = [None] * ctx.num_stages
        if ctx.needs_input_grad[8]:
            inverses, sent = rest[: ctx.num_stages], rest[ctx.num_stages :]
            splits_and_group = (splits, *ctx.group)
            gathering = gather_kv_again(grad_SC, k_TGD, v_TGD, inverses, sent, *splits_and_group)
        return grad_SC, grad_SC, *(None,) * 6, *gathering, *(None,) * len(rest)


def _fake_attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, arriving: list[Tensor], *_: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    slots = [gradient_slot(k_TGD, x.shape[0], k_TGD.dtype) for x in arriving]
    return (*attention_like(q_THD), slots)


@custom_op("context_attend", fake=_fake_attend)
def context_attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    arriving: list[Tensor],
    slot: list[Tensor],
    index_K: Tensor,
    inverse_UR: Tensor,
    sent_N: list[Tensor],
    splits: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    sliding: int,
    softcap: float,
    backend: str,
    cp: int,
    group_name: str,
    keep_gathered: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output [T, H, D], log-sum-exp, and a slot for the gather of backward, [R, 2, G, D].

    arriving, slot: `gather_kv`'s of the one stage. The output is differentiable in q and in the
    slot, whose gradient is that of k and v, still travelling. fused: of `gradients_by_row`.
    """
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k, sliding, softcap)
    k, v = segment_keys(_collectives.wait_tensor(arriving[0]), index_K, segments, backend)
    out_THD, lse = forward(backend, q_THD, k, v, segments)
    return out_THD.contiguous(), lse.contiguous(), slots_again(k_TGD, [inverse_UR])


def _fake_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor | None,
    v_TGD: Tensor | None,
    kv_gather: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    like = k_TGD if kv_gather is None else kv_gather
    assert like is not None
    *_, wire, _ = arguments
    inverse, sent, cp = arguments[3], arguments[4], arguments[13]
    (num_rows,) = returned_rows([inverse], sent, cp)
    return q_THD.new_empty(q_THD.shape), gathered_like(like, num_rows).to(wire)


@custom_op("context_attend_backward", fake=_fake_backward)
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
    sent_N: list[Tensor],
    splits: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    sliding: int,
    softcap: float,
    backend: str,
    cp: int,
    group_name: str,
    wire: torch.dtype,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of the local K and V: [T, 2, G, D], or by need [N, 2, G, D], in dtype
    `wire`, which only `receive_kv_gradient` may read. Give either k and v or kv_gather."""
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k, sliding, softcap)
    if kv_gather is None:
        assert k_TGD is not None
        assert v_TGD is not None
        group = (cp, group_name)
        gathers = start_gather(k_TGD, v_TGD, [inverse_UR], sent_N, splits, *group)
        (kv_gather,) = gathers
        del gathers
    k, v = segment_keys(_collectives.wait_tensor(kv_gather), index_K, segments, backend)
    saved = SavedTensors(q_THD, k, v, out_THD, lse)
    dq, dk, dv = backward(backend, grad_THD, saved, segments)
    # The copies are freed here; autograd holds a gather that began in AddAndGatherAgain.
    del k, v, saved
    # This frees a gather that began here.
    del kv_gather
    if reads_buffer(segments, backend):
        dkv_R2GD = torch.stack([dk, dv], 1)
    else:
        dkv_R2GD = gradients_by_row(dk, dv, inverse_UR, fused=fused)
    return dq.contiguous(), start_return(dkv_R2GD.to(wire), splits, 0, cp, group_name)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q_THD, k_TGD, v_TGD, (kv_gather,), (slot,), index, inverse, sent, splits = inputs[:9]
    offsets, (*static, keep_gathered, fused) = inputs[9:11], inputs[11:]
    ctx.static = (*static, slot.dtype, fused)
    ctx.keeps_gathered, ctx.num_sent = keep_gathered, len(sent)
    kept = (None, None, kv_gather) if keep_gathered else (k_TGD, v_TGD, None)
    out_THD, lse, _ = output
    ctx.save_for_backward(q_THD, *kept, out_THD, lse, index, inverse, splits, *offsets, *sent)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_THD: Tensor | None, _: Any, gathering: list[Tensor | None]
) -> tuple[Any, ...]:
    rest = (None, None, [None] * ctx.num_sent, *(None,) * 12)
    # Only the log-sum-exp was differentiated.
    if grad_THD is None:
        return None, None, None, [None], [None], *rest
    q_THD, k_TGD, v_TGD, kv_gather, out_THD, lse, index, inverse, splits, *tensors = (
        ctx.saved_tensors
    )
    offsets, sent = tensors[:2], tensors[2:]
    if gathering[0] is not None and not ctx.keeps_gathered:
        k_TGD, v_TGD, kv_gather = None, None, gathering[0]
    saved = (q_THD, k_TGD, v_TGD, kv_gather, out_THD, lse, index, inverse)
    dq_THD, returning = context_attend_backward(
        grad_THD, *saved, sent, splits, *offsets, *ctx.static
    )
    return dq_THD, None, None, [None], [returning], *rest


context_attend.register_autograd(_differentiate, setup_context=_keep)
