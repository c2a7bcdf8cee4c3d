"""Simulates whole runs: planner and simulator over the same global batches, to their end.

Documents that a policy holds back are flushed after the last batch, and the flush counts, so that
delaying outliers cannot look like speed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from wlb.cost import ProfiledWorkload, document_flops
from wlb.data import ListedBatches
from wlb.memory import gpu_budget
from wlb.memory.budget import ROUNDING
from wlb.memory.estimate import GIB
from wlb.plan import FloatArray, GlobalBatch, IntArray, StepMetrics, StepPlan, UserError
from wlb.planner import Planner
from wlb.simulate.pass_times import ShardedStep, StepPrices, joined
from wlb.simulate.program import Wires
from wlb.simulate.shards import WLB_FSDP, FsdpExecution
from wlb.simulate.step import Simulation, Simulator, chunked
from wlb.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSimulation:
    """The simulated steps of one run. step_time_s, tokens: [steps]. bubble: mean over pipelines,
    [steps, pp]. peak_memory_bytes: [steps, pp]. model_flops: of all documents, both passes.
    """

    label: str
    simulator: Simulator
    prices: StepPrices
    metrics: tuple[StepMetrics, ...]
    step_time_s: FloatArray
    tokens: IntArray
    bubble: FloatArray
    peak_memory_bytes: IntArray
    model_flops: float

    @property
    def time_s(self) -> float:
        return float(self.step_time_s.sum())

    @property
    def tokens_per_s(self) -> float:
        return float(self.tokens.sum()) / self.time_s

    @property
    def standard_error(self) -> float:
        """Of the time per token, as a share of it, with steps as independent; infinite for one
        step.
        """
        num = self.step_time_s.size
        if num < 2:
            return float("inf")
        # Of a ratio of two sums (Cochran 1977, Sampling Techniques, Eq. 6.13).
        residuals = self.step_time_s - self.tokens * (self.time_s / float(self.tokens.sum()))
        return float(np.sqrt((residuals**2).sum() * num / (num - 1))) / self.time_s

    def mfu(self, *, peak_tflops: float) -> float:
        """Model FLOPs of the documents (not of full windows) over the GPUs' peak."""
        gpus = self.simulator.spec.parallel.world_size
        return self.model_flops / self.time_s / (gpus * peak_tflops * 1e12)

    @property
    def mean_delay(self) -> float:
        """Steps that a token waits on average."""
        delays = [m.mean_delay * m.num_tokens for m in self.metrics]
        return float(sum(delays) / max(1, int(self.tokens.sum())))

    @property
    def imbalance(self) -> float:
        """Time-weighted: sum of the slowest micro-batches' predicted work over sum of means."""
        mean = sum(m.mean_workload_ns for m in self.metrics)
        return sum(m.max_workload_ns for m in self.metrics) / mean if mean else 1.0

    @property
    def mean_bubble(self) -> float:
        """Time-weighted mean bubble of all pipeline ranks."""
        return float((self.bubble.mean(axis=1) * self.step_time_s).sum()) / self.time_s

    def again(self, step: int) -> Simulation:
        """One of the steps, simulated again with its events."""
        return self.simulator.run(self.prices.select(slice(step, step + 1)))

    def balanced_time_s(self) -> float:
        """Seconds of these steps under perfect balance (`StepPrices.balanced`)."""
        return self.simulator.total_s(self.prices, StepPrices.balanced)

    def to_json(self) -> dict[str, Any]:
        """Totals and step times as plain JSON values."""
        return {
            "label": self.label,
            "steps": int(self.step_time_s.size),
            "time_s": self.time_s,
            "tokens": int(self.tokens.sum()),
            "tokens_per_s": self.tokens_per_s,
            "imbalance": self.imbalance,
            "mean_delay": self.mean_delay,
            "bubble": np.average(self.bubble, axis=0, weights=self.step_time_s).tolist(),
            "peak_memory_bytes": self.peak_memory_bytes.max(axis=0).tolist(),
            "step_time_s": self.step_time_s.tolist(),
        }


def sharded_steps(
    planner: Planner, *, dp: int, most: int | None = None, plans: Iterable[StepPlan] | None = None
) -> Iterator[ShardedStep]:
    """Shards `plans` (None: all of the planner's), at most `most`, for all pipelines."""
    for plan in islice(planner.steps() if plans is None else plans, most):
        pipelines = tuple(planner.shard(plan, pipeline) for pipeline in range(dp))
        yield ShardedStep(plan=plan, pipelines=pipelines)


def planner_of(spec: RunSpec, cost: ProfiledWorkload, batches: Sequence[GlobalBatch]) -> Planner:
    """The planner of a run over these batches."""
    return Planner.from_spec(spec, ListedBatches(batches), cost)


def simulate_run(
    spec: RunSpec,
    cost: ProfiledWorkload,
    batches: Sequence[GlobalBatch],
    *,
    label: str = "",
    steps: Iterable[ShardedStep] | None = None,
    wires: Wires = Wires.LINKS,
    fsdp: FsdpExecution = WLB_FSDP,
) -> RunSimulation:
    """Simulates all steps made of `batches`, including the flush of documents that wait at the end.

    Args:
        spec: The run; `spec.parallel.dp` must be set.
        cost: Prices of the run's model and layout.
        batches: Global batches to plan.
        label: Name of the run in tables.
        steps: The sharded steps, where they are known already.
        wires: Transfers between pipeline ranks that wait for each other.
        fsdp: What the trainer does with sharded parameters.
    """
    simulator = Simulator(spec=spec, cost=cost, wires=wires, fsdp=fsdp)
    if steps is None:
        steps = sharded_steps(planner_of(spec, cost, batches), dp=spec.parallel.dp)
    parts: list[Simulation] = []
    plans: list[StepPlan] = []
    metrics: list[StepMetrics] = []
    for chunk in chunked(steps):
        parts.append(simulator.run(simulator.price(chunk)))
        plans += [step.plan for step in chunk]
        metrics += parts[-1].metrics(chunk)
    if not parts:
        raise UserError("no global batch was given; there is nothing to simulate")
    return collected(parts, plans, tuple(metrics), label=label)


def collected(
    parts: Sequence[Simulation],
    plans: Sequence[StepPlan],
    metrics: tuple[StepMetrics, ...],
    *,
    label: str = "",
) -> RunSimulation:
    """Joins simulations of consecutive steps into one run; plans, metrics: of all steps."""
    simulator = parts[0].simulator
    lengths = np.concatenate([plan.packing.attended for plan in plans])
    return RunSimulation(
        label=label,
        simulator=simulator,
        prices=joined([part.prices for part in parts]),
        metrics=metrics,
        step_time_s=np.concatenate([part.step_time_s for part in parts]),
        tokens=np.array([m.num_tokens for m in metrics], np.int64),
        bubble=np.concatenate([part.bubble.mean(axis=1) for part in parts]),
        peak_memory_bytes=np.concatenate([part.peak_memory_bytes for part in parts]),
        model_flops=float(document_flops(simulator.spec.model, lengths).sum()),
    )


def check_memory(run: RunSimulation) -> None:
    """Raises UserError, naming rank and bytes, where a rank exceeds what plans may use of
    `cluster.memory_gib`.
    """
    spec = run.simulator.spec
    budget = gpu_budget(spec)
    step, rank = np.unravel_index(int(run.peak_memory_bytes.argmax()), run.peak_memory_bytes.shape)
    most = int(run.peak_memory_bytes[step, rank])
    if most <= budget.planned_bytes * ROUNDING:
        return
    stages = spec.stages_of(int(rank))
    raise UserError(
        f"{run.label}: pipeline rank {rank} (stages {', '.join(map(str, stages))}) needs "
        f"{most:,} bytes ({most / GIB:.1f} GiB) in step {step}, more than the "
        f"{budget.explanation}; lower packing.s_max or packing.step_tokens (or set "
        f"packing.memory_gib), use training.recompute, or more ranks (parallel.tp, cp, pp)"
    )
