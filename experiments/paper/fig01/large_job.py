"""Simulates the paper's 8K-GPU job (Figures 1 and 4): a 405B model with a 128K window.

The job is preset `405b_128k` with lengths and prices of `experiments/harness/constants.py`. Under
Plain-4D each pipeline trains the windows that its own loader made, in their order; the other
systems deal micro-batches to pipelines by predicted work.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from experiments.harness import constants
from experiments.harness.evaluation import EARLIER_GIB, batches_of
from wlb.cost import ProfiledWorkload, workload_of
from wlb.planner import Planner
from wlb.simulate import ShardedStep, Simulation, Simulator, planner_of, sharded_steps
from wlb.spec import RunSpec, load, system_overrides

PRESET = "405b_128k"
STEPS = 32
AHEAD = 2
"""This many more global batches than steps are drawn, so that no step is one of the flush."""
PAPER = 1.44
"""In Figure 1 the slowest GPU computes this many times as long as the others."""
FloatArray = npt.NDArray[np.float64]


def spec_of(system: str) -> RunSpec:
    """Returns the job's settings with recomputed MLPs, without which a GPU needs over 80 GiB."""
    overrides = system_overrides(system, planned_gib=EARLIER_GIB)[-1]
    return load(PRESET, [*constants.settings(), *overrides, "training.recompute=selective"])


def cost_of(spec: RunSpec) -> ProfiledWorkload:
    return workload_of(spec, constants.profile())


def simulate(system: str, *, steps: int = STEPS, seed: int) -> Simulation:
    """Simulates the first `steps` steps of the job under a system of `wlb.spec.SYSTEMS`."""
    spec = spec_of(system)
    cost = cost_of(spec)
    batches = batches_of(spec, family=constants.FAMILY, steps=steps + AHEAD, seed=seed)
    planner = planner_of(spec, cost, batches)
    simulator = Simulator(spec=spec, cost=cost)
    dp = spec.parallel.dp
    made = in_order(planner, dp) if system == "plain_4d" else sharded_steps(planner, dp=dp)
    return simulator.run(simulator.price(tuple(islice(made, steps))))


def in_order(planner: Planner, dp: int) -> Iterator[ShardedStep]:
    """Yields steps whose micro-batches go to the pipelines in their order.

    The first N / dp micro-batches go to the first pipeline, and so on.
    """
    for plan in planner.steps():
        num = plan.packing.num_micro_batches
        dealt = replace(plan, pipelines=np.arange(num).reshape(dp, num // dp))
        pipelines = tuple(planner.shard(dealt, pipeline) for pipeline in range(dp))
        yield ShardedStep(plan=dealt, pipelines=pipelines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """Holds the slowest GPU's time over the mean of all others, the median, and the fastest."""

    others: float
    median: float
    fastest: float


def slowest(of_gpus: FloatArray, *, tp: int) -> Slowest:
    """Compares the slowest GPU with the others.

    of_gpus: one value for every `tp` ranks, which are alike
    """
    values = np.sort(of_gpus.ravel())
    most, num = float(values[-1]), values.size * tp
    others = (float(values.sum()) * tp - most) / (num - 1)
    return Slowest(
        others=most / others,
        median=most / float(np.median(values)),
        fastest=most / float(values[0]),
    )


def over_others(of_steps: FloatArray, *, tp: int) -> FloatArray:
    """Returns the slowest GPU's time over the mean of the others, for each step."""
    return np.array([slowest(step, tp=tp).others for step in of_steps])


def traced_step(simulation: Simulation) -> int:
    """Returns a typical step: its slowest GPU over the others is the median of all steps."""
    found = over_others(simulation.compute_s, tp=simulation.simulator.spec.parallel.tp)
    return int(np.argsort(found, kind="stable")[(found.size - 1) // 2])
