"""Simulate whole runs: plan all steps of some global batches, and simulate each step.

Documents that a policy still delays after the last batch are trained in a flush. The time of the
flush is included, because otherwise a policy that trains fewer documents would look faster.
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
    """The simulated steps of one run."""

    label: str  # name of the run in tables
    simulator: Simulator  # the simulator of the run's layout
    prices: StepPrices  # prices of all passes
    metrics: tuple[StepMetrics, ...]  # metrics of each step: predictions and simulated times
    step_time_s: FloatArray  # seconds of each step, [steps]
    tokens: IntArray  # tokens of each step, [steps]
    # Fraction of each step that a pipeline rank spends outside passes, as the mean over all
    # pipelines, [steps, pp].
    bubble: FloatArray
    peak_memory_bytes: IntArray  # peak memory of each pipeline rank, [steps, pp]
    model_flops: float  # model FLOPs of all trained documents, forward and backward

    @property
    def time_s(self) -> float:
        """Seconds of all steps."""
        return float(self.step_time_s.sum())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, all ranks together."""
        return float(self.tokens.sum()) / self.time_s

    @property
    def standard_error(self) -> float:
        """Relative standard error of the mean time per token; infinite if there is only one step.

        Steps are treated as independent samples.
        """
        num = self.step_time_s.size
        if num < 2:
            return float("inf")
        # The estimate is a ratio of two sums (Cochran 1977, Sampling Techniques, Eq. 6.13).
        residuals = self.step_time_s - self.tokens * (self.time_s / float(self.tokens.sum()))
        return float(np.sqrt((residuals**2).sum() * num / (num - 1))) / self.time_s

    def mfu(self, *, peak_tflops: float) -> float:
        """Return MFU with the model FLOPs of single documents, rather than of full windows.

        Args:
            peak_tflops: Peak TFLOP/s of one GPU.
        """
        gpus = self.simulator.spec.parallel.world_size
        return self.model_flops / self.time_s / (gpus * peak_tflops * 1e12)

    @property
    def mean_delay(self) -> float:
        """Mean delay of a token in steps."""
        delays = [m.mean_delay * m.num_tokens for m in self.metrics]
        return float(sum(delays) / max(1, int(self.tokens.sum())))

    @property
    def imbalance(self) -> float:
        """Predicted work of the steps' slowest micro-batches, divided by the mean of micro-batches.

        The work of each step's slowest micro-batch is added up over all steps, and so is the mean
        work of each step's micro-batches.
        """
        mean = sum(m.mean_workload_ns for m in self.metrics)
        return sum(m.max_workload_ns for m in self.metrics) / mean if mean else 1.0

    @property
    def mean_bubble(self) -> float:
        """Mean bubble of all pipeline ranks and steps, where each step is weighted by its time."""
        return float((self.bubble.mean(axis=1) * self.step_time_s).sum()) / self.time_s

    def simulation_of(self, step: int) -> Simulation:
        """Simulate one step again, because a run does not keep events, and return its events."""
        return self.simulator.run(self.prices.select(slice(step, step + 1)))

    def balanced_time_s(self) -> float:
        """Return the seconds that all steps would take if micro-batches and CP ranks were equal."""
        return self.simulator.total_s(self.prices, StepPrices.balanced)

    def to_json(self) -> dict[str, Any]:
        """Return totals and step times as JSON values."""
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
    """Yield the planned steps of a run with the shardings of all pipelines.

    Args:
        planner: Packs and shards the run.
        dp: Number of pipelines.
        most: Largest number of steps to yield; None means all.
        plans: Steps that are packed already; None means that the planner packs them.
    """
    for plan in islice(planner.steps() if plans is None else plans, most):
        pipelines = tuple(planner.shard(plan, pipeline) for pipeline in range(dp))
        yield ShardedStep(plan=plan, pipelines=pipelines)


def planner_of(spec: RunSpec, cost: ProfiledWorkload, batches: Sequence[GlobalBatch]) -> Planner:
    """Return a planner of the run that reads these global batches instead of the run's data."""
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
    """Simulate all steps that are planned from some global batches, including the flush.

    Args:
        spec: The run; `spec.parallel.dp` must be set.
        cost: Prices of the run's model and layout.
        batches: The global batches.
        label: Name of the run in tables.
        steps: The sharded steps of these batches. None means that they are planned here.
        wires: Which sends and receives between pipeline ranks share a communicator.
        fsdp: How the trainer gathers, reduces and updates parameters.

    Raises:
        UserError: There are no batches.
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
        raise UserError("there are no global batches to simulate; give at least one (--steps)")
    return collected(parts, plans, tuple(metrics), label=label)


def collected(
    parts: Sequence[Simulation],
    plans: Sequence[StepPlan],
    metrics: tuple[StepMetrics, ...],
    *,
    label: str = "",
) -> RunSimulation:
    """Join simulations of consecutive steps into one run.

    Args:
        parts: The simulations.
        plans: Plans of all steps.
        metrics: Metrics of all steps.
        label: Name of the run in tables.
    """
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
    """Raise UserError if a rank of a simulated run needs more memory than plans may use."""
    spec = run.simulator.spec
    budget = gpu_budget(spec)
    step, rank = np.unravel_index(int(run.peak_memory_bytes.argmax()), run.peak_memory_bytes.shape)
    most = int(run.peak_memory_bytes[step, rank])
    if most <= budget.planned_bytes * ROUNDING:
        return
    stages = spec.stages_of(int(rank))
    raise UserError(
        f"{run.label}: pipeline rank {rank} (stages {', '.join(map(str, stages))}) needs {most:,} "
        f"bytes ({most / GIB:.1f} GiB) in step {step}, more than the {budget.explanation}. Lower "
        "packing.s_max or packing.step_tokens, set packing.memory_gib, set training.recompute, or "
        "raise parallel.tp, parallel.cp or parallel.pp"
    )
