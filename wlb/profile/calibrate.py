"""Refit a kernel profile to the times that a run measured.

The terms of predicted time (Eq. 2 of the paper) are attention and linear work (everything else in
layers), each in forward and in backward. They are fitted separately:

- Attention gets a factor for each pass. It is the median over records of measured time divided by
  predicted time, weighted by predicted time, so that a few disturbed steps have little influence.
- Linear work gets a factor and a constant time per micro-batch for each pass. A line of measured
  over predicted time is fitted in each record, and the medians of slope and intercept are taken in
  the same way. If more than half of the records permit no line, because their predicted times vary
  too little, linear work gets a factor only.
- Output head and loss get a separate factor, which does not change plans.

Plans change only if terms get different factors (`Scales.relative`). `Scales.common` shows whether
the whole machine is slower than predicted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from wlb.cost.flops import TP_BACKWARD, TP_FORWARD
from wlb.cost.profile import (
    AttentionTable,
    Collective,
    CollectiveCost,
    Elementwise,
    KernelProfile,
    LayerCost,
    Provenance,
)
from wlb.cost.surface import Curve, Surface
from wlb.plan import TERMS, Telemetry, UserError

LINEAR = ("linear_forward", "linear_backward")
"""Terms that may get a constant time in addition to their factor."""
_CALL = "{}_call_ns"
"""Field of `LayerCost` and `ElementwiseCost` that each pass has; "{}" is forward or backward."""
_ATTENTION = ("{}", "square_{}", "launch_{}_ns", "group_{}_ns")
"""Fields of `AttentionTable` that each pass has; "{}" is forward or backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Measured divided by predicted time of a run, for each term of predicted time."""

    attention_forward: float
    attention_backward: float
    linear_forward: float
    linear_backward: float
    # Constant time that a micro-batch takes in each stage, in addition to factor x predicted time.
    linear_forward_extra_ns: float = 0.0
    linear_backward_extra_ns: float = 0.0
    head: float = 1.0  # factor of output head and loss; 1 if their time was not predicted
    num_records: int  # number of records that the fit used
    num_steps: int  # number of steps that these records cover

    @property
    def by_term(self) -> dict[str, float]:
        """Name of each term of predicted time -> its factor (measured / predicted)."""
        return {name: getattr(self, name) for name in TERMS}

    @property
    def common(self) -> float:
        """Median of measured / predicted time over TERMS: how slow the machine is as a whole."""
        return median(self.by_term.values())

    @property
    def relative(self) -> dict[str, float]:
        """Name of each term of predicted time -> its factor / the median of the others' factors.

        A factor is measured / predicted time (`by_term`).
        """
        factors = self.by_term
        return {
            name: factor / median(f for other, f in factors.items() if other != name)
            for name, factor in factors.items()
        }

    def drifted(self, threshold: float) -> tuple[str, ...]:
        """Return the names of terms whose `relative` factor differs from 1 by over `threshold`."""
        return tuple(name for name, r in self.relative.items() if abs(r - 1) > threshold)


def fit_scales(records: Sequence[Telemetry]) -> Scales:
    """Fit the factor of each term of predicted time to the records of a run.

    Raises:
        UserError: If there is a term for which no record has both a measured and a predicted time.
    """
    scales: dict[str, float] = {}
    for name in TERMS:
        known = [dict(record.terms)[name] for record in records]
        known = [m for m in known if m.measured_s and m.predicted_s]
        if not known:
            raise UserError(
                f"the profile cannot be calibrated, because none of {len(records)} records after "
                f"warm-up has a time of {name}; train more steps or lower telemetry.warmup_steps"
            )
        # Fit a factor and a constant if at least half of the records have a usable line of measured
        # over predicted time (`Moments.line`). Otherwise fit only a factor.
        lines = [(m, line) for m in known if (line := m.line) is not None]
        if name in LINEAR and 2 * len(lines) >= len(known):
            scales[name] = _weighted_median([(slope, m.predicted_s) for m, (slope, _) in lines])
            scales[f"{name}_extra_ns"] = 1e9 * _weighted_median(
                [(extra, m.predicted_s) for m, (_, extra) in lines]
            )
        else:
            ratios = [(m.measured_s / m.predicted_s, m.predicted_s) for m in known]
            scales[name] = _weighted_median(ratios)
    heads = [(ratio, r.predicted_head_s) for r in records if (ratio := r.head_ratio)]
    if heads:
        scales["head"] = _weighted_median(heads)
    steps = sum(record.num_steps for record in records)
    return Scales(**scales, num_records=len(records), num_steps=steps)


def _weighted_median(pairs: list[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight) pairs.

    If the values up to some value have exactly half of the weight, the result is the mean of this
    value and the next larger one.
    """
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
    linear_forward_extra_ns: float = 0.0,
    linear_backward_extra_ns: float = 0.0,
    head: float = 1.0,
    name: str,
    provenance: Provenance,
    table: AttentionTable | None = None,
    backend: str | None = None,
    collectives: bool = True,
) -> KernelProfile:
    """Return a copy of `profile` in which the times of each term are multiplied by its factor.

    The factors of linear work change the profile's times of a whole layer (`LayerCost`) and not
    those of its operators, because a run does not measure single operators. The cost of the
    embedding is not changed.

    Args:
        profile: The profile that predicted the times.
        attention_forward: Factor of attention's forward times.
        attention_backward: Factor of attention's backward times.
        linear_forward: Factor of forward times of all other work in layers.
        linear_backward: Factor of backward times of all other work in layers.
        linear_forward_extra_ns: Nanoseconds to add to the forward time of each call of a layer.
        linear_backward_extra_ns: Nanoseconds to add to the backward time of each call of a layer.
        head: Factor of the times of output head and loss.
        name: Name of the new profile.
        provenance: Provenance of the scaled parts.
        table: The attention table to scale; None scales all tables.
        backend: The attention kernel that the run used. Other kernels of a scaled table keep an
            unscaled copy of the table. With None, no kernel keeps one.
        collectives: Whether to scale all-gathers and reduce-scatters, too. Pass False if the
            measurement did not include collectives. They are scaled by the mean of
            `linear_forward` and `linear_backward`, weighted by how often TP calls collectives in
            forward and in backward.
    """
    factors = (attention_forward, attention_backward, linear_forward, linear_backward, head)
    if not all(0 < factor < float("inf") for factor in factors):
        raise ValueError(f"factors of {name!r} must be finite and above 0, got {factors}")
    attention = (attention_forward, attention_backward)
    linear = (linear_forward, linear_backward)
    extra_ns = (linear_forward_extra_ns, linear_backward_extra_ns)
    slower_head = replace(
        profile.head,
        tflops=profile.head.tflops / head,
        backward_bytes_per_s=profile.head.backward_bytes_per_s / head,
        provenance=provenance,
    )
    return replace(
        profile,
        name=name,
        provenance=provenance,
        attention=_slower_tables(profile.attention, table, backend, attention, provenance),
        elementwise=tuple(
            c if c.op == Elementwise.EMBEDDING else replace(c, **_slower(c, linear, _CALL))
            for c in profile.elementwise
        ),
        layer=_slower_layer(profile.layer, linear, extra_ns, provenance),
        head=profile.head if head == 1 else slower_head,
        collectives=_slower_collectives(profile.collectives, *linear)
        if collectives
        else profile.collectives,
    )


def calibrated_name(name: str) -> str:
    """Return the name of a calibrated profile, given the name of the profile before.

    "cpu" becomes "cpu-calibrated", and "cpu-calibrated" becomes "cpu-calibrated-2".
    """
    match = re.fullmatch(r"(.*-calibrated)(?:-(\d+))?", name)
    return f"{match[1]}-{int(match[2] or 1) + 1}" if match else f"{name}-calibrated"


def _slower(cost: Any, factors: tuple[float, float], *names: str) -> dict[str, Any]:
    """Return new values for fields of `cost` that make each pass take `factors` times as long.

    Fields that hold times or factors are multiplied. Throughput (surfaces and curves) is divided.

    Args:
        cost: A part of a profile.
        factors: Factors of the times of forward and of backward.
        *names: Names of the fields, with "{}" in place of the pass, such as "{}_call_ns".
    """
    found: dict[str, Any] = {}
    for one_pass, factor in zip(("forward", "backward"), factors, strict=True):
        for name in (pattern.format(one_pass) for pattern in names):
            value: Any = getattr(cost, name)
            if isinstance(value, Surface | Curve):
                value = replace(value, values=value.values / factor)
            elif value is not None:
                value = round(value * factor) if name.endswith("_ns") else value * factor
            found[name] = value
    return found


def _slower_tables(
    tables: tuple[AttentionTable, ...],
    wanted: AttentionTable | None,
    backend: str | None,
    factors: tuple[float, float],
    provenance: Provenance,
) -> tuple[AttentionTable, ...]:
    # Scaled tables come first, because `auto` uses the first table.
    first: list[AttentionTable] = []
    rest: list[AttentionTable] = []
    for table in tables:
        if wanted is not None and table is not wanted:
            rest.append(table)
            continue
        slower = replace(table, **_slower(table, factors, *_ATTENTION), provenance=provenance)
        if table.blocks is not None:
            slower = replace(slower, blocks=table.blocks.times(*factors))
        others = tuple(b for b in table.backends if backend is not None and b != backend)
        # The run did not measure the other backends, so they keep their prices.
        if others:
            rest.append(replace(table, backends=others))
            slower = replace(slower, backends=(backend,))
        first.append(slower)
    return (*first, *rest)


def _slower_layer(
    layer: LayerCost,
    factors: tuple[float, float],
    extra_ns: tuple[float, float],
    provenance: Provenance,
) -> LayerCost:
    values = _slower(layer, factors, _CALL, "{}_factor")
    values["forward_call_ns"] += round(extra_ns[0])
    values["backward_call_ns"] += round(extra_ns[1])
    return LayerCost(**values, provenance=provenance)


def _slower_collectives(
    costs: tuple[CollectiveCost, ...], forward: float, backward: float
) -> tuple[CollectiveCost, ...]:
    # A collective has a single cost for both passes, so take the mean of the two factors, weighted
    # by the number of calls in each pass.
    passes = (sum(TP_FORWARD), sum(TP_BACKWARD))
    both = (passes[0] * forward + passes[1] * backward) / sum(passes)
    in_layers = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    return tuple(
        replace(c, alpha_ns=round(c.alpha_ns * both), bytes_per_s=c.bytes_per_s / both)
        if c.op in in_layers
        else c
        for c in costs
    )
