"""Measures how long the simulator takes for a step of 16,384 GPUs and 1,000 steps of 7B-128K.

`python -m experiments.simulator_speed` plans and shards global batches of the fitted length family,
then times the simulator's work on them: the layout's graph, pricing, the walk, the critical path
(for the one step only), metrics, memory and bubbles. Planning and sharding are timed separately.
Times are processor seconds of this process, on which other work on the machine has little effect;
the one step's are the least of several repeats.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.configurations import configuration
from experiments.harness.pages import How, Table, show, this_machine, write_results
from experiments.harness.streams import batches_of
from wlb.cost import ProfiledWorkload, workload_for
from wlb.simulate import (
    ShardedStep,
    Simulation,
    Simulator,
    critical_path,
    planner_of,
    sharded_steps,
)
from wlb.simulate.step import CHUNK
from wlb.spec import RunSpec

LARGE = (
    "parallel.tp=8",
    "parallel.cp=16",
    "parallel.pp=16",
    "parallel.dp=8",
    "pp.virtual_stages=5",
    "data.num_windows=128",
    "planner.baseline=false",
)
TARGETS_S = {"16K GPUs, one step": 1.0, "7B-128K, 1,000 steps": 60.0}
"""This project set itself these targets, in processor seconds."""
PARTS = ("graph", "price", "walk", "critical path", "metrics")


class Stopwatch:
    """Adds up processor seconds by part of the work."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("plan", *PARTS), 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] += time.process_time() - began

    @property
    def simulated_s(self) -> float:
        return sum(self.seconds[part] for part in PARTS)


def chunks_of(
    spec: RunSpec, cost: ProfiledWorkload, steps: int, seed: int
) -> Iterator[tuple[ShardedStep, ...]]:
    """Returns an iterator over sharded steps, in the chunks that `simulate_run` walks."""
    batches = batches_of(
        "wlb_paper", num_micro_batches=spec.num_micro_batches, num_batches=steps, seed=seed
    )
    planner = planner_of(spec, cost, batches)
    coming = sharded_steps(planner, dp=spec.parallel.dp, most=steps)
    return iter(lambda: tuple(islice(coming, CHUNK)), ())


def measure(spec: RunSpec, *, steps: int, seed: int, explain: bool) -> tuple[Stopwatch, Simulator]:
    """Simulates `steps` steps and times the parts.

    explain: also finds the critical path of each chunk's first step
    """
    watch, cost = Stopwatch(), workload_for(spec, "cuda")
    with watch.part("graph"):
        simulator = Simulator(spec=spec, cost=cost)
    chunks = chunks_of(spec, cost, steps, seed)
    while True:
        with watch.part("plan"):
            chunk = next(chunks, ())
        if not chunk:
            return watch, simulator
        with watch.part("price"):
            prices = simulator.price(chunk)
        with watch.part("walk"):
            simulation = simulator.run(prices)
        with watch.part("metrics"):
            metrics_of(simulation, chunk)
        if explain:
            with watch.part("critical path"):
                critical_path(simulation).describe()


def metrics_of(simulation: Simulation, steps: tuple[ShardedStep, ...]) -> object:
    """Returns all that `simulate_run` keeps, and the computing time of each rank."""
    return (
        simulation.metrics(steps),
        simulation.bubble,
        simulation.peak_memory_bytes,
        simulation.compute_s,
    )


def row_of(case: str, steps: int, watch: Stopwatch, simulator: Simulator) -> list[Any]:
    return [
        case,
        simulator.spec.parallel.world_size,
        steps,
        len(simulator.graph.nodes),
        *(watch.seconds[part] for part in PARTS),
        watch.simulated_s,
        TARGETS_S[case],
        watch.seconds["plan"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="simulate 100 steps of 7B-128K, write nothing"
    )
    options = parser.parse_args()
    large, small = TARGETS_S
    spec = configuration("70b_128k", *LARGE)
    repeats = [measure(spec, steps=1, seed=options.seed, explain=True) for _ in range(5)]
    rows = [row_of(large, 1, *min(repeats, key=lambda made: made[0].simulated_s))]
    steps = 100 if options.quick else 1000
    spec = configuration("7b_128k", "planner.baseline=false")
    rows.append(row_of(small, steps, *measure(spec, steps=steps, seed=options.seed, explain=False)))
    table = Table(
        name="speed",
        title="Processor seconds",
        columns=("case", "GPUs", "steps", "events a step", *PARTS, "all", "target", "planning"),
        rows=rows,
        formats={name: ".3f" for name in (*PARTS, "all", "planning")} | {"GPUs": ",d"},
        note="`all` leaves planning and sharding out.",
    )
    show(table)
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="Speed of the simulator",
        how=How.MEASURED,
        profile=f"processor time on {this_machine()}, NumPy {np.__version__}.",
        seed=options.seed,
        text=(
            "One step of 70B-128K at (TP, CP, PP, DP) = (8, 16, 16, 8) with 5 virtual stages and "
            "128 micro-batches: the least of five. 1,000 steps of 7B-128K as the preset packs "
            f"them, {CHUNK} walked at a time. Other work shared the machine's cores and caches."
        ),
        tables=[table],
    )


if __name__ == "__main__":
    main()
