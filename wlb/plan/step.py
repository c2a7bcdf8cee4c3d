"""StepPlan: a step's micro-batches on their pipelines; PipelinePlan: one pipeline's part."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from wlb.plan.arrays import IntArray, digest
from wlb.plan.errors import UserError
from wlb.plan.metrics import StepMetrics, predict
from wlb.plan.packing import CARRY, PACKING, Carry, MicroBatch, PackingPlan
from wlb.plan.plain import PlainRecord, parsing, plain
from wlb.plan.schema import COUNT, Schema, check_schema
from wlb.plan.sharding import ShardingPlan, local_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannerState(PlainRecord):
    """Everything that a planner needs to continue after a step; immutable, saved as JSON."""

    carry: Carry  # the packer's state
    baseline: Carry  # state of the usual loader's packer, whose steps are planned for comparison
    corpus: dict[str, Any]  # read position of the data source, in a form that only the source knows
    ready: tuple[PackingPlan, ...] = ()  # plans that the packer already made for later steps
    # metrics of baseline steps that no training step has reported yet
    baseline_made: tuple[StepMetrics, ...] = ()
    num_batches: int = 0  # global batches that the source has returned
    exhausted: bool = False  # the source has ended, and no document waits
    num_tokens: int = 0  # document tokens of all steps so far

    def __eq__(self, other: object) -> bool:
        """Return whether a planner would continue identically from both states.

        Their JSON forms are compared, so a state equals its copy that was read back from a file.
        """
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
        """Return the state to resume from, in which ended data may continue.

        The source is read once more, because the resumed run may have more epochs.
        """
        return replace(self, exhausted=False)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PlannerState":
        """Read what `to_json` wrote; UserError if it is not a planner state."""
        what = "this is not a planner state that `to_json` wrote"
        check_schema(data, _STATE, what, remedy="give the whole value")
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
    # Written by versions that learned prices while they trained.
    "prices?": ({"base": str, "changes": [{"step": COUNT, "prices": dict}]}, None),
}


def _refuse_learned(data: dict[str, Any]) -> None:
    """Refuse the state of an earlier version whose run had learned prices (`cost.online`).

    The next steps were to be planned with those prices. This version does not know them and would
    plan differently without notice.
    """
    prices = data.get("prices")
    if prices is None or not prices["changes"]:
        return
    step = prices["changes"][0]["step"]
    raise UserError(
        f"this planner state has prices for steps from {step + 1} on that its run learned from its "
        f"own times, over those of {prices['base']!r}, and cost.online, which learned them, was "
        f"removed; resume from a checkpoint saved before prices changed, or use the version of "
        f"wlb that wrote this one, or start a new run from its weights (checkpoint.init_from)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgress:
    """Progress of a run after a step."""

    next_step: int  # step that comes next
    num_tokens: int  # document tokens of all steps so far
    # planner state for a checkpoint. None on ranks that write no checkpoint, because it has every
    # waiting document.
    state: PlannerState | None

    @classmethod
    def of(cls, state: PlannerState) -> "PlanProgress":
        """Return a record that includes the whole state."""
        return cls(next_step=state.next_step, num_tokens=state.num_tokens, state=state)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One training step over all pipelines."""

    packing: PackingPlan  # the step's micro-batches
    pipelines: IntArray  # micro-batches of each pipeline in execution order, shape [dp, N / dp]
    cp: int  # ranks that share a micro-batch
    row_multiple: int  # the rows of every rank are a multiple of this
    # the usual loader on the same documents: its steps for the global batches since our last step
    # (usually one), merged into one record. None if it is not computed.
    baseline: StepMetrics | None
    progress: PlanProgress  # progress once this step has been executed

    @property
    def state(self) -> PlannerState:
        """Planner state that a checkpoint stores once this step has been executed."""
        if self.progress.state is None:
            raise ValueError(f"the plan of step {self.step} was sent here without planner state")
        return self.progress.state

    def without_state(self) -> "StepPlan":
        """Return the plan without planner state, for ranks that write no checkpoint."""
        return replace(self, progress=replace(self.progress, state=None))

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self.packing.step

    @property
    def num_targets(self) -> int:
        """Labels of the step; the summed loss is divided by it."""
        return self.packing.num_targets

    @property
    def predicted(self) -> StepMetrics:
        """The step's metrics, as far as they follow from packing."""
        rows_of = partial(local_tokens, cp=self.cp, row_multiple=self.row_multiple)
        padded = sum(map(rows_of, self.packing.rows.tolist())) * self.cp
        return predict(self.packing, num_padding_tokens=padded - self.packing.num_tokens)

    def local_tokens(self, pipeline: int) -> tuple[int, ...]:
        """Return the rows per CP rank of each micro-batch of a pipeline, in execution order."""
        rows = self.packing.rows[self.pipelines[pipeline]]
        return tuple(local_tokens(int(n), cp=self.cp, row_multiple=self.row_multiple) for n in rows)

    def digest(self) -> int:
        """Return a 60-bit hash of the plan, by which hosts notice that their plans differ."""
        return digest(self.packing.digest(), self.pipelines.ravel(), self.cp, self.row_multiple)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`; `from_json` reads them back."""
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
    """One pipeline's micro-batches in execution order, with their spans."""

    step: int  # number of the step, from 0
    pipeline: int  # number of the pipeline, from 0
    micro_batches: tuple[MicroBatch, ...]  # in execution order
    shardings: tuple[ShardingPlan, ...]  # spans of each micro-batch, in the same order
    local_tokens: tuple[int, ...]  # rows of each micro-batch on every CP rank, padding included
    # rows of the whole step's segments, over all pipelines, without the rows that pad ranks to
    # equal sizes
    step_rows: int

    def digest(self) -> int:
        """Return a 60-bit hash of the pipeline's spans, by which hosts notice that they differ."""
        return digest(self.step, self.pipeline, *(s.digest() for s in self.shardings))
