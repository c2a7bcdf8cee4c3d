"""Measures training steps on CPU ranks over Gloo, with all keys gathered and with those needed,
and with own keys first (`cp.overlap`).

`python -m experiments.cp_traffic.step [--cp 4] [--pairs 8] [--quick]` trains a small model on one
CP group. Each step runs in all four ways, one after the other in turns, on the same documents:
the fitted stream with lengths divided by 16, in micro-batches of 8K to 12K tokens. Peak memory is
that of processes which use one way only. Times are of whole steps, from a barrier to a
barrier.
"""

import argparse
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from rich.console import Console

from experiments.harness.pages import How, Table, show, this_machine, write_results
from experiments.harness.streams import RATIO
from wlb.cost import FlopsWorkload
from wlb.data import lengths_of_family
from wlb.launch.local import run_local
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.plan import KeyExchange, PipelinePlan, rows_gathered, rows_moved
from wlb.planner import Planner
from wlb.spec import ModelSpec, ParallelSpec, RunSpec, check

FOLDER = Path(__file__).parent / "step"
SHRINK, WINDOW = 16, 8192
MODEL = ModelSpec(
    vocab_size=512, hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=8, ffn_hidden_size=1024
)
SEED = 0


@dataclass(frozen=True, slots=True)
class Way:
    """How a step gets its keys. overlap: as `cp.overlap`."""

    exchange: KeyExchange
    overlap: bool


EXCHANGES = (KeyExchange.GATHER, KeyExchange.NEEDED)
"""Those of ranks in one node."""
WAYS = tuple(Way(exchange, overlap) for overlap in (False, True) for exchange in EXCHANGES)


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Reads tokens that are a function of the document alone."""

    lengths: npt.NDArray[np.int64]

    def length(self, document: int) -> int:
        return int(self.lengths[document])

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.integer]:
        draw = np.random.default_rng(document)
        return draw.integers(0, MODEL.vocab_size, self.length(document))[start:stop]


def plans_of(cp: int, steps: int) -> tuple[list[PipelinePlan], RandomTokens]:
    """Returns steps of one micro-batch each, by `bounded` and `balanced`, and their tokens."""
    drawn = lengths_of_family(window=WINDOW * SHRINK, num_documents=20_000, seed=SEED).lengths
    lengths = np.maximum(1, drawn // SHRINK)
    planner = Planner.for_lengths(
        lengths,
        context_window=WINDOW,
        num_micro_batches=1,
        cp=cp,
        cost=FlopsWorkload(quadratic_ns=1000 * RATIO / WINDOW, linear_ns_per_token=1000),
        strategy="balanced",
    )
    steps_of = zip(range(steps), planner.steps(), strict=False)
    return [planner.shard(plan, 0) for _, plan in steps_of], RandomTokens(lengths)


def with_exchange(plan: PipelinePlan, exchange: KeyExchange) -> PipelinePlan:
    shardings = tuple(replace(s, exchange=exchange) for s in plan.shardings)
    return replace(plan, shardings=shardings)


def executor_of(cp: int, *, overlap: bool) -> Executor:
    spec = RunSpec()
    spec = replace(
        spec,
        model=MODEL,
        parallel=ParallelSpec(tp=1, cp=cp, pp=1, dp=1),
        cp=replace(spec.cp, overlap=overlap),
        data=replace(spec.data, context_window=WINDOW, num_windows=1),
    )
    return Executor(check(spec), build_mesh(spec.parallel, torch.device("cpu")))


def timed(world: World, pairs: int, ways: tuple[Way, ...]) -> list[list[float]]:
    """Returns seconds of each step in each way, [pairs][ways], and at the end the peak memory of
    this process in MiB."""
    plans, reader = plans_of(world.world_size, pairs + 1)
    executors = {way: executor_of(world.world_size, overlap=way.overlap) for way in ways}
    out: list[list[float]] = []
    for i, plan in enumerate(plans):
        took = [0.0] * len(ways)
        # They take turns in going first.
        for k in range(len(ways)):
            k = (k + i) % len(ways)
            mine, executor = with_exchange(plan, ways[k].exchange), executors[ways[k]]
            inputs = executor.load(mine, reader, loss_scale=1e-3)
            dist.barrier()
            began = time.perf_counter()
            executor.train_step(mine, reader, loss_scale=1e-3, inputs=inputs)
            dist.barrier()
            took[k] = time.perf_counter() - began
        out.append(took)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    # The first step makes stages and connections.
    return [*out[1:], [peak]]


def table(cp: int, pairs: int) -> Table:
    first, *_ = run_local(timed, cp, pairs, WAYS, start_group=True)
    seconds = np.array(first[:-1])
    peaks = {
        way: max(rank[-1][0] for rank in run_local(timed, cp, 3, (way,), start_group=True))
        for way in WAYS
    }
    shardings = [s for plan in plans_of(cp, pairs + 1)[0][1:] for s in plan.shardings]
    gathered = sum(rows_gathered(s, local_tokens=-(-s.num_tokens // cp)) for s in shardings)
    needed = sum(int(rows_moved(s).sum(axis=1).max()) for s in shardings)
    shares = {KeyExchange.GATHER: 1.0, KeyExchange.NEEDED: needed / gathered}
    medians = np.median(seconds, axis=0)
    over = np.median(seconds / seconds[:, :1], axis=0)
    rows = [
        [cp, str(way.exchange), way.overlap, shares[way.exchange], medians[k], over[k], peaks[way]]
        for k, way in enumerate(WAYS)
    ]
    columns = ("CP", "exchange", "overlap", "rows", "s / step", "time / gather", "peak (MiB)")
    return Table(
        name=f"step_cp{cp}",
        title=f"CP {cp}: {pairs} steps of each",
        columns=columns,
        rows=rows,
        formats=dict(zip(columns[3:], (".3f", ".3f", ".3f", ".0f"), strict=True)),
        note="`rows` of the busiest rank over an all-gather's; the ratio is the median of pairs.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cp", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--pairs", type=int, default=12, help="steps in each way")
    parser.add_argument("--quick", action="store_true", help="2 pairs at CP 2, and write nothing")
    options = parser.parse_args()
    if options.quick:
        show(table(2, 2))
        return
    tables = [table(cp, options.pairs) for cp in options.cp]
    show(*tables)
    written = write_results(
        FOLDER,
        title="Training steps with keys gathered and by need",
        how=How.MEASURED,
        profile=f"on CPU ranks over Gloo ({this_machine()}, all ranks on these cores)",
        text=TEXT,
        seed=SEED,
        tables=tables,
        command=f"python -m experiments.cp_traffic.step --pairs {options.pairs}",
    )
    Console().print(f"written to {written.name}")


TEXT = f"""
A model of {MODEL.num_layers} layers and width {MODEL.hidden_size} trains in float32 on one CP
group, one micro-batch of {WINDOW:,} to {WINDOW * 3 // 2:,} tokens a step, by `bounded` and
`balanced`. Loopback stands for a network, and
ranks share cores with each other and with Gloo's threads, so the times show no cluster's. Peak
memory is a process's resident set at most, Python and torch included.
"""


if __name__ == "__main__":
    main()
