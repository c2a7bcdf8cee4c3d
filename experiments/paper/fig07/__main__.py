"""Predicts Figure 7: how long a document's operations take, by its length.

`python -m experiments.paper.fig07 [--profile h100 ...]` draws the terms of W_a and W_l (Eq. 2) on
one pipeline rank of `7b_128k`, forward plus backward: attention, matrix products (GEMM),
collectives, element-wise operators, and "total linear", which is everything but attention. It also
gives the length at which attention takes as long as total linear, for all configurations of
Table 1.

The paper measured LLaMA2-7B on 16 GPUs and prints no numbers with the figure. Here all times are
predicted by `ProfiledWorkload.terms`, where linear terms are linear by construction.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.arguments import experiment_parser
from experiments.harness.constants import TABLE_1, configuration, title
from experiments.harness.drawing import COLOURS, LINES, new_figure, tokens_axis, tokens_text
from experiments.harness.pages import Against, How, Picture, Table, priced_with, show, write_results
from experiments.paper.table2.__main__ import ratio as table2_ratio
from wlb.cost import KernelProfile, ProfiledWorkload, load_profile, mismatches
from wlb.plan import IntArray

PRESET = "7b_128k"
NORMAL = 4096
"""Length whose attention time is the unit of the right plot, as in the paper's figure."""
SHORTEST = 256
"""Shortest document in the plots."""
PARTS = {
    "attention": ("attention",),
    "total linear": ("gemm", "tp_comm", "cp_comm", "elementwise"),
    "GEMM": ("gemm",),
    "collectives": ("tp_comm", "cp_comm"),
    "element-wise": ("elementwise",),
}


def workload(name: str, profile: KernelProfile) -> ProfiledWorkload:
    spec = configuration(name)
    return ProfiledWorkload(
        model=spec.model,
        parallel=spec.parallel,
        profile=profile,
        micro_batch_tokens=spec.data.context_window,
    )


def parts_of(cost: ProfiledWorkload, lengths: IntArray) -> dict[str, np.ndarray]:
    """Returns forward plus backward time of documents in ms, for each curve of the figure."""
    terms = cost.terms(lengths)
    passes = ("forward", "backward")
    return {
        part: np.sum([terms[f"{name}_{p}"] for name in names for p in passes], axis=0) / 1e6
        for part, names in PARTS.items()
    }


def crossing(cost: ProfiledWorkload, *, window: int) -> int | None:
    """Returns the length from which on attention always takes longer than the linear part.

    Attention kernels compute whole tiles, so very short documents are expensive as well. They are
    not meant here. Returns None if the linear part still takes longer at the window.
    """
    lengths = np.arange(1, window + 1)
    is_linear = cost.attention_ns(lengths) <= cost.linear_ns(lengths)
    if is_linear[-1]:
        return None
    return int(np.flatnonzero(is_linear)[-1]) + 2 if is_linear.any() else 1


def growth(cost: ProfiledWorkload, *, window: int) -> float:
    """Returns the exponent by which attention time grows from half the window to the window."""
    half, whole = cost.attention_ns([window // 2, window]).tolist()
    return float(np.log2(whole / half))


def draw(cost: ProfiledWorkload, *, window: int, at: int | None) -> Any:
    figure, (left, right) = new_figure(ncols=2, height=4.2)
    octaves = int(np.log2(window // SHORTEST)) * 16 + 1
    for axes, lengths in (
        (left, np.unique(np.geomspace(SHORTEST, window, octaves).round().astype(np.int64))),
        (right, np.linspace(SHORTEST, window, 257).round().astype(np.int64)),
    ):
        unit = parts_of(cost, np.array([NORMAL]))["attention"][0] if axes is right else 1.0
        for i, (part, ms) in enumerate(parts_of(cost, lengths).items()):
            wide = 2.2 if i < 2 else 1.5
            axes.plot(lengths, ms / unit, color=COLOURS[i], ls=LINES[i], lw=wide, label=part)
        if at is not None:
            axes.axvline(at, color="black", linewidth=0.8, linestyle=":")
    left.set(yscale="log", xlabel="document length (tokens)")
    left.set_ylabel("forward + backward of a pipeline rank (ms)")
    tokens_axis(left)
    right.set(xlim=(0, window * 1.02), ylim=(0, None), xlabel="document length (tokens)")
    right.set_ylabel(f"relative to attention at {NORMAL:,} tokens")
    tokens_axis(right, log=False)
    if at is not None:
        right.annotate(
            f"attention =\ntotal linear at\n{at:,} tokens",
            (at, right.get_ylim()[1]),
            xytext=(-6, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9,
        )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False)
    return figure


def terms_table(cost: ProfiledWorkload, *, window: int, name: str) -> Table:
    lengths = 2 ** np.arange(int(np.log2(SHORTEST)), int(np.log2(window)) + 1)
    parts = parts_of(cost, lengths)
    columns = ("document length", *(f"{part} (ms)" for part in parts), "attention / total linear")
    rows = [
        [int(n), *(float(ms[i]) for ms in parts.values()), float(ratio)]
        for i, (n, ratio) in enumerate(
            zip(lengths, parts["attention"] / parts["total linear"], strict=True)
        )
    ]
    formats = dict.fromkeys(columns[1:-1], ".3g") | {columns[0]: ",d", columns[-1]: ".3f"}
    return Table(
        name=f"terms_{name}",
        title=f"Times of a document, {PRESET}, profile {name}",
        columns=columns,
        rows=rows,
        formats=formats,
        note="Forward plus backward of a pipeline rank's layers.",
    )


def crossings_table(profile: KernelProfile) -> Table:
    columns = (
        "configuration",
        "TP, CP",
        "attention crosses total linear at",
        "in windows",
        "attention / total linear at the window",
        "forward alone",
    )
    rows: list[list[Any]] = []
    for name in TABLE_1:
        cost = workload(name, profile)
        window = cost.micro_batch_tokens
        at = crossing(cost, window=window)
        ratio = float((cost.attention_ns([window]) / cost.linear_ns([window]))[0])
        attention = int(cost.terms([window])["attention_forward"][0])
        forward = attention / (int(cost.forward_latency_ns([window])[0]) - attention)
        layout = f"{cost.parallel.tp}, {cost.parallel.cp}"
        rows.append(
            [title(name), layout, at or "nowhere", at / window if at else None, ratio, forward]
        )
    return Table(
        name=f"crossings_{profile.name}",
        title=f"Where attention crosses total linear, profile {profile.name}",
        columns=columns,
        rows=rows,
        formats={columns[2]: ",d", columns[3]: ".2f", columns[4]: ".2f", columns[5]: ".2f"},
        note="Shortest document from which on attention takes longer than everything else. TP 16 "
        "spans two nodes, so its collectives are priced with the network between nodes. The "
        f"prices of Table 2 (FlashAttention-2) give {table2_ratio():.2f} for 7B-128K, forward.",
    )


def main() -> None:
    parser = experiment_parser(__doc__)
    parser.add_argument(
        "--profile", nargs="+", default=["h100"], help="profile names or JSON files"
    )
    options = parser.parse_args()
    window = configuration(PRESET).data.context_window
    profiles = [load_profile(name) for name in options.profile]
    made: list[Table] = []
    figures: list[Picture] = []
    against: list[Against] = []
    limits: list[str] = []
    for profile in profiles:
        cost = workload(PRESET, profile)
        at = crossing(cost, window=window)
        made += [terms_table(cost, window=window, name=profile.name), crossings_table(profile)]
        limits += [f"- profile {profile.name}: {note}" for note in mismatches(cost)]
        against += [
            Against(
                what=f"growth of attention with length, {profile.name}",
                paper="quadratic",
                ours=f"length to the power of {growth(cost, window=window):.2f} (last octave)",
            ),
            Against(
                what="growth of everything else", paper="linear", ours="linear (by construction)"
            ),
        ]
        caption = (
            f"Time of a document by operation, {PRESET}, profile {profile.name}: absolute (left), "
            f"relative to attention at {tokens_text(NORMAL)} (right)"
        )
        drawn = draw(cost, window=window, at=at)
        figures.append(Picture(name=f"terms_{profile.name}", caption=caption, figure=drawn))
    show(*made, against=against, width=160)
    spec = configuration(PRESET)
    write_results(
        Path(__file__).parent,
        title="Figure 7: operations by document length",
        how=How.PREDICTED,
        profile=priced_with(*profiles),
        text=(
            f"`{PRESET}`: LLaMA2-7B at TP {spec.parallel.tp}, CP {spec.parallel.cp}, PP "
            f"{spec.parallel.pp}; one pipeline rank's {spec.model.num_layers // spec.parallel.pp} "
            f"layers, forward plus backward, for a document that is spread evenly over its CP "
            f"group. Collectives are those of TP and CP, by their bandwidth and without any "
            f"overlap: an upper bound. Launches, pipeline transfers and gradients are left out, "
            f"because they do not depend on documents.\n\nThe paper's figure is of a job on 16 "
            f"GPUs whose layout it does not give, and prints no number; shapes can be compared, "
            f"values cannot.\n\nWhere a profile does not match the model:\n" + "\n".join(limits)
        ),
        against=against,
        tables=made,
        figures=figures,
    )


if __name__ == "__main__":
    main()
