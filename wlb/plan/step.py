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
    """Everything that a planner needs to resume after a step. Checkpoints store it as JSON."""

    carry: Carry  # state of the packer: the documents that wait
    # state of a second packer, the usual loader, whose steps are planned only for comparison
    baseline: Carry
    corpus: dict[str, Any]  # read position of the data source, which only the source interprets
    ready: tuple[PackingPlan, ...] = ()  # packing plans that were already made for later steps
    # predicted metrics of the usual loader's steps, except those that were already returned as the
    # `baseline` of a `StepPlan`
    baseline_made: tuple[StepMetrics, ...] = ()
    num_batches: int = 0  # global batches that were read from the source so far
    exhausted: bool = False  # whether the source has ended and no document waits
    num_tokens: int = 0  # document tokens of all steps so far

    def __eq__(self, other: object) -> bool:
        """Return whether a planner would continue identically from both states.

        The JSON of both states is compared, so that a state equals its copy read from a file.
        """
        if not isinstance(other, PlannerState):
            return NotImplemented
        return self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.next_step, self.num_batches, self.num_tokens))

    @property
    def next_step(self) -> int:
        """Number of the step that `Planner.next` returns first when it starts from this state."""
        return self.ready[0].step if self.ready else self.carry.next_step

    def reopened(self) -> "PlannerState":
        """Return this state with `exhausted` = False, for a run that resumes from the state.

        The planner then asks the source for data once more, because the resumed run may be
        configured with more epochs.
        """
        return replace(self, exhausted=False)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PlannerState":
        """Make the state from what `to_json` returned; UserError if it is not a planner state."""
        what = "the value is not a planner state as `to_json` returns it"
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
    # Earlier versions could adjust prices during training, and stored the adjusted prices here.
    "prices?": ({"base": str, "changes": [{"step": COUNT, "prices": dict}]}, None),
}


def _refuse_learned(data: dict[str, Any]) -> None:
    """Raise a UserError if a planner state contains prices that the run adjusted (`cost.online`).

    Earlier versions could adjust prices to measured times during training. This version cannot
    apply such prices, and without them it would plan the next steps differently.
    """
    prices = data.get("prices")
    if prices is None or not prices["changes"]:
        return
    step = prices["changes"][0]["step"]
    raise UserError(
        f"the run of this checkpoint used cost.online, which adjusted the predicted times of "
        f"profile {prices['base']!r} to measured times from step {step + 1} on; this version of "
        f"wlb has no cost.online, so it cannot resume from this checkpoint. Resume from a "
        f"checkpoint of an earlier step, use the version of wlb that wrote this checkpoint, or "
        f"start a new run from its weights (checkpoint.init_from)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgress:
    """How far a run has come once a step is executed."""

    next_step: int  # number of the step that follows
    num_tokens: int  # document tokens of all steps so far
    # planner state that a checkpoint stores. Ranks that write no checkpoint have None, because the
    # state lists every waiting document and can be large.
    state: PlannerState | None

    @classmethod
    def of(cls, state: PlannerState) -> "PlanProgress":
        """Return the progress that a planner state describes, with the state itself."""
        return cls(next_step=state.next_step, num_tokens=state.num_tokens, state=state)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """The plan of one training step: its micro-batches, and which pipeline executes which."""

    packing: PackingPlan  # the pieces of each micro-batch
    # numbers of the micro-batches of each pipeline, in execution order; shape [dp, N / dp]
    pipelines: IntArray
    cp: int  # context-parallel ranks that share each micro-batch
    row_multiple: int  # every rank pads its rows to a multiple of this
    # predicted metrics of the usual loader on the global batches that were read since the previous
    # step (usually one global batch). If the usual loader makes several steps of these global
    # batches, the steps are merged into one record. None if the usual loader makes no step of them,
    # or if the comparison is off.
    baseline: StepMetrics | None
    progress: PlanProgress  # how far the run has come once this step is executed

    @property
    def state(self) -> PlannerState:
        """Planner state that a checkpoint stores once this step has been executed."""
        if self.progress.state is None:
            raise ValueError(
                f"the plan of step {self.step} has no planner state, because it was made with "
                f"`without_state`; read the state from the plan of a rank that writes checkpoints"
            )
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
        """Number of labels in the step: tokens whose prediction counts in the loss."""
        return self.packing.num_targets

    @property
    def predicted(self) -> StepMetrics:
        """Predicted metrics of the step that follow from packing, without those of sharding."""
        rows_of = partial(local_tokens, cp=self.cp, row_multiple=self.row_multiple)
        padded = sum(map(rows_of, self.packing.rows.tolist())) * self.cp
        return predict(self.packing, num_padding_tokens=padded - self.packing.num_tokens)

    def local_tokens(self, pipeline: int) -> tuple[int, ...]:
        """Return the number of rows that each CP rank has in each micro-batch of a pipeline.

        Args:
            pipeline: Number of the pipeline, from 0.

        Returns:
            One number for each micro-batch in execution order, padding included.
        """
        rows = self.packing.rows[self.pipelines[pipeline]]
        return tuple(local_tokens(int(n), cp=self.cp, row_multiple=self.row_multiple) for n in rows)

    def digest(self) -> int:
        """Return a 60-bit hash of the plan. Ranks compare it to detect that their plans differ."""
        return digest(self.packing.digest(), self.pipelines.ravel(), self.cp, self.row_multiple)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary that `json.dumps` can write and `from_json` can read."""
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
        """Make the plan from what `to_json` returned; UserError if it is not a step plan."""
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
    """What one pipeline executes in a step: its micro-batches, sharded over CP ranks."""

    step: int  # number of the step, from 0
    pipeline: int  # number of the pipeline, from 0
    micro_batches: tuple[MicroBatch, ...]  # in execution order
    shardings: tuple[ShardingPlan, ...]  # how each of `micro_batches` is divided over CP ranks
    # rows that each CP rank has in each of `micro_batches`, padding included
    local_tokens: tuple[int, ...]
    # rows of all attention segments of the step, summed over all pipelines. Rows that pad CP ranks
    # to equal numbers of rows are not counted.
    step_rows: int

    def digest(self) -> int:
        """Return a 60-bit hash of the plan. Ranks compare it to detect that their plans differ."""
        return digest(self.step, self.pipeline, *(s.digest() for s in self.shardings))
