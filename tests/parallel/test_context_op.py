"""Tests the custom ops of context attention: shapes that compiled code knows, and refusals."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from wlb.kernels.segments import PLAIN
from wlb.parallel.context import op
from wlb.parallel.context.attention import ContextAttention, HeadShape
from wlb.parallel.context.exchange import flatten, stages_of, to_device
from wlb.parallel.context.rows import RankExchange, Transfer, rank_exchange
from wlb.plan import KeyExchange, exchange_of
from wlb.sharding.paper import per_document

D = 8
CPU = torch.device("cpu")
MOST_ARGUMENTS = 12


def exchange(kind: KeyExchange, *, own_first: bool = False, stages: int = 1) -> RankExchange:
    """Returns rank 0's part: it has 6 rows, receives 2 of others, and 3 of others' are its own."""
    plan = replace(per_document([5, 3], cp=2), exchange=kind)
    return rank_exchange(exchange_of(plan, local_tokens=6, own_first=own_first, stages=stages), 0)


@pytest.mark.parametrize("own_first", [False, True])
@pytest.mark.parametrize("kind", KeyExchange)
def test_ops_restore_what_was_flattened(kind: KeyExchange, own_first: bool) -> None:
    rows = exchange(kind, own_first=own_first, stages=2)
    on_device = to_device(dict(rows.arrays()), CPU)
    flat, _ = flatten(rows, on_device, backend="sdpa", device=CPU, scores=PLAIN)
    stages, returned = stages_of(flat.tensors, flat.layout)
    assert (returned is None) == (rows.returned is None) == (kind == KeyExchange.GATHER)
    assert flat.layout == f"2 {'own ' * own_first}{' '.join([kind] * (1 + own_first))}"
    for made, stage, numbers in zip(rows.stages, stages, flat.numbers.tolist(), strict=True):
        pairs = [
            (made.cu_seqlens_q, stage.cu_seqlens_q),
            (made.cu_seqlens_k, stage.cu_seqlens_k),
            (made.kv_index, stage.index_K),
            (made.inverse, stage.inverse_UR),
            (made.query_rows, stage.query_rows),
            (made.sent_rows, stage.sent_N),
        ]
        for array, tensor in pairs:
            assert (array is None) == (tensor is None)
            assert array is None or tensor is None or array.tolist() == tensor.tolist()
        assert stage.splits(numbers) == (made.received.tolist(), made.sent.tolist())
        segments = stage.segments(numbers, 0.0)
        assert segments.offsets_k == tuple(made.cu_seqlens_k.tolist())
        assert segments.is_causal == (made.query_rows is None)
        if made.transfer != Transfer.OWN:
            assert stage.num_rows == int(made.received.sum())


def test_ops_take_few_arguments() -> None:
    for name in ("gather_kv", "gather_kv_again", "context_attend", "context_attend_backward"):
        arguments = inspect.signature(getattr(op, name)._init_fn).parameters
        assert len(arguments) <= MOST_ARGUMENTS


@pytest.mark.parametrize("stages", [0, 1, 2])
@pytest.mark.parametrize("kind", KeyExchange)
@pytest.mark.parametrize("fused", [False, True])
def test_compiled_code_knows_the_shapes_of_results_and_gradients(
    fused: bool, kind: KeyExchange, stages: int
) -> None:
    """If it expected another dtype than the slot's, autograd would convert what still travels."""
    rows = exchange(kind, own_first=stages > 0, stages=max(1, stages))
    on_device = to_device(dict(rows.arrays()), CPU)
    flat, _ = flatten(rows, on_device, backend="sdpa", device=CPU, scores=PLAIN)
    with FakeTensorMode() as fakes:
        q, k = (torch.empty(6, n, D, dtype=torch.bfloat16) for n in (4, 2))
        fake = [fakes.from_tensor(x) for x in flat.tensors]
        record = (fake, fakes.from_tensor(flat.numbers), flat.layout)
        arriving, slots = op.gather_kv(k, k, *record, "0", fused)
        static = (0.0, "sdpa", "0")
        begun = [*arriving, *slots]
        out, lse, again = op.context_attend(q, k, k, begun, *record, *static, False, fused)
        saved = [q, out, lse, k, k]
        dq, gradients = op.context_attend_backward(out, saved, [], *record, *static, fused)
        own = gradients[-1] if stages else None
        returning = gradients[: len(arriving)]
        _, returned = stages_of(fake, flat.layout)
        received = op.receive_kv_gradient(returning, own, returned, k.dtype, fused)
        second = op.gather_kv_again(out, k, k, *record, "0")
    assert (out.shape, dq.shape, lse.shape) == (q.shape, q.shape, (4, 6))
    assert len(slots) == len(arriving) + 1
    for slot, gradient in zip(slots, gradients, strict=stages > 0):
        assert described(gradient) == described(slot)
        assert slot.dtype == torch.float32
    assert described(slots[-1]) == (torch.float32, (6, 2, 2, D))
    assert list(map(described, again)) == list(map(described, second))
    assert list(map(described, again)) == list(map(described, arriving))
    travelling = [stage for stage in rows.stages if stage.transfer != Transfer.OWN]
    assert [x.shape for x in arriving] == [(int(s.received.sum()), 2, 2, D) for s in travelling]
    assert described(received) == (k.dtype, (6, 2, 2, D))


def described(x: Tensor) -> tuple[torch.dtype, torch.Size]:
    return x.dtype, x.shape


def test_a_kernel_without_a_log_sum_exp_is_refused() -> None:
    """Outside the CPU torch's own attention returns none that could be merged."""
    heads = HeadShape(num_heads=4, num_kv_heads=2, head_dim=D, dtype=torch.float32)
    with pytest.raises(
        ValueError,
        match=(
            r"cp\.overlap_stages needs a kernel "
            r"that returns the log-sum-exp"
        ),
    ):
        ContextAttention.from_rows(
            exchange(KeyExchange.NEEDED, own_first=True),
            group=None,
            heads=heads,
            backend="sdpa",
            device=torch.device("meta"),
        )
