"""Compares `balanced` by need with an integer program's plans and bounds.

`python -m experiments.sharding_solver [--count 6] [--seconds 20] [--quick]` shards micro-batches of
the fitted stream, 128K windows packed by `bounded`, over CP 2, 4 and 8. It needs PuLP and HiGHS
(`pip install pulp highspy`).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.cp_degree.prices import Prices
from experiments.paper.fig15.case import micro_batches
from experiments.harness.pages import How, Table, priced_with, show, write_results
from experiments.sharding_solver.case import PER_SHARE, Case
from experiments.sharding_solver.program import Solution, solve
from experiments.harness.streams import WINDOW
from wlb.cost import load_profile
from wlb.plan import IntArray
from wlb.sharding import shard
from wlb.sharding.bounds import least_time_ns

FOLDER = Path(__file__).parent
LAYOUTS = tuple((tp, cp) for tp in (1, 8) for cp in (2, 4, 8))
"""TP and CP degrees: CP ranks in a node, and each on a node of its own."""
QUICK = LAYOUTS[3:5]
NUM_LONG = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Times of a micro-batch in ns: of `balanced`, of the best plan known, what no plan that cuts
    in the same places is below, and the bound of `wlb.sharding.bounds`."""

    tp: int
    cp: int
    documents: int
    chunks: int
    ours: float
    best: float
    bound: float
    known_bound: float
    is_proven: bool


def case_of(lengths: IntArray, *, tp: int, cp: int, num_long: int = NUM_LONG) -> Case:
    prices = Prices(tp=tp, rows=WINDOW // cp)
    cost = prices.cost(cp)
    ours = shard(lengths, cp=cp, strategy="balanced", cost=cost, exchange="needed")
    linear = prices.linear_ns(prices.rows) / prices.rows
    return Case(lengths=lengths, cp=cp, cost=cost, linear_ns=linear, ours=ours, num_long=num_long)


def row_of(case: Case, found: Solution, *, tp: int) -> Row:
    ours = case.time_ns(case.ours)
    plans = [case.plan(*found.placed)] if found.placed else []
    rows = -(-int(case.lengths.sum()) // case.cp)
    least = least_time_ns(case.lengths, cp=case.cp, cost=case.cost)[1] + case.linear_ns * rows
    return Row(
        tp=tp,
        cp=case.cp,
        documents=case.lengths.size,
        chunks=case.piece.size,
        ours=ours,
        best=min([ours, *map(case.time_ns, plans)]),
        bound=max(found.bound, least),
        known_bound=least,
        is_proven=found.is_proven,
    )


def rows_of(
    layouts: Sequence[tuple[int, int]], *, count: int, seconds: float, seed: int
) -> Iterator[Row]:
    lengths = micro_batches("bounded", window=WINDOW, count=count, seed=seed)
    for tp, cp in layouts:
        for pieces in lengths:
            case = case_of(pieces, tp=tp, cp=cp)
            yield row_of(case, solve(case, time_limit_s=seconds), tp=tp)


def summary(rows: Sequence[Row]) -> Table:
    """Returns means and worst cases by layout."""
    lines: list[list[object]] = []
    for tp, cp in dict.fromkeys((row.tp, row.cp) for row in rows):
        mine = [row for row in rows if (row.tp, row.cp) == (tp, cp)]
        ours, best, bound, known = (
            np.array([getattr(row, name) for row in mine])
            for name in ("ours", "best", "bound", "known_bound")
        )
        over_bound, over_best = ours / bound, ours / best
        lines.append([
            *(tp, cp, len(mine)),
            *(float(over_bound.mean()), float(over_bound.max())),
            *(float(over_best.mean()), float(over_best.max())),
            *(float((bound / known).mean()), sum(row.is_proven for row in mine)),
        ])  # fmt: skip
    ratios = ("over bound", "worst", "over best", "worst of best", "bound over known")
    return Table(
        name="summary",
        title="Time of `balanced` over the program's bound and over the best plan known",
        columns=("TP", "CP", "micro-batches", *ratios, "solved"),
        rows=lines,
        formats=dict.fromkeys(ratios, ".4f"),
        note="`bound over known`: the bound over `wlb.sharding.bounds`. `solved`: to a gap of "
        "0.01% in time.",
    )


def every(rows: Sequence[Row]) -> Table:
    lines = [
        [
            *(row.tp, row.cp, row.documents, row.chunks, row.ours * 1e-6),
            *(row.ours / row.bound, row.ours / row.best, row.is_proven),
        ]
        for row in rows
    ]
    formats = {"ms": ".2f", "over bound": ".4f", "over best": ".4f"}
    return Table(
        name="micro_batches",
        title="All micro-batches",
        columns=("TP", "CP", "documents", "chunks", *formats, "solved"),
        rows=lines,
        formats=formats,
        most_rows=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two micro-batches, 3 s, no page")
    parser.add_argument("--count", type=int, default=6, help="micro-batches of each layout")
    parser.add_argument("--seconds", type=float, default=20, help="time limit of a solve")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    layouts = QUICK if options.quick else LAYOUTS
    count, seconds = (2, 3.0) if options.quick else (options.count, options.seconds)
    rows = list(rows_of(layouts, count=count, seconds=seconds, seed=options.seed))
    tables = summary(rows), every(rows)
    show(*tables)
    if options.quick:
        return
    write_results(
        FOLDER,
        title="`balanced` by need beside an integer program",
        how=How.PREDICTED,
        profile=priced_with(load_profile("h100")),
        text=TEXT,
        seed=options.seed,
        tables=list(tables),
    )


TEXT = f"""
The program ([program.py](../program.py)) places chunks of the {NUM_LONG} longest documents of a
micro-batch on ranks, and the others as a fluid. It minimises the linear work of the fullest rank,
the attention of the slowest one, and what is waited for keys by need. Chunks end at a grid of a
{PER_SHARE}th of a rank's share and where `balanced` cuts, so `balanced`'s plan is one of its
answers, from which HiGHS starts. Ranks may have unequal rows, which cost linear work.

One layer of the 7B model, both passes. Plans are judged by the price that `balanced` minimises,
with every segment's own throughput; the program adds up what each chunk adds to its document, as if
cutting were free. The bound is for plans that cut in those places only, and for that price; like
all bounds from `ideal_kernels_ns` it is a yardstick, because a segment may be predicted a little
faster than it adds to its document.
"""


if __name__ == "__main__":
    main()
