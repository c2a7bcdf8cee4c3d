"""Tests attention in two calls: shapes that compiled code knows, and kernels that cannot do it."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wlb.parallel import context_op, overlap_op
from wlb.parallel.context import ContextAttention, HeadShape
from wlb.parallel.rows import attention_rows
from wlb.plan import KeyExchange
from wlb.sharding.paper import per_document

D = 8


@pytest.mark.parametrize("exchange", KeyExchange)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_compiled_code_knows_the_shapes_of_results_and_gradients(
    wire: torch.dtype, exchange: KeyExchange
) -> None:
    with FakeTensorMode():
        q, k = (torch.empty(6, n, D, dtype=torch.bfloat16) for n in (4, 2))
        rows, sent, returned, splits, num = 12, [], None, None, 6
        if exchange == KeyExchange.NEEDED:  # 3 rows come and 2 go
            rows, num = 3, 2
            sent = [torch.empty(2, dtype=torch.int64)]
            returned = torch.empty(1, 6, dtype=torch.int64)
            splits = torch.empty(1, 2, 2, dtype=torch.int64)
        inverse = [torch.empty(1, rows, dtype=torch.int64)]
        own = [torch.empty(shape, dtype=torch.int64) for shape in ((9,), (2, 6))]
        own_cu, cu = ([torch.empty(n, dtype=torch.int32) for _ in range(2)] for n in (3, 2))
        query_rows, index = ([torch.empty(n, dtype=torch.int64)] for n in (4, 5))
        lists = (query_rows, index, inverse, *([x] for x in cu), sent)
        where = (*own, *own_cu, *lists, splits, 6, 6, [4], [3], 0.0, "sdpa", 2, "0")
        sending = (sent, returned, splits)
        gathered, *slots = context_op.gather_kv(k, k, inverse, *sending, 2, "0", wire, False)
        out, lse, again = overlap_op.attend_while_gathering(
            q, k, k, gathered, *slots, *where, False, False
        )
        dq, *gradients = overlap_op.attend_while_gathering_backward(
            out, q, k, k, [], out, lse, *where, wire, False
        )
        received = context_op.receive_kv_gradient(*gradients, returned, k.dtype, False)
    slots, gradients = ([*x[0], x[1]] for x in (slots, gradients))
    (gathered,), (again,) = gathered, again
    assert (out.shape, dq.shape, lse.shape) == (q.shape, q.shape, (4, 6))
    assert (again.dtype, again.shape) == (gathered.dtype, gathered.shape)
    assert gathered.shape == (rows, 2, 2, D)
    for slot, gradient in zip(slots, gradients, strict=True):
        assert (gradient.dtype, gradient.shape) == (slot.dtype, slot.shape)
    assert [(x.dtype, x.shape[0]) for x in gradients] == [(wire, num), (torch.float32, 6)]
    assert (received.dtype, received.shape) == (k.dtype, (6, 2, 2, D))


def test_a_kernel_without_a_log_sum_exp_is_refused() -> None:
    """Outside the CPU torch's own attention returns none that could be merged."""
    plan = replace(per_document([5, 3], cp=2), exchange=KeyExchange.NEEDED)
    heads = HeadShape(num_heads=4, num_kv_heads=2, head_dim=D, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"cp\.overlap_stages needs the log-sum-exp"):
        ContextAttention.from_rows(
            attention_rows(plan, 0, 4, overlap=True),
            group=None,
            heads=heads,
            backend="sdpa",
            device=torch.device("meta"),
        )
