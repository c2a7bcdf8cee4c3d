"""Metrics of a step: the planner predicts `StepMetrics`, and ranks measure `MeasuredStep`.

metrics.jsonl has both records, with nearly the same keys: most keys that only one record has are
null, empty or 0 in the other (`_EMPTY`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from wlb.plan.arrays import IntArray
from wlb.plan.errors import UserError
from wlb.plan.exchange import KeyRows
from wlb.plan.expert_load import LOAD, ExpertLoad
from wlb.plan.packing import PackingPlan
from wlb.plan.schema import ANYTHING, OTHERS, Schema, check_schema, schema_of
from wlb.plan.telemetry import TELEMETRY, Telemetry

_PADDING_IN_FILES = "num_filler_tokens"
"""Key of `num_padding_tokens` in metrics.jsonl: the name that the field had in earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counts that the plan of a step determines, whether or not the step is executed.

    `cp_imbalance`, `sharding_counts` and `key_rows` have their defaults until the micro-batches are
    sharded, because only then are they known.
    """

    origin: ClassVar[str]  # "predicted" or "measured", as in metrics.jsonl
    step: int  # number of the step, from 0
    num_documents: int  # documents with at least one piece in the step
    num_tokens: int  # document tokens, without padding
    num_targets: int  # tokens that have a label
    num_padding_tokens: int = 0  # rows of padding on all CP ranks together
    num_held_tokens: int = 0  # tokens of documents that still wait after the step
    # number of pieces trained more than `packing.max_delay` steps after they were read
    num_overdue: int = 0
    # delay in steps, mean over tokens; a token that is trained early has a delay of 0
    mean_delay: float = 0.0
    max_delay: int = 0  # longest delay of a token, in steps
    # predicted attention time of the slowest CP rank divided by the mean over CP ranks
    cp_imbalance: float = 1.0
    # pairs (sharding strategy, number of micro-batches that it divided)
    sharding_counts: tuple[tuple[str, int], ...] = ()
    # rows of keys that CP ranks send each other. None with one CP rank and in files of earlier
    # versions
    key_rows: KeyRows | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary with the keys of metrics.jsonl, which `from_json` can read."""
        data = _EMPTY | asdict(self)
        data["origin"] = self.origin
        data[_PADDING_IN_FILES] = data.pop("num_padding_tokens")
        data["sharding_counts"] = dict(self.sharding_counts)
        if self.key_rows is None:
            del data["key_rows"]
        return data

    @classmethod
    @cache
    def schema(cls) -> Schema:
        """Return a schema (`wlb.plan.schema`) of the JSON that any version's `to_json` wrote."""
        nested = {
            "key_rows": (schema_of(KeyRows), None),
            "sharding_counts": {OTHERS: int},
            "telemetry": (TELEMETRY, None),
            "experts": (LOAD, None),
        }
        own = {f.name for f in fields(cls)}
        out = schema_of(cls, **{n: s for n, s in nested.items() if n in own})
        # Also allow an older name of a key, and keys that only the other record (measured or
        # predicted) has.
        others = {f"{name}?": ANYTHING for name in _EMPTY if name not in own}
        return out | others | {"origin": str, f"{_PADDING_IN_FILES}?": int}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Make the record from what `to_json` of any version returned.

        Raises:
            UserError: The data has unknown keys, or its "origin" (measured or predicted) is not
                the origin of this class.
        """
        if data["origin"] != cls.origin:
            raise UserError(
                f"the metrics of step {data['step']} have origin = {data['origin']}, but "
                f"{cls.__name__} reads only {cls.origin} metrics; read predicted metrics with "
                f"StepMetrics, and measured metrics with MeasuredStep"
            )
        what = f"{cls.origin} metrics of a step"
        check_schema(data, cls.schema(), what, remedy="correct or remove the record")
        names = {f.name for f in fields(cls)}
        values = {name: value for name, value in data.items() if name in names}
        if _PADDING_IN_FILES in data:
            values["num_padding_tokens"] = data[_PADDING_IN_FILES]
        values["sharding_counts"] = tuple(data["sharding_counts"].items())
        if values.get("key_rows") is not None:
            values["key_rows"] = KeyRows(**values["key_rows"])
        if "degrees" in names:
            values["degrees"] = tuple(data.get("degrees", ()))
        elif values.get("telemetry") is not None:
            values["telemetry"] = Telemetry.from_json(values["telemetry"])
        if values.get("experts") is not None:
            values["experts"] = ExpertLoad.from_json(values["experts"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics(StepCounts):
    """Metrics of a step that the planner predicts."""

    origin: ClassVar[str] = "predicted"
    # time of the slowest micro-batch divided by the mean over micro-batches (Section 7.4)
    imbalance: float = 1.0
    # imbalance of each step, if this record is the sum of several steps (`merge`)
    degrees: tuple[float, ...] = ()
    max_workload_ns: int = 0  # predicted forward plus backward time of the slowest micro-batch
    # predicted forward plus backward time of a micro-batch, mean over micro-batches
    mean_workload_ns: float = 0.0
    step_time_s: float | None = None  # simulated time of the step; None without a simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep(StepCounts):
    """Measurements of an executed step, with the counts of its plan."""

    origin: ClassVar[str] = "measured"
    # loss in nats, mean over labels; None if the step did not update the weights
    loss: float | None = None
    # norm of the gradient before clipping; None if the step did not update the weights
    grad_norm: float | None = None
    step_time_s: float | None = None  # wall time on the rank that writes the record
    # times summed over the steps since the previous telemetry record, this step included. None if
    # telemetry is off, or if this step is not at the end of a telemetry interval.
    telemetry: Telemetry | None = None
    # rows of the most loaded expert divided by the mean over experts; mean over layers. None if the
    # model has no experts
    expert_load: float | None = None
    # load of experts for each layer and EP rank. None if the model has no experts, and in files of
    # earlier versions
    experts: ExpertLoad | None = None

    @classmethod
    def of(
        cls,
        counts: StepCounts,
        *,
        loss: float | None,
        grad_norm: float | None,
        step_time_s: float,
        telemetry: Telemetry | None,
        experts: ExpertLoad | None = None,
    ) -> "MeasuredStep":
        """Make the record of a step from the counts of its plan and from measurements.

        Args:
            counts: Counts of the step's plan.
            loss: Mean loss over labels in nats; None if the step did not update the weights.
            grad_norm: Norm of the gradient before clipping; None if the step did not update the
                weights.
            step_time_s: Wall time of the step.
            telemetry: Times since the previous telemetry record; None if there is no record now.
            experts: Load of experts; None if the model has no experts.
        """
        return cls(
            **{f.name: getattr(counts, f.name) for f in fields(StepCounts)},
            loss=loss,
            grad_norm=grad_norm,
            step_time_s=step_time_s,
            telemetry=telemetry,
            expert_load=None if experts is None else experts.mean_expert,
            experts=experts,
        )

    @property
    def imbalance(self) -> float | None:
        """Measured forward imbalance: slowest micro-batch over mean; None without telemetry."""
        return None if self.telemetry is None else self.telemetry.imbalance

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary with the keys of metrics.jsonl.

        If the record has telemetry, the dictionary also has the imbalance computed from it.
        """
        data = StepCounts.to_json(self)
        if self.expert_load is None:
            del data["expert_load"]
        if self.experts is None:
            del data["experts"]
        else:
            data["experts"] = self.experts.to_json()
        if self.telemetry is not None:
            data["telemetry"] = self.telemetry.to_json()
            data["imbalance"] = self.imbalance
            data["max_workload_ns"] = self.telemetry.slowest_ns
            data["mean_workload_ns"] = self.telemetry.mean_ns
        return data


_EMPTY: dict[str, Any] = {
    **dict.fromkeys(("imbalance", "loss", "grad_norm", "step_time_s", "telemetry")),
    "degrees": (),
    "max_workload_ns": 0,
    "mean_workload_ns": 0.0,
}
"""Values that metrics.jsonl has in a measured record for keys that only `StepMetrics` has, and in a
predicted record for keys that only `MeasuredStep` has."""


def imbalance(workload_ns: IntArray) -> float:
    """Return the largest of `workload_ns` (shape [n]) divided by their mean; 1.0 if all are 0."""
    total = int(workload_ns.sum())
    return float(workload_ns.max()) * workload_ns.size / total if total else 1.0


def token_delay(plan: PackingPlan) -> tuple[float, int]:
    """Return the mean delay of a plan's tokens and the longest delay of a token, both in steps.

    The delay of a token is the number of steps between reading and training it.
    """
    if not len(plan.pieces):
        return 0.0, 0
    # Policies that pack several global batches together train some tokens early. Count these as 0,
    # so that they do not offset the delay of other tokens.
    delay = np.maximum(plan.step - plan.pieces.arrival_step, 0)
    return float(np.average(delay, weights=plan.pieces.length)), int(delay.max())


def predict(plan: PackingPlan, *, num_padding_tokens: int = 0) -> StepMetrics:
    """Return the metrics of a step that follow from its packing plan, before it is sharded.

    Args:
        plan: The packing plan of the step.
        num_padding_tokens: Number of padding rows in the step, on all CP ranks together.
    """
    mean_delay, max_delay = token_delay(plan)
    keys = np.stack([plan.pieces.source, plan.pieces.document])
    return StepMetrics(
        step=plan.step,
        num_documents=int(np.unique(keys, axis=1).shape[1]),
        num_tokens=plan.num_tokens,
        num_targets=plan.num_targets,
        num_padding_tokens=num_padding_tokens,
        num_held_tokens=plan.num_held_tokens,
        num_overdue=plan.num_overdue,
        imbalance=imbalance(plan.workload_ns),
        max_workload_ns=int(plan.workload_ns.max(initial=0)),
        mean_workload_ns=float(plan.workload_ns.mean()) if plan.workload_ns.size else 0.0,
        mean_delay=mean_delay,
        max_delay=max_delay,
    )


def late_remark(num_overdue: int, max_delay: int) -> str:
    """Return a warning about pieces that were trained later than `packing.max_delay` allows.

    Args:
        num_overdue: Number of these pieces.
        max_delay: Longest delay of a piece in the run, in steps.
    """
    return (
        f"{num_overdue} pieces of documents were trained later than packing.max_delay, up to "
        f"{max_delay} steps after they were read, because steps were full; raise "
        f"packing.step_tokens or packing.s_max so that a step can train more pieces, or raise "
        f"packing.max_delay if this delay is acceptable"
    )


STARVED = 0.25
"""A step is starved if it has fewer tokens than this fraction of the median over all steps."""


def starved_remark(step_tokens: Sequence[int] | IntArray) -> str:
    """Return a warning about steps with very few tokens; "" if there are none.

    Args:
        step_tokens: Tokens of each step, shape [num_steps]. Steps without tokens are ignored,
            because they do not update the weights.
    """
    tokens = np.asarray(step_tokens, np.int64)
    tokens = tokens[tokens > 0]
    if not tokens.size:
        return ""
    usual = float(np.median(tokens))
    starved = tokens[tokens < STARVED * usual]
    if not starved.size:
        return ""
    return (
        f"{starved.size} of {tokens.size} steps are starved: they have less than a quarter of the "
        f"median of {usual:,.0f} tokens; the smallest has {starved.min():,} tokens. Each of them "
        f"updates the weights like a full step, but with a noisier and larger gradient. To avoid "
        f"starved steps, set packing.policy = bounded, which makes a step only if there are enough "
        f"tokens for it, or keep var_len and set packing.queue_thresholds = [], so that no "
        f"document waits. Or set training.loss_normalizer = constant, which makes the gradient of "
        f"a step proportional to its number of tokens"
    )


_COUNTS = ("num_documents", "num_tokens", "num_targets", "num_padding_tokens", "num_overdue")
_SUMMED = (*_COUNTS, "max_workload_ns", "mean_workload_ns")


def merge(first: StepMetrics | None, second: StepMetrics) -> StepMetrics:
    """Merge the metrics of two consecutive steps into one record.

    The merged record has the sums of the counts, of `max_workload_ns` and of `mean_workload_ns`.
    Its `imbalance` is the quotient of the last two sums.

    Args:
        first: Metrics of the earlier step or steps; None to return `second` unchanged.
        second: Metrics of the later step.
    """
    if first is None:
        return second
    sums = {name: getattr(first, name) + getattr(second, name) for name in _SUMMED}
    slowest, mean = sums["max_workload_ns"], sums["mean_workload_ns"]
    delays = first.mean_delay * first.num_tokens + second.mean_delay * second.num_tokens
    return replace(
        second,
        **sums,
        imbalance=slowest / mean if mean else second.imbalance,
        degrees=(*degrees_of(first), *degrees_of(second)),
        mean_delay=delays / sums["num_tokens"] if sums["num_tokens"] else 0.0,
        max_delay=max(first.max_delay, second.max_delay),
    )


def degrees_of(metrics: StepMetrics) -> tuple[float, ...]:
    """Return the imbalance of each step of a record; `merge` makes records of several steps."""
    return metrics.degrees or (metrics.imbalance,)
