"""Figures of a kernel profile: the paper's Figures 7 and 10, and how well fits match measurements.

Points are measurements and lines are fits. The axes always include all points.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wlb.cost import AttentionTable, Collective, Elementwise, KernelProfile, Scope
from wlb.plan import FloatArray, IntArray
from wlb.report.plots import COLOURS, legend_above, new_figure
from wlb.report.profile.points import (
    PASSES,
    HeldPoint,
    PlottedSample,
    Record,
    TermCurves,
    attention_rate,
    collective_samples,
    elementwise_samples,
    gemm_rate,
    gemm_samples,
    grid_samples,
    layer_samples,
    segment_ns,
    terms_of,
    without_layer,
    workload_at,
)
from wlb.spec import ModelSpec

MARKERS = "osD^vPX"
"""matplotlib markers of the first series of a figure, the second series, and so on."""
DENSE_ROWS = 512
"""Up to this number of query rows, the fitted time is drawn for every number of rows, which shows
the steps from one kernel tile to the next. The paper's Figure 10 goes to 256."""
MOST_SERIES = 4
"""Most series (such as numbers of keys) in one figure, so that it stays legible."""


def profile_figures(
    profile: KernelProfile,
    *,
    model: ModelSpec,
    records: Sequence[Record],
    held: Sequence[HeldPoint],
) -> dict[str, Any]:
    """Return all figures of a kernel profile, by the name of their file.

    There is no figure of parts that were not measured.

    Args:
        profile: The kernel profile.
        model: The model for which the profile was measured.
        records: All measurements (`Record`).
        held: Attention calls that were measured but not used for the fit.
    """
    work = workload_at(profile, model)
    figures = {"figure7": terms_figure(terms_of(work, records))}
    for i, table in enumerate(profile.attention):
        kernel = f"{table.backends[0]}-{heads_text(table)}"
        samples = grid_samples(table, records)
        for which, name in enumerate(PASSES if shown_keys(samples) else ()):
            figures[f"figure10-{kernel}-{name}"] = kernel_figure(table, samples, which=which)
        if mine := [point for point in held if point.table == i]:
            figures[f"held_out-{kernel}"] = held_figure(mine, title=kernel)
    if samples := gemm_samples(profile, records):
        figures["gemm"] = gemm_figure(profile, samples)
    if samples := elementwise_samples(profile, records):
        figures["elementwise"] = elementwise_figure(profile, samples)
    fitted, held_out = (
        layer_samples(profile, model, records, kind=kind) for kind in ("layer", "held_layer")
    )
    if fitted or held_out:
        bare = without_layer(profile)
        operators = [
            sample
            for kind in ("layer", "held_layer")
            for sample in layer_samples(bare, model, records, kind=kind)
        ]
        operators.sort(key=lambda sample: sample.at["tokens"])
        figures["layers"] = layer_figure(fitted, held_out, operators)
    if samples := collective_samples(profile, records):
        figures["collectives"] = collective_figure(profile, samples)
    return figures


def heads_text(table: AttentionTable) -> str:
    """Return the attention heads of a table as text: "4x128" means 4 heads of size 128.

    "8-2x128" means 8 query heads and 2 key-value heads.
    """
    grouped = table.num_kv_heads != table.num_heads
    heads = f"{table.num_heads}-{table.num_kv_heads}" if grouped else f"{table.num_heads}"
    return f"{heads}x{table.head_dim}"


def rate_unit(tflops: Sequence[float]) -> tuple[float, str]:
    """Return a unit for an axis of these speeds, and the factor that converts TFLOP/s to it."""
    return (1.0, "TFLOP/s") if max(tflops, default=1.0) >= 1 else (1e3, "GFLOP/s")


def spoken(name: str) -> str:
    """Return `name` with hyphens instead of underscores."""
    return name.replace("_", "-")


def terms_figure(terms: TermCurves) -> Any:
    """Return the paper's Figure 7: time of each part of the model against document length.

    Times on the left axis are relative to attention at `TermCurves.normal_length`. The right axis
    has absolute times.
    """
    figure, (axes,) = new_figure(ncols=1, height=4.4)
    styles = {
        "attention": (COLOURS[0], "-", 2.4),
        "total linear": ("#000000", "-", 2.0),
        "GEMM": (COLOURS[1], "--", 1.4),
        "collective communication": (COLOURS[3], "-.", 1.4),
        "element-wise": (COLOURS[2], ":", 1.8),
    }
    for part, (colour, line, wide) in styles.items():
        values = terms.parts[part] / terms.normal_ns
        if values.any():
            axes.plot(terms.lengths, values, line, color=colour, linewidth=wide, label=part)
    if terms.measured:
        tokens, took = np.array(terms.measured).T
        axes.plot(
            *(tokens, took / terms.normal_ns), "o", color=COLOURS[0], label="attention, measured"
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="document length (tokens)",
        ylabel=f"time / time of attention at {terms.normal_length} tokens",
    )
    unit = terms.normal_ns * 1e-9

    def seconds(relative: FloatArray) -> FloatArray:
        return relative * unit

    def relative(seconds: FloatArray) -> FloatArray:
        return seconds / unit

    right = axes.secondary_yaxis("right", functions=(seconds, relative))
    right.set_ylabel("time, forward and backward, all layers")
    _engineering(right.yaxis, "s", axes.get_ylim())
    axes.yaxis.set_major_formatter("{x:g}")
    _powers_of_two(axes)
    axes.legend(frameon=False)
    return figure


def shown_keys(samples: Sequence[PlottedSample]) -> list[int]:
    """Return at most `MOST_SERIES` numbers of keys, for which `kernel_figure` draws series.

    They are chosen from the numbers of keys that were measured with at least three numbers of query
    rows.
    """
    rows: dict[int, set[int]] = {}
    for s in samples:
        if s.at["q"] < s.at["kv"]:
            rows.setdefault(s.at["kv"], set()).add(s.at["q"])
    many = [kv for kv, of in rows.items() if len(of) >= 3]
    return _few([kv for kv in many if kv >= DENSE_ROWS] or many)


def kernel_figure(table: AttentionTable, samples: Sequence[PlottedSample], *, which: int) -> Any:
    """Return a figure of the forward or backward pass of an attention kernel (Figure 10).

    The left panel has the time of one segment with few query rows. The right panel has the
    throughput for all numbers of query rows, with a separate line for whole documents, which have
    as many keys as query rows.

    Args:
        table: The fitted attention table.
        samples: Measured calls with their fitted times.
        which: 0 for forward, 1 for backward.
    """
    figure, (left, right) = new_figure(ncols=2, height=4.0)

    def rates(mine: Sequence[PlottedSample], of: str) -> list[float]:
        return [attention_rate(table, s, getattr(s, of)[which], which) for s in mine]

    scale, unit = rate_unit(rates(samples, "measured_ns"))

    def draw_rates(mine: Sequence[PlottedSample], marker: str, colour: str, label: str) -> None:
        rows = [s.at["q"] for s in mine]
        found = (rates(mine, of) for of in ("measured_ns", "fitted_ns"))
        measured, fitted = (np.array(of_rows) * scale for of_rows in found)
        _draw(right, marker, colour, (rows, measured), (rows, fitted), label=label)

    # Draw one series for each number of keys.
    for i, kv in enumerate(shown_keys(samples)):
        mine = [s for s in samples if s.at["kv"] == kv and s.at["q"] < kv]
        style, label = (MARKERS[i], COLOURS[i]), f"{tokens_text(kv)} keys"
        dense = [s for s in mine if s.at["q"] <= DENSE_ROWS]
        rows, fitted = _fitted(table, mine)
        few = rows <= DENSE_ROWS
        measured = ([s.at["q"] for s in dense], [s.measured_ns[which] * 1e-9 for s in dense])
        _draw(left, *style, measured, (rows[few], fitted[which][few] * 1e-9), label=label)
        draw_rates(mine, *style, label)
    if whole := [s for s in samples if s.at["q"] == s.at["kv"]]:
        draw_rates(whole, "x", "#000000", "keys = rows")
    left.set(
        xlabel="query rows", ylabel=f"{PASSES[which]}, one segment", yscale="log", xlim=(0, None)
    )
    right.set(xscale="log", xlabel="query rows", ylabel=f"{PASSES[which]}, {unit}")
    _from_zero(right)
    left.xaxis.set_major_locator(_locator([0, 64, 128, 192, 256, 320, 384, 448, 512]))
    _engineering(left.yaxis, "s")
    _powers_of_two(right)
    left.set_title(f"{table.backends[0]}, {heads_text(table)}", loc="left", fontsize=10)
    legend_above(figure, [right], ncols=MOST_SERIES + 1)
    return figure


def _fitted(
    table: AttentionTable, samples: Sequence[PlottedSample]
) -> tuple[IntArray, tuple[FloatArray, FloatArray]]:
    """Return fitted times of attention for many numbers of query rows.

    The numbers of rows are all numbers up to `DENSE_ROWS` and, above it, the measured ones.
    The fit also depends on the number of segments of a call, which is taken from the measured call
    with the next larger number of rows.

    Args:
        table: The fitted attention table.
        samples: Measured calls that all have the same number of keys, sorted by rows.

    Returns:
        Numbers of query rows, and the forward and backward times of one segment in nanoseconds.
    """
    at = np.array([[s.at["q"], s.at["count"]] for s in samples], np.int64)
    first, last = int(at[0, 0]), int(at[-1, 0])
    rows = np.append(np.arange(first, min(DENSE_ROWS, last) + 1), at[at[:, 0] > DENSE_ROWS, 0])
    count = at[np.searchsorted(at[:, 0], rows), 1]
    return rows, segment_ns(table, rows, np.full(rows.size, samples[0].at["kv"]), count)


def _draw(axes: Any, marker: str, colour: str, measured: Any, fitted: Any, *, label: str) -> None:
    """Draw measured values as points and fitted values as a line.

    Args:
        axes: Axes in which to draw.
        marker: Marker of the points.
        colour: Colour of points and line.
        measured: x and y coordinates of the points.
        fitted: x and y coordinates of the line.
        label: Label in the legend.
    """
    axes.plot(*measured, marker, color=colour, markersize=4, label=label)
    axes.plot(*fitted, color=colour, linewidth=1.2)


def held_figure(points: Sequence[HeldPoint], *, title: str) -> Any:
    """Return a figure of predicted against measured times of attention calls that were not fitted.

    A grey band marks errors of up to 10%. The left panel is forward, the right one backward.
    """
    figure, panels = new_figure(ncols=2, height=4.6)
    for which, axes in enumerate(panels):
        for kind, label, colour, mark in (
            ("held_pair", "equal segments", COLOURS[0], "o"),
            ("held_batch", "varlen batches", COLOURS[1], "s"),
        ):
            mine = [p for p in points if p.kind == kind]
            axes.plot(
                [p.measured_ns[which] * 1e-9 for p in mine],
                [p.predicted_ns[which] * 1e-9 for p in mine],
                *mark,
                color=colour,
                markersize=4,
                alpha=0.75,
                markeredgewidth=0,
                label=label if mine else None,
            )
        both = [ns * 1e-9 for p in points for ns in (p.measured_ns[which], p.predicted_ns[which])]
        ends = np.array([min(both) / 1.6, max(both) * 1.6])
        axes.plot(ends, ends, color="#000000", linewidth=0.8)
        axes.fill_between(ends, ends * 0.9, ends * 1.1, color="#888888", alpha=0.25, linewidth=0)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        axes.set(xlabel=f"measured {PASSES[which]}", ylabel=f"predicted {PASSES[which]}")
        for axis in (axes.xaxis, axes.yaxis):
            _engineering(axis, "s")
        axes.legend(frameon=False, loc="upper left")
    panels[0].set_title(title, loc="left", fontsize=10)
    return figure


def gemm_figure(profile: KernelProfile, samples: Sequence[PlottedSample]) -> Any:
    """Return a figure of the throughput of matrix products against the number of tokens.

    Args:
        profile: The kernel profile.
        samples: Measured products, of which a few sizes of weights are drawn.
    """
    figure, panels = new_figure(ncols=2, height=3.8)
    sizes = _few(sorted({s.at["weights"] for s in samples}))
    scale, unit = rate_unit([gemm_rate(s, s.measured_ns[i], i) for s in samples for i in range(2)])
    tokens = _between(np.array([s.at["tokens"] for s in samples], np.float64))
    for which, axes in enumerate(panels):
        surface = (profile.gemm.forward, profile.gemm.backward)[which]
        for i, weights in enumerate(sizes):
            mine = [s for s in samples if s.at["weights"] == weights]
            rates = [gemm_rate(s, s.measured_ns[which], which) * scale for s in mine]
            fitted = surface.at(tokens, np.full(tokens.size, weights)) * scale
            measured, label = ([s.at["tokens"] for s in mine], rates), f"{weights:,.0f} weights"
            _draw(axes, MARKERS[i], COLOURS[i], measured, (tokens, fitted), label=label)
        axes.set(xscale="log", xlabel="tokens", ylabel=f"{PASSES[which]}, {unit}")
        _from_zero(axes)
        _powers_of_two(axes)
    legend_above(figure, panels)
    return figure


def elementwise_figure(profile: KernelProfile, samples: Sequence[PlottedSample]) -> Any:
    """Return a figure of element-wise operators: bytes per second against bytes of a call.

    Args:
        profile: The kernel profile.
        samples: Measured calls with their fitted times.
    """
    figure, panels = new_figure(ncols=2, height=3.8)
    for which, axes in enumerate(panels):
        for i, op in enumerate(Elementwise):
            of_op = [s for s in samples if s.at["op"] == op and s.measured_ns[which] > 0]
            mine = sorted((s.at["bytes"][which], s.measured_ns[which]) for s in of_op)
            if not mine:
                continue
            sizes, took = np.array(mine).T
            cost = profile.elementwise_of(op)
            call = (cost.forward_call_ns, cost.backward_call_ns)[which]
            rate = (cost.forward_bytes_per_s, cost.backward_bytes_per_s)[which]
            line = _between(sizes)
            fitted = (line, line / (call * 1e-9 + line / rate))
            measured = (sizes, sizes / took * 1e9)
            _draw(axes, MARKERS[i], COLOURS[i], measured, fitted, label=str(op))
        axes.set(
            xscale="log", yscale="log", xlabel="bytes of a call", ylabel=f"{PASSES[which]}, B/s"
        )
        _bytes_axis(axes)
        _engineering(axes.yaxis, "B/s")
    legend_above(figure, panels)
    return figure


def layer_figure(
    fitted: Sequence[PlottedSample],
    held: Sequence[PlottedSample],
    operators: Sequence[PlottedSample],
) -> Any:
    """Return a figure of the time of layers without attention, against the number of tokens.

    Filled markers are measurements that were not used for the fit, empty markers those that were
    used. Dotted lines are the sum of the layer's operators.

    Args:
        fitted: Measured layers that were used for the fit.
        held: Measured layers that were not used for the fit.
        operators: The same layers. Their `fitted_ns` is the sum of the fitted times of a layer's
            operators.
    """
    figure, panels = new_figure(ncols=2, height=3.8)
    both = sorted([*fitted, *held], key=lambda s: s.at["tokens"])
    for which, axes in enumerate(panels):
        for i, tp in enumerate(sorted({s.at["tp"] for s in both})):
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            style = {"linewidth": 1.2, "color": colour}
            axes.plot(*_times(both, "fitted_ns", tp, which), "-", label=f"TP {tp}", **style)
            words = f"TP {tp}, sum of operators"
            axes.plot(*_times(operators, "fitted_ns", tp, which), ":", label=words, **style)
            for samples, filling in ((fitted, "none"), (held, colour)):
                style = {"markerfacecolor": filling, "color": colour, "markersize": 5}
                axes.plot(*_times(samples, "measured_ns", tp, which), marker, **style)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=f"{PASSES[which]}, one layer")
        _powers_of_two(axes)
        _engineering(axes.yaxis, "s")
    legend_above(figure, panels)
    return figure


def _times(
    samples: Sequence[PlottedSample], of: str, tp: int, which: int
) -> tuple[list[int], list[float]]:
    """Return the numbers of tokens and the times of the measured layers of one TP size.

    Args:
        samples: Measured layers.
        of: Which times: "measured_ns" or "fitted_ns".
        tp: The TP size.
        which: 0 for forward, 1 for backward.

    Returns:
        The number of tokens of each layer, and the time of each layer in seconds.
    """
    mine = [s for s in samples if s.at["tp"] == tp]
    return [s.at["tokens"] for s in mine], [getattr(s, of)[which] * 1e-9 for s in mine]


def collective_figure(profile: KernelProfile, samples: Sequence[PlottedSample]) -> Any:
    """Return a figure of the time of collectives against the bytes of the whole buffer.

    There is one panel for collectives within a node, and one for collectives between nodes.

    Args:
        profile: The kernel profile.
        samples: Measured collectives with their fitted times.
    """
    scopes = [scope for scope in Scope if any(s.at["scope"] == scope for s in samples)]
    figure, panels = new_figure(ncols=len(scopes), height=3.8)
    for scope, axes in zip(scopes, panels, strict=True):
        for i, op in enumerate(Collective):
            mine = [s for s in samples if (s.at["op"], s.at["scope"]) == (op, scope)]
            if not mine:
                continue
            sizes = np.array([s.at["bytes"] for s in mine], np.float64)
            cost = next(c for c in profile.collectives if (c.op, c.scope) == (op, scope))
            line, ranks = _between(sizes), mine[0].at["ranks"]
            fitted = [cost.time_ns(n, num_ranks=ranks) * 1e-9 for n in map(float, line)]
            measured = (sizes, [s.measured_ns[0] * 1e-9 for s in mine])
            _draw(axes, MARKERS[i], COLOURS[i], measured, (line, fitted), label=spoken(op))
        ranks = " or ".join(
            str(n) for n in sorted({s.at["ranks"] for s in samples if s.at["scope"] == scope})
        )
        title = f"{spoken(scope)}, {ranks} ranks"
        axes.set(xscale="log", yscale="log", xlabel="bytes of the whole buffer", ylabel=title)
        _bytes_axis(axes)
        _engineering(axes.yaxis, "s")
    legend_above(figure, panels)
    return figure


def tokens_text(count: int) -> str:
    """Return a number of tokens as text: 4096 is 4K, 131072 is 128K, 384 is 384."""
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else str(count)


def _few(values: Sequence[Any]) -> list[Any]:
    """Return at most `MOST_SERIES` of the values, evenly spread, with the first and the last."""
    some = np.linspace(0, len(values) - 1, min(MOST_SERIES, len(values))).round()
    return [values[int(i)] for i in some]


def _between(sizes: FloatArray) -> FloatArray:
    """Return 60 sizes from the smallest to the largest, evenly spaced on a logarithmic axis."""
    first, last = float(sizes.min()), float(sizes.max())
    return first * (last / first) ** np.linspace(0.0, 1.0, 60)


def _locator(ticks: Sequence[float]) -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator(ticks)


def _from_zero(axes: Any) -> None:
    """Let the y axis start at zero and end a little above the largest value."""
    axes.set_ylim(0, 1.07 * axes.dataLim.y1)


def _powers_of_two(axes: Any) -> None:
    """Set ticks of a logarithmic x axis of tokens at powers of two, such as 4K and 8K."""
    _fixed_ticks(axes, 1, lambda x, _: tokens_text(round(x)))


def _bytes_axis(axes: Any) -> None:
    """Set ticks of a logarithmic x axis of bytes at powers of two, such as 4 KiB and 1 MiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")

    def text(x: float, _: int) -> str:
        i = min(len(units) - 1, max(0, int(np.log2(x)) // 10))
        return f"{x / 1024**i:g} {units[i]}"

    _fixed_ticks(axes, 2, text)


def _fixed_ticks(axes: Any, least_step: int, text: Callable[[float, int], str]) -> None:
    """Set about seven ticks of a logarithmic x axis at powers of two.

    Args:
        axes: The axes.
        least_step: Smallest step between the exponents of two ticks: 2 means ticks at 1, 4, 16, ...
        text: Function from a value and its position to the label of the tick.
    """
    low, high = (float(np.log2(x)) for x in axes.get_xlim())
    step = max(least_step, int(np.ceil((high - low) / 7)))
    first = int(np.ceil(low / step)) * step
    axes.xaxis.set_major_locator(_locator([2.0**i for i in range(first, int(high) + 1, step)]))
    axes.xaxis.set_major_formatter(text)
    axes.xaxis.set_minor_locator(_locator([]))


def _engineering(axis: Any, unit: str, span: tuple[float, float] | None = None) -> None:
    """Label a logarithmic axis with units, such as 100 µs and 1 ms.

    If the axis spans few decades, it also has ticks at 2 and 5 times powers of ten.

    Args:
        axis: The axis.
        unit: The unit without prefix, such as "s".
        span: Smallest and largest value. None means the limits of the axis.
    """
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    low, high = span or axis.get_view_interval()
    subs = (1.0,) if high / low > 50 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(EngFormatter(unit=unit))
    axis.set_minor_formatter(NullFormatter())
