"""The custom ops of context attention: wlb::gather_kv, wlb::context_attend and their backward.

They contain their collectives, so that one compiled graph serves all lengths and the compiler
cannot merge the exchanges of forward and backward, which would keep their result. `slot`s, tensors
of the right shape without memory, bring as gradients what backward receives while it computes.
Without `sent` and `splits` the exchange is an all-gather. Shapes, besides those of `context`: R
rows that arrive, N rows sent by need, K keys of segments, U uses of a row, W receivers of a row.
"""

from typing import Any

import torch
from torch import Tensor

from wlb.kernels import Segments
from wlb.kernels.backend import SavedTensors, sum_dtype
from wlb.kernels.fused import fused_sum_uses
from wlb.kernels.op import BACKENDS, attention_like, backward, custom_op, forward

_collectives = torch.ops._c10d_functional


def start_gather(
    k_TGD: Tensor,
    v_TGD: Tensor,
    sent_N: Tensor | None,
    splits: Tensor | None,
    cp: int,
    group_name: str,
) -> Tensor:
    """Start bringing K and V of other ranks here, [R, 2, G, D]. splits: see `SentRows`; it is on
    the host, so that nothing waits for the device."""
    both = torch.stack([k_TGD, v_TGD], 1)
    if sent_N is None or splits is None:
        return _collectives.all_gather_into_tensor(both, cp, group_name)
    received, sent = splits.tolist()
    both = both.index_select(0, sent_N)
    return _collectives.all_to_all_single(both, received, sent, group_name)


def start_return(dkv_R2GD: Tensor, splits: Tensor | None, cp: int, group_name: str) -> Tensor:
    """Start bringing gradients to the ranks of their rows: [T, 2, G, D], added up over ranks, or
    with an exchange by need [N, 2, G, D], those of each receiver after the other's."""
    if splits is None:
        return _collectives.reduce_scatter_tensor(dkv_R2GD, "sum", cp, group_name)
    received, sent = splits.tolist()
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


def num_returned(local: Tensor, sent_N: Tensor | None) -> int:
    """Rows of gradients that come back. len() would make the length a constant, and each length a
    graph of its own."""
    return local.shape[0] if sent_N is None else sent_N.shape[0]


def _fake_gather(
    k_TGD: Tensor,
    v_TGD: Tensor,
    inverse_UR: Tensor,
    sent_N: Tensor | None,
    returned_WT: Tensor | None,
    splits: Tensor | None,
    cp: int,
    group_name: str,
    wire: torch.dtype,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return gathered_like(k_TGD, inverse_UR.shape[1]), *_gradient_slots(k_TGD, sent_N, wire)


@custom_op("gather_kv", fake=_fake_gather)
def gather_kv(
    k_TGD: Tensor,
    v_TGD: Tensor,
    inverse_UR: Tensor,
    sent_N: Tensor | None,
    returned_WT: Tensor | None,
    splits: Tensor | None,
    cp: int,
    group_name: str,
    wire: torch.dtype,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Start bringing K and V of other ranks here, [R, 2, G, D]; only context_attend may read it.

    The second result is the slot for the gradients of the local K and V, [T, 2, G, D], or [N, 2, G,
    D] before they are added up, which travel in dtype `wire`. Backward waits for them: autograd
    runs it after the nodes of q, which are made later. The third is a slot for gradients that do
    not travel (`overlap_op`), [T, 2, G, D]. inverse_UR is read for R only.
    """
    slots = _gradient_slots(k_TGD, sent_N, wire)
    return start_gather(k_TGD, v_TGD, sent_N, splits, cp, group_name), *slots


def _gradient_slots(
    k_TGD: Tensor, sent_N: Tensor | None, wire: torch.dtype
) -> tuple[Tensor, Tensor]:
    slot = gradient_slot(k_TGD, num_returned(k_TGD, sent_N), wire)
    return slot, gradient_slot(k_TGD, k_TGD.shape[0], sum_dtype(k_TGD))


def _fake_receive(
    returning: Tensor,
    own_T2GD: Tensor | None,
    returned_WT: Tensor | None,
    dtype: torch.dtype,
    fused: bool,
) -> Tensor:
    num_rows = returning.shape[0] if returned_WT is None else returned_WT.shape[1]
    return gathered_like(returning, num_rows).to(dtype)


@custom_op("receive_kv_gradient", fake=_fake_receive)
def receive_kv_gradient(
    returning: Tensor,
    own_T2GD: Tensor | None,
    returned_WT: Tensor | None,
    dtype: torch.dtype,
    fused: bool,
) -> Tensor:
    """Wait for gradients that context_attend_backward sent, [T, 2, G, D] in `dtype`. By need, those
    of a row's receivers are added here, in the order of ranks, in float32. own_T2GD: gradients that
    did not travel, added last."""
    arrived = _collectives.wait_tensor(returning)
    if returned_WT is not None:
        arrived = gradients_by_row(arrived[:, 0], arrived[:, 1], returned_WT, fused=fused)
    if own_T2GD is not None:
        return (arrived + own_T2GD).to(dtype)
    return arrived.to(dtype, copy=True)


def _keep_dtype(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype, ctx.fused = inputs[0].dtype, inputs[-1]
    ctx.save_for_backward(inputs[4])
    ctx.set_materialize_grads(False)


def _receive(
    ctx: Any, _: None, returning: Tensor | None, own_T2GD: Tensor | None
) -> tuple[Tensor | None, ...]:
    none = (None,) * 8
    if returning is None:
        return None, None, *none
    dkv_T2GD = receive_kv_gradient(returning, own_T2GD, *ctx.saved_tensors, ctx.dtype, ctx.fused)
    return dkv_T2GD[:, 0], dkv_T2GD[:, 1], *none


gather_kv.register_autograd(_receive, setup_context=_keep_dtype)


@custom_op("gather_kv_again", fake=lambda _, k, v, inverse, *__: gathered_like(k, inverse.shape[1]))
def gather_kv_again(
    grad_SC: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    inverse_UR: Tensor,
    sent_N: Tensor | None,
    splits: Tensor | None,
    cp: int,
    group_name: str,
) -> Tensor:
    """Start the gather of backward. grad_SC is not read: it ties the gather to the backward pass,
    or the compiler would run it in forward and keep its result."""
    return start_gather(k_TGD, v_TGD, sent_N, splits, cp, group_name)


class AddAndGatherAgain(torch.autograd.Function):
    """x + y, the end of a layer; backward first starts gathering the layer's K and V again.

    slot: context_attend's third result; its gradient brings the gather to context_attend's
    backward, so that the MLP's and o_proj's products lie between its start and its wait.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_SC: Tensor,
        y_SC: Tensor,
        slot_R2GD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        inverse_UR: Tensor,
        sent_N: Tensor | None,
        splits: Tensor | None,
        cp: int,
        group_name: str,
    ) -> Tensor:
        ctx.cp, ctx.group_name = cp, group_name
        ctx.save_for_backward(k_TGD, v_TGD, inverse_UR, sent_N, splits)
        return x_SC + y_SC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_SC,) = grads
        gathering = None
        if ctx.needs_input_grad[2]:
            gathering = gather_kv_again(grad_SC, *ctx.saved_tensors, ctx.cp, ctx.group_name)
        return grad_SC, grad_SC, gathering, *(None,) * 7


@custom_op(
    "context_attend",
    fake=lambda q, k, _, kv, *__: (*attention_like(q), gradient_slot(k, kv.shape[0], k.dtype)),
)
def context_attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    kv_gather: Tensor,
    slot: Tensor,
    index_K: Tensor,
    inverse_UR: Tensor,
    sent_N: Tensor | None,
    splits: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    backend: str,
    cp: int,
    group_name: str,
    keep_gathered: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, H, D], log-sum-exp, and a slot for the gather of backward, [R, 2, G, D].

    kv_gather, slot: `gather_kv`'s. The output is differentiable in q and in the slot, whose
    gradient is that of k and v, still travelling. fused: of `gradients_by_row`.
    """
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    k, v = segment_keys(_collectives.wait_tensor(kv_gather), index_K, segments, backend)
    out_THD, lse = forward(backend, q_THD, k, v, segments)
    again = gradient_slot(k_TGD, kv_gather.shape[0], k_TGD.dtype)
    return out_THD.contiguous(), lse.contiguous(), again


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
    num_rows = num_returned(q_THD, arguments[4])
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
    sent_N: Tensor | None,
    splits: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    backend: str,
    cp: int,
    group_name: str,
    wire: torch.dtype,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of the local K and V: [T, 2, G, D], or by need [N, 2, G, D], in dtype
    `wire`, which only `receive_kv_gradient` may read. Give either k and v or kv_gather."""
    segments = Segments.of(cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    if kv_gather is None:
        assert k_TGD is not None
        assert v_TGD is not None
        kv_gather = start_gather(k_TGD, v_TGD, sent_N, splits, cp, group_name)
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
    return dq.contiguous(), start_return(dkv_R2GD.to(wire), splits, cp, group_name)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q_THD, k_TGD, v_TGD, kv_gather, slot, *indices = inputs[:11]
    *static, keep_gathered, fused = inputs[11:]
    ctx.static = (*static, slot.dtype, fused)
    ctx.num_inputs, ctx.keeps_gathered = len(inputs), keep_gathered
    kept = (None, None, kv_gather) if keep_gathered else (k_TGD, v_TGD, None)
    out_THD, lse, _ = output
    ctx.save_for_backward(q_THD, *kept, out_THD, lse, *indices)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_THD, _, gathering = grads
    none: list[None] = [None] * ctx.num_inputs
    # Only the log-sum-exp was differentiated.
    if grad_THD is None:
        return tuple(none)
    q_THD, k_TGD, v_TGD, kv_gather, *others = ctx.saved_tensors
    if gathering is not None and not ctx.keeps_gathered:
        k_TGD, v_TGD, kv_gather = None, None, gathering
    dq_THD, returning = context_attend_backward(
        grad_THD, q_THD, k_TGD, v_TGD, kv_gather, *others, *ctx.static
    )
    return dq_THD, None, None, None, returning, *none[5:]


context_attend.register_autograd(_differentiate, setup_context=_keep)
