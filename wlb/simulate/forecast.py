"""Forecast a run from a simulation: time of a step, MFU, days, size of a checkpoint.

A few steps of the run's planner are simulated. The forecast for a step is their time per token
times the tokens of a global batch, so that a step that flushes delayed documents does not count
like a full step. Evaluations, checkpoints and interruptions are not included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from wlb.cost import ProfiledWorkload, cluster_peak_tflops, rank_peak_tflops
from wlb.memory.budget import CHECKPOINT_BYTES
from wlb.plan import FloatArray, GlobalBatch, UserError
from wlb.simulate.pass_times import ShardedStep
from wlb.simulate.run import RunSimulation, planner_of, sharded_steps, simulate_run
from wlb.spec import PackingSection, RunSpec
from wlb.spec.methods import kept_method

SIMULATED_MICRO_BATCHES = 64
"""Approximate number of micro-batches of the first simulation, in 2 to 8 steps."""
MOST_MICRO_BATCHES = 16_384
"""Most micro-batches that are simulated for one forecast."""
ENOUGH = 0.01
"""Relative standard error of a forecast at which no more steps are simulated."""
BLOCKS = 8
"""Parts of a run from which the error of a comparison is estimated."""
COMPARED_MICRO_BATCHES = 2048
"""Approximate number of micro-batches with which two packings are compared."""
DAY_S = 86_400
"""Seconds of a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run will take, according to a simulation of a few steps."""

    spec: RunSpec  # the run, with all degrees filled in
    cost: ProfiledWorkload  # prices
    first: ShardedStep  # the run's first step
    simulation: RunSimulation  # the simulated steps
    is_cpu: bool = False  # whether ranks are processes on a CPU, whose peak is not known

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens of documents per second, of all ranks."""
        return self.simulation.tokens_per_s

    @property
    def step_time_s(self) -> float:
        """Predicted seconds for the tokens of one global batch."""
        return self.spec.tokens_per_step / self.tokens_per_s

    @property
    def peak_tflops(self) -> float:
        """Peak TFLOP/s of a rank's device, to which MFU refers; 0 if unknown."""
        if self.is_cpu:
            return rank_peak_tflops(self.spec, "")
        return cluster_peak_tflops(self.spec)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs of the documents over the devices' peak; None if the peak is unknown."""
        peak = self.peak_tflops
        return self.simulation.mfu(peak_tflops=peak) if peak else None

    @property
    def days(self) -> float:
        """Predicted days of all training steps."""
        return self.step_time_s * self.spec.training.steps / DAY_S

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's tensors, over all ranks."""
        return CHECKPOINT_BYTES * self.spec.model.num_parameters


class SavedShare(NamedTuple):
    """How much less time a run takes than another run on the same documents."""

    saved: float  # fraction of the other run's GPU hours
    error: float | None  # standard error of `saved`; None if there are too few steps

    @property
    def remark(self) -> str:
        """What to do about a large standard error; empty if it is small."""
        if self.error is not None and self.error <= ENOUGH:
            return ""
        known = "is unknown, for so few steps" if self.error is None else f"is {self.error:.1%}"
        return f"the saving's standard error {known}: give more --steps"


def simulated_shares(
    cost: ProfiledWorkload,
    batches: Sequence[GlobalBatch],
    *,
    usual: RunSpec,
    ours: Sequence[RunSpec],
) -> list[SavedShare]:
    """Return how many of the GPU hours of `usual` each of `ours` saves on the same global batches.

    Whole steps are simulated: pipeline, CP sharding, communication and the flush.

    Args:
        cost: Prices.
        batches: Global batches to plan.
        usual: The run to compare with.
        ours: The other runs.
    """
    other, *runs = [simulate_run(spec, cost, batches) for spec in (usual, *ours)]
    return [share_saved(own, other) for own in runs]


def packed_by(spec: RunSpec, section: PackingSection) -> RunSpec:
    """Return the run with another packing section, without a method or packs that contradict it."""
    method = kept_method(section.method, section.policy)
    return replace(spec, packing=replace(section, method=method, packs=""))


def share_saved(own: RunSimulation, other: RunSimulation) -> SavedShare:
    """Return the fraction of the other run's time that `own` saves on the same documents."""
    saved = 1 - own.time_s / other.time_s
    num = min(own.step_time_s.size, other.step_time_s.size)
    if num < 2 * BLOCKS:
        return SavedShare(saved, None)
    # A delayed document is trained in a later part of one run than of the other. So times are
    # divided by the work in them; otherwise the document would count as a saving in one part and as
    # a loss in another.
    bounds = [num * i // BLOCKS for i in range(BLOCKS)]
    own_parts, other_parts = (_time_per_work(run, bounds, num) for run in (own, other))
    return SavedShare(saved, float((1 - own_parts / other_parts).std(ddof=1)) / BLOCKS**0.5)


def _time_per_work(run: RunSimulation, bounds: Sequence[int], num: int) -> FloatArray:
    """Return simulated time over predicted work, for each part of the first `num` steps.

    `bounds` has the first step of each part.
    """
    work = np.array([step.mean_workload_ns for step in run.metrics[:num]])
    time, work = (np.add.reduceat(of_steps, bounds) for of_steps in (run.step_time_s[:num], work))
    return time / work


def batches_to_compare(spec: RunSpec) -> int:
    """Return how many global batches `simulated_shares` needs; simulating them takes seconds."""
    return max(8, COMPARED_MICRO_BATCHES // spec.num_micro_batches)


def steps_to_simulate(spec: RunSpec) -> int:
    """Return from how many global batches `forecast` predicts a run."""
    return min(8, max(2, SIMULATED_MICRO_BATCHES // spec.num_micro_batches))


def forecast(
    spec: RunSpec, cost: ProfiledWorkload, batches: Sequence[GlobalBatch], *, is_cpu: bool = False
) -> Forecast:
    """Predict a run from some of its global batches.

    Args:
        spec: The run; dp and the vocabulary size must be set.
        cost: Prices.
        batches: Global batches to plan.
        is_cpu: Whether ranks are processes on a CPU.

    Raises:
        UserError: The documents are too few for a step.
    """
    planner = planner_of(spec, cost, batches)
    steps = tuple(sharded_steps(planner, dp=spec.parallel.dp))
    if not steps:
        raise UserError(
            "the corpus is too small for a step; raise data.epochs or use a larger corpus"
        )
    return Forecast(
        spec=spec,
        cost=cost,
        first=steps[0],
        simulation=simulate_run(spec, cost, batches, label="run", steps=steps),
        is_cpu=is_cpu,
    )
