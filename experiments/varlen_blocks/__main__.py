"""Predicts whether calls of few long and many short segments should be split by length.

The kernel launches as many thread blocks for every segment and head as for the longest one; blocks
beyond a segment's end leave at once. Splitting a call into runs of similar lengths launches fewer,
but each call ends with multiprocessors that wait for its last long block, and in one call the short
segments fill them. Nothing was measured: `makespan_ns` places the blocks of planned steps.
"""

import argparse
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from experiments.harness.configurations import configuration, title
from experiments.harness.pages import How, Table, priced_with, show, write_results
from wlb.cost import load_profile, workload_for
from wlb.cost.flops import BACKWARD_FLOPS_PER_PAIR, FORWARD_FLOPS_PER_PAIR, FloatArray
from wlb.data import GlobalBatches, lengths_of_family
from wlb.parallel.rows import attention_rows
from wlb.plan import IntArray
from wlb.planner import Planner
from wlb.spec import RunSpec, resolve_dp
from wlb.spec.systems import system_choices

NUM_SMS, TILE, HEAD_SIZE = 132, 128, 128
CONFIGURATIONS = ("550m_64k", "7b_128k", "70b_128k")
EMPTY_NS = (500.0, 1000.0, 2000.0)
"""A multiprocessor's time for an empty block. NVIDIA's forum reports half a microsecond for a small
kernel; two follow from flash-attention issue 2521, of a larger kernel on a B200."""
BLOCK_NS, CALL_NS = 1500.0, 5000.0
"""Costs of a full block besides its products, and of every kernel of a further call."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of the kernel. at_once: blocks on a multiprocessor; kernels: launched by a call."""

    name: str
    tflops: float
    flops_per_pair: int
    at_once: int
    kernels: int

    @property
    def slots(self) -> int:
        return NUM_SMS * self.at_once

    def block_ns(self, q: IntArray, k: IntArray, empty_ns: float) -> FloatArray:
        """Times of one head's blocks in launch order: those of the first segment, then the next."""
        is_forward = self.name == "forward"
        launched = -(-int((q if is_forward else k).max()) // TILE)
        first = np.arange(launched) * TILE
        if is_forward:
            inside = first < q[:, None]
            other = np.minimum(k[:, None], (k - q)[:, None] + first + TILE)
        else:
            inside = first < k[:, None]
            other = q[:, None] - np.maximum(0, first - (k - q)[:, None])
        work = np.ceil(other / 64) * 64 * TILE * HEAD_SIZE * self.flops_per_pair
        full = BLOCK_NS + work * self.slots / (self.tflops * 1e3)
        return np.where(inside, full, empty_ns).ravel()


def makespan_ns(blocks: FloatArray, *, heads: int, slots: int) -> float:
    """Returns when the last block ends, if each starts on the first free slot, head after head.

    Blocks are put on multiprocessors in launch order. Times of full blocks follow from profile
    `h100`, that of an empty block is varied. FlashAttention 2.8.3 on an H100, heads of 128: forward
    128 query rows a block, two blocks at once on a multiprocessor; backward (any order) 128 keys a
    block, one at once.
    """
    free = [0.0] * slots
    of_one_head = blocks.tolist()
    for _ in range(heads):
        for ns in of_one_head:
            heapq.heapreplace(free, free[0] + ns)
    return max(free)


def runs_of(lengths: IntArray, *, heads: int, call_blocks: float) -> list[slice]:
    """Contiguous runs of segments with the fewest launched blocks, a call counted as some."""
    tiles = -(-lengths // TILE)
    fewest, begins = [0.0], [0]
    for stop in range(1, lengths.size + 1):
        most = np.maximum.accumulate(tiles[:stop][::-1])[::-1]
        total = most * np.arange(stop, 0, -1) * heads + call_blocks + np.array(fewest)
        begins.append(int(total.argmin()))
        fewest.append(float(total.min()))
    runs: list[slice] = []
    stop = lengths.size
    while stop:
        runs.append(slice(begins[stop], stop))
        stop = begins[stop]
    return runs[::-1]


def launched(lengths: IntArray, runs: list[slice]) -> int:
    """Blocks a head that these calls launch."""
    return sum(int((-(-lengths[run] // TILE)).max()) * lengths[run].size for run in runs)


def calls_of(spec: RunSpec, *, steps: int, seed: int) -> Iterator[tuple[IntArray, IntArray]]:
    """(query rows, keys) of the segments of a drawn CP rank, for each planned micro-batch."""
    lengths = lengths_of_family(
        window=spec.data.context_window,
        num_documents=max(4096, spec.tokens_per_step * (steps + 8) // 1000),
        seed=seed,
    )
    batches = GlobalBatches(lengths, tokens_per_batch=spec.tokens_per_step, seed=seed, epochs=1)
    planner = Planner.from_spec(spec, batches, workload_for(spec, "cuda"))
    random = np.random.default_rng(seed)
    for plan in islice(planner.steps(), steps):
        pipeline = planner.shard(plan, 0)
        for sharding, tokens in zip(pipeline.shardings, pipeline.local_tokens, strict=True):
            rows = attention_rows(sharding, int(random.integers(spec.parallel.cp)), tokens)
            yield np.diff(rows.call.cu_seqlens_q), np.diff(rows.call.cu_seqlens_k)


def row_of(
    name: str, one_pass: Pass, empty_ns: float, heads: int, calls: list[tuple[IntArray, IntArray]]
) -> list[object]:
    one, free, split, best = (np.zeros(len(calls)) for _ in range(4))
    blocks = np.zeros((len(calls), 3))
    num_runs = 0
    for i, (q, k) in enumerate(calls):
        lengths = q if one_pass.name == "forward" else k

        def time(part: slice, ns: float = empty_ns, q: IntArray = q, k: IntArray = k) -> float:
            return makespan_ns(
                one_pass.block_ns(q[part], k[part], ns), heads=heads, slots=one_pass.slots
            )

        call_ns = CALL_NS * one_pass.kernels
        runs = runs_of(lengths, heads=heads, call_blocks=call_ns * one_pass.slots / empty_ns)
        one[i], free[i] = time(slice(None)), time(slice(None), 0.0)
        split[i] = sum(map(time, runs)) + call_ns * (len(runs) - 1)
        best[i] = min(one[i], split[i])
        needed = int((-(-lengths // TILE)).sum())
        blocks[i] = launched(lengths, [slice(None)]), launched(lengths, runs), needed
        num_runs += len(runs)
    mean = blocks.mean(0) * heads
    return [
        *(title(name), one_pass.name, empty_ns / 1e3, len(calls)),
        *(mean[0], mean[1], mean[2], num_runs / len(calls), one.mean() / 1e3),
        *(one.sum() / free.sum() - 1, split.sum() / one.sum() - 1, best.sum() / one.sum() - 1),
    ]


COLUMNS = (
    *("configuration", "pass", "empty block, us", "calls", "blocks", "blocks, split", "needed"),
    *("runs a call", "one call, us", "empty blocks", "split", "split where it gains"),
)
FORMATS = {
    **dict.fromkeys(("blocks", "blocks, split", "needed"), ",.0f"),
    **dict.fromkeys(COLUMNS[-3:], "+.1%"),
    "runs a call": ".1f",
    "one call, us": ",.0f",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one configuration, one step")
    quick = parser.parse_args().quick
    profile = load_profile("h100")
    table = profile.table(backend="torch_varlen", head_dim=HEAD_SIZE, num_heads=32, num_kv_heads=32)
    forward, backward = (float(x.values.max()) for x in (table.forward, table.backward))
    passes = (
        Pass("forward", forward, FORWARD_FLOPS_PER_PAIR, at_once=2, kernels=1),
        Pass("backward", backward, BACKWARD_FLOPS_PER_PAIR, at_once=1, kernels=4),
    )
    rows: list[list[object]] = []
    for name in CONFIGURATIONS[:1] if quick else CONFIGURATIONS:
        spec = configuration(name, *system_choices("wlb", planned_gib=76.0)[0])
        spec = resolve_dp(spec, spec.parallel.world_size)
        spec = replace(spec, planner=replace(spec.planner, baseline=False))
        calls = list(calls_of(spec, steps=1 if quick else 6, seed=1))
        heads = spec.model.num_heads // spec.parallel.tp
        rows += [row_of(name, p, ns, heads, calls) for p in passes for ns in EMPTY_NS]
    made = Table(
        name="blocks",
        title="Launched thread blocks, and what splitting calls changes",
        columns=COLUMNS,
        rows=rows,
        formats=FORMATS,
        note="blocks: mean of calls, all heads of a rank. Last three columns: time relative to a "
        "kernel without empty blocks, to one call, and to one call with each call's better choice.",
    )
    show(made, width=180)
    if quick:
        return
    write_results(
        Path(__file__).parent,
        title="Thread blocks of variable-length calls",
        how=How.PREDICTED,
        profile=priced_with(profile),
        seed=1,
        text=" ".join(__doc__.splitlines()[2:]),
        tables=[made],
    )


if __name__ == "__main__":
    main()
