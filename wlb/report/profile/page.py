"""`wlb profile`'s page: what was measured, the paper's Figures 7 and 10, and how well fits fit.

Every number in its text is computed from the records and the profile that it is given; what was not
measured is named instead of drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wlb.cost import AttentionTable, Collective, KernelProfile, ProfiledWorkload, ProvenanceKind
from wlb.report.plots import require_matplotlib
from wlb.report.profile import plots, points
from wlb.report.profile.points import PASSES, HeldPoint, PlottedSample, Record, TermCurves
from wlb.report.profile.words import (
    made_with,
    rate_text,
    rates_text,
    spoken,
    table_title,
    time_text,
)
from wlb.report.render import render
from wlb.spec import ModelSpec, ParallelSpec

__all__ = ["HeldPoint", "profile_page"]

HELD = ("held_pair", "held_batch")
"""Kinds of held-out attention calls: equal segments, varlen batches."""
OF_THE_REST = ("gemm", "elementwise", "embedding", "head", "layer", "held_layer", "collective")
"""Kinds of records that belong to no attention table."""
Context = dict[str, Any]


def profile_page(
    profile: KernelProfile,
    *,
    model: ModelSpec,
    records: Sequence[Record],
    held: Sequence[HeldPoint],
    residuals: Sequence[Mapping[str, float]],
) -> str:
    """The page as HTML; equal arguments give equal bytes.

    records: all that the sweep has, with `kind`, `point`, `numbers` and `failed` each. held: held-
    out calls with their predictions. residuals: of each attention table of the profile.
    """
    require_matplotlib()
    work = _workload(profile, model)
    curves = points.terms_of(work, records)
    return render(
        "profile",
        title=f"Kernel profile {profile.name}",
        profile=profile,
        num_done=sum(not r["failed"] for r in records),
        num_records=len(records),
        held_errors=[
            (table_title(table), found["held_batch_total_mape"])
            for table, found in zip(profile.attention, residuals, strict=True)
            if "held_batch_total_mape" in found
        ],
        failed=[r for r in records if r["failed"]],
        missing=_missing(profile, records, held),
        stand_ins=[c for c in profile.collectives if c.provenance.kind != ProvenanceKind.MEASURED],
        work=work,
        curves=curves,
        communication=_communication(work, curves),
        figures={"terms": plots.terms_figure(curves, name="terms")},
        kernels=[
            _kernel(i, table, records, [p for p in held if p.table == i], residuals[i])
            for i, table in enumerate(profile.attention)
        ],
        gemm=_gemm(profile, records),
        elementwise=_elementwise(profile, records),
        layers=_layers(profile, model, records),
        collectives=_collectives(profile, records),
        provenance=made_with(profile),
        time=time_text,
        rate=rate_text,
        rates=rates_text,
        spoken=spoken,
        table_title=table_title,
    )


def _missing(
    profile: KernelProfile, records: Sequence[Record], held: Sequence[HeldPoint]
) -> list[tuple[str, str]]:
    """Kinds of points that the sweep does not have: of each attention table, by its title, and of
    the rest."""
    missing: list[tuple[str, str]] = []
    for i, table in enumerate(profile.attention):
        has = {p.kind for p in held if p.table == i}
        has |= {"grid"} if points.grid_samples(table, records) else set()
        missing += [(kind, table_title(table)) for kind in ("grid", *HELD) if kind not in has]
    rest = [kind for kind in OF_THE_REST if not points.measured_of(records, kind)]
    return missing + [(kind, "") for kind in rest]


def _errors(samples: Sequence[PlottedSample], which: int) -> dict[str, float] | None:
    """Mean and worst error of a pass; None where no point took measurable time."""
    errors = np.abs([s.error(which) for s in samples if s.measured_ns[which] > 0])
    return {"mean": float(errors.mean()), "worst": float(errors.max())} if errors.size else None


def _both_errors(samples: Sequence[PlottedSample]) -> list[dict[str, float] | None]:
    return [_errors(samples, which) for which in range(2)]


def _workload(profile: KernelProfile, model: ModelSpec) -> ProfiledWorkload:
    """At the TP degree whose ranks have the first table's heads; TP 1 where none has."""
    table = profile.attention[0]
    tp, rest = divmod(model.num_heads, table.num_heads)
    return ProfiledWorkload(
        model=model,
        parallel=ParallelSpec(tp=1 if rest else tp),
        profile=profile,
        backend=table.backends[0],
        micro_batch_tokens=int(table.forward.axis1[-1]),
    )


def _communication(work: ProfiledWorkload, curves: TermCurves) -> Context | None:
    """Where the prices of TP collectives come from; None for a rank that communicates nothing."""
    if not curves.parts["collective communication"].any():
        return None
    costs = [
        work.profile.collective(op, span_ranks=work.parallel.tp)
        for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    ]
    sources = {c.provenance.source for c in costs if c.provenance.kind != ProvenanceKind.MEASURED}
    return {"sources": sorted(sources), "scope": spoken(costs[0].scope)}


def _kernel(
    index: int,
    table: AttentionTable,
    records: Sequence[Record],
    held: Sequence[HeldPoint],
    residuals: Mapping[str, float],
) -> Context:
    samples = points.grid_samples(table, records)
    return {
        "table": table,
        "title": table_title(table),
        "num_samples": len(samples),
        "passes": [
            _pass(index, table, samples, which) for which in range(2) if plots.shown_keys(samples)
        ],
        "residuals": residuals,
        "num_held": {kind: sum(p.kind == kind for p in held) for kind in HELD},
        "figure": plots.held_figure(held, name=f"held-{index}") if held else None,
        "inside": [sum(abs(p.error(i)) <= 0.1 for p in held) for i in range(2)],
        "worst": [(name, points.worst(held, i)) for i, name in enumerate(PASSES)],
    }


def _pass(
    index: int, table: AttentionTable, samples: Sequence[PlottedSample], which: int
) -> Context:
    (tflops, best), *_ = points.kernel_rates(table, samples, which)
    name = PASSES[which]
    return {
        "name": name,
        "figure": plots.kernel_figure(table, samples, which=which, name=f"kernel-{index}-{name}"),
        "steps": _steps(table, samples, which),
        "best_tflops": tflops,
        "best": best,
        "error": _errors(samples, which),
    }


def _steps(table: AttentionTable, samples: Sequence[PlottedSample], which: int) -> Context:
    """How time grows over the most keys: from the fewest rows to one tile and to two; without
    tiles, from the fewest rows to the most."""
    kv, tile = plots.shown_keys(samples)[-1], table.tile_rows
    rows = {s.at["q"]: s for s in samples if s.at["kv"] == kv and s.at["q"] < kv}
    first, last = min(rows), max(rows)

    def growth(few: int, many: int) -> float:
        return rows[many].measured_ns[which] / rows[few].measured_ns[which]

    steps = {"kv": kv, "first": first, "last": last}
    if tile > 1 and first < tile and {tile, 2 * tile} <= rows.keys():
        second = growth(tile, 2 * tile)
        return {**steps, "tile": tile, "growth": growth(first, tile), "second_growth": second}
    rates = [points.kernel_rates(table, [rows[q]], which)[0][0] for q in (first, last)]
    return {
        **steps,
        "tile": 0,
        "growth": growth(first, last),
        "first_tflops": rates[0],
        "last_tflops": rates[1],
    }


def _gemm(profile: KernelProfile, records: Sequence[Record]) -> Context | None:
    samples = points.gemm_samples(profile, records)
    if not samples:
        return None
    return {
        "figure": plots.gemm_figure(profile, samples, name="gemm"),
        "num": len(samples),
        "peaks": [max(points.gemm_rate(s, s.measured_ns[i], i) for s in samples) for i in range(2)],
        "errors": _both_errors(samples),
    }


def _elementwise(profile: KernelProfile, records: Sequence[Record]) -> Context | None:
    samples = points.elementwise_samples(profile, records)
    if not samples:
        return None
    return {
        "figure": plots.elementwise_figure(profile, samples, name="elementwise"),
        "errors": _both_errors(samples),
        "num_too_short": sum(ns <= 0 for s in samples for ns in s.measured_ns),
        "missing": sorted(
            {str(cost.op) for cost in profile.elementwise} - {s.at["op"] for s in samples}
        ),
    }


def _layers(profile: KernelProfile, model: ModelSpec, records: Sequence[Record]) -> Context | None:
    kinds = ("layer", "held_layer")
    fitted, held = (points.layer_samples(profile, model, records, kind=kind) for kind in kinds)
    if not fitted and not held:
        return None
    bare = points.without_layer(profile)
    operators = [s for kind in kinds for s in points.layer_samples(bare, model, records, kind=kind)]
    operators.sort(key=lambda s: s.at["tokens"])
    return {
        "figure": plots.layer_figure(fitted, held, operators, name="layers"),
        "num_fitted": len(fitted),
        "num_held": len(held),
        "fitted": _both_errors(fitted),
        "held": _both_errors(held),
        "operators": _both_errors(operators),
    }


def _collectives(profile: KernelProfile, records: Sequence[Record]) -> Context | None:
    samples = points.collective_samples(profile, records)
    if not samples:
        return None
    measured = {(s.at["op"], s.at["scope"]) for s in samples}
    return {
        "figure": plots.collective_figure(profile, samples, name="collectives"),
        "fitted": [c for c in profile.collectives if (c.op, c.scope) in measured],
        "missing": [c for c in profile.collectives if (c.op, c.scope) not in measured],
        "error": _errors(samples, 0),
    }
