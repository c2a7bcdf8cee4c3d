"""Metrics of a step: `StepMetrics` is predicted by the planner, `MeasuredStep` measured by ranks.

Both are written to metrics.jsonl with the same keys. A key for which a record has no value is null
there, or 0 for workloads. Files of all versions do this.
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
"""Key of `num_padding_tokens` in metrics.jsonl, which is older than the field's present name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counts that follow from a step's plan, whether or not it is executed.

    The last three fields are known once micro-batches are sharded. Packing alone leaves their
    defaults.
    """

    origin: ClassVar[str]
    step: int  # number of the step, from 0
    num_documents: int  # documents with at least one piece in the step
    num_tokens: int  # document tokens, without padding
    num_targets: int  # labels
    num_padding_tokens: int = 0  # rows of padding
    num_held_tokens: int = 0  # tokens that wait after the step
    num_overdue: int = 0  # pieces trained later than `packing.max_delay`
    # steps by which tokens are late, mean over tokens; an early token counts as 0
    mean_delay: float = 0.0
    max_delay: int = 0  # steps by which the latest token is late
    cp_imbalance: float = 1.0  # predicted attention time of the slowest CP rank over the mean one's
    # number of micro-batches by sharding strategy
    sharding_counts: tuple[tuple[str, int], ...] = ()
    # rows that CP ranks exchange; None for one rank and in files of earlier versions
    key_rows: KeyRows | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the values by the keys of metrics.jsonl; `from_json` reads them back."""
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
        """Return the schema (`wlb.plan.schema`) of what `to_json` of any version wrote."""
        nested = {
            "key_rows": (schema_of(KeyRows), None),
            "sharding_counts": {OTHERS: int},
            "telemetry": (TELEMETRY, None),
            "experts": (LOAD, None),
        }
        own = {f.name for f in fields(cls)}
        out = schema_of(cls, **{n: s for n, s in nested.items() if n in own})
        # Keys that only the other record has, and the older name of one key.
        others = {f"{name}?": ANYTHING for name in _EMPTY if name not in own}
        return out | others | {"origin": str, f"{_PADDING_IN_FILES}?": int}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read what `to_json` of any version wrote.

        Raises:
            UserError: The record is of the other kind, or has unknown keys.
        """
        if data["origin"] != cls.origin:
            raise UserError(
                f"these are {data['origin']} metrics of step {data['step']}, not {cls.origin} "
                f"ones; StepMetrics reads predicted metrics, MeasuredStep measured ones"
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
    """The planner's prediction of a step."""

    origin: ClassVar[str] = "predicted"
    imbalance: float = 1.0  # slowest micro-batch over the mean one (Section 7.4)
    # imbalance of each step, if `merge` made this record of several
    degrees: tuple[float, ...] = ()
    max_workload_ns: int = 0  # predicted time of the slowest micro-batch
    mean_workload_ns: float = 0.0  # predicted time of the mean micro-batch
    step_time_s: float | None = None  # simulated time of the step; None without a simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep(StepCounts):
    """Measurements of an executed step, with the counts of its plan."""

    origin: ClassVar[str] = "measured"
    loss: float | None = None  # mean over labels, in nats; None if the step updated nothing
    grad_norm: float | None = None  # norm before clipping; None if the step updated nothing
    step_time_s: float | None = None  # wall time on the rank that writes the record
    # times of this step and of those since the last record; None if telemetry is off or not due
    telemetry: Telemetry | None = None
    # rows of the most loaded expert over the mean one's, mean over layers; None without experts
    expert_load: float | None = None
    # the same by layer and by EP rank; None without experts and in files of earlier versions
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
        """Return the measurements of the step that has these counts."""
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
        """Slowest over mean micro-batch, by measured forward times; None without telemetry."""
        return None if self.telemetry is None else self.telemetry.imbalance

    def to_json(self) -> dict[str, Any]:
        """Return the values by the keys of metrics.jsonl, and further values derived from them."""
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
"""Values that metrics.jsonl has for keys that only the other of the two records has."""


def imbalance(workload_ns: IntArray) -> float:
    """Return the largest of `workload_ns` (shape [n]) over their mean; 1.0 if all are 0."""
    total = int(workload_ns.sum())
    return float(workload_ns.max()) * workload_ns.size / total if total else 1.0


def token_delay(plan: PackingPlan) -> tuple[float, int]:
    """Return the mean delay over tokens and the longest delay of a plan's pieces, in steps."""
    if not len(plan.pieces):
        return 0.0, 0
    # Policies that pack several batches train some tokens early. Early tokens count as 0, so that
    # they do not offset the delay of others.
    delay = np.maximum(plan.step - plan.pieces.arrival_step, 0)
    return float(np.average(delay, weights=plan.pieces.length)), int(delay.max())


def predict(plan: PackingPlan, *, num_padding_tokens: int = 0) -> StepMetrics:
    """Return the metrics that follow from packing alone."""
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
    """Describe pieces that were trained later than `packing.max_delay`, with the remedy.

    Args:
        num_overdue: Number of these pieces.
        max_delay: Steps by which the latest piece is late.
    """
    return (
        f"{num_overdue} pieces of documents were trained later than packing.max_delay, up to "
        f"{max_delay} steps after they were read, because steps were full; raise "
        f"packing.step_tokens or packing.s_max so that a step can train more of them, or "
        f"packing.max_delay if such a delay is acceptable"
    )


STARVED = 0.25
"""A step is starved if it has less than this share of the median step's tokens."""


def starved_remark(step_tokens: Sequence[int] | IntArray) -> str:
    """Describe starved steps in sentences, with the remedies; "" if there are none.

    Args:
        step_tokens: Tokens of each step, shape [num_steps]. Steps without tokens are ignored,
            because they update nothing.
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
        f"usual step's {usual:,.0f} tokens, {starved.min():,} at least; each updates the weights "
        f"like a full step, with a noisier and larger gradient. packing.policy = bounded makes a "
        f"step only where there is enough for one; with var_len, empty packing.queue_thresholds "
        f"hold nothing back; training.loss_normalizer = constant makes such a step's gradient as "
        f"small as its tokens are few"
    )


_COUNTS = ("num_documents", "num_tokens", "num_targets", "num_padding_tokens", "num_overdue")
_SUMMED = (*_COUNTS, "max_workload_ns", "mean_workload_ns")


def merge(first: StepMetrics | None, second: StepMetrics) -> StepMetrics:
    """Merge the metrics of two consecutive steps into one record.

    Tokens and the times of slowest and mean micro-batches add up.
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
    """Return the imbalance of each step of which the record was made."""
    return metrics.degrees or (metrics.imbalance,)
