"""Makes the tables of the page from measured cells."""

from collections.abc import Sequence

import numpy as np

from experiments.beyond.step_balance.cells import ANY_COUNTS, Cell, Score
from experiments.beyond.step_balance.peers import Peer
from experiments.harness.pages import Table
from wlb.plan import FloatArray

FREE = 1.0005
"""Steps with a lower bound below this can be balanced perfectly."""


def rows_of(cells: Sequence[Cell], peers: Sequence[Peer]) -> Table:
    rows = []
    for c in cells:
        ours = c.scores["wlb"]
        rows.append([
            c.lengths_of, c.ranks, c.samples, f"{c.caps}x", ours.micro_batches, c.bound, ours.wait,
            *(c.scores[p.name].wait if p.name in c.scores else None for p in peers), ours.ms,
        ])  # fmt: skip
    return Table(
        name="cells",
        title="Wait of every step: slowest rank of every micro-batch over the mean rank",
        columns=("lengths", "ranks", "samples", "cap", "micro-batches", "bound", "wlb",
                 *(p.name for p in peers), "ms"),
        rows=rows,
        formats=dict.fromkeys(("bound", "wlb", *(p.name for p in peers)), ".3f") | {"ms": ".1f"},
        most_rows=100,
        note="cap: in lengths of the longest sample. bound: no division with this cap waits less. "
        "micro-batches, ms: of wlb, a rank's and the median CPU time of a call. A peer's wait "
        "counts also where it breaks the cap or has more micro-batches.",
    )  # fmt: skip


def _means(cells: Sequence[Cell], who: str) -> list[float]:
    """Returns the last columns of a row of `summary`: means over the cells of one division."""
    scores = [c.scores[who] for c in cells]
    ours = [c.scores["wlb"] for c in cells]
    pairs = [(s, o) for s, o in zip(scores, ours, strict=True) if not s.over]
    return [
        float(np.mean([s.wait for s in scores])),
        float(np.mean([s.wait / c.bound for s, c in zip(scores, cells, strict=True)])),
        float(np.mean([s.step for s in scores])),
        sum(s.over for s in scores),
        sum(s.micro_batches for s in scores) / sum(o.micro_batches for o in ours),
        sum(s.wait < o.wait - 1e-9 for s, o in pairs),
        sum(s.micro_batches < o.micro_batches for s, o in pairs),
        float(np.median([s.ms for s in scores])),
    ]


def summary(name: str, title: str, cells: Sequence[Cell], peers: Sequence[Peer]) -> Table:
    """Returns the table with a row for each division, which has means over all cells."""
    rows = []
    ours = (("wlb", ""), (ANY_COUNTS, ""))
    for who, version in (*ours, *((p.name, p.version) for p in peers)):
        those = [c for c in cells if who in c.scores]
        if not those:
            continue
        rows.append([who, version, len(those), *_means(those, who)])
    return Table(
        name=name,
        title=title,
        columns=("division", "version", "cells", "wait", "over bound", "once a step",
                 "over the cap", "micro-batches", "better", "fewer", "ms"),
        rows=rows,
        formats={"wait": ".4f", "over bound": ".4f", "once a step": ".4f", "micro-batches": ".3f",
                 "ms": ".1f"},
        note="wait, and over the bound: means of the cells. once a step: the same division where "
        "ranks wait once. micro-batches: over wlb's. better, fewer: cells in which this division, "
        "with no micro-batch over the cap, waits less than wlb or has fewer micro-batches."
        + _any_counts(cells),
    )  # fmt: skip


def _any_counts(cells: Sequence[Cell]) -> str:
    pairs = [
        (c.scores["slime"], c.scores[ANY_COUNTS])
        for c in cells
        if {"slime", ANY_COUNTS} <= c.scores.keys()
    ]
    if not pairs:
        return ""
    better = sum(theirs.wait < ours.wait - 1e-9 for theirs, ours in pairs)
    fewer = sum(theirs.micro_batches < ours.micro_batches for theirs, ours in pairs)
    return (
        f" slime keeps no counts, and its mini-batches are the samples as they come, not alike in "
        f"lengths: beside {ANY_COUNTS} it waits less in {better} cells, with fewer micro-batches "
        f"in {fewer}."
    )


def speed(cells: Sequence[Cell]) -> Table:
    rows = []
    for shape in dict.fromkeys((c.ranks, c.samples) for c in cells):
        ms = [c.scores["wlb"].ms for c in cells if (c.ranks, c.samples) == shape]
        rows.append([*shape, float(np.median(ms)), max(ms)])
    return Table(
        name="speed",
        title="CPU time of a call, one thread",
        columns=("ranks", "samples", "median ms", "most ms"),
        rows=rows,
        formats={"median ms": ".1f", "most ms": ".1f"},
        note="Over families and caps, each the median of 3 calls.",
    )


def aims(
    cells: Sequence[Cell], several: Sequence[Cell], bounds: FloatArray, once: FloatArray
) -> Table:
    """Returns the table of wlb's waits beside the values that were aimed at.

    Args:
        cells: Steps of one mini-batch.
        several: Steps of several mini-batches.
        bounds: Lower bounds of steps in which ranks wait once.
        once: wlb's waits in the same steps.
    """
    lowest, lowest_several = (np.array([c.bound for c in some]) for some in (cells, several))
    waits, waits_several = _waits(cells), _waits(several)
    free, free_once = lowest < FREE, bounds < FREE
    parts = (
        ("all steps", 1.01, waits, lowest),
        ("steps whose bound is 1.000", 1.01, waits[free], lowest[free]),
        ("4 mini-batches, equal counts", 1.02, waits_several, lowest_several),
        ("ranks wait once a step", 1.002, once, bounds),
        ("the same, bound 1.000", 1.002, once[free_once], bounds[free_once]),
    )
    return Table(
        name="aims",
        title="Beside what was aimed at",
        columns=("steps", "aimed at", "cells", "wait", "lowest possible", "over bound"),
        rows=[[name, aim, *_means_of(w, b)] for name, aim, w, b in parts if w.size],
        formats={"aimed at": ".3f"}
        | dict.fromkeys(("wait", "lowest possible", "over bound"), ".4f"),
        note="Means of cells, ours. Over bound is the mean of wait / lowest possible. Compare it "
        "with the aim: where the lowest possible is above the aim, no division can reach the aim. "
        f"Micro-batches over the cap: {sum(s.over for s in _ours(cells))} (aimed at: 0).",
    )


def _waits(cells: Sequence[Cell]) -> FloatArray:
    return np.array([s.wait for s in _ours(cells)])


def _means_of(waits: FloatArray, bounds: FloatArray) -> list[float]:
    return [len(waits), float(waits.mean()), float(bounds.mean()), float((waits / bounds).mean())]


def _ours(cells: Sequence[Cell]) -> list[Score]:
    return [c.scores["wlb"] for c in cells]
