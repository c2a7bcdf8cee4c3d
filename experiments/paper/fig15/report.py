"""Makes the tables, the page and the charts of Figure 15.

Every run writes a JSON file that is named by its device. The page has the tables of all these
files, so a run on another device only adds tables.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import new_figure
from experiments.harness.pages import How, Picture, Table, write_results
from experiments.paper.fig15.case import STATIC, STRATEGIES

RESULTS = Path(__file__).parent / "results"
OPTIMAL, ALL = "optimal", "optimal of all"
ROWS = (*STRATEGIES, OPTIMAL, ALL)
KINDS = ("predicted", "cuda", "cpu")
PAPER = {65536: 1.01, 131072: 1.07}
"""Speed-ups of per-document over per-sequence sharding in the paper's Figure 15, by window."""
PAPER_ADAPTIVE = (1.075, 1.034)
"""Speed-ups of `adaptive` in the paper's text: over per-sequence and over per-document sharding.

Both are means of the two windows.
"""
COLORS = {
    "per_document": "#56B4E9",
    "adaptive": "#0072B2",
    "hybrid": "#E69F00",
    "balanced": "#D55E00",
    OPTIMAL: "#999999",
    ALL: "#444444",
}

Found = Mapping[str, Any]
"""Results of a run for one window, as in its JSON file (`run_window`)."""


def totals(found: Found) -> dict[str, float]:
    return {name: sum(ms) for name, ms in found["ms"].items()}


def rest_of(found: Found) -> float | None:
    """Returns the predicted ms of the layer besides attention; None if kernels were measured."""
    return None if found["rest"] is None else sum(found["rest"].values())


def table_of(kind: str, window: int, found: Found, title: str) -> Table:
    """Returns the table of all strategies for one window and device."""
    total = totals(found)
    per_sequence, per_document = (total[name] for name in STATIC)
    rest = rest_of(found)
    papers = {"adaptive": f"{PAPER_ADAPTIVE[0]} (mean)"}
    if window in PAPER:
        papers["per_document"] = f"{PAPER[window]:.2f}"
    records = [
        {
            "strategy": name,
            "forward ms": found["ms"][name][0],
            "backward ms": found["ms"][name][1],
            "total ms": total[name],
            "over per_sequence": per_sequence / total[name],
            "over per_document": per_document / total[name],
            "layer, over per_sequence": None
            if rest is None
            else (per_sequence + rest) / (total[name] + rest),
            "paper, over per_sequence": papers.get(name),
        }
        for name in ROWS
    ]
    columns = list(records[0])
    formats = dict.fromkeys(columns[1:4], ".1f") | dict.fromkeys(columns[4:7], ".3f")
    heading = f"Window {window}: {title}"
    return Table.of(f"{kind}_{window}", heading, records, formats=formats, note=note_of(found))


def note_of(found: Found) -> str:
    """Returns the note below a table: what `adaptive` chose, and predictions.

    Predicted runs state the times of the rest of the layer; measured runs state the predicted
    speed-ups.
    """
    num = found["micro_batches"]
    text = f"{num} micro-batches; adaptive took per_document for {found['chose_per_document']}."
    rest = found["rest"]
    if rest is None:
        guess = found["predicted_ms"]
        gains = ", ".join(f"{n} {guess['per_sequence'] / guess[n]:.3f}" for n in STRATEGIES[1:])
        return (
            f"{text} Predicted by the profile that chose: per_sequence "
            f"{guess['per_sequence']:.1f} ms, speed-up over it: {gains}."
        )
    return (
        f"{text} Predicted besides, equal for all: all-gather forward {rest['gather_ms']:.1f} ms, "
        f"gather and reduce-scatter backward {rest['exchange_ms']:.1f} ms, the rest of the layer "
        f"{rest['linear_ms']:.1f} ms; the layer column counts all of it."
    )


def mean_line(windows: Mapping[str, Found]) -> str:
    """Returns a line with the speed-ups of `adaptive` over both static strategies.

    Like the paper's text, it gives means over windows.
    """
    gains = []
    for base in STATIC:
        ratios = [totals(f)[base] / totals(f)["adaptive"] for f in windows.values()]
        gains.append(f"{np.mean(ratios):.3f} over {base}")
    text = " and ".join(gains)
    if all(rest_of(found) is not None for found in windows.values()):
        layers = []
        for base in STATIC:
            ratios = [
                (totals(f)[base] + rest_of(f)) / (totals(f)["adaptive"] + rest_of(f))
                for f in windows.values()
            ]
            layers.append(f"{np.mean(ratios):.3f}")
        text += f", of the whole layer {' and '.join(layers)}"
    return f"adaptive, mean of windows: {text} (paper: {' and '.join(map(str, PAPER_ADAPTIVE))})"


def conditions_of(windows: Mapping[str, Found]) -> str:
    """Returns how the times were obtained; windows with equal conditions are named together."""
    common: dict[str, list[str]] = {}
    for window, found in windows.items():
        common.setdefault(found["note"], []).append(window)
    if len(common) == 1:
        return next(iter(common))
    return " ".join(f"Window {', '.join(of)}: {note}" for note, of in common.items())


def write(kind: str, run: Mapping[str, Any]) -> None:
    """Writes the JSON file of a run, and the page and charts of all runs."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{kind}.json").write_text(json.dumps(run, indent=1) + "\n")
    files = [RESULTS / f"{k}.json" for k in KINDS]
    write_page({f.stem: json.loads(f.read_text()) for f in files if f.exists()})


def write_page(runs: Mapping[str, Mapping[str, Any]]) -> None:
    parts = []
    for kind, run in runs.items():
        line = mean_line(run["windows"])
        parts.append(
            f"**{run['title'][0].upper()}{run['title'][1:]}** (`{kind}`): `{run['command']}` at "
            f"commit {run['commit']}, {run['date']}; CP {run['cp']}, seed {run['seed']}. "
            f"{conditions_of(run['windows'])} {line[0].upper()}{line[1:]}."
        )
    write_results(
        RESULTS.parent,
        title="Figure 15: CP sharding of one attention layer",
        how=How.PREDICTED if list(runs) == ["predicted"] else How.MEASURED,
        profile="each table says by its name and note how its times came about.",
        text="\n\n".join([TEXT, *parts]),
        tables=[
            table_of(kind, int(window), found, run["title"])
            for kind, run in runs.items()
            for window, found in run["windows"].items()
        ],
        figures=[
            Picture(
                name=kind, caption=f"Speed-up over per sequence: {run['title']}", figure=draw(run)
            )
            for kind, run in runs.items()
        ],
    )


TEXT = f"""One layer of the 7B model, Plain-4D's micro-batches of the fitted stream `wlb_paper`.
Milliseconds are sums over micro-batches of the slowest rank's forward and the slowest rank's
backward. `{OPTIMAL}`: the better static strategy for each micro-batch, in hindsight, as in the
paper; `{ALL}`: the best of all five. "Layer" (predictions only) adds the collectives and the linear
layers, in case the paper's figures are of those too.

The paper's figures: per_document over per_sequence 1.01 at 64K and 1.07 at 128K; its WLB-LLM, here
adaptive, 1.075 over per_sequence and 1.034 over per_document, both means of the two windows."""


def draw(run: Mapping[str, Any]) -> Any:
    """Draws speed-ups over per-sequence sharding by window, beside the paper's."""
    figure, (axes,) = new_figure(height=4.7)
    mean = PAPER_ADAPTIVE[0]
    gains = [1.0, mean]
    for i, (window, found) in enumerate(run["windows"].items()):
        gains += _bars(axes, i, int(window), found)
    low, top = min(0.8, *(gain - 0.05 for gain in gains)), max(gains)
    axes.axhline(1, color="#222222", linewidth=0.9)
    label = f"paper: adaptive, mean of windows ({mean:g})"
    axes.axhline(mean, color="#0072B2", linewidth=1.3, linestyle="--", label=label, zorder=3)
    axes.set(ylim=(low, top + 0.06), ylabel=f"speed-up over per_sequence (axis from {low:.2f})")
    axes.set_xticks(range(len(run["windows"])), [f"{int(w) // 1024}K" for w in run["windows"]])
    axes.set(xlabel="window", title=f"One layer's attention, CP {run['cp']}: {run['title']}")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _bars(axes: Any, i: int, window: int, found: Found) -> list[float]:
    """Draws the bars of one window around x = i and returns their heights."""
    total, rest = totals(found), rest_of(found)
    base = total["per_sequence"]
    bars = [(name, base / total[name], {"color": color}) for name, color in COLORS.items()]
    if window in PAPER:
        hatched = {"color": "white", "edgecolor": "#222222", "hatch": "///"}
        bars.insert(0, ("paper: per_document", PAPER[window], hatched))
    width = 0.8 / (len(COLORS) + 1)
    for j, (name, gain, style) in enumerate(bars):
        x = i + (j - (len(bars) - 1) / 2) * width
        axes.bar(x, gain, 0.92 * width, label=None if i else name, **style)
        axes.annotate(
            f"{gain:.2f}",
            (x, gain),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
        if rest is not None and name in total:
            layer = (base + rest) / (total[name] + rest)
            sign = {"color": "white", "markeredgecolor": "black", "markersize": 7, "zorder": 4}
            label = "whole layer, predicted" if i == 0 and j == len(bars) - 1 else None
            axes.plot([x], [layer], "D", linestyle="none", label=label, **sign)
    return [gain for _, gain, _ in bars]
