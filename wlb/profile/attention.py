"""Measure attention kernels on a grid of equal segments and on random varlen calls.

- A grid point is a call on equal segments of `q` queries and `kv` keys. A call has enough segments
  to fill the device, because in training a segment shares the device with others.
- Kernels that group similar segments (SDPA) are measured on segments with and without a prefix. A
  prefix is the keys before the first query. Their calls also have a one-token segment, because
  equal segments alone would form a single group.
- A random batch is a call on the segments of one CP rank in a random micro-batch. Held-out batches
  only test the fit. They are measured at the beginning and at the end of a sweep, and the
  difference shows how well times can be reproduced.

Kernels are called through the custom operators that training uses, without autograd.
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
"""Number of tiles (thread blocks) in a call on a GPU. It fills all SMs several times."""
CPU_KEYS, CPU_SEGMENTS = 4096, 256
"""Keys of all segments of a call on a CPU together, and most segments of such a call.

With so many keys, the fixed cost of a call is a negligible part of its time."""
MOST_BYTES = 24 << 30
"""Most bytes of keys, values and their gradients in a call of equal segments."""
NAMED_BY = ("backend", "num_heads", "num_kv_heads", "head_dim")
"""Fields of a `HeadLayout` that are part of `Task.point`, to identify the layout."""
STRATEGIES = ("per_sequence", "per_document", "balanced")
"""Sharding strategies of random batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """An attention kernel, with the numbers and sizes of the heads that a rank computes."""

    backend: str  # name of the kernel
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> dict[str, Any]:
        """The fields that identify the layout in a `Task.point`: the kernel, and the heads."""
        return {name: getattr(self, name) for name in NAMED_BY}

    @property
    def group(self) -> int:
        """Number of query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kernel(self) -> tuple[str, int, int]:
        """(Kernel, head size, query heads per KV head).

        Layouts with equal values share one fit, whatever their number of heads is.
        """
        return self.backend, self.head_dim, self.group

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Lengths to which the kernel rounds segments up; empty if it does not pad them."""
        return PADDED_LENGTHS if self.backend == "sdpa" else ()

    @property
    def tiles(self) -> Tiles:
        """Tile sizes of the kernel; tiles of a single token for kernels without tiles."""
        is_untiled = self.padded_lengths or self.device.type == "cpu"
        return Tiles(1, 1, 1) if is_untiled else tiles_of(self.backend, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGrid:
    """Settings of an attention sweep: which calls are measured, and for how long."""

    lengths: tuple[int, ...]  # numbers of queries and numbers of keys of grid points; ascending
    held_pairs: int  # number of random points between grid points, on which errors are measured
    batches: int  # number of random batches that the fit uses
    held_batches: int  # number of random batches on which errors are measured
    batch_tokens: tuple[int, ...]  # a random batch has one of these numbers of queries
    budget_s: float  # seconds for the repeats of a call, forward and backward together

    @property
    def longest(self) -> int:
        """Largest number of queries or keys of a grid point."""
        return self.lengths[-1]


def steps(first: int, last: int, per_octave: Sequence[float] = (1.0, 1.5)) -> tuple[int, ...]:
    """Return lengths that grow geometrically from `first` to `last`.

    Args:
        first: Shortest length.
        last: Longest length, which is always included.
        per_octave: For each of first, 2 * first, 4 * first and so on, the result has the products
            with all these factors. So (1.0,) gives only first, 2 * first, 4 * first and so on.
    """
    found = {last}
    power = first
    while power <= last:
        found |= {n for m in per_octave if (n := round(power * m)) <= last}
        power *= 2
    return tuple(sorted(found))


def time_call(
    layout: HeadLayout, q: IntArray, kv: IntArray, timer: KernelTimer, budget_s: float
) -> Numbers:
    """Measure the forward and backward time of one varlen call.

    Args:
        layout: Kernel and heads.
        q: Number of queries of each segment, shape [num_segments].
        kv: Number of keys of each segment, shape [num_segments].
        timer: Timer of the device.
        budget_s: Seconds for the repeats.

    Returns:
        forward_ns and backward_ns are median times. forward_spread and backward_spread are the
        differences between the 90th and the 10th percentile, divided by the median.
    """
    offsets_q, offsets_k = offsets_of(q), offsets_of(kv)
    segments = Segments.from_offsets(offsets_q, offsets_k, device=layout.device)
    generator = torch.Generator().manual_seed(0)

    def made(rows: int, heads: int) -> torch.Tensor:
        # Repeat one block of random values, because drawing all of them would take longer than the
        # kernels.
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
    """Yield (queries, keys) of the grid points, which have at most as many queries as keys.

    A kernel that pads lengths is not equally fast on segments with and without a prefix (keys
    before the first query). So for such a kernel each point (n, n) is followed by a second point
    (n - 1, n), which has a prefix of one key.

    Args:
        layout: Kernel and heads.
        grid: Settings of the sweep.
    """
    for i, q in enumerate(grid.lengths):
        yield q, q
        if layout.padded_lengths and q > 1:
            yield q - 1, q
        for kv in grid.lengths[i + 1 :]:
            yield q, kv


def count_of(layout: HeadLayout, q: int, kv: int) -> int:
    """Return how many equal segments of `q` queries and `kv` keys a measured call has.

    On a GPU there are as many as keep it busy, but not more than `MOST_BYTES` allows. On a CPU
    there are as many as have `CPU_KEYS` keys together, but at most `CPU_SEGMENTS`.
    """
    if layout.device.type == "cpu":
        return max(1, min(CPU_SEGMENTS, CPU_KEYS // kv))
    fill = -(-CUDA_TILES // (layout.num_heads * -(-q // layout.tiles.forward_rows)))
    bytes_a_key = 4 * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
    return max(1, min(fill, MOST_BYTES // (bytes_a_key * kv)))


def equal_call(point: Mapping[str, Any]) -> tuple[IntArray, IntArray]:
    """Return the numbers of queries and the numbers of keys of all segments of a task's call.

    All segments are equal, except that a one-token segment may come first.

    Args:
        point: Sizes of the task's call: "q" and "kv" (queries and keys of a segment), "count"
            (number of equal segments) and "has_other" (whether a one-token segment comes first).
    """
    q, kv = (np.full(point["count"], point[name], np.int64) for name in ("q", "kv"))
    if point["has_other"]:
        q, kv = np.insert(q, 0, 1), np.insert(kv, 0, 1)
    return q, kv


def grid_tasks(layout: HeadLayout, grid: AttentionGrid, timer: KernelTimer) -> list[Task]:
    """Return the tasks that measure calls on equal segments.

    The kinds of these tasks are "call" (one tiny segment), "two_groups" (two segments that the
    kernel puts into different groups), "grid" (grid points), and "held_pair" (random points between
    grid points, on which only errors are measured).

    Args:
        layout: Kernel and heads.
        grid: Settings of the sweep.
        timer: Timer of the device.
    """
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
    """Return tasks of kind "heads", which measure some grid points with several numbers of heads.

    Args:
        layout: Kernel and heads of an attention table.
        others: Layouts of the same kernel with other numbers of heads.
        grid: Settings of the sweep.
        timer: Timer of the device.
    """
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
    """Return a task that times a call on equal segments.

    Args:
        layout: Kernel and heads.
        grid: Settings of the sweep.
        timer: Timer of the device.
        kind: `Task.kind` of the task.
        q: Number of queries of each segment.
        kv: Number of keys of each segment.
        count: Number of segments. Defaults to the number that fills the device.
        has_other: Whether the call also has a one-token segment. None means that it has one if the
            kernel groups similar segments, because equal segments alone would form a single group.
    """
    count = count_of(layout, q, kv) if count is None else count
    has_other = bool(layout.padded_lengths) if has_other is None else has_other
    point = {**layout.name, "q": q, "kv": kv, "count": count, "has_other": has_other}

    def run() -> Numbers:
        return time_call(layout, *equal_call(point), timer, grid.budget_s)

    return Task(kind=kind, point=point, run=run, may_fail=True)


def random_call(grid: AttentionGrid, index: int) -> tuple[IntArray, IntArray]:
    """Draw a micro-batch, and return numbers of queries and keys of a CP rank's segments.

    Args:
        grid: Settings of the sweep.
        index: Number of the micro-batch. The same number always gives the same segments.
    """
    rng = np.random.default_rng([7, index])
    cp = int(rng.choice([1, 2, 4, 8]))
    rows = int(rng.choice(grid.batch_tokens))
    tokens = min(rows * cp, 2 * grid.longest)
    # Draw a window of 1/8 to 4 times the micro-batch. In the length family, the median document has
    # 1/175 of the window, so some batches have a few long documents, and others many short ones.
    window = int(np.exp(rng.uniform(np.log(tokens / 8), np.log(4 * tokens))))
    drawn = LengthFamily().sample(4_000, window=max(64, window), seed=index)
    drawn = np.minimum(drawn, grid.longest)
    # Cut the last document so that the micro-batch has exactly `tokens` tokens.
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
    """Return the tasks that measure random batches.

    Args:
        layout: Kernel and heads.
        grid: Settings of the sweep.
        timer: Timer of the device.
        held: Whether to return held-out tasks (kind "held_batch") instead of tasks for the fit
            (kind "batch"). The two kinds have different batches.
        repeat: Number of the repetition, 0 or 1. Both repetitions have the same batches.
    """

    def run(index: int) -> Numbers:
        return time_call(layout, *random_call(grid, index), timer, 4 * grid.budget_s)

    kind, num = ("held_batch", grid.held_batches) if held else ("batch", grid.batches)
    first = 1000 if held else 0
    tasks: list[Task] = []
    for index in range(first, first + num):
        # The digest of the segments is part of the task's key. So if `random_call` returns other
        # segments after a change of its code, old records are not used for them.
        segments = digest(*random_call(grid, index))
        point = {**layout.name, "index": index, "repeat": repeat, "segments": segments}
        tasks.append(Task(kind=kind, point=point, run=partial(run, index), may_fail=True))
    return tasks
