"""Forecast a run from a simulation: time of a step, MFU, days, size of a checkpoint.

Some global batches of the run are planned and simulated. The predicted time of a step is the
simulated time per token, multiplied by the tokens of a global batch. So the short steps at the end,
which train the last delayed documents, do not count as much as full steps. Evaluations, checkpoints
and interruptions are not included.
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
"""About how many micro-batches are simulated first for a forecast; they make 2 to 8 steps."""
MOST_MICRO_BATCHES = 16_384
"""Most micro-batches that are simulated for one forecast, which bounds its time."""
ENOUGH = 0.01
"""Relative standard error of a forecast that is small enough to simulate no further steps."""
BLOCKS = 8
"""Number of parts of a run from which the standard error of a comparison is estimated."""
COMPARED_MICRO_BATCHES = 2048
"""About how many micro-batches are simulated to compare two packings."""
DAY_S = 86_400
"""Seconds of a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predictions about a run from a simulation of some of its steps."""

    spec: RunSpec  # the run, with all degrees of parallelism set
    cost: ProfiledWorkload  # prices
    first: ShardedStep  # the run's first step
    simulation: RunSimulation  # the simulated steps
    is_cpu: bool = False  # whether ranks are processes on a CPU, whose peak TFLOP/s is not known

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second, all ranks together, without padding."""
        return self.simulation.tokens_per_s

    @property
    def step_time_s(self) -> float:
        """Predicted seconds for the tokens of one global batch."""
        return self.spec.tokens_per_step / self.tokens_per_s

    @property
    def peak_tflops(self) -> float:
        """Peak TFLOP/s of a rank's device, from which MFU is computed; 0 if unknown."""
        if self.is_cpu:
            return rank_peak_tflops(self.spec, "")
        return cluster_peak_tflops(self.spec)

    @property
    def mfu(self) -> float | None:
        """Predicted MFU, from the FLOPs of documents; None if the device's peak is unknown."""
        peak = self.peak_tflops
        return self.simulation.mfu(peak_tflops=peak) if peak else None

    @property
    def days(self) -> float:
        """Predicted days of all training steps."""
        return self.step_time_s * self.spec.training.steps / DAY_S

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's tensors, all ranks together."""
        return CHECKPOINT_BYTES * self.spec.model.num_parameters


class SavedShare(NamedTuple):
    """How much time a run saves, compared with another run on the same documents."""

    saved: float  # fraction of the other run's GPU hours
    error: float | None  # standard error of `saved`; None if there are too few steps

    @property
    def remark(self) -> str:
        """Advice to simulate more steps if the standard error is large or unknown; otherwise ""."""
        if self.error is not None and self.error <= ENOUGH:
            return ""
        known = "is unknown after so few steps" if self.error is None else f"is {self.error:.1%}"
        return f"the standard error of the saving {known}; simulate more steps with --steps"


def simulated_shares(
    cost: ProfiledWorkload,
    batches: Sequence[GlobalBatch],
    *,
    usual: RunSpec,
    ours: Sequence[RunSpec],
) -> list[SavedShare]:
    """Return the fraction of a usual run's GPU hours that each of the other runs saves.

    All runs train the same global batches. All their steps are simulated, with pipeline, CP
    sharding, communication and the flush.

    Args:
        cost: Prices of all runs.
        batches: Global batches that each run plans.
        usual: The run with which the others are compared.
        ours: The other runs.

    Returns:
        One result for each of `ours`.
    """
    other, *runs = [simulate_run(spec, cost, batches) for spec in (usual, *ours)]
    return [share_saved(own, other) for own in runs]


def packed_by(spec: RunSpec, section: PackingSection) -> RunSpec:
    """Return the run with another `packing` section of its configuration.

    `packing.method` is removed if it contradicts the section's policy. `packing.packs` is always
    removed.
    """
    method = kept_method(section.method, section.policy)
    return replace(spec, packing=replace(section, method=method, packs=""))


def share_saved(own: RunSimulation, other: RunSimulation) -> SavedShare:
    """Return the fraction of the time of run `other` that run `own` saves on the same documents."""
    saved = 1 - own.time_s / other.time_s
    num = min(own.step_time_s.size, other.step_time_s.size)
    if num < 2 * BLOCKS:
        return SavedShare(saved, None)
    # Both runs are divided into parts, and the savings of the parts give the standard error. A run
    # that delays documents trains some of them in a later part than the other run. So the time of
    # each part is divided by its predicted work. Otherwise a delayed document would count as a
    # saving in one part and as a loss in a later one.
    bounds = [num * i // BLOCKS for i in range(BLOCKS)]
    own_parts, other_parts = (_time_per_work(run, bounds, num) for run in (own, other))
    return SavedShare(saved, float((1 - own_parts / other_parts).std(ddof=1)) / BLOCKS**0.5)


def _time_per_work(run: RunSimulation, bounds: Sequence[int], num: int) -> FloatArray:
    """Return simulated time / predicted work for each of several consecutive parts of a run.

    Args:
        run: The run.
        bounds: Index of the first step of each part, shape [num_parts].
        num: Number of steps in all parts together; later steps are ignored.
    """
    work = np.array([step.mean_workload_ns for step in run.metrics[:num]])
    time, work = (np.add.reduceat(of_steps, bounds) for of_steps in (run.step_time_s[:num], work))
    return time / work


def batches_to_compare(spec: RunSpec) -> int:
    """Return how many global batches `simulated_shares` needs to compare packings of a run."""
    return max(8, COMPARED_MICRO_BATCHES // spec.num_micro_batches)


def steps_to_simulate(spec: RunSpec) -> int:
    """Return how many global batches a dry run plans and simulates at first (2 to 8)."""
    return min(8, max(2, SIMULATED_MICRO_BATCHES // spec.num_micro_batches))


def forecast(
    spec: RunSpec, cost: ProfiledWorkload, batches: Sequence[GlobalBatch], *, is_cpu: bool = False
) -> Forecast:
    """Plan and simulate some global batches of a run, and predict the run from them.

    Args:
        spec: The run; dp and the vocabulary size must be set.
        cost: Prices.
        batches: Some of the run's global batches.
        is_cpu: Whether ranks are processes on a CPU.

    Raises:
        UserError: There are too few documents for a step.
    """
    planner = planner_of(spec, cost, batches)
    steps = tuple(sharded_steps(planner, dp=spec.parallel.dp))
    if not steps:
        raise UserError(
            "the corpus has too few tokens for one step (a global batch has "
            f"{spec.tokens_per_step} tokens); raise data.epochs, or use a larger corpus"
        )
    return Forecast(
        spec=spec,
        cost=cost,
        first=steps[0],
        simulation=simulate_run(spec, cost, batches, label="run", steps=steps),
        is_cpu=is_cpu,
    )
