"""What a run would take: time of a step, MFU, days, size of a checkpoint; simulated, not measured.

A few steps of the run's own planner are simulated. Their time per token times the tokens of a
global batch is the time of a step, so that a step which flushes delayed documents does not count
like a full one. Evaluations, checkpoints and interruptions are not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from wlb.cost import ProfiledWorkload, cluster_peak_tflops, rank_peak_tflops
from wlb.memory.budget import CHECKPOINT_BYTES
from wlb.plan import GlobalBatch, UserError
from wlb.simulate.pass_times import ShardedStep
from wlb.simulate.run import RunSimulation, planner_of, sharded_steps, simulate_run
from wlb.spec import PackingSection, RunSpec
from wlb.spec.methods import kept_method

SIMULATED_MICRO_BATCHES = 64
"""Approximate number of micro-batches that are simulated, in 2 to 8 steps."""
COMPARED_MICRO_BATCHES = 2048
"""Approximate number of micro-batches of which two packings are compared."""
DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """spec: filled in. first: the run's first step. is_cpu: ranks are processes on a CPU, of which
    no peak is known."""

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


def simulated_shares(
    spec: RunSpec,
    cost: ProfiledWorkload,
    batches: Sequence[GlobalBatch],
    *,
    usual: Sequence[PackingSection],
    best: PackingSection,
) -> list[float]:
    """Share of the GPU hours of each of `usual` that `best` saves on the same global batches, with
    whole steps simulated: pipeline, CP sharding and communication are in it, and the flush."""
    # A method and packs of the run's own would contradict another policy.
    sections = [
        replace(section, method=kept_method(section.method, section.policy), packs="")
        for section in (best, *usual)
    ]
    own, *times = [
        simulate_run(replace(spec, packing=section), cost, batches).time_s for section in sections
    ]
    return [1 - own / time for time in times]


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
