"""Metrics of a step: `StepMetrics` is the planner's prediction, `MeasuredStep` the ranks'
measurement.

Both are written to metrics.jsonl with the same keys. A key that a record has no value for is null
there, or 0 for workloads, as files of all versions have it.
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
from wlb.plan.schema import ANYTHING, OTHERS, Schema, hold_schema, schema_of
from wlb.plan.telemetry import TELEMETRY, Telemetry

_PADDING_IN_FILES = "num_filler_tokens"
"""Name of num_padding_tokens in metrics.jsonl, which was written before the field was renamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counts that follow from a step's plan, whether or not it was executed.

    step: its number. num_documents: documents with a piece in it. num_tokens: real tokens only;
    num_padding_tokens are apart. num_targets: valid labels. num_held_tokens: tokens that wait after
    it. num_overdue: pieces later than the policy's maximum delay. mean_delay, max_delay: iterations
    from the step that was next when a token's global batch came to the one that trains it, per
    token; 0 where a policy that packs several batches trains it early. cp_imbalance: predicted
    attention time of the slowest over the mean CP rank; sharding_counts: micro-batches by strategy;
    key_rows: what CP ranks exchange, None for one rank and in files of earlier versions. These are
    known once micro-batches are sharded, not from packing alone.
    """

    origin: ClassVar[str]
    step: int
    num_documents: int
    num_tokens: int
    num_targets: int
    num_padding_tokens: int = 0
    num_held_tokens: int = 0
    num_overdue: int = 0
    mean_delay: float = 0.0
    max_delay: int = 0
    cp_imbalance: float = 1.0
    sharding_counts: tuple[tuple[str, int], ...] = ()
    key_rows: KeyRows | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary with the keys of metrics.jsonl; `from_json` reads it again."""
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
        """What any version's `to_json` wrote (`wlb.plan.schema`)."""
        nested = {
            "key_rows": (schema_of(KeyRows), None),
            "sharding_counts": {OTHERS: int},
            "telemetry": (TELEMETRY, None),
            "experts": (LOAD, None),
        }
        own = {f.name for f in fields(cls)}
        out = schema_of(cls, **{n: s for n, s in nested.items() if n in own})
        # Keys that only the other record has, and the older name of one.
        others = {f"{name}?": ANYTHING for name in _EMPTY if name not in own}
        return out | others | {"origin": str, f"{_PADDING_IN_FILES}?": int}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read what any version's `to_json` wrote; UserError for the other record, unknown keys."""
        if data["origin"] != cls.origin:
            raise UserError(
                f"these are {data['origin']} metrics of step {data['step']}, not {cls.origin} "
                f"ones; StepMetrics reads predicted metrics, MeasuredStep measured ones"
            )
        what = f"{cls.origin} metrics of a step"
        hold_schema(data, cls.schema(), what, remedy="correct or remove the record")
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
    """The planner's prediction of a step.

    imbalance: slowest micro-batch x number of micro-batches / total workload (Section 7.4).
    max_workload_ns, mean_workload_ns: of the step's micro-batches.
    degrees: the imbalance of each of several steps that `merge` made one, else empty.
    step_time_s: of a simulation; None from packing alone.
    """

    origin: ClassVar[str] = "predicted"
    imbalance: float = 1.0
    degrees: tuple[float, ...] = ()
    max_workload_ns: int = 0
    mean_workload_ns: float = 0.0
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep(StepCounts):
    """Measurements of an executed step, with the counts of its plan.

    loss: mean over valid labels, in nats; grad_norm: before clipping; both None where the step
    updated nothing. step_time_s: wall time on the rank that writes the record. telemetry: times of
    this step and those since the last record; None where it is off or not due. expert_load: rows
    of the most loaded expert over the mean one's, mean of layers; experts: of each layer and EP
    rank, None in files of earlier versions; both None without experts.
    """

    origin: ClassVar[str] = "measured"
    loss: float | None = None
    grad_norm: float | None = None
    step_time_s: float | None = None
    telemetry: Telemetry | None = None
    expert_load: float | None = None
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
        """The measurements of the step that has `counts`."""
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
        """Section 7.4's degree of measured forward latencies; None without telemetry."""
        return None if self.telemetry is None else self.telemetry.imbalance

    def to_json(self) -> dict[str, Any]:
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
"""Values in metrics.jsonl of keys that only the other of the two records has."""


def imbalance(workload_ns: IntArray) -> float:
    """Max x number / total of `workload_ns` (shape [n]), Section 7.4; 1.0 where all are zero."""
    total = int(workload_ns.sum())
    return float(workload_ns.max()) * workload_ns.size / total if total else 1.0


def token_delay(plan: PackingPlan) -> tuple[float, int]:
    """Mean (over tokens) and maximum delay of a plan's pieces, in iterations; early ones have 0."""
    if not len(plan.pieces):
        return 0.0, 0
    # Policies that pack several batches train some tokens early; early tokens count as 0, so that
    # they do not offset the delay of others.
    delay = np.maximum(plan.step - plan.pieces.arrival_step, 0)
    return float(np.average(delay, weights=plan.pieces.length)), int(delay.max())


def predict(plan: PackingPlan, *, num_padding_tokens: int = 0) -> StepMetrics:
    """The metrics that follow from packing alone."""
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
    """A sentence about pieces that were trained later than `packing.max_delay`, with the remedy.
    max_delay: of a piece, in steps.
    """
    return (
        f"{num_overdue} pieces of documents were trained later than packing.max_delay, up to "
        f"{max_delay} steps after they came, because steps were full; raise packing.step_tokens or "
        f"packing.s_max so that more can be caught up, or packing.max_delay if so late is fine"
    )


STARVED = 0.25
"""A step with less than this share of the median step's tokens is starved."""


def starved_remark(step_tokens: Sequence[int] | IntArray) -> str:
    """Sentences about starved steps, with the remedies; "" if there are none.

    step_tokens: tokens of each step, shape [num_steps]. Steps without tokens update nothing and do
    not count.
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
    """Two consecutive steps as one: sums of workload, tokens and time to wait for."""
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
    """The imbalance of each step that `metrics` is of."""
    return metrics.degrees or (metrics.imbalance,)
