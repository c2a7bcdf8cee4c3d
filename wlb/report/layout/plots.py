"""Figures of a search of layouts: where a step's time goes, and time against memory."""

from wlb.cost import planned_gib
from wlb.cost.memory import GIB
from wlb.report.layout.tables import LayoutReport
from wlb.report.plots import COLOURS, new_figure, svg
from wlb.simulate.layout_search.account import (
    BUBBLE,
    CP_RANKS,
    MICRO_BATCHES,
    RECOMPUTE,
    TermSeconds,
)
from wlb.simulate.layout_search.layouts import degrees_of
from wlb.simulate.layout_search.trial import Trial
from wlb.simulate.layout_search.why import COMPARED
from wlb.spec import Recompute

GROUPS = (
    ("attention", ("attention",), "#0072B2"),
    ("matrix products, element-wise", ("gemm", "elementwise", "embedding", "head"), "#56B4E9"),
    ("TP communication", ("tp_comm",), "#E69F00"),
    ("CP communication", ("cp_comm",), "#D55E00"),
    ("recompute", (RECOMPUTE,), "#CC79A7"),
    ("bubble", (BUBBLE,), "#999999"),
    ("imbalance", (MICRO_BATCHES, CP_RANKS), "#000000"),
)
"""Name, terms and colour of each part of a bar; all other terms are `REST`."""
REST = ("launches, gradients, optimiser", "#009E73")
MOST_BARS = 8


def account_figure(report: LayoutReport) -> str:
    """Bars of the best layouts, the run's own settings, and the best of each other tp, cp, pp."""
    bars = _bars(report)
    figure, (axes,) = new_figure(ncols=1, height=1.2 + 0.42 * len(bars), width=10.0)
    names = [label for label, _ in bars]
    left = [0.0] * len(bars)
    for name, _, colour in (*GROUPS, (REST[0], (), REST[1])):
        widths = [max(0.0, _grouped(trial.terms)[name]) for _, trial in bars]
        axes.barh(names, widths, left=left, color=colour, label=name, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set(xlabel="seconds a global batch")
    axes.grid(visible=False, axis="y")
    figure.legend(frameon=False, loc="outside upper center", ncols=4, fontsize=8)
    return svg(figure, "account")


def memory_figure(report: LayoutReport) -> str:
    """Step time against memory, by degree of TP."""
    figure, (axes,) = new_figure(ncols=1, height=4.2)
    trials = list(report.search.packed.values())
    for i, tp in enumerate(sorted({t.spec.parallel.tp for t in trials})):
        mine = [t for t in trials if t.spec.parallel.tp == tp]
        axes.scatter(
            [t.peak_memory_bytes / GIB for t in mine],
            [t.time_s for t in mine],
            s=26,
            color=COLOURS[i % len(COLOURS)],
            marker="osD^vPX"[i % 7],
            alpha=0.8,
            label=f"tp {tp}",
        )
    winner = report.winner
    at = (winner.peak_memory_bytes / GIB, winner.time_s)
    axes.plot(*at, "*", ms=15, color="#000000", label=f"winner, tuned: {degrees_of(winner.spec)}")
    axes.axvline(planned_gib(winner.spec), color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="fullest rank (GiB)", ylabel="seconds a global batch")
    figure.legend(frameon=False, loc="outside upper center", ncols=6, fontsize=8)
    return svg(figure, "memory")


def _bars(report: LayoutReport) -> list[tuple[str, Trial]]:
    out = [(f"{i + 1}: {_short(t)}", t) for i, t in enumerate(report.best[:MOST_BARS])]
    if report.own is not None:
        out.append((f"own: {_short(report.own)}", report.own))
    others: dict[str, tuple[list[str], Trial]] = {}
    for loser in report.losers:
        if loser.trial is not None and loser.label.split()[0] in COMPARED:
            labels, _ = others.setdefault(loser.trial.name, ([], loser.trial))
            labels.append(loser.label)
    shown = {trial.layout for _, trial in out}
    for labels, trial in others.values():
        if trial.layout not in shown:
            out.append((f"{', '.join(labels)}: {_short(trial)}", trial))
    return out


def _short(trial: Trial) -> str:
    p, v = trial.spec.parallel, trial.spec.pp.virtual_stages
    schedule = {"1f1b": "1f1b", "interleaved_1f1b": "int.", "interleaved_zero_bubble": "zero-b."}
    name = schedule[str(trial.spec.pp.schedule)]
    pipeline = f" {name} v {v}" if p.pp > 1 else ""
    recompute = trial.spec.training.recompute
    again = "" if recompute == Recompute.NONE else f" recompute {recompute}"
    experts = f" ep {p.ep}" if trial.spec.model.experts.num else ""
    return f"{p.tp} x {p.cp} x {p.pp} x {p.dp}{experts}{pipeline}{again}"


def _grouped(terms: TermSeconds) -> dict[str, float]:
    out = {name: sum(terms.get(t, 0.0) for t in members) for name, members, _ in GROUPS}
    out[REST[0]] = sum(terms.values()) - sum(out.values())
    return out
