"""What the figures of a kernel profile show, in sentences with their numbers."""

from collections.abc import Sequence

import numpy as np

from wlb.cost import (
    AttentionTable,
    Collective,
    Elementwise,
    KernelProfile,
    ProfiledWorkload,
    ProvenanceKind,
)
from wlb.report.profile.plots import rate_unit, shown_keys
from wlb.report.profile.points import (
    PASSES,
    HeldPoint,
    PlottedSample,
    TermCurves,
    gemm_rate,
    kernel_rates,
)

HELD = {"held_pair": "equal segments", "held_batch": "varlen batches"}
"""Kinds of held-out calls, in words."""


def terms_words(work: ProfiledWorkload, terms: TermCurves) -> list[str]:
    longest = int(terms.lengths[-1])
    ratio = terms.parts["attention"][-1] / terms.parts["total linear"][-1]
    crossing = terms.crossing
    if crossing is None:
        crosses = "Attention takes less than total linear up to there."
    elif crossing == terms.lengths[0]:
        crosses = f"From {crossing} tokens on, the shortest drawn, attention takes longer."
    else:
        crosses = f"From {crossing} tokens on attention takes longer than total linear."
    return [
        f"Forward and backward of all {work.num_layers_per_rank} layers on one rank of TP "
        f"{work.parallel.tp}, CP 1: {table_title(work.table)}. 1 is attention at "
        f"{terms.normal_length} tokens, {time_text(terms.normal_ns)}.",
        f"Total linear is GEMM, collective communication and element-wise operators, at the "
        f"throughput of a micro-batch of {work.micro_batch_tokens} tokens.",
        f"Near {longest} tokens attention grows with length to the power of "
        f"{terms.growth('attention'):.2f}, total linear to the power of "
        f"{terms.growth('total linear'):.2f}.",
        crosses,
        f"At {longest} tokens it is {ratio:.3g} times total linear.",
        _communication(work, terms),
        "Points are whole documents (as many keys as rows), with their share of the call's cost, "
        "which the lines leave out."
        if terms.measured
        else "No whole document was measured at this head layout.",
    ]


def held_words(held: Sequence[HeldPoint]) -> list[str]:
    inside = [
        sum(abs(p.predicted_ns[i] / p.measured_ns[i] - 1) <= 0.1 for p in held) for i in range(2)
    ]
    counts = " and ".join(
        f"{sum(p.kind == kind for p in held)} of {words}" for kind, words in HELD.items()
    )
    return [
        f"Predicted against measured time of held-out calls, all of them: {counts}. A batch that "
        f"was measured twice is two points.",
        f"Within the band of 10% lie {inside[0]} of {len(held)} forward and {inside[1]} backward.",
        "Numbers mark the worst, which are listed below.",
    ]


def table_title(table: AttentionTable) -> str:
    heads = f"{table.num_heads} head{'s' * (table.num_heads > 1)}"
    if table.num_kv_heads != table.num_heads:
        heads += f" over {table.num_kv_heads}"
    return f"{table.backends[0]}, {heads} of {table.head_dim}"


def time_text(ns: float) -> str:
    """Three digits and a unit: 12.3 µs, 4.56 ms."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.3g} ns"


def rate_text(tflops: float) -> str:
    scale, unit = rate_unit([tflops])
    return f"{tflops * scale:.3g} {unit}"


def spoken(name: str) -> str:
    return name.replace("_", "-")


def _communication(work: ProfiledWorkload, terms: TermCurves) -> str:
    tp = work.parallel.tp
    if not terms.parts["collective communication"].any():
        return "One rank alone communicates nothing."
    costs = [
        work.profile.collective(op, span_ranks=tp)
        for op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    ]
    sources = {c.provenance.source for c in costs if c.provenance.kind != ProvenanceKind.MEASURED}
    if not sources:
        return f"Collectives were measured ({spoken(costs[0].scope)})."
    return f"Collectives: {'; '.join(sorted(sources))}."


def table_words(table: AttentionTable) -> list[str]:
    said = [
        f"A call costs {time_text(table.launch_forward_ns)} forward and "
        f"{time_text(table.launch_backward_ns)} backward, whatever it holds."
    ]
    if table.group_forward_ns or table.group_backward_ns:
        said.append(
            f"Segments of like lengths are computed together; each such group costs "
            f"{time_text(table.group_forward_ns)} and {time_text(table.group_backward_ns)} more."
        )
    if table.padded_lengths:
        said.append(f"Lengths up to {table.padded_lengths[-1]} are rounded up to one of a few.")
    if table.tile_rows > 1:
        said.append(f"It computes whole tiles of {table.tile_rows} query rows.")
    if table.heads.size > 1:
        pairs = zip(table.heads.tolist(), table.heads_efficiency.tolist(), strict=True)
        said.append(
            "Throughput relative to this layout's: "
            + ", ".join(f"{efficiency:.2f} with {n:.0f} heads" for n, efficiency in pairs)
            + "."
        )
    return said


def kernel_words(table: AttentionTable, samples: Sequence[PlottedSample], which: int) -> list[str]:
    """What Figure 10 says, with this kernel's numbers."""
    (rate, at), *_ = kernel_rates(table, samples, which)
    errors = np.abs([s.error(which) for s in samples])
    return [
        f"Left: time of one {PASSES[which]} segment of a call that fills the device. Right: "
        f"achieved throughput of the FLOPs that the segments ask for, padding not counted.",
        _steps(table, samples, which),
        f"The highest that was measured is {rate_text(rate)}, with {at.at['q']} rows over "
        f"{at.at['kv']} keys.",
        f"The fit is {errors.mean():.1%} off its {len(samples)} grid points on average (worst "
        f"{errors.max():.1%}); it also follows the random batches, and time may not fall with "
        f"length.",
    ]


def _steps(table: AttentionTable, samples: Sequence[PlottedSample], which: int) -> str:
    """From the fewest rows to a tile to two tiles; without tiles, from the fewest to the most."""
    kv = shown_keys(samples)[-1]
    rows = {s.at["q"]: s for s in samples if s.at["kv"] == kv and s.at["q"] < kv}
    first, last = min(rows), max(rows)
    tile = table.tile_rows

    def grows(few: int, many: int) -> str:
        ratio = rows[many].measured_ns[which] / rows[few].measured_ns[which]
        return f"{many} rows take {ratio:.2f} times as long as {few}"

    if tile > 1 and first < tile and {tile, 2 * tile} <= rows.keys():
        return f"Over {kv} keys {grows(first, tile)}: one tile; {grows(tile, 2 * tile)}: two."
    rates = (kernel_rates(table, [rows[q]], which)[0][0] for q in (first, last))
    low, high = (rate_text(rate) for rate in rates)
    return f"Over {kv} keys {grows(first, last)}, at {high} against {low}."


def held_text(error: float, point: HeldPoint, which: int) -> str:
    at = point.label
    if point.kind == "held_pair":
        what = f"{at['count']} segments of {at['q']} rows over {at['kv']} keys"
    else:
        what = f"varlen batch {at['index']}"
        if "repeat" in at:
            what += f", measurement {at['repeat'] + 1}"
    return (
        f"{what}: measured {time_text(point.measured_ns[which])}, predicted "
        f"{time_text(point.predicted_ns[which])} ({error:+.1%})"
    )


def _off(samples: Sequence[PlottedSample], which: int) -> str:
    """Mean and worst error of a pass; points of no measurable time have none."""
    errors = np.abs([s.error(which) for s in samples if s.measured_ns[which] > 0])
    if not errors.size:
        return "no point took measurable time"
    return f"{errors.mean():.1%} (worst {errors.max():.1%})"


def gemm_words(samples: Sequence[PlottedSample]) -> list[str]:
    peaks = [max(gemm_rate(s, s.measured_ns[i], i) for s in samples) for i in range(2)]
    return [
        "Achieved throughput over the tokens of a call. Weights are a matrix's inputs times "
        "outputs; points of one colour may be matrices of different shape.",
        f"The highest that was measured is {rate_text(peaks[0])} forward and "
        f"{rate_text(peaks[1])} backward (both of its products).",
        f"Over all {len(samples)} products the fit is {_off(samples, 0)} off in forward time and "
        f"{_off(samples, 1)} in backward.",
    ]


def elementwise_words(samples: Sequence[PlottedSample]) -> list[str]:
    missing = sorted({str(op) for op in Elementwise} - {s.at["op"] for s in samples})
    idle = sum(ns <= 0 for s in samples for ns in s.measured_ns)
    return [
        "Bytes that the cost model counts over the time of a call, with the embedding's look-up; "
        "the fit is a cost of the call and a rate. Operators that read and write more than the "
        "model counts have lower rates for it.",
        f"The fit is {_off(samples, 0)} off in forward time and {_off(samples, 1)} in backward.",
        f"{idle} times were too short to tell from the cost of entering backward and are left out."
        if idle
        else "",
        f"Not measured: {', '.join(missing)}." if missing else "",
    ]


def layer_words(
    profile: KernelProfile,
    fitted: Sequence[PlottedSample],
    held: Sequence[PlottedSample],
    operators: Sequence[PlottedSample],
) -> list[str]:
    layer = profile.layer
    fit = (
        f"From those that it is fitted to it is {_off(fitted, 0)} off forward and "
        f"{_off(fitted, 1)} backward."
        if fitted
        else ""
    )
    return [
        "One decoder layer whose attention passes its input through, without collectives. Lines "
        "are matrix products and element-wise operators times a factor, and calls; dotted lines "
        "are the operators' sum alone.",
        f"The factor is {layer.forward_factor:.3g} forward and {layer.backward_factor:.3g} "
        f"backward; a layer costs {time_text(layer.forward_call_ns)} and "
        f"{time_text(layer.backward_call_ns)} whatever it holds.",
        f"No fit has seen the full marks ({len(held)}): the line is {_off(held, 0)} off forward "
        f"and {_off(held, 1)} backward."
        if held
        else "No held-out layer was measured.",
        fit,
        f"The sum alone would be {_off(operators, 0)} and {_off(operators, 1)} off.",
    ]


def collective_words(profile: KernelProfile, samples: Sequence[PlottedSample]) -> list[str]:
    fits = [
        f"{spoken(c.op)} {spoken(c.scope)} {time_text(c.alpha_ns)} + wire bytes / "
        f"{c.bytes_per_s / 1e9:.3g} GB/s"
        for c in profile.collectives
        if any((s.at["op"], s.at["scope"]) == (c.op, c.scope) for s in samples)
    ]
    missing = [
        f"{spoken(c.op)} {spoken(c.scope)}"
        for c in profile.collectives
        if not any((s.at["op"], s.at["scope"]) == (c.op, c.scope) for s in samples)
    ]
    return [
        "Time of the slowest rank over the whole buffer's bytes; wire bytes are those that a rank "
        "moves.",
        f"Fits: {'; '.join(fits)}.",
        f"They are {_off(samples, 0)} off.",
        f"Not measured: {', '.join(missing)}." if missing else "",
    ]
