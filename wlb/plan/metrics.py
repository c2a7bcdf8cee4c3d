"""StepMetrics: one record for a step, filled by the planner (predicted) or by ranks (measured)."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from wlb.plan.arrays import IntArray
from wlb.plan.packing import PackingPlan
from wlb.plan.telemetry import Telemetry

_PADDING_IN_FILES = "num_filler_tokens"
"""Name of num_padding_tokens in metrics.jsonl, which was written before the field was renamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What a step did (origin "measured") or is predicted to do.

    num_documents: with a piece in the step. num_tokens counts real tokens only, num_padding_tokens
    are apart; num_targets: valid labels. num_held_tokens: that wait after the step. num_overdue:
    pieces later than the policy's maximum delay. imbalance is Section 7.4's degree: slowest
    micro-batch x number of micro-batches / total. A measured one, and max_workload_ns and
    mean_workload_ns with it, is of the forward latencies of the steps that `telemetry` is of; None
    and 0 where none is written (off, or not this step's turn). Delays are in iterations per token:
    mean_delay and max_delay: the step that trains a token less the step that was next when its
    global batch came, 0 where it is trained before (policies that pack several batches). loss: mean
    of the valid labels, in nats; grad_norm: before clipping; step_time_s: on the rank that writes
    it; None where not measured. cp_imbalance is slowest rank / mean rank of predicted attention
    time, and sharding_counts how often a strategy was chosen; from packing alone they are not known
    yet. degrees: the imbalance of each of several steps that are one here (`merge`), else empty.
    """

    step: int
    origin: Literal["predicted", "measured"]
    num_documents: int
    num_tokens: int
    num_targets: int
    num_padding_tokens: int = 0
    num_held_tokens: int = 0
    num_overdue: int = 0
    imbalance: float | None = 1.0
    degrees: tuple[float, ...] = ()
    max_workload_ns: int = 0
    mean_workload_ns: float = 0.0
    mean_delay: float = 0.0
    max_delay: int = 0
    cp_imbalance: float = 1.0
    sharding_counts: tuple[tuple[str, int], ...] = ()
    loss: float | None = None
    grad_norm: float | None = None
    step_time_s: float | None = None
    telemetry: Telemetry | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dumps`; `from_json` reads them again."""
        data = asdict(self)
        data[_PADDING_IN_FILES] = data.pop("num_padding_tokens")
        data["sharding_counts"] = dict(self.sharding_counts)
        data["telemetry"] = None if self.telemetry is None else self.telemetry.to_json()
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepMetrics":
        """What `to_json` gave."""
        data = dict(data)
        if _PADDING_IN_FILES in data:
            data["num_padding_tokens"] = data.pop(_PADDING_IN_FILES)
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"unknown StepMetrics fields {unknown}")
        values: dict[str, Any] = {**data, "sharding_counts": tuple(data["sharding_counts"].items())}
        values["degrees"] = tuple(data.get("degrees", ()))
        if values.get("telemetry") is not None:
            values["telemetry"] = Telemetry.from_json(values["telemetry"])
        return cls(**values)


def imbalance(workload_ns: IntArray) -> float:
    """Max x number / total of `workload_ns` (shape [n]), Section 7.4; 1.0 where all are zero."""
    total = int(workload_ns.sum())
    return float(workload_ns.max()) * workload_ns.size / total if total else 1.0


def token_delay(plan: PackingPlan) -> tuple[float, int]:
    """Mean (over tokens) and maximum delay of a plan's pieces, in iterations; early ones have 0."""
    if not len(plan.pieces):
        return 0.0, 0
    # Policies that pack several batches train some tokens early; they cancel nobody's delay.
    delay = np.maximum(plan.step - plan.pieces.arrival_step, 0)
    return float(np.average(delay, weights=plan.pieces.length)), int(delay.max())


def predict(plan: PackingPlan, *, num_padding_tokens: int = 0) -> StepMetrics:
    """The metrics that follow from packing alone."""
    mean_delay, max_delay = token_delay(plan)
    keys = np.stack([plan.pieces.source, plan.pieces.document])
    return StepMetrics(
        step=plan.step,
        origin="predicted",
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


def merge(first: StepMetrics | None, second: StepMetrics) -> StepMetrics:
    """Two steps one after the other as one: sums of work, tokens and time to wait for.

    Both are predicted: their imbalance is known.
    """
    if first is None:
        return second
    tokens = first.num_tokens + second.num_tokens
    slowest = first.max_workload_ns + second.max_workload_ns
    mean = first.mean_workload_ns + second.mean_workload_ns
    delays = first.mean_delay * first.num_tokens + second.mean_delay * second.num_tokens
    return replace(
        second,
        num_documents=first.num_documents + second.num_documents,
        num_tokens=tokens,
        num_targets=first.num_targets + second.num_targets,
        num_padding_tokens=first.num_padding_tokens + second.num_padding_tokens,
        num_overdue=first.num_overdue + second.num_overdue,
        imbalance=slowest / mean if mean else second.imbalance,
        degrees=(*_degrees(first), *_degrees(second)),
        max_workload_ns=slowest,
        mean_workload_ns=mean,
        mean_delay=delays / tokens if tokens else 0.0,
        max_delay=max(first.max_delay, second.max_delay),
    )


def _degrees(metrics: StepMetrics) -> tuple[float, ...]:
    assert metrics.imbalance is not None
    return metrics.degrees or (metrics.imbalance,)
