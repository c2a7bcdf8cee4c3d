"""Times the attention kernels of all ranks of a sharding plan, one after the other on one device.

A rank runs the attention call of context parallelism: its queries, the keys of all its spans, one
`attend` in forward and its gradient. Collectives and the copying of keys are not timed.

On CUDA, times are measured between events on the stream. On a CPU, they are the CPU time of the
calling thread, because torch runs one thread and waiting for a core must not count. What a backend
computes once for all layers, from the offsets, is done before the first timed call.
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
    """Shape and type of the tensors, and the device and attention backend."""

    num_heads: int  # query heads of a TP rank
    num_kv_heads: int  # KV heads of a TP rank
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    backend: str  # attention kernel


class RankCall:
    """The attention call of one rank, with random tensors of the right shapes."""

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
        """Returns the times of forward and backward in nanoseconds."""
        is_cuda = self.gradient.is_cuda
        return passes_ns(self, None if is_cuda else time.thread_time_ns)


class Passes(Protocol):
    """Something that has a forward pass and a backward pass, so that `passes_ns` can time it."""

    def forward(self) -> torch.Tensor: ...

    def backward(self, out: torch.Tensor) -> Any: ...


def passes_ns(call: Passes, clock: Callable[[], int] | None) -> tuple[float, float]:
    """Times forward and backward and returns both in nanoseconds.

    Args:
        call: What is timed.
        clock: Function that returns a time in ns. None: CUDA events measure the times.
    """
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
    """Times every rank of every plan, several times.

    A round times all ranks of all plans once. Every second round starts with another plan, because
    a machine may slow down in the course of a round. Over 2 * plans rounds, each plan has each
    place in the order twice.

    Args:
        plans: The plans to compare, with the same number of ranks.
        layout: Tensors, device and backend.
        rounds: Rounds that count.
        warm_up: Rounds before them.

    Returns:
        Nanoseconds of forward and backward, shape [rounds, plans, 2, cp].
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
    """Returns the times of the slowest rank, as medians over rounds, shape [plans, 2]."""
    return np.median(times, axis=0).max(axis=-1)
