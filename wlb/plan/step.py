"""StepPlan: a step's packing dealt to pipelines; PipelinePlan: what one pipeline executes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb.plan.arrays import digest
from wlb.plan.metrics import StepMetrics
from wlb.plan.packing import Carry, MicroBatch, PackingPlan
from wlb.plan.sharding import ShardingPlan, local_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannerState:
    """All that a planner needs to go on after a step: explicit, immutable, JSON in and out.

    carry: what the packer holds. ready: plans the packer already made for later steps. baseline:
    what the baseline packer holds; baseline_made: metrics of its plans that no step reported yet.
    corpus: the source's own state; num_batches: global batches it has given. exhausted: it had
    ended and the packer was flushed.
    """

    carry: Carry
    baseline: Carry
    corpus: dict[str, Any]
    ready: tuple[PackingPlan, ...] = ()
    baseline_made: tuple[StepMetrics, ...] = ()
    num_batches: int = 0
    exhausted: bool = False

    @property
    def next_step(self) -> int:
        return self.ready[0].step if self.ready else self.carry.next_step

    def to_json(self) -> dict[str, Any]:
        return {
            "carry": self.carry.to_json(),
            "baseline": self.baseline.to_json(),
            "corpus": self.corpus,
            "ready": [plan.to_json() for plan in self.ready],
            "baseline_made": [metrics.to_json() for metrics in self.baseline_made],
            "num_batches": self.num_batches,
            "exhausted": self.exhausted,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PlannerState":
        return cls(
            carry=Carry.from_json(data["carry"]),
            baseline=Carry.from_json(data["baseline"]),
            corpus=data["corpus"],
            ready=tuple(PackingPlan.from_json(p) for p in data["ready"]),
            baseline_made=tuple(StepMetrics.from_json(m) for m in data["baseline_made"]),
            num_batches=data["num_batches"],
            exhausted=data["exhausted"],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One global training step.

    pipelines: shape [dp, N / dp], the micro-batches of each pipeline in execution order.
    baseline: metrics of Plain-4D on the same stream, where it is asked for: its steps for the
    global batches since our last step (usually one), as one. state: what a checkpoint stores once
    this step has been executed.
    """

    packing: PackingPlan
    pipelines: npt.NDArray[np.int64]
    cp: int
    quantum: int
    predicted: StepMetrics
    baseline: StepMetrics | None
    state: PlannerState

    @property
    def step(self) -> int:
        return self.packing.step

    @property
    def num_targets(self) -> int:
        return self.packing.num_targets

    def local_tokens(self, pipeline: int) -> tuple[int, ...]:
        """Rows per CP rank of each of a pipeline's micro-batches, in execution order."""
        rows = self.packing.rows[self.pipelines[pipeline]]
        return tuple(local_tokens(int(n), cp=self.cp, quantum=self.quantum) for n in rows)

    def digest(self) -> int:
        return digest(self.packing.digest(), self.pipelines.ravel(), self.cp, self.quantum)

    def to_json(self) -> dict[str, Any]:
        return {
            "packing": self.packing.to_json(),
            "pipelines": self.pipelines.tolist(),
            "cp": self.cp,
            "quantum": self.quantum,
            "predicted": self.predicted.to_json(),
            "baseline": _metrics_to_json(self.baseline),
            "state": self.state.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepPlan":
        return cls(
            packing=PackingPlan.from_json(data["packing"]),
            pipelines=np.array(data["pipelines"], np.int64),
            cp=data["cp"],
            quantum=data["quantum"],
            predicted=StepMetrics.from_json(data["predicted"]),
            baseline=_metrics_from_json(data["baseline"]),
            state=PlannerState.from_json(data["state"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelinePlan:
    """One pipeline's micro-batches in execution order, with their spans."""

    step: int
    pipeline: int
    micro_batches: tuple[MicroBatch, ...]
    shardings: tuple[ShardingPlan, ...]
    local_tokens: tuple[int, ...]

    def digest(self) -> int:
        return digest(self.step, self.pipeline, *(s.digest() for s in self.shardings))


def _metrics_to_json(metrics: StepMetrics | None) -> dict[str, Any] | None:
    return None if metrics is None else metrics.to_json()


def _metrics_from_json(data: dict[str, Any] | None) -> StepMetrics | None:
    return None if data is None else StepMetrics.from_json(data)
