"""Runs the whole context-parallel operation with real collectives, on torchrun's ranks.

`benchmark` times every plan's forward (all-gather of K and V, attention) and backward (gather,
attention, reduce-scatter). `check` compares outputs and gradients with one process that attends to
the whole packed sequence.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from experiments.paper.fig15.rank_times import Layout, passes_ns
from wlb.kernels import Segments, attend
from wlb.parallel.context import ContextAttention, take_rows
from wlb.parallel.host import all_reduce_hosts
from wlb.plan import IntArray, ShardingPlan, offsets_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Results may differ from one process by this share of the reference's largest value."""


def attention_of(plan: ShardingPlan, layout: Layout) -> ContextAttention:
    return ContextAttention.from_plan(
        plan,
        group=dist.group.WORLD,
        num_heads=layout.num_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        device=layout.device,
        backend=layout.backend,
    )


def packed(lengths: IntArray, layout: Layout, *, seed: int) -> list[torch.Tensor]:
    """Returns q, k, v and the output's gradient of the whole packed sequence on every rank."""
    generator = torch.Generator().manual_seed(seed)
    heads = (layout.num_heads, layout.num_kv_heads, layout.num_kv_heads, layout.num_heads)
    rows = int(lengths.sum())
    return [
        torch.randn(rows, n, layout.head_dim, generator=generator).to(layout.device, layout.dtype)
        for n in heads
    ]


class RankOp:
    """Holds one plan's operation on this rank: its rows of packed tensors, and the attention."""

    def __init__(self, plan: ShardingPlan, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self.attention = attention_of(plan, layout)
        self.plan = plan
        self.q, self.k, self.v, self.gradient = self.mine(tensors)
        self.inputs = [x.requires_grad_() for x in (self.q, self.k, self.v)]

    def mine(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns this rank's rows of packed tensors; padding is zero."""
        rank, rows = dist.get_rank(), self.attention.num_rows
        return [take_rows(x, self.plan, rank=rank, num_rows=rows) for x in tensors]

    def forward(self) -> torch.Tensor:
        moving = self.attention.begin(self.k, self.v)
        return self.attention(self.q, self.k, self.v, moving)

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.gradient)

    def time_ns(self) -> tuple[float, float]:
        """Times forward and backward, with all ranks starting together."""
        on_cuda = self.gradient.is_cuda
        if on_cuda:
            torch.cuda.synchronize()
        # The all-reduce lets all ranks begin together.
        all_reduce_hosts(torch.zeros(1))
        return passes_ns(self, None if on_cuda else time.perf_counter_ns)


def benchmark(
    plans: Sequence[ShardingPlan], layout: Layout, *, rounds: int, warm_up: int = 1
) -> np.ndarray:
    """Returns forward and backward ns of the slowest rank, medians over rounds, shape [plans, 2].

    A round runs every plan once, and each round begins with another plan. All ranks return the
    same.
    """
    tensors = packed(plans[0].lengths, layout, seed=0)
    ops = [RankOp(plan, layout, tensors) for plan in plans]
    out = np.zeros((rounds, len(ops), 2))
    for i in range(-warm_up, rounds):
        for j in range(len(ops)):
            at = (i + j) % len(ops)
            took = ops[at].time_ns()
            if i >= 0:
                out[i, at] = took
    slowest = torch.from_numpy(np.median(out, axis=0))
    all_reduce_hosts(slowest, "max")
    return slowest.numpy()


def check(plan: ShardingPlan, layout: Layout) -> list[float]:
    """Returns the largest error of output, dq, dk, dv against one process.

    Errors are over the reference's largest value. Every rank computes the reference, in float64
    where the operation is in float32 (else in float32), and compares its own rows; the maximum is
    over ranks.
    """
    tensors = packed(plan.lengths, layout, seed=1)
    op = RankOp(plan, layout, tensors)
    out = op.forward()
    found = [out.detach(), *op.backward(out)]
    exact = torch.float64 if layout.dtype == torch.float32 else torch.float32
    *inputs, gradient = (x.to(exact) for x in tensors)
    q_THD, k_SGD, v_SGD = (x.requires_grad_() for x in inputs)
    offsets = offsets_of(plan.lengths)
    segments = Segments.from_offsets(offsets, offsets, device=layout.device)
    whole = attend(q_THD, k_SGD, v_SGD, segments, backend="sdpa")
    expected = [whole.detach(), *torch.autograd.grad(whole, (q_THD, k_SGD, v_SGD), gradient)]
    rows = plan.for_rank(dist.get_rank()).num_tokens
    errors = [
        float((a[:rows] - b[:rows]).abs().max() / full.abs().max())
        for a, b, full in zip(found, op.mine(expected), expected, strict=True)
    ]
    worst = torch.tensor(errors, dtype=torch.float64)
    # NaN counts as an infinite error, because a comparison of maxima would let it pass.
    worst = worst.nan_to_num(nan=torch.inf)
    all_reduce_hosts(worst, "max")
    return worst.tolist()
