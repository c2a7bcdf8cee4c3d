"""Simulates the paper's 8K-GPU job (Figures 1 and 4): a 405B model with a 128K window.

The job is preset `405b_128k` with the document lengths and prices of `harness/constants.py`. Under
Plain-4D each pipeline has a loader of its own and trains the windows in their order. The other
systems assign micro-batches to pipelines by predicted work.
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
"""Global batches drawn beyond the number of steps, so that no simulated step is in the flush."""
PAPER = 1.44
"""Computing time of the slowest GPU over the others in the paper's Figure 1."""
FloatArray = npt.NDArray[np.float64]


def spec_of(system: str) -> RunSpec:
    """Returns the job's configuration under a system.

    MLPs are recomputed, because otherwise a GPU would need more than 80 GiB.
    """
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
    """Yields steps with micro-batches assigned to pipelines in their order, ignoring work.

    The first N / dp micro-batches go to the first pipeline, and so on.
    """
    for plan in planner.steps():
        num = plan.packing.num_micro_batches
        assigned = replace(plan, pipelines=np.arange(num).reshape(dp, num // dp))
        pipelines = tuple(planner.shard(assigned, pipeline) for pipeline in range(dp))
        yield ShardedStep(plan=assigned, pipelines=pipelines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """Ratios of the slowest GPU's time to other GPUs."""

    others: float  # its time over the mean of all other GPUs
    median: float  # its time over the median of all GPUs
    fastest: float  # its time over the fastest GPU


def slowest(of_gpus: FloatArray, *, tp: int) -> Slowest:
    """Compares the slowest GPU with the others.

    Args:
        of_gpus: Times of GPUs, of any shape. Each value stands for `tp` GPUs with equal times.
        tp: Tensor-parallel ranks.
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
    """Returns the slowest GPU's time over the mean of the others in each step, shape [steps]."""
    return np.array([slowest(step, tp=tp).others for step in of_steps])


def traced_step(simulation: Simulation) -> int:
    """Returns the number of a typical step, the median by slowest GPU over the others."""
    found = over_others(simulation.compute_s, tp=simulation.simulator.spec.parallel.tp)
    return int(np.argsort(found, kind="stable")[(found.size - 1) // 2])
