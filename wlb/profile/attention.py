"""Sweep of attention kernels: equal segments on a (rows, keys) grid, and random varlen calls.

A grid point is one call on enough equal segments to fill the device, because in training a segment
shares it with others. Kernels that group similar segments (SDPA) are measured with and without a
prefix, beside a one-token segment, because equal segments alone need no regrouping. Random batches
are a rank's share of a sharded micro-batch; held-out ones only test the fit and run twice, first
and last, for the test-retest error. Kernels run as the executor's custom ops, without autograd.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from wlb.cost import FlopsWorkload
from wlb.data import LengthFamily
from wlb.kernels import Segments
from wlb.kernels.op import SavedTensors, backward, forward
from wlb.kernels.sdpa import PADDED_LENGTHS
from wlb.kernels.tiles import Tiles, tiles_of
from wlb.plan import IntArray, digest, offsets_of
from wlb.profile.tasks import Numbers, Task
from wlb.profile.timing import KernelTimer
from wlb.sharding import shard

CUDA_TILES = 1024
"""Number of tiles that fills a GPU with several waves."""
CPU_KEYS, CPU_SEGMENTS = 4096, 256
"""On a CPU, keys of a call's segments together, which make the call's own cost negligible, and the
largest number of segments."""
MOST_BYTES = 24 << 30
"""Limit of keys, values and their gradients in a call of equal segments."""
NAMED_BY = ("backend", "num_heads", "num_kv_heads", "head_dim")
STRATEGIES = ("per_sequence", "per_document", "balanced")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """A kernel and the heads of one rank that it computes."""

    backend: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> dict[str, Any]:
        """The entries of a task's point."""
        return {name: getattr(self, name) for name in NAMED_BY}

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kernel(self) -> tuple[str, int, int]:
        """Key of layouts whose throughput differs only by their number of heads."""
        return self.backend, self.head_dim, self.group

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Lengths that the backend rounds segments up to."""
        return PADDED_LENGTHS if self.backend == "sdpa" else ()

    @property
    def tiles(self) -> Tiles:
        is_untiled = self.padded_lengths or self.device.type == "cpu"
        return Tiles(1, 1, 1) if is_untiled else tiles_of(self.backend, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGrid:
    """Points of the attention sweep. lengths: of rows and of keys. held_pairs: off the grid.
    batches, held_batches: random varlen calls of batch_tokens rows. budget_s: for the repeats of a
    point, forward and backward together.
    """

    lengths: tuple[int, ...]
    held_pairs: int
    batches: int
    held_batches: int
    batch_tokens: tuple[int, ...]
    budget_s: float

    @property
    def longest(self) -> int:
        return self.lengths[-1]


def steps(first: int, last: int, per_octave: Sequence[float] = (1.0, 1.5)) -> tuple[int, ...]:
    """Lengths from `first` to `last`, both included: these multiples of first, 2 * first, ..."""
    found = {last}
    power = first
    while power <= last:
        found |= {n for m in per_octave if (n := round(power * m)) <= last}
        power *= 2
    return tuple(sorted(found))


def time_call(
    layout: HeadLayout, q: IntArray, kv: IntArray, timer: KernelTimer, budget_s: float
) -> Numbers:
    """Forward and backward time of one varlen call of segments of q rows over kv keys."""
    offsets_q, offsets_k = offsets_of(q), offsets_of(kv)
    segments = Segments.from_offsets(offsets_q, offsets_k, device=layout.device)
    generator = torch.Generator().manual_seed(0)

    def made(rows: int, heads: int) -> torch.Tensor:
        # One block of random values is repeated, because drawing all of them would take longer than
        # the kernels.
        block = torch.randn(min(rows, 1024), heads, layout.head_dim, generator=generator)
        block = block.to(layout.device, layout.dtype)
        return block.repeat(-(-rows // block.shape[0]), 1, 1)[:rows].contiguous()

    num_q, num_k = int(offsets_q[-1]), int(offsets_k[-1])
    q_THD, grad_THD = made(num_q, layout.num_heads), made(num_q, layout.num_heads)
    k_SGD, v_SGD = made(num_k, layout.num_kv_heads), made(num_k, layout.num_kv_heads)

    def run_forward() -> tuple[torch.Tensor, torch.Tensor]:
        return forward(layout.backend, q_THD, k_SGD, v_SGD, segments)

    def run_backward(saved: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return backward(
            layout.backend, grad_THD, SavedTensors(q_THD, k_SGD, v_SGD, *saved), segments
        )

    passes = timer.time_passes(run_forward, run_backward, budget_s=budget_s, least=3, most=50)
    numbers: Numbers = {}
    for name, timing in zip(("forward", "backward"), passes, strict=True):
        numbers[f"{name}_ns"] = timing.median_ns
        numbers[f"{name}_spread"] = (timing.high_ns - timing.low_ns) / timing.median_ns
    return numbers


def grid_pairs(layout: HeadLayout, grid: AttentionGrid) -> Iterator[tuple[int, int]]:
    """(rows, keys) of the grid's points. For kernels that pad, the diagonal has a second point with
    one row less, because segments with and without a prefix differ there.
    """
    for i, q in enumerate(grid.lengths):
        yield q, q
        if layout.padded_lengths and q > 1:
            yield q - 1, q
        for kv in grid.lengths[i + 1 :]:
            yield q, kv


def count_of(layout: HeadLayout, q: int, kv: int) -> int:
    """Number of equal segments that fills the device."""
    if layout.device.type == "cpu":
        return max(1, min(CPU_SEGMENTS, CPU_KEYS // kv))
    fill = -(-CUDA_TILES // (layout.num_heads * -(-q // layout.tiles.forward_rows)))
    bytes_a_key = 4 * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
    return max(1, min(fill, MOST_BYTES // (bytes_a_key * kv)))


def equal_call(point: Mapping[str, Any]) -> tuple[IntArray, IntArray]:
    """Rows and keys of the equal segments of a task."""
    q, kv = (np.full(point["count"], point[name], np.int64) for name in ("q", "kv"))
    if point["has_other"]:
        q, kv = np.insert(q, 0, 1), np.insert(kv, 0, 1)
    return q, kv


def grid_tasks(layout: HeadLayout, grid: AttentionGrid, timer: KernelTimer) -> list[Task]:
    """Kinds "call" (a tiny segment), "two_groups" (with another), "grid", "held_pair"."""
    task = partial(_equal_task, layout, grid, timer)
    shortest = grid.lengths[0]
    tasks = [task("call", shortest, shortest, count=1, has_other=False)]
    if layout.padded_lengths:
        second = layout.padded_lengths[1]
        tasks.append(task("two_groups", second, second, count=1))
    tasks += [task("grid", q, kv) for q, kv in grid_pairs(layout, grid)]
    rng = np.random.default_rng(1)
    for _ in range(grid.held_pairs):
        a, b = np.exp(rng.uniform(np.log(shortest), np.log(grid.longest), 2))
        tasks.append(task("held_pair", round(min(a, b)), round(max(a, b))))
    return tasks


def head_tasks(
    layout: HeadLayout, others: Sequence[HeadLayout], grid: AttentionGrid, timer: KernelTimer
) -> list[Task]:
    """Kind "heads": a few points at the layout's and at other numbers of heads."""
    some = [n for n in grid.lengths if 128 <= n <= 8192][::3]
    return [
        _equal_task(at, grid, timer, "heads", q, kv)
        for at in (layout, *others)
        for i, q in enumerate(some)
        for kv in some[i:]
    ]


def _equal_task(
    layout: HeadLayout,
    grid: AttentionGrid,
    timer: KernelTimer,
    kind: str,
    q: int,
    kv: int,
    *,
    count: int | None = None,
    has_other: bool | None = None,
) -> Task:
    """A call on `count` segments (None: that fill the device). has_other: the call has a one-token
    segment too; None: if the kernel has groups.
    """
    count = count_of(layout, q, kv) if count is None else count
    has_other = bool(layout.padded_lengths) if has_other is None else has_other
    point = {**layout.name, "q": q, "kv": kv, "count": count, "has_other": has_other}

    def run() -> Numbers:
        return time_call(layout, *equal_call(point), timer, grid.budget_s)

    return Task(kind=kind, point=point, run=run, may_fail=True)


def random_call(grid: AttentionGrid, index: int) -> tuple[IntArray, IntArray]:
    """Rows and keys of one rank's segments of a random micro-batch, the same for equal `index`."""
    rng = np.random.default_rng([7, index])
    cp = int(rng.choice([1, 2, 4, 8]))
    rows = int(rng.choice(grid.batch_tokens))
    tokens = min(rows * cp, 2 * grid.longest)
    # The family's median document is 1/175 of its window.
    window = int(np.exp(rng.uniform(np.log(tokens / 8), np.log(4 * tokens))))
    drawn = LengthFamily().sample(4_000, window=max(64, window), seed=index)
    drawn = np.minimum(drawn, grid.longest)
    num = int(np.searchsorted(np.cumsum(drawn), tokens)) + 1
    lengths = drawn[:num]
    lengths[-1] -= int(lengths.sum()) - tokens
    cost = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=0)
    plan = shard(lengths, cp=cp, strategy=str(rng.choice(STRATEGIES)), cost=cost)
    spans = plan.for_rank(int(rng.integers(cp)))
    return spans.stop - spans.start, spans.stop


def batch_tasks(
    layout: HeadLayout, grid: AttentionGrid, timer: KernelTimer, *, held: bool, repeat: int = 0
) -> list[Task]:
    """Kinds "batch" and "held_batch", of disjoint micro-batches; repeat: number of the
    repetition.
    """

    def run(index: int) -> Numbers:
        return time_call(layout, *random_call(grid, index), timer, 4 * grid.budget_s)

    kind, num = ("held_batch", grid.held_batches) if held else ("batch", grid.batches)
    first = 1000 if held else 0
    tasks: list[Task] = []
    for index in range(first, first + num):
        # The digest identifies the batch in records.
        segments = digest(*random_call(grid, index))
        point = {**layout.name, "index": index, "repeat": repeat, "segments": segments}
        tasks.append(Task(kind=kind, point=point, run=partial(run, index), may_fail=True))
    return tasks
