"""Calibration: a kernel profile refitted to what a run measured, one factor a term of Eq. 2.

The factor of a term is the median over records (steps, mostly), weighted by predicted time, of
measured over predicted time, both summed over the record's cells. Sums inside a record, so that a
cell counts by its time and the factor is right for a step as a whole; the median over records, so
that steps which something else on the machine slowed down do not count. It needs no more than the
sums that telemetry reduces. What a token costs and what a micro-batch costs whatever it holds get
the same factor, so calibrate with micro-batches of the size that is to be trained.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from wlb.cost.linear import TP_BACKWARD, TP_FORWARD
from wlb.cost.profile import (
    AttentionTable,
    Collective,
    ElementwiseCost,
    KernelProfile,
    LayerCost,
    Provenance,
)
from wlb.cost.surface import Curve, Surface
from wlb.plan import TERMS, Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Measured over predicted time by term. num_records, num_steps: what they were fitted to."""

    attention_forward: float
    attention_backward: float
    linear_forward: float
    linear_backward: float
    num_records: int
    num_steps: int

    @property
    def by_term(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in TERMS}

    def drifted(self, threshold: float) -> tuple[str, ...]:
        """Terms whose factor is further from 1 than `threshold`."""
        return tuple(name for name, scale in self.by_term.items() if abs(scale - 1) > threshold)


def fit_scales(records: Sequence[Telemetry]) -> Scales:
    """ValueError if a term was not measured, or not predicted, in any of the records."""
    scales: dict[str, float] = {}
    for name in TERMS:
        known = [
            (m.measured_s / m.predicted_s, m.predicted_s)
            for record in records
            for term, m in record.terms
            if term == name and m.measured_s and m.predicted_s
        ]
        if not known:
            raise ValueError(
                f"nothing to calibrate with: no {name} time was measured in {len(records)} records "
                f"after warm-up; train more steps or lower telemetry.warmup_steps"
            )
        scales[name] = _weighted_median(known)
    steps = sum(record.num_steps for record in records)
    return Scales(**scales, num_records=len(records), num_steps=steps)


def _weighted_median(pairs: list[tuple[float, float]]) -> float:
    """Of (value, weight) pairs: where half the weight lies below, between two values their mean."""
    half, below = sum(weight for _, weight in pairs) / 2, 0.0
    ordered = sorted(pairs)
    for i, (value, weight) in enumerate(ordered):
        below += weight
        if below > half:
            return value
        if below == half:
            return (value + ordered[i + 1][0]) / 2
    return ordered[-1][0]


def scaled_profile(
    profile: KernelProfile,
    *,
    attention_forward: float,
    attention_backward: float,
    linear_forward: float,
    linear_backward: float,
    name: str,
    provenance: Provenance,
    table: AttentionTable | None = None,
    collectives: bool = True,
) -> KernelProfile:
    """`profile` with every time of a term multiplied by that term's factor.

    table: the attention table to scale, the others stay (None = all). collectives: whether linear
    factors hold for all-gathers and reduce-scatters of layers too (not where their time was not
    part of what was measured). A collective has one price for both passes, so their factors are
    averaged by calls under TP, 2 to 3. The linear factors go to the layer's own (`LayerCost`): what
    its operators take one by one was not measured. Embedding and head stay.
    """
    factors = (attention_forward, attention_backward, linear_forward, linear_backward)
    if not all(0 < factor < float("inf") for factor in factors):
        raise ValueError(f"factors of {name!r} must be finite and above 0, got {factors}")
    passes = (sum(TP_FORWARD), sum(TP_BACKWARD))
    both = (passes[0] * linear_forward + passes[1] * linear_backward) / sum(passes)
    in_layers = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    return replace(
        profile,
        name=name,
        provenance=provenance,
        attention=tuple(
            _slower_table(t, attention_forward, attention_backward, provenance)
            if table is None or t is table
            else t
            for t in profile.attention
        ),
        elementwise=tuple(
            replace(c, **_slower_calls(c, linear_forward, linear_backward), provenance=provenance)
            for c in profile.elementwise
        ),
        layer=LayerCost(
            forward_factor=profile.layer.forward_factor * linear_forward,
            backward_factor=profile.layer.backward_factor * linear_backward,
            **_slower_calls(profile.layer, linear_forward, linear_backward),
            provenance=provenance,
        ),
        collectives=tuple(
            replace(
                c,
                alpha_ns=round(c.alpha_ns * both),
                bytes_per_s=c.bytes_per_s / both,
                provenance=provenance,
            )
            if collectives and c.op in in_layers
            else c
            for c in profile.collectives
        ),
    )


def calibrated_name(name: str) -> str:
    """ "cpu" -> "cpu-calibrated" -> "cpu-calibrated-2" -> "cpu-calibrated-3"."""
    again = re.fullmatch(r"(.*-calibrated)(?:-(\d+))?", name)
    return f"{again[1]}-{int(again[2] or 1) + 1}" if again else f"{name}-calibrated"


def _slower_calls(
    cost: ElementwiseCost | LayerCost, forward: float, backward: float
) -> dict[str, int]:
    return {
        "forward_call_ns": round(cost.forward_call_ns * forward),
        "backward_call_ns": round(cost.backward_call_ns * backward),
    }


def _slower(surface: Surface, factor: float) -> Surface:
    return replace(surface, values=surface.values / factor)


def _slower_curve(curve: Curve | None, factor: float) -> Curve | None:
    return None if curve is None else replace(curve, values=curve.values / factor)


def _slower_table(
    table: AttentionTable, forward: float, backward: float, provenance: Provenance
) -> AttentionTable:
    return replace(
        table,
        forward=_slower(table.forward, forward),
        backward=_slower(table.backward, backward),
        launch_forward_ns=round(table.launch_forward_ns * forward),
        launch_backward_ns=round(table.launch_backward_ns * backward),
        group_forward_ns=round(table.group_forward_ns * forward),
        group_backward_ns=round(table.group_backward_ns * backward),
        square_forward=_slower_curve(table.square_forward, forward),
        square_backward=_slower_curve(table.square_backward, backward),
        provenance=provenance,
    )
