"""StepPlan: a step's packing dealt to pipelines; PipelinePlan: one pipeline's part."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from wlb.plan.arrays import IntArray, digest
from wlb.plan.errors import UserError
from wlb.plan.metrics import StepMetrics, predict
from wlb.plan.packing import CARRY, PACKING, Carry, MicroBatch, PackingPlan
from wlb.plan.plain import PlainRecord, parsing, plain
from wlb.plan.schema import COUNT, Schema, hold_schema
from wlb.plan.sharding import ShardingPlan, local_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannerState(PlainRecord):
    """State that a planner needs to continue after a step: explicit, immutable, JSON in and out.

    carry: the packer's state. ready: plans the packer already made for later steps. baseline: the
    baseline packer's state; baseline_made: metrics of its plans that no step reported yet. corpus:
    the source's own state; num_batches: global batches it has given. exhausted: it had ended and
    nothing is left to flush. num_tokens: document tokens of all steps so far.
    """

    carry: Carry
    baseline: Carry
    corpus: dict[str, Any]
    ready: tuple[PackingPlan, ...] = ()
    baseline_made: tuple[StepMetrics, ...] = ()
    num_batches: int = 0
    exhausted: bool = False
    num_tokens: int = 0

    def __eq__(self, other: object) -> bool:
        """Whether a planner goes on alike from both; a state equals what its JSON reads as."""
        if not isinstance(other, PlannerState):
            return NotImplemented
        return self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.next_step, self.num_batches, self.num_tokens))

    @property
    def next_step(self) -> int:
        """The step that `Planner.next` plans from here."""
        return self.ready[0].step if self.ready else self.carry.next_step

    def reopened(self) -> "PlannerState":
        """Return the state to resume from; ended data is asked again: epochs may be more now."""
        return replace(self, exhausted=False)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PlannerState":
        """Read what `to_json` wrote; UserError if it is not a planner state."""
        what = "this is no planner state as `to_json` writes it"
        hold_schema(data, _STATE, what, remedy="give the whole value")
        _refuse_learned(data)
        with parsing("planner state"):
            return cls(
                carry=Carry.from_json(data["carry"]),
                baseline=Carry.from_json(data["baseline"]),
                corpus=data["corpus"],
                ready=tuple(PackingPlan.from_json(p) for p in data["ready"]),
                baseline_made=tuple(StepMetrics.from_json(m) for m in data["baseline_made"]),
                num_batches=data["num_batches"],
                exhausted=data["exhausted"],
                num_tokens=data["num_tokens"],
            )


_STATE: Schema = {
    "carry": CARRY,
    "baseline": CARRY,
    "corpus": dict,
    "ready": [PACKING],
    "baseline_made": [StepMetrics.schema()],
    "num_batches": COUNT,
    "exhausted": bool,
    "num_tokens": COUNT,
    # Of versions that learned prices while they trained.
    "prices?": ({"base": str, "changes": [{"step": COUNT, "prices": dict}]}, None),
}


def _refuse_learned(data: dict[str, Any]) -> None:
    """UserError for a state of an earlier version whose run had learned prices (`cost.online`):
    its coming steps were to be planned with them, and would be planned otherwise now.
    """
    prices = data.get("prices")
    if prices is None or not prices["changes"]:
        return
    step = prices["changes"][0]["step"]
    raise UserError(
        f"this planner state has prices for steps from {step + 1} on that its run learned from its "
        f"own times, over those of {prices['base']!r}, and cost.online, which learned them, was "
        f"removed; go on with a checkpoint saved before prices changed, with the version of wlb "
        f"that wrote this one, or in a new run with its weights (checkpoint.init_from)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgress:
    """Progress of a run after a step, for any rank. next_step: the step that comes next.
    num_tokens: document tokens of all steps so far. state: the planner's, for a checkpoint; None on
    ranks that write none, since it holds every waiting document.
    """

    next_step: int
    num_tokens: int
    state: PlannerState | None

    @classmethod
    def of(cls, state: PlannerState) -> "PlanProgress":
        """Return a record that includes the whole state."""
        return cls(next_step=state.next_step, num_tokens=state.num_tokens, state=state)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One global training step.

    packing: the step's micro-batches. pipelines: shape [dp, N / dp], the micro-batches of each
    pipeline in execution order. cp: ranks of a micro-batch. row_multiple: a
    rank's rows are a multiple of it. baseline: metrics of Plain-4D on the same stream, where it is
    asked for: its steps for the global batches since our last step (usually one), as one. progress:
    once this step has been executed.
    """

    packing: PackingPlan
    pipelines: IntArray
    cp: int
    row_multiple: int
    baseline: StepMetrics | None
    progress: PlanProgress

    @property
    def state(self) -> PlannerState:
        """State that a checkpoint stores once this step has been executed."""
        if self.progress.state is None:
            raise ValueError(f"the plan of step {self.step} was sent here without planner state")
        return self.progress.state

    def without_state(self) -> "StepPlan":
        """The plan for ranks that write no checkpoint's planner state."""
        return replace(self, progress=replace(self.progress, state=None))

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self.packing.step

    @property
    def num_targets(self) -> int:
        """Labels of the step, by which its mean loss is divided."""
        return self.packing.num_targets

    @property
    def predicted(self) -> StepMetrics:
        """The step's metrics, as far as they follow from its plan."""
        rows_of = partial(local_tokens, cp=self.cp, row_multiple=self.row_multiple)
        padded = sum(map(rows_of, self.packing.rows.tolist())) * self.cp
        return predict(self.packing, num_padding_tokens=padded - self.packing.num_tokens)

    def local_tokens(self, pipeline: int) -> tuple[int, ...]:
        """Rows per CP rank of each of a pipeline's micro-batches, in execution order."""
        rows = self.packing.rows[self.pipelines[pipeline]]
        return tuple(local_tokens(int(n), cp=self.cp, row_multiple=self.row_multiple) for n in rows)

    def digest(self) -> int:
        """60 bits that tell two plans apart, equal on every host for equal plans."""
        return digest(self.packing.digest(), self.pipelines.ravel(), self.cp, self.row_multiple)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`; `from_json` reads them again."""
        return {
            "packing": self.packing.to_json(),
            "pipelines": self.pipelines.tolist(),
            "cp": self.cp,
            "quantum": self.row_multiple,
            "baseline": plain(self.baseline),
            "state": self.state.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepPlan":
        """Read what `to_json` wrote; UserError if it is not a step plan."""
        with parsing("step plan"):
            baseline = data["baseline"]
            return cls(
                packing=PackingPlan.from_json(data["packing"]),
                pipelines=np.array(data["pipelines"], np.int64),
                cp=data["cp"],
                row_multiple=data["quantum"],
                baseline=None if baseline is None else StepMetrics.from_json(baseline),
                progress=PlanProgress.of(PlannerState.from_json(data["state"])),
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelinePlan:
    """One pipeline's micro-batches in execution order, with their spans.

    step, pipeline: which. micro_batches, shardings: one each, in the same order. local_tokens: rows
    of each micro-batch on every CP rank, padding included. step_rows: rows of the whole step's
    segments, in all pipelines, without what fills up ranks.
    """

    step: int
    pipeline: int
    micro_batches: tuple[MicroBatch, ...]
    shardings: tuple[ShardingPlan, ...]
    local_tokens: tuple[int, ...]
    step_rows: int

    def digest(self) -> int:
        """60 bits that tell two pipelines' spans apart, equal on every host."""
        return digest(self.step, self.pipeline, *(s.digest() for s in self.shardings))
