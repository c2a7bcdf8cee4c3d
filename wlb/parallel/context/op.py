"""The custom ops of context attention: wlb::gather_kv, wlb::context_attend and their backward.

The ops contain their collectives, so torch.compile does not see them. One compiled graph therefore
serves all lengths. And the compiler cannot replace the second gather, in backward, by keeping the
rows that forward has gathered.

A transfer starts in one op and ends in another, so that computation runs in between. In forward
the buffer of received rows is an ordinary tensor that the second op waits for. In backward autograd
passes nothing but gradients from one op to another, so we use **slots**: tensors with the right
shape but without memory, which one op returns and a later one takes. The slot's values are never
read; its gradient is the buffer of a transfer.

    forward     gather_kv -> rows, slots      context_attend(q, rows, slots) -> out
    backward    context_attend_backward       starts to send dK and dV, and returns the
                                              buffers as the gradients of the slots
                (Q's projection runs)         while they travel
                _receive, of gather_kv        waits for the gradients of its slots

`AddAndGatherAgain` uses slots in the same way for the second gather of K and V in backward.

For each op the file has its computation, the function that makes empty results for tracing
("fake"), the function that saves tensors for backward, and the derivative, in this order.

Shapes, besides those of `attention`: R rows that arrive in a stage, N rows sent in all stages
(`needed` exchange), K keys of all segments, U the largest number of segments of a rank that read
the same row, W the largest number of ranks to which the same row is sent.
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
from wlb.parallel.context.exchange import DeviceStage, stages_of
from wlb.parallel.context.rows import Transfer

_collectives = torch.ops._c10d_functional


# -- Transfers -------------------------------------------------------------------------------------


def _travelling(tensors: list[Tensor], layout: str) -> list[DeviceStage]:
    """Return an exchange's stages that have a transfer: all but the one that reads only local keys.

    Args:
        tensors: Index tensors of all stages (`FlatExchange.tensors`).
        layout: Number of CP ranks, and how each stage gets its rows (`FlatExchange.layout`).
    """
    stages, _ = stages_of(tensors, layout)
    return [stage for stage in stages if stage.transfer != Transfer.OWN]


def _start(
    both_T2GD: Tensor, tensors: list[Tensor], numbers: Tensor, layout: str, group_name: str
) -> list[Tensor]:
    """Start the transfers of K and V, and return one [R, 2, G, D] buffer for each transfer.

    Only the ops of attention may read the buffers, because they wait for the transfers first.

    Args:
        both_T2GD: Local K and V, stacked.
        tensors: Index tensors of all stages (`FlatExchange.tensors`).
        numbers: Sizes of all stages (`FlatExchange.numbers`). They are on the host, so reading how
            many rows go to each rank does not wait for the device.
        layout: Number of CP ranks, and how each stage gets its rows (`FlatExchange.layout`).
        group_name: Name of the CP group.
    """
    stages = _travelling(tensors, layout)
    started: list[Tensor] = []
    # Each stage of an all-gather sends the next part of the local rows.
    at = 0
    for stage, of_stage in zip(stages, numbers.tolist()[-len(stages) :], strict=True):
        if stage.sent_N is None:
            part = both_T2GD[at : at + stage.num_sent]
            at += stage.num_sent
            started.append(_collectives.all_gather_into_tensor(part, stage.cp, group_name))
        else:
            part = both_T2GD.index_select(0, stage.sent_N)
            splits = stage.splits(of_stage)
            started.append(_collectives.all_to_all_single(part, *splits, group_name))
    return started


def _start_return(
    dkv_R2GD: Tensor, stage: DeviceStage, numbers: list[int], group_name: str
) -> Tensor:
    """Start to send the gradients of a stage's rows back to the ranks that have the rows.

    If all ranks received all rows, a reduce-scatter also adds the gradients up. Otherwise an
    all-to-all returns the gradients from each receiver separately, and `receive_kv_gradient` adds
    them up.

    Args:
        dkv_R2GD: Gradients of the rows of K and V that this rank received.
        stage: The stage of the exchange.
        numbers: Sizes of this stage, from `FlatExchange.numbers`.
        group_name: Name of the CP group.
    """
    # Sum in float32: a bfloat16 sum would be rounded once per rank, so its error would grow with
    # the number of CP ranks.
    dkv_R2GD = dkv_R2GD.to(sum_dtype(dkv_R2GD))
    if stage.sent_N is None:
        return _collectives.reduce_scatter_tensor(dkv_R2GD, "sum", stage.cp, group_name)
    received, sent = stage.splits(numbers)
    return _collectives.all_to_all_single(dkv_R2GD, sent, received, group_name)


def _rows_like(x_TGD: Tensor, num_rows: int) -> Tensor:
    """Allocate a [num_rows, 2, G, D] buffer for rows of K and V with the heads of `x_TGD`."""
    return x_TGD.new_empty((num_rows, 2, *x_TGD.shape[-2:]))


def _slot(x_TGD: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Make a slot: a [num_rows, 2, G, D] placeholder without memory, used only for its gradient.

    It takes no memory because it is one value, expanded.

    G, D and the device are those of x_TGD.
    """
    return x_TGD.new_empty((), dtype=dtype).expand(num_rows, 2, *x_TGD.shape[-2:])


def _gradient_slots(k_TGD: Tensor, stages: list[DeviceStage]) -> list[Tensor]:
    """Make the slots (placeholders) whose gradients will be the gradients of this rank's K and V.

    There is a slot for each of `stages`, and a last one for the attention call over local keys. See
    `gather_kv` and the module docstring.
    """
    num_rows = (*(stage.num_sent for stage in stages), k_TGD.shape[0])
    return [_slot(k_TGD, num, sum_dtype(k_TGD)) for num in num_rows]


def _fake_gather(
    k_TGD: Tensor, _v: Tensor, tensors: list[Tensor], _n: Tensor, layout: str, *_: Any
) -> tuple[list[Tensor], list[Tensor]]:
    stages = _travelling(tensors, layout)
    return [_rows_like(k_TGD, x.num_rows) for x in stages], _gradient_slots(k_TGD, stages)


@custom_op("gather_kv", fake=_fake_gather)
def gather_kv(
    k_TGD: Tensor,
    v_TGD: Tensor,
    tensors: list[Tensor],
    numbers: Tensor,
    layout: str,
    group_name: str,
    fused: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Start to receive K and V of other ranks; each stage fills a [R, 2, G, D] buffer.

    Only the ops of attention may read the buffers, because they wait for the transfer.

    Args:
        k_TGD: Local keys.
        v_TGD: Local values.
        tensors: Index tensors of all stages (`FlatExchange.tensors`).
        numbers: Numbers of rows and keys of each stage, on the host (`FlatExchange.numbers`).
        layout: Number of CP ranks, and how each stage gets its rows (`FlatExchange.layout`).
        group_name: Name of the CP group.
        fused: Let a Triton kernel add up the gradients that return in backward.

    Returns:
        The buffers, and slots: placeholders without memory, whose gradients in backward are the
        gradients of the local K and V. Each stage has a slot for the gradients that other ranks
        send back. With an all-gather, the slots of all stages together have T rows. With a `needed`
        exchange they have as many rows as this rank sends, because a row gets one gradient from
        each rank that received it. The last slot, [T, 2, G, D], is for the gradients from the
        attention call over local keys.
    """
    # The backward of this op waits for the gradients. Autograd runs the nodes of later operations
    # first. Therefore the model projects Q after this op: the backward of that projection then runs
    # while the gradients travel.
    slots = _gradient_slots(k_TGD, _travelling(tensors, layout))
    return _start(torch.stack([k_TGD, v_TGD], 1), tensors, numbers, layout, group_name), slots


def _fake_receive(
    returning: list[Tensor],
    own_T2GD: Tensor | None,
    returned_WT: Tensor | None,
    dtype: torch.dtype,
    fused: bool,
) -> Tensor:
    by_stage = sum(x.shape[0] for x in returning)
    num_rows = by_stage if returned_WT is None else returned_WT.shape[1]
    return _rows_like(returning[0], num_rows).to(dtype)


@custom_op("receive_kv_gradient", fake=_fake_receive)
def receive_kv_gradient(
    returning: list[Tensor],
    own_T2GD: Tensor | None,
    returned_WT: Tensor | None,
    dtype: torch.dtype,
    fused: bool,
) -> Tensor:
    """Wait for the gradients of K and V from other ranks; returns each row's sum, [T, 2, G, D].

    Args:
        returning: Gradients of the rows sent in each stage, still in transfer.
        own_T2GD: Gradients from the attention call over local keys, which are added last. None
            without such a call.
        returned_WT: `RankExchange.returned`, which says where the gradients of each local row are.
            They are added in float32, in the order of stages and ranks. None for an all-gather,
            whose gradients arrive already added up.
        dtype: Dtype of the result.
        fused: Let a Triton kernel add the gradients.
    """
    stages = [_collectives.wait_tensor(x) for x in returning]
    arrived = torch.cat(stages) if len(stages) > 1 else stages[0]
    if returned_WT is not None:
        arrived = gradients_by_row(arrived[:, 0], arrived[:, 1], returned_WT, fused=fused)
    if own_T2GD is not None:
        return (arrived + own_T2GD).to(dtype)
    return arrived.to(dtype, copy=True)


def _keep_returned(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    k_TGD, _, tensors, _, layout, _, fused = inputs
    _, returned = stages_of(tensors, layout)
    ctx.dtype, ctx.fused, ctx.num_tensors = k_TGD.dtype, fused, len(tensors)
    ctx.save_for_backward(returned)
    ctx.set_materialize_grads(False)


def _receive(ctx: Any, _: Any, slots: list[Tensor | None]) -> tuple[Any, ...]:
    none = ([None] * ctx.num_tensors, *(None,) * 4)
    *returning, own_T2GD = slots
    # Attention's output was not part of the loss, so there are no gradients.
    if returning[0] is None:
        return None, None, *none
    dkv_T2GD = receive_kv_gradient(returning, own_T2GD, *ctx.saved_tensors, ctx.dtype, ctx.fused)
    return dkv_T2GD[:, 0], dkv_T2GD[:, 1], *none


gather_kv.register_autograd(_receive, setup_context=_keep_returned)


def _fake_gather_again(
    _: Tensor, k_TGD: Tensor, _v: Tensor, tensors: list[Tensor], _n: Tensor, layout: str, _g: str
) -> list[Tensor]:
    return [_rows_like(k_TGD, stage.num_rows) for stage in _travelling(tensors, layout)]


@custom_op("gather_kv_again", fake=_fake_gather_again)
def gather_kv_again(
    grad_SC: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    tensors: list[Tensor],
    numbers: Tensor,
    layout: str,
    group_name: str,
) -> list[Tensor]:
    """Start to receive K and V of other ranks a second time, during backward.

    Args:
        grad_SC: Any gradient of the backward pass. Its values are not read. This argument makes the
            gather depend on the backward pass; otherwise the compiler would run the gather in
            forward and keep the result.
        k_TGD: Local keys.
        v_TGD: Local values.
        tensors: Index tensors of all stages of the exchange (`FlatExchange.tensors`).
        numbers: Numbers of rows and keys of each stage, on the host (`FlatExchange.numbers`).
        layout: Number of CP ranks, and how each stage gets its rows (`FlatExchange.layout`).
        group_name: Name of the CP group.

    Returns:
        A buffer [rows to receive, 2, G, D] for each transfer. The transfers are still running.
    """
    return _start(torch.stack([k_TGD, v_TGD], 1), tensors, numbers, layout, group_name)


class AddAndGatherAgain(torch.autograd.Function):
    """Adds x and y at the end of a layer; backward starts to gather the layer's K and V again.

    The rows of K and V travel while the backward of the MLP and of the output projection runs. Then
    attention's backward takes them. Autograd passes only gradients from one backward to another. So
    `context_attend` returns slots, placeholders without memory, which are inputs of this function.
    The backward of this function returns the buffers of the rows as the gradients of the slots, and
    autograd hands these gradients to the backward of `context_attend`.

    The arguments are x_SC, y_SC, k_TGD, v_TGD; the exchange's `FlatExchange.numbers` and
    `FlatExchange.layout`; group_name, the CP group; num_slots; then `num_slots` slots; and
    `FlatExchange.tensors`.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Return x + y, and save K and V, which `backward` starts to gather again."""
        # If forward is called with exactly as many arguments as it has parameters, torch.compile
        # (2.13) drops the first one. Therefore forward takes all of them as *arguments.
        x_SC, y_SC, k_TGD, v_TGD, numbers, layout, group_name, num_slots, *rest = arguments
        ctx.static, ctx.num_slots = (layout, group_name), num_slots
        ctx.save_for_backward(k_TGD, v_TGD, numbers, *rest[num_slots:])
        return x_SC + y_SC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Start to gather K and V again; return the gradient of x + y as those of x and of y."""
        (grad_SC,) = grads
        k_TGD, v_TGD, numbers, *tensors = ctx.saved_tensors
        gathering: list[Tensor | None] = [None] * ctx.num_slots
        # Argument 8 is the first slot. If it needs no gradient, attention has no backward, and
        # nobody needs the rows.
        if ctx.needs_input_grad[8]:
            gathering = gather_kv_again(grad_SC, k_TGD, v_TGD, tensors, numbers, *ctx.static)
        return grad_SC, grad_SC, *(None,) * 6, *gathering, *(None,) * len(tensors)


# -- Attention -------------------------------------------------------------------------------------


def segment_keys(
    kv_R2GD: Tensor, index_K: Tensor, segments: Segments, backend: str
) -> tuple[Tensor, Tensor]:
    """Return the tensors of K and of V that are passed to the attention kernel.

    Args:
        kv_R2GD: Rows of K and V, received or local.
        index_K: Row of each key, segment by segment.
        segments: Segments of the attention call.
        backend: Name of the kernel. Some kernels look up keys in the whole buffer; for the others
            the keys of each segment are copied out of it.
    """
    if not reads_buffer(segments, backend):
        kv_R2GD = kv_R2GD.index_select(0, index_K)
    return kv_R2GD[:, 0], kv_R2GD[:, 1]


def reads_buffer(segments: Segments, backend: str) -> bool:
    """Return whether the kernel looks up keys in the buffer of K and V rows, so none are copied."""
    return BACKENDS[backend].takes_key_rows and segments.key_rows is not None


def gradients_by_row(
    dk_KGD: Tensor, dv_KGD: Tensor, inverse_UR: Tensor, *, fused: bool = False
) -> Tensor:
    """Return the gradients of rows of K and V, [R, 2, G, D]: for each row the sum over its copies.

    A row is copied once for each segment that attends to it. The sums are in float32.

    Args:
        dk_KGD: Gradient of each key.
        dv_KGD: Gradient of each value.
        inverse_UR: inverse_UR[u, r] is the index of the (u + 1)-th key that was copied from row r,
            or the number of keys if there are fewer (`RankStage.inverse`).
        fused: Use one Triton kernel, which needs no temporary copies and returns the same values.
    """
    if fused:
        return fused_sum_uses(dk_KGD, dv_KGD, inverse_UR)
    shape = (inverse_UR.shape[1], 2, *dk_KGD.shape[1:])
    total = dk_KGD.new_empty(shape, dtype=sum_dtype(dk_KGD))
    for i, grad_KGD in enumerate((dk_KGD, dv_KGD)):
        # Append a row of zeros: inverse_UR has its index where a row has fewer than U copies.
        used = torch.cat([grad_KGD, grad_KGD.new_zeros((1, *grad_KGD.shape[1:]))])
        total[:, i] = used.index_select(0, inverse_UR[0])
        for index_R in inverse_UR[1:]:
            total[:, i] += used.index_select(0, index_R)
    return total


def _merge(
    out_THD: Tensor, lse_HT: Tensor, other: tuple[Tensor, Tensor], query_rows: Tensor
) -> None:
    """Merge the result of a later attention call into the results of earlier calls, in place.

    Args:
        out_THD: Output of the earlier calls, for all queries.
        lse_HT: Log-sum-exp of the earlier calls.
        other: Output and log-sum-exp of the later call, for some queries.
        query_rows: Rows of these queries in `out_THD`.
    """
    other_THD, other_HT = other
    # The denominator of the softmax over all keys is the sum of both calls' denominators.
    before_HT = lse_HT.index_select(1, query_rows)
    both_HT = torch.logaddexp(before_HT, other_HT)
    # Average the outputs, each weighted with its call's share of the denominator.
    share = (other_HT - both_HT).exp().t()[..., None]
    before_THD = out_THD.index_select(0, query_rows)
    merged = torch.lerp(before_THD.to(share.dtype), other_THD.to(share.dtype), share)
    out_THD.index_copy_(0, query_rows, merged.to(out_THD.dtype))
    lse_HT.index_copy_(1, query_rows, both_HT)


def _fake_attend(
    q_THD: Tensor, k_TGD: Tensor, _v: Tensor, begun: list[Tensor], *arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    tensors, _, layout, *_ = arguments
    arriving = begun[: len(_travelling(tensors, layout))]
    slots = [_slot(k_TGD, x.shape[0], k_TGD.dtype) for x in arriving]
    return (*attention_like(q_THD), slots)


@custom_op("context_attend", fake=_fake_attend)
def context_attend(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    begun: list[Tensor],
    tensors: list[Tensor],
    numbers: Tensor,
    layout: str,
    softcap: float,
    backend: str,
    group_name: str,
    keep_gathered: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute attention with one call per stage, waiting for a stage's keys just before its call.

    The output is differentiable in q and in the slots of `begun`. The gradients of k and v travel
    as the gradients of those slots, so k and v themselves get no gradients here.

    Args:
        q_THD: Queries.
        k_TGD: Local keys.
        v_TGD: Local values.
        begun: Both results of `gather_kv`, concatenated: the buffers in transfer, then the slots.
        tensors: Index tensors of all stages (`FlatExchange.tensors`).
        numbers: Numbers of rows and keys of each stage, on the host (`FlatExchange.numbers`).
        layout: Number of CP ranks, and how each stage gets its rows (`FlatExchange.layout`).
        softcap: Cap on scores, 0 for none.
        backend: Name of the attention kernel.
        group_name: Name of the CP group.
        keep_gathered: Keep the received rows for backward. Otherwise backward gathers them again.
        fused: Whether a Triton kernel adds up the gradients of a row's copies. A row is copied
            once for each segment that attends to it.

    Returns:
        The output [T, H, D], the log-sum-exp [H, T], and for each stage a slot [R, 2, G, D] for the
        R rows that arrive in it: `AddAndGatherAgain`, which gathers them again in backward, passes
        them on as the gradient of this slot.
    """
    stages, _ = stages_of(tensors, layout)
    arriving = begun[: len(_travelling(tensors, layout))]
    left = list(arriving)
    out_THD: Tensor | None = None
    lse_HT: Tensor | None = None
    for stage, of_stage in zip(stages, numbers.tolist(), strict=True):
        # 1. Wait for the stage's keys. They travelled while earlier calls ran.
        segments, rows = stage.segments(of_stage, softcap), stage.query_rows
        is_own = stage.transfer == Transfer.OWN
        kv = torch.stack([k_TGD, v_TGD], 1) if is_own else _collectives.wait_tensor(left.pop(0))
        keys = segment_keys(kv, stage.index_K, segments, backend)
        # 2. Compute attention of the queries that attend to these keys.
        q = q_THD if rows is None else q_THD.index_select(0, rows)
        out, lse = forward(backend, q, *keys, segments)
        del kv, keys, q
        # 3. Merge the result with those of earlier calls. With three or more calls, sum in float32
        # and round once at the end.
        if out_THD is None or lse_HT is None or rows is None:
            merged_in = sum_dtype(out) if len(stages) > 2 else out.dtype
            out_THD, lse_HT = out.to(merged_in).contiguous(), lse.contiguous()
        else:
            _merge(out_THD, lse_HT, (out, lse), rows)
        del out, lse
    assert out_THD is not None
    assert lse_HT is not None
    again = [_slot(k_TGD, x.shape[0], k_TGD.dtype) for x in arriving]
    return out_THD.to(q_THD.dtype), lse_HT, again


def _stage_backward(
    stage: DeviceStage,
    segments: Segments,
    local: list[Tensor],
    left: list[Tensor],
    of_queries: list[Tensor],
    backend: str,
    *,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of one attention call, which reads R rows of K and V.

    Args:
        stage: The stage of the exchange whose rows the call reads.
        segments: Segments of the call.
        local: Local k and v. Only the stage without a transfer reads them.
        left: The received rows of this stage and of each later one. This function removes the
            first entry, unless the stage has no transfer.
        of_queries: For all queries: gradient of the output, q, output and log-sum-exp.
        backend: Name of the attention kernel.
        fused: Whether a Triton kernel adds up the gradients of a row's copies. A row is copied
            once for each segment that attends to it.

    Returns:
        dQ of the call's queries; and dK and dV of the R rows as one tensor [R, 2, G, D]. The tensor
        is in float32, unless the kernel itself looked up keys in the R rows (`reads_buffer`).
    """
    is_own = stage.transfer == Transfer.OWN
    kv = torch.stack(local, 1) if is_own else _collectives.wait_tensor(left.pop(0))
    keys = segment_keys(kv, stage.index_K, segments, backend)
    # Drop the reference to the buffer. This frees it if the gather started in this op; if it
    # started in AddAndGatherAgain, autograd keeps it alive.
    del kv
    grad, q, out, lse = of_queries
    if (rows := stage.query_rows) is not None:
        grad, q, out = [x.index_select(0, rows) for x in (grad, q, out)]
        lse = lse.index_select(1, rows)
    dq, dk, dv = backward(backend, grad, SavedTensors(q, *keys, out, lse), segments)
    # Free copies of keys and queries before the sums below allocate memory.
    del keys, grad, q, out, lse
    if reads_buffer(segments, backend):
        return dq, torch.stack([dk, dv], 1)
    return dq, gradients_by_row(dk, dv, stage.inverse_UR, fused=fused)


def _fake_backward(
    grad_THD: Tensor,
    saved: list[Tensor],
    arriving: list[Tensor],
    tensors: list[Tensor],
    _n: Tensor,
    layout: str,
    *_: Any,
) -> tuple[Tensor, list[Tensor]]:
    q_THD, like = saved[0], arriving[0] if arriving else saved[3]
    travelling = _travelling(tensors, layout)
    rows = [stage.num_sent for stage in travelling]
    if Transfer.OWN in layout.split():
        rows.append(saved[3].shape[0])
    gradients = [_rows_like(like, num).to(sum_dtype(like)) for num in rows]
    return q_THD.new_empty(q_THD.shape), gradients


@custom_op("context_attend_backward", fake=_fake_backward)
def context_attend_backward(
    grad_THD: Tensor,
    saved: list[Tensor],
    arriving: list[Tensor],
    tensors: list[Tensor],
    numbers: Tensor,
    layout: str,
    softcap: float,
    backend: str,
    group_name: str,
    fused: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Compute dQ, and start to send each stage's dK and dV back to the ranks that have the rows.

    Args:
        grad_THD: Gradient of the output.
        saved: q, output and log-sum-exp. Local k and v follow if a call reads local keys or if this
            op must gather the rows.
        arriving: Received rows of each stage. If empty, this op gathers K and V.
        tensors: Index tensors of all stages (`FlatExchange.tensors`).
        numbers: Numbers of rows and keys of each stage, on the host (`FlatExchange.numbers`).
        layout: Number of CP ranks, and how each stage gets its rows (`FlatExchange.layout`).
        softcap: Cap on scores, 0 for none.
        backend: Name of the attention kernel.
        group_name: Name of the CP group.
        fused: Whether a Triton kernel adds up the gradients of a row's copies. A row is copied
            once for each segment that attends to it.

    Returns:
        dQ, and a list of gradients of K and V in float32. First comes one tensor for each transfer:
        the gradients that return to this rank, still in transfer, which only `receive_kv_gradient`
        may read. If there is an attention call over local keys, the last entry has the gradients of
        these keys.
    """
    q_THD, out_THD, lse_HT, *local = saved
    left = list(arriving)
    if not left:
        left = _start(torch.stack(local, 1), tensors, numbers, layout, group_name)
    of_queries = [grad_THD, q_THD, out_THD, lse_HT]
    stages, _ = stages_of(tensors, layout)
    both = list(zip(stages, numbers.tolist(), strict=True))
    # The first call gives dQ of all queries, and later calls give dQ of some queries. If there are
    # two or more later calls, add their results up in float32 (`several`).
    dq_THD = one = rows = None
    several = q_THD.new_zeros(q_THD.shape, dtype=sum_dtype(q_THD)) if len(stages) > 2 else None
    gradients: list[Tensor] = []
    # Process local keys last, so that the gradients of other ranks' keys travel meanwhile.
    for stage, of_stage in sorted(both, key=lambda pair: pair[0].transfer == Transfer.OWN):
        segments = stage.segments(of_stage, softcap)
        dq, dkv_R2GD = _stage_backward(
            stage, segments, local, left, of_queries, backend, fused=fused
        )
        if stage.query_rows is None:
            dq_THD = dq.contiguous()
        elif several is None:
            one, rows = dq, stage.query_rows
        else:
            added = several.index_select(0, stage.query_rows) + dq
            several.index_copy_(0, stage.query_rows, added)
            del added
        if stage.transfer == Transfer.OWN:
            gradients.append(dkv_R2GD.to(sum_dtype(dkv_R2GD)))
        else:
            gradients.append(_start_return(dkv_R2GD, stage, of_stage, group_name))
        del dq, dkv_R2GD
    assert dq_THD is not None
    return _sum_of_queries(dq_THD, several if several is not None else one, rows), gradients


def _sum_of_queries(dq_THD: Tensor, later: Tensor | None, rows: Tensor | None) -> Tensor:
    """Add up the gradients of Q from all attention calls, and round once.

    Args:
        dq_THD: Gradient from the first call, which has all queries.
        later: Gradient from the later calls. None if there are none.
        rows: Rows of the queries to which `later` belongs. None if `later` has all queries.
    """
    if later is None:
        return dq_THD
    if rows is None:
        return (dq_THD + later).to(dq_THD.dtype)
    added = dq_THD.index_select(0, rows).to(sum_dtype(dq_THD)) + later
    return dq_THD.index_copy_(0, rows, added.to(dq_THD.dtype))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q_THD, k_TGD, v_TGD, begun, tensors, numbers, layout, *static, keep_gathered, fused = inputs
    num_travelling = len(_travelling(tensors, layout))
    has_own = Transfer.OWN in layout.split()
    local = [k_TGD, v_TGD] if has_own or not keep_gathered else []
    arriving = begun[:num_travelling] if keep_gathered else []
    ctx.static = (layout, *static, fused)
    ctx.has_own, ctx.keeps_gathered = has_own, keep_gathered
    ctx.num_travelling, ctx.num_tensors = num_travelling, len(tensors)
    ctx.num_local, ctx.num_kept = len(local), len(local) + len(arriving)
    out_THD, lse_HT, _ = output
    ctx.save_for_backward(q_THD, out_THD, lse_HT, numbers, *local, *arriving, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_THD: Tensor | None, _: Any, gathering: list[Tensor | None]
) -> tuple[Any, ...]:
    no_rows = [None] * ctx.num_travelling
    rest = ([None] * ctx.num_tensors, *(None,) * 7)
    # The output was not part of the loss, so there are no gradients. (The log-sum-exp is not
    # differentiable.)
    if grad_THD is None:
        return None, None, None, [*no_rows, *no_rows, None], *rest
    q_THD, out_THD, lse_HT, numbers, *kept = ctx.saved_tensors
    tensors = kept[ctx.num_kept :]
    local, arriving = kept[: ctx.num_local], kept[ctx.num_local : ctx.num_kept]
    # In place of gradients of the slots, AddAndGatherAgain returned the rows of K and V that it has
    # begun to gather.
    if gathering[0] is not None and not ctx.keeps_gathered:
        arriving = gathering
    saved = [q_THD, out_THD, lse_HT, *local]
    dq_THD, gradients = context_attend_backward(
        grad_THD, saved, arriving, tensors, numbers, *ctx.static
    )
    of_slots = gradients if ctx.has_own else [*gradients, None]
    return dq_THD, None, None, [*no_rows, *of_slots], *rest


context_attend.register_autograd(_differentiate, setup_context=_keep)
