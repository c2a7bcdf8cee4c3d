"""Times the attention kernels of every rank of a plan, in turn on one device.

A rank's call is that of context parallelism: its queries, a copy of the keys of all its spans, one
`attend` forward and its gradient. Collectives and the copying of keys are not in it. On CUDA times
are between events on the stream; on CPU they are the calling thread's own time (torch runs one
thread), which leaves out being preempted. Work that a backend derives from the offsets once for all
layers happens before the first timed call.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from wlb.kernels import Segments, attend
from wlb.plan import RankSpans, ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Describes the tensors and the device that the kernels run on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    backend: str


class RankCall:
    """Holds one rank's attention call: random tensors of the right shapes, and its segments."""

    def __init__(self, spans: RankSpans, layout: Layout) -> None:
        cu_q, cu_k = spans.cu_seqlens_q, spans.cu_seqlens_k
        self.segments = Segments.from_offsets(cu_q, cu_k, device=layout.device)
        self.backend = layout.backend
        options = {"dtype": layout.dtype, "device": layout.device}
        shapes = (
            (int(cu_q[-1]), layout.num_heads),
            (int(cu_k[-1]), layout.num_kv_heads),
            (int(cu_k[-1]), layout.num_kv_heads),
        )
        self.inputs = [
            torch.randn(*s, layout.head_dim, **options, requires_grad=True) for s in shapes
        ]
        self.gradient = torch.randn(*shapes[0], layout.head_dim, **options)

    def forward(self) -> torch.Tensor:
        q_THD, k_SGD, v_SGD = self.inputs
        return attend(q_THD, k_SGD, v_SGD, self.segments, backend=self.backend)

    def backward(self, out: torch.Tensor) -> None:
        torch.autograd.grad(out, self.inputs, self.gradient)

    def time_ns(self) -> tuple[float, float]:
        """Returns the times of forward and backward."""
        is_cuda = self.gradient.is_cuda
        return passes_ns(self, None if is_cuda else time.thread_time_ns)


class Passes(Protocol):
    """Has a forward pass, and a backward pass of its output."""

    def forward(self) -> torch.Tensor: ...

    def backward(self, out: torch.Tensor) -> Any: ...


def passes_ns(call: Passes, clock: Callable[[], int] | None) -> tuple[float, float]:
    """Times forward and backward by a clock in ns, or between events on the CUDA stream (None)."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if clock is None else []
    times: list[int] = []

    def mark(i: int) -> None:
        if clock is None:
            marks[i].record()
        else:
            times.append(clock())

    mark(0)
    out = call.forward()
    mark(1)
    call.backward(out)
    mark(2)
    if clock is not None:
        return times[1] - times[0], times[2] - times[1]
    marks[2].synchronize()
    return marks[0].elapsed_time(marks[1]) * 1e6, marks[1].elapsed_time(marks[2]) * 1e6


def times_ns(
    plans: Sequence[ShardingPlan], layout: Layout, *, rounds: int, warm_up: int = 1
) -> np.ndarray:
    """Returns forward and backward ns of every rank of every plan, shape [rounds, plans, 2, cp].

    A round times every rank of every plan once. Every second round begins with another plan, so
    that plans are compared at the same moments of the machine; over 2 * plans rounds each of them
    has every place once in the even and once in the odd rounds.
    """
    num, cp = len(plans), plans[0].cp
    calls = [[RankCall(plan.for_rank(rank), layout) for rank in range(cp)] for plan in plans]
    out = np.zeros((rounds, num, 2, cp))
    for i in range(-warm_up, rounds):
        for j in range(num):
            plan = (i // 2 + j) % num
            for rank, call in enumerate(calls[plan]):
                took = call.time_ns()
                if i >= 0:
                    out[i, plan, :, rank] = took
    return out


def slowest_ns(times: np.ndarray) -> np.ndarray:
    """Returns forward and backward of the slowest rank, medians over rounds, shape [plans, 2]."""
    return np.median(times, axis=0).max(axis=-1)
