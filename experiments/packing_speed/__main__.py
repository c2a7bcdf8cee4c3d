"""Measures the cost of packing and its growth: `python -m experiments.packing_speed`.

1. A 7B-128K global batch (4 micro-batches): the median time of a push in steady state for each
   policy, beside the overheads of the paper's Table 2 (on its machine, 8-23 ms for Algorithm 1).
   All policies pack a batch before the next one is drawn, so that a busy machine slows all alike.
2. `growth` to 20,480 micro-batches (a million documents). A step is planned ahead of its time, so
   planning has to take less than a step (seconds).
"""

import argparse
import csv
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.harness.pages import commit
from experiments.harness.streams import COST, RATIO, WINDOW, batches_of
from wlb.packing import (
    BinMethod,
    BoundedPacker,
    CapacityPacker,
    FixedPacker,
    OriginalPacker,
    Packer,
    PackerOptions,
    VarLenPacker,
    WindowCut,
)
from wlb.plan import GlobalBatch

RESULTS = Path(__file__).parent / "results"
QUEUES = {1: (0.2,), 2: (0.2, 0.63), 3: (0.2, 0.4, 0.63)}
S_MAX = 2.0
STEP_TOKENS = 1.5
ALGORITHM_1 = "Algorithm 1, 2 queues"
BOUNDED = "bounded"
TARGETS = {ALGORITHM_1: 100, BOUNDED: 500}
"""This project set itself these limits in ms for the 51,000 documents of 1,024 micro-batches."""
GROWTH = (
    (4, 4, 60),
    (16, 4, 30),
    (64, 4, 15),
    (256, 4, 9),
    (1024, 4, 9),
    (4096, 4, 6),
    (16384, 3, 3),
    (20480, 3, 3),
)
"""Each entry is micro-batches, pushes to warm up, and pushes timed.

The cycle of bounded at large N is 3 steps.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Describes the pushes of one policy at one size.

    documents: documents of a batch, median
    waiting: documents at a push, those carried included, median
    repeats: timed pushes
    ns_per_n_log_n: median over the pushes of time / (waiting * log2 waiting), in ns
    ratio: median time over that of Algorithm 1 with 2 queues in the same run
    paper_ms: overhead in the paper's Table 2, "" if it has none
    """

    policy: str
    num_micro_batches: int
    documents: int
    waiting: int
    repeats: int
    median_ms: float
    worst_ms: float
    ns_per_n_log_n: float
    ratio: float = 1.0
    paper_ms: str = ""


def options_of(num_micro_batches: int) -> PackerOptions:
    return PackerOptions(
        num_micro_batches=num_micro_batches, context_window=WINDOW, cost=COST, seed=0
    )


def algorithm_1(num: int, queues: int, *, literal: bool = False) -> VarLenPacker:
    return VarLenPacker(
        options=options_of(num),
        s_max=int(S_MAX * WINDOW),
        queue_thresholds=tuple(int(t * WINDOW) for t in QUEUES[queues]),
        literal=literal,
    )


def bounded(num: int) -> BoundedPacker:
    return BoundedPacker(
        options=options_of(num),
        s_max=int(S_MAX * WINDOW),
        step_tokens=int(STEP_TOKENS * num * WINDOW),
    )


def policies() -> dict[str, tuple[Packer, str]]:
    """Returns by label the packer of a batch of 4 micro-batches, and the paper's overhead in ms."""
    options = options_of(4)
    capacity = CapacityPacker(options=options, method=BinMethod.BEST_FIT_DECREASING)
    return {
        "original, cut anywhere": (OriginalPacker(options=options), "0"),
        "original, short ones cut": (OriginalPacker(options=options, cut=WindowCut.SHORT), "0"),
        "fixed greedy, W = 1": (FixedPacker(options=options), "4"),
        "Algorithm 1, 1 queue": (algorithm_1(4, 1), "8"),
        ALGORITHM_1: (algorithm_1(4, 2), "20"),
        "Algorithm 1, 2 queues, literal": (algorithm_1(4, 2, literal=True), ""),
        "Algorithm 1, 3 queues": (algorithm_1(4, 3), "23"),
        BOUNDED: (bounded(4), ""),
        "capacity, best fit decreasing": (capacity, ""),
    }


def timed(
    packers: dict[str, Packer], batches: list[GlobalBatch], warm_up: int
) -> dict[str, list[tuple[int, float]]]:
    """Returns (documents waiting, s) of each push after the first `warm_up`, by label."""
    carries = {label: packer.start() for label, packer in packers.items()}
    out: dict[str, list[tuple[int, float]]] = {label: [] for label in packers}
    for i, batch in enumerate(batches):
        for label, packer in packers.items():
            waiting = len(carries[label].pieces) + len(batch.documents)
            began = time.perf_counter()
            _, carries[label] = packer.push(batch, carries[label])
            if i >= warm_up:
                out[label].append((waiting, time.perf_counter() - began))
    return out


def rows_of(
    packers: dict[str, Packer], num: int, *, warm_up: int, repeats: int, seed: int
) -> list[Row]:
    """Returns a row for each packer on the same batches, the first `warm_up` of them untimed."""
    batches = batches_of(
        "wlb_paper", num_micro_batches=num, num_batches=warm_up + repeats, seed=seed
    )
    pushes = timed(packers, batches, warm_up)
    documents = int(np.median([len(batch.documents) for batch in batches[warm_up:]]))
    reference = float(np.median([s for _, s in pushes[ALGORITHM_1]]))
    out: list[Row] = []
    for label, found in pushes.items():
        n, seconds = (np.array(column, np.float64) for column in zip(*found, strict=True))
        out.append(
            Row(
                policy=label,
                num_micro_batches=num,
                documents=documents,
                waiting=int(np.median(n)),
                repeats=repeats,
                median_ms=1e3 * float(np.median(seconds)),
                worst_ms=1e3 * float(seconds.max()),
                ns_per_n_log_n=1e9 * float(np.median(seconds / (n * np.log2(n)))),
                ratio=float(np.median(seconds)) / reference,
                paper_ms=policies()[label][1] if num == 4 else "",
            )
        )
    return out


def growth(*, largest: int, seed: int) -> Iterator[list[Row]]:
    """Yields the rows of each size up to `largest` micro-batches, for Algorithm 1 and bounded.

    Time is shown with the quotient by n log2 n, where n documents wait, new ones included. The
    worst push stands beside the median, because bounded's steps differ when it holds documents for
    long.
    """
    for num, warm_up, repeats in GROWTH:
        if num <= largest:
            packers: dict[str, Packer] = {ALGORITHM_1: algorithm_1(num, 2), BOUNDED: bounded(num)}
            yield rows_of(packers, num, warm_up=warm_up, repeats=repeats, seed=seed)


def cells(row: Row, *, is_growth: bool) -> list[str]:
    median, worst = f"{row.median_ms:,.2f}", f"{row.worst_ms:,.2f}"
    if not is_growth:
        return [row.policy, median, worst, f"{row.ratio:.2f}", row.paper_ms]
    return [
        f"{row.num_micro_batches:,}",
        f"{row.documents:,}",
        row.policy,
        f"{row.waiting:,}",
        str(row.repeats),
        median,
        worst,
        f"{row.ns_per_n_log_n:.0f}",
    ]


BATCH_COLUMNS = ("policy", "median ms", "worst ms", "to Algorithm 1", "paper ms")
GROWTH_COLUMNS = (
    "micro-batches",
    "documents",
    "policy",
    "waiting",
    "pushes",
    "median ms",
    "worst ms",
    "ns / (n log2 n)",
)


def table_of(title: str, rows: list[Row], *, is_growth: bool) -> Table:
    table = Table(title=title)
    for name in GROWTH_COLUMNS if is_growth else BATCH_COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(*cells(row, is_growth=is_growth))
    return table


def markdown(title: str, rows: list[Row], *, is_growth: bool) -> list[str]:
    names = GROWTH_COLUMNS if is_growth else BATCH_COLUMNS
    lines = [
        "| " + " | ".join(line) + " |" for line in (cells(r, is_growth=is_growth) for r in rows)
    ]
    return [
        f"## {title}",
        "",
        "| " + " | ".join(names) + " |",
        "|---" * len(names) + "|",
        *lines,
        "",
    ]


def targets(rows: list[Row]) -> list[str]:
    """Compares with the project's targets, in one line each."""
    return [
        f"{row.policy}, 1,024 micro-batches, {row.documents:,} documents: median "
        f"{row.median_ms:.0f} ms, worst {row.worst_ms:.0f} ms (target {TARGETS[row.policy]} ms)"
        for row in rows
        if row.num_micro_batches == 1024
    ]


def write_csv(path: Path, parts: dict[str, list[Row]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["part", *(f.name for f in fields(Row))])
        for part, rows in parts.items():
            for row in rows:
                writer.writerow([part, *asdict(row).values()])


def draw(path: Path, rows: list[Row]) -> bool:
    """Draws growth on log-log axes; returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.add_subplot()
    for label, color, marker in ((ALGORITHM_1, "#0072B2", "o"), (BOUNDED, "#D55E00", "s")):
        mine = [row for row in rows if row.policy == label]
        n, ms = [row.documents for row in mine], [row.median_ms for row in mine]
        over = [row.worst_ms - row.median_ms for row in mine]
        axes.errorbar(
            n, ms, [[0.0] * len(over), over], color=color, marker=marker, capsize=3, label=label
        )
        at = next((row.documents for row in mine if row.num_micro_batches == 1024), None)
        if at is not None:
            target = TARGETS[label]
            axes.plot([at], [target], "_", color=color, markersize=18, markeredgewidth=2.5)
            place = {"xytext": (-14, 0), "textcoords": "offset points", "ha": "right"}
            text = f"target of {label}: {target} ms"
            axes.annotate(text, (at, target), va="center", color=color, **place)
    largest = max(rows, key=lambda row: (row.documents, row.policy == ALGORITHM_1))
    n = np.geomspace(min(row.documents for row in rows), largest.documents, 50)
    guide = n * np.log2(n) * largest.median_ms / (largest.documents * np.log2(largest.documents))
    axes.plot(n, guide, ":", color="#555555", label="n log n through the last point")
    axes.set(xscale="log", yscale="log", xlabel="documents of a global batch", ylabel="ms a push")
    axes.set_title("Time to pack a global batch (median; bars reach to the slowest push)")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=150)
    return True


def page(parts: dict[str, list[Row]], seed: int, has_plot: bool) -> str:
    batch = parts["batch"]
    machine = (
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, NumPy {np.__version__}"
    )
    queues = "; ".join(", ".join(f"{t:g}" for t in thresholds) for thresholds in QUEUES.values())
    lines = [
        "# Packing speed",
        "",
        f"`python -m experiments.packing_speed --seed {seed}` at commit {commit()}; {machine}. One "
        f"run, one thread, on a machine with other work: trust ratios more than milliseconds.",
        "",
        f"Lengths `wlb_paper`, window {WINDOW}, W_a / W_l = {RATIO} there, S_max {S_MAX:g} "
        f"windows, queues from {queues} windows, bounded with T = {STEP_TOKENS:g} global batches.",
        "",
        *markdown(
            f"A 7B-128K global batch: 4 micro-batches, {batch[0].documents} documents (median), "
            f"{batch[0].repeats} pushes",
            batch,
            is_growth=False,
        ),
        *markdown("Growth", parts["growth"], is_growth=True),
        *(f"- {line}" for line in targets(parts["growth"])),
        "",
        "n counts the documents that wait at a push, new ones included. The paper's milliseconds "
        "are its Table 2's, measured on its machine. Bin packing: `python -m "
        "experiments.bin_packing`.",
    ]
    return "\n".join([*lines, "", "![growth](growth.png)"] if has_plot else lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="run less and write nothing")
    options = parser.parse_args()
    console = Console(width=120)
    repeats = 40 if options.quick else 240
    packers = {label: packer for label, (packer, _) in policies().items()}
    batch = rows_of(packers, 4, warm_up=20, repeats=repeats, seed=options.seed)
    title = f"4 micro-batches, {batch[0].documents} documents (median), {repeats} pushes"
    console.print(table_of(title, batch, is_growth=False))
    grown: list[Row] = []
    for rows in growth(largest=1024 if options.quick else 1 << 20, seed=options.seed):
        grown += rows
        console.print(f"  {rows[0].num_micro_batches:,} micro-batches done", style="dim")
    console.print(table_of("Growth", grown, is_growth=True))
    for line in targets(grown):
        console.print(line)
    if options.quick:
        return
    RESULTS.mkdir(exist_ok=True)
    parts = {"batch": batch, "growth": grown}
    write_csv(RESULTS / "packing_speed.csv", parts)
    has_plot = draw(RESULTS / "growth.png", grown)
    if not has_plot:
        console.print("no plot: it needs matplotlib, pip install -e '.[plot]'")
    (RESULTS / "README.md").write_text(page(parts, options.seed, has_plot))
    console.print("written to experiments/packing_speed/results")


if __name__ == "__main__":
    main()
