"""`wlb profile`'s page: what was measured, the paper's Figures 7 and 10, and how well fits fit.

One page that needs nothing else. Every number in its text is computed from the records and the
profile that it is given; what was not measured is named instead of drawn.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, cast

from wlb.cost import AttentionTable, KernelProfile, ProfiledWorkload, Provenance, ProvenanceKind
from wlb.report.packing.page import STYLE
from wlb.report.plots import require_matplotlib
from wlb.report.profile.plots import (
    collective_figure,
    elementwise_figure,
    gemm_figure,
    held_figure,
    kernel_figure,
    layer_figure,
    rate_unit,
    shown_keys,
    terms_figure,
)
from wlb.report.profile.points import (
    PASSES,
    HeldPoint,
    Record,
    collective_samples,
    elementwise_samples,
    gemm_samples,
    grid_samples,
    layer_samples,
    measured_of,
    terms_of,
    without_layer,
    worst,
)
from wlb.report.profile.words import (
    HELD,
    collective_words,
    elementwise_words,
    gemm_words,
    held_text,
    held_words,
    kernel_words,
    layer_words,
    rate_text,
    spoken,
    table_title,
    table_words,
    terms_words,
    time_text,
)
from wlb.spec import ModelSpec, ParallelSpec

__all__ = ["HeldPoint", "profile_page"]

KINDS = {
    "grid": "attention of equal segments",
    "held_pair": "held-out equal segments",
    "held_batch": "held-out varlen batches",
    "gemm": "matrix products",
    "elementwise": "element-wise operators",
    "embedding": "the embedding",
    "head": "the output head",
    "layer": "whole layers",
    "held_layer": "held-out whole layers",
    "collective": "collectives",
}
"""Kinds of records, in words."""
FACTS = {
    "cpu": "CPU",
    "torch": "PyTorch",
    "num_threads": "threads",
    "packages": "attention packages",
    "memory_bytes": "memory",
    "capability": "compute capability",
    "cuda": "CUDA",
    "num_sms": "multiprocessors",
    "l2_bytes": "L2 cache",
    "lengths": "grid (tokens)",
    "batch_tokens": "rows of a batch",
    "model": "hidden, feed-forward and vocabulary size",
    "budgets_s": "seconds for a point of attention, of the linear part, of collectives",
    "sm_clock_mhz": "SM clock (MHz)",
    "memory_clock_mhz": "memory clock (MHz)",
    "power_w": "power (W)",
    "temperature_c": "temperature (degrees Celsius)",
    "num_samples": "samples of clocks and power",
    "throttled": "throttled, share of samples",
    "unavailable": "not told by the device",
    "why_empty": "clocks and power",
}
"""Names of a profile's environment, in words; others are shown as they are."""
NO_COST_BYTES_PER_S = 1e15
"""A rate above it says that the time of calls did not grow with their bytes."""
TOTALS = (*PASSES, "total")


def profile_page(
    profile: KernelProfile,
    *,
    model: ModelSpec,
    records: Sequence[Record],
    held: Sequence[HeldPoint],
    residuals: Sequence[Mapping[str, float]],
) -> str:
    """The page as text; equal arguments give equal bytes.

    records: all that the sweep has, with `kind`, `point`, `numbers` and `failed` each. held: held-
    out calls with their predictions. residuals: of each attention table of the profile.
    """
    require_matplotlib()
    title = f"Kernel profile {profile.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *_lead(profile, records, residuals),
        *_not_measured(profile, records, held),
        "<h2>Latency over document length (the paper's Figure 7)</h2>",
        _figure_7(profile, model, records),
        *(
            part
            for i, table in enumerate(profile.attention)
            for part in _kernel(i, table, records, [p for p in held if p.table == i])
        ),
        "<h2>How well unseen calls are predicted</h2>",
        *_residuals(profile, held, residuals),
        *_linear(profile, model, records),
        "<h2>Where the numbers come from</h2>",
        _sources(profile),
        "<h2>Made with</h2>",
        _made_with(profile),
    ]
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(parts) + "</body></html>\n"


def _p(*sentences: str) -> str:
    return f"<p>{escape(' '.join(s for s in sentences if s))}</p>"


def _figure(svg: str, *sentences: str) -> str:
    caption = escape(" ".join(s for s in sentences if s))
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="scroll"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _lead(
    profile: KernelProfile, records: Sequence[Record], residuals: Sequence[Mapping[str, float]]
) -> list[str]:
    origin = profile.provenance
    done = sum(not r["failed"] for r in records)
    when = f" on {origin.date}" if origin.date else ""
    errors = [
        f"{r['held_batch_total_mape']:.1%} ({table_title(table)})"
        for table, r in zip(profile.attention, residuals, strict=True)
        if "held_batch_total_mape" in r
    ]
    return [
        _p(
            f"{profile.device}, {profile.dtype}, {origin.kind}{when}: {origin.source}.",
            f"{done} of {len(records)} points were measured.",
            f"Varlen batches that no fit has seen are predicted with a mean error of "
            f"{', '.join(errors)}."
            if errors
            else "",
        ),
        _p("In all figures points are measured and lines are what the profile says of the same."),
    ]


def _not_measured(
    profile: KernelProfile, records: Sequence[Record], held: Sequence[HeldPoint]
) -> list[str]:
    lines = [_failed_text(r) for r in records if r["failed"]]
    for i, table in enumerate(profile.attention):
        has = {p.kind for p in held if p.table == i}
        has |= {"grid"} if grid_samples(table, records) else set()
        lines += [
            f"Without any point: {KINDS[kind]}, {table_title(table)}."
            for kind in ("grid", *HELD)
            if kind not in has
        ]
    lines += [
        f"Without any point: {words}."
        for kind, words in KINDS.items()
        if kind not in ("grid", *HELD) and not measured_of(records, kind)
    ]
    lines += [
        f"{spoken(c.op)}, {spoken(c.scope)}: {c.provenance.source} ({c.provenance.kind})."
        for c in profile.collectives
        if c.provenance.kind != ProvenanceKind.MEASURED
    ]
    if not lines:
        return []
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return ["<h2>What was not measured</h2>", f"<ul>{items}</ul>"]


def _failed_text(record: Record) -> str:
    point = ", ".join(f"{name} {value}" for name, value in record["point"].items())
    return f"Failed: {KINDS.get(record['kind'], record['kind'])} at {point}: {record['failed']}"


# Figure 7.


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


def _figure_7(profile: KernelProfile, model: ModelSpec, records: Sequence[Record]) -> str:
    work = _workload(profile, model)
    terms = terms_of(work, records)
    return _figure(terms_figure(terms, name="terms"), *terms_words(work, terms))


# Attention kernels: Figure 10, and held-out calls.


def _kernel(
    index: int, table: AttentionTable, records: Sequence[Record], held: Sequence[HeldPoint]
) -> list[str]:
    samples = grid_samples(table, records)
    parts = [f"<h2>Attention: {escape(table_title(table))} (the paper's Figure 10)</h2>"]
    parts.append(_p(*table_words(table)))
    if shown_keys(samples):
        for which, name in enumerate(PASSES):
            parts.append(
                _figure(
                    kernel_figure(table, samples, which=which, name=f"kernel-{index}-{name}"),
                    *kernel_words(table, samples, which),
                )
            )
    else:
        parts.append(_p("Too little of the grid was measured to draw it."))
    if not held:
        return [*parts, _p("No held-out call was measured.")]
    return [*parts, _held(index, held)]


def _held(index: int, held: Sequence[HeldPoint]) -> str:
    lists = "".join(
        f"<p>The worst {name} predictions:</p><ol>"
        + "".join(f"<li>{escape(held_text(e, p, i))}</li>" for e, p in worst(held, i))
        + "</ol>"
        for i, name in enumerate(PASSES)
    )
    return _figure(held_figure(held, name=f"held-{index}"), *held_words(held)) + lists


def _residuals(
    profile: KernelProfile, held: Sequence[HeldPoint], residuals: Sequence[Mapping[str, float]]
) -> list[str]:
    rows: list[list[str]] = []
    for i, (table, found) in enumerate(zip(profile.attention, residuals, strict=True)):
        for kind, words in HELD.items():
            count = sum(p.kind == kind and p.table == i for p in held)
            for name in TOTALS:
                errors = [found.get(f"{kind}_{name}_{part}") for part in ("mape", "p95", "max")]
                again = found.get(f"retest_{name}") if kind == "held_batch" else None
                cells = [f"{e:.1%}" if e is not None else "not measured" for e in [*errors, again]]
                if kind == "held_pair":
                    cells[-1] = ""
                rows.append([table_title(table), words, name, str(count), *cells])
    return [
        _p(
            "Errors are |predicted / measured - 1| of held-out calls: their mean, the 95th "
            "percentile and the worst. Test-retest is how far two measurements of the same batch "
            "differ on average; a prediction without error of its own would be off by about 0.7 "
            "times that."
        ),
        _table(
            ["kernel", "calls", "pass", "points", "mean", "95%", "worst", "test-retest"],
            rows,
        ),
    ]


# The linear part.


def _linear(profile: KernelProfile, model: ModelSpec, records: Sequence[Record]) -> list[str]:
    gemm = gemm_samples(profile, records)
    elementwise = elementwise_samples(profile, records)
    collectives = collective_samples(profile, records)
    return [
        "<h2>Matrix products</h2>",
        _figure(gemm_figure(profile, gemm, name="gemm"), *gemm_words(gemm))
        if gemm
        else _p("Matrix products were not measured."),
        "<h2>Element-wise operators</h2>",
        _figure(
            elementwise_figure(profile, elementwise, name="elementwise"),
            *elementwise_words(elementwise),
        )
        if elementwise
        else _p("Element-wise operators were not measured."),
        "<h2>Whole layers without attention</h2>",
        _layers(profile, model, records),
        "<h2>Collectives</h2>",
        _figure(
            collective_figure(profile, collectives, name="collectives"),
            *collective_words(profile, collectives),
        )
        if collectives
        else _p("Collectives were not measured; what stands in for them is named above."),
    ]


def _layers(profile: KernelProfile, model: ModelSpec, records: Sequence[Record]) -> str:
    fitted, held = (
        layer_samples(profile, model, records, kind=kind) for kind in ("layer", "held_layer")
    )
    if not fitted and not held:
        return _p("Whole layers were not measured.")
    operators = sorted(
        (
            s
            for kind in ("layer", "held_layer")
            for s in layer_samples(without_layer(profile), model, records, kind=kind)
        ),
        key=lambda s: s.at["tokens"],
    )
    return _figure(
        layer_figure(fitted, held, operators, name="layers"),
        *layer_words(profile, fitted, held, operators),
    )


# Provenance.


def _sources(profile: KernelProfile) -> str:
    def row(what: str, forward: str, backward: str, origin: Provenance) -> list[str]:
        return [what, forward, backward, str(origin.kind), origin.source]

    def tops(values: Any) -> str:
        scale, unit = rate_unit([float(values.max())])
        return f"{values.min() * scale:.3g} to {values.max() * scale:.3g} {unit}"

    def rate(bytes_per_s: float, call_ns: float) -> str:
        is_told = bytes_per_s < NO_COST_BYTES_PER_S
        told = f"{bytes_per_s / 1e9:.3g} GB/s" if is_told else "no measurable cost a byte"
        return f"{told}, {time_text(call_ns)} a call"

    rows = [
        row(table_title(t), tops(t.forward.values), tops(t.backward.values), t.provenance)
        for t in profile.attention
    ]
    gemm, head = profile.gemm, profile.head
    rows.append(
        row(
            "matrix products",
            tops(gemm.forward.values),
            tops(gemm.backward.values),
            gemm.provenance,
        )
    )
    rows += [
        row(
            str(c.op),
            rate(c.forward_bytes_per_s, c.forward_call_ns),
            rate(c.backward_bytes_per_s, c.backward_call_ns),
            c.provenance,
        )
        for c in profile.elementwise
    ]
    layer = profile.layer
    rows.append(
        row(
            "a layer's own",
            f"{layer.forward_factor:.3g} times its operators, {time_text(layer.forward_call_ns)}",
            f"{layer.backward_factor:.3g} times its operators, {time_text(layer.backward_call_ns)}",
            layer.provenance,
        )
    )
    scaling = f"{head.backward_bytes_per_s / 1e9:.3g} GB/s"
    rows.append(row("head and loss", rate_text(head.tflops), scaling, head.provenance))
    rows += [
        row(
            f"{spoken(c.op)}, {spoken(c.scope)}",
            f"{time_text(c.alpha_ns)} + wire bytes / {c.bytes_per_s / 1e9:.3g} GB/s",
            "",
            c.provenance,
        )
        for c in profile.collectives
    ]
    return _table(["", "forward", "backward", "kind", "source"], rows)


def _made_with(profile: KernelProfile) -> str:
    origin = profile.provenance
    plain = [
        ("device", profile.device),
        ("data type", profile.dtype),
        ("attention kernels", ", ".join(profile.backends)),
        ("date", origin.date),
        ("commit", origin.commit),
        ("command", origin.command),
    ]
    starts: list[dict[str, Any]] = origin.environment.get("starts") or [{}]
    conditions: dict[str, Any] = starts[-1].get("conditions", {})
    facts = [
        (FACTS.get(name, name), text)
        for texts in (
            [(k, _value_text(k, v)) for k, v in origin.environment.items()],
            [(k, _condition_text(v)) for k, v in conditions.items() if v not in ("", {}, 0)],
        )
        for name, text in texts
        if name not in ("starts", "name", "dtype", "device")
    ]
    items = (
        f"<dt>{escape(name)}</dt><dd><code>{escape(text)}</code></dd>"
        for name, text in [*plain, *facts]
        if text
    )
    return f"<dl>{''.join(items)}</dl>"


def _value_text(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.3g} GiB" if value >= 2**30 else f"{value / 2**20:.3g} MiB"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(str(v) for v in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return str(value)


def _condition_text(value: Any) -> str:
    """Of three numbers: least, median, most; of shares by reason: percent of samples."""
    match value:
        case [float() | int() as low, float() | int() as middle, float() | int() as high]:
            return f"{low:g} at least, {middle:g} at the median, {high:g} at most"
        case Mapping():
            shares = cast(Mapping[str, Any], value)
            return ", ".join(
                f"{spoken(k)} {v:.0%}" if isinstance(v, float) else f"{spoken(k)} ({v})"
                for k, v in shares.items()
            )
        case _:
            return str(value)
