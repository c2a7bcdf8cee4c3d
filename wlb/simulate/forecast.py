"""What a run would take: time of a step, MFU, days, size of a checkpoint; simulated, not measured.

A few steps of the run's own planner are simulated. Their time per token times the tokens of a
global batch is the time of a step, so that a step which flushes delayed documents does not count
like a full one. Evaluations, checkpoints and interruptions are not in it.
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
"""Approximate number of micro-batches that are simulated at first, in 2 to 8 steps."""
MOST_MICRO_BATCHES = 16_384
"""Most micro-batches that are simulated for one prediction."""
ENOUGH = 0.01
"""Standard error of a prediction, as a share of it, at which more steps are not needed."""
BLOCKS = 8
"""Parts of a run by which the error of a comparison is estimated."""
COMPARED_MICRO_BATCHES = 2048
"""Approximate number of micro-batches of which two packings are compared."""
DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """spec: filled in. first: the run's first step. is_cpu: ranks are processes on a CPU, of which
    no peak is known.
    """

    spec: RunSpec
    cost: ProfiledWorkload
    first: ShardedStep
    simulation: RunSimulation
    is_cpu: bool = False

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
        """Peak of a rank's device that MFU refers to; 0 where none is known."""
        if self.is_cpu:
            return rank_peak_tflops(self.spec, "")
        return cluster_peak_tflops(self.spec)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs of the documents over the devices' peak; None without a known peak."""
        peak = self.peak_tflops
        return self.simulation.mfu(peak_tflops=peak) if peak else None

    @property
    def days(self) -> float:
        """Predicted days of all training steps."""
        return self.step_time_s * self.spec.training.steps / DAY_S

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's tensors, which all ranks share."""
        return CHECKPOINT_BYTES * self.spec.model.num_parameters


class SavedShare(NamedTuple):
    """How much less time a run takes than another one on the same documents."""

    saved: float  # share of the other's GPU hours
    error: float | None  # its standard error, None for too few steps

    @property
    def remark(self) -> str:
        """What to do about a standard error that is too large; empty if it is not."""
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
    """Share of the GPU hours of `usual` that each of `ours` saves on the same global batches, with
    whole steps simulated: pipeline, CP sharding and communication are in it, and the flush.
    """
    other, *runs = [simulate_run(spec, cost, batches) for spec in (usual, *ours)]
    return [share_saved(own, other) for own in runs]


def packed_by(spec: RunSpec, section: PackingSection) -> RunSpec:
    """The run with another policy's section, without a method and packs that contradict it."""
    method = kept_method(section.method, section.policy)
    return replace(spec, packing=replace(section, method=method, packs=""))


def share_saved(own: RunSimulation, other: RunSimulation) -> SavedShare:
    """Share of the other run's time that `own` saves on the same documents."""
    saved = 1 - own.time_s / other.time_s
    num = min(own.step_time_s.size, other.step_time_s.size)
    if num < 2 * BLOCKS:
        return SavedShare(saved, None)
    # A document that waits is trained in a later part of one run than of the other. Times are
    # therefore divided by the work in them, or such a document would count as a saving in one part
    # and as a loss in another.
    bounds = [num * i // BLOCKS for i in range(BLOCKS)]
    own_parts, other_parts = (_time_per_work(run, bounds, num) for run in (own, other))
    return SavedShare(saved, float((1 - own_parts / other_parts).std(ddof=1)) / BLOCKS**0.5)


def _time_per_work(run: RunSimulation, bounds: Sequence[int], num: int) -> FloatArray:
    """Simulated time over predicted work, of the parts of the first `num` steps that `bounds` begin."""
    work = np.array([step.mean_workload_ns for step in run.metrics[:num]])
    time, work = (np.add.reduceat(of_steps, bounds) for of_steps in (run.step_time_s[:num], work))
    return time / work


def batches_to_compare(spec: RunSpec) -> int:
    """Number of global batches that `simulated_shares` takes seconds for."""
    return max(8, COMPARED_MICRO_BATCHES // spec.num_micro_batches)


def steps_to_simulate(spec: RunSpec) -> int:
    """Number of global batches from which `forecast` predicts a run."""
    return min(8, max(2, SIMULATED_MICRO_BATCHES // spec.num_micro_batches))


def forecast(
    spec: RunSpec, cost: ProfiledWorkload, batches: Sequence[GlobalBatch], *, is_cpu: bool = False
) -> Forecast:
    """Predict a run from some of its global batches; dp and the vocabulary size must be set.

    UserError where the documents give no step.
    """
    planner = planner_of(spec, cost, batches)
    steps = tuple(sharded_steps(planner, dp=spec.parallel.dp))
    if not steps:
        raise UserError("the corpus gives no step; raise data.epochs or use a larger corpus")
    return Forecast(
        spec=spec,
        cost=cost,
        first=steps[0],
        simulation=simulate_run(spec, cost, batches, label="run", steps=steps),
        is_cpu=is_cpu,
    )
