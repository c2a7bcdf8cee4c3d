"""Counts the key rows that CP ranks need of each other, beside those that an all-gather moves.

`python -m experiments.cp_traffic [--quick] [--lengths FILE ...]` shards micro-batches of 128K
windows, packed by the Plain-4D loader and by `bounded`, over CP 2 to 16. All rows have equal bytes,
so a ratio of rows is one of bytes: forward, backward and of the gradients on their way back.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.paper.fig15.case import PACKERS, layer_cost, micro_batches
from experiments.harness.pages import How, Table, priced_with, show, write_results
from experiments.harness.streams import WINDOW, title_of
from wlb.cost import WorkloadModel, exchange_ns, ideal_kernels_ns, load_profile, waits_ns
from wlb.plan import (
    IntArray,
    KeyExchange,
    ShardingPlan,
    least_rows_received,
    local_tokens,
    rows_gathered,
    rows_moved,
)
from wlb.sharding import shard
from wlb.sharding.prices import cheapest
from wlb.spec import ExchangeChoice, ParallelSpec

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
DEGREES = (2, 4, 8, 16)
STRATEGIES = ("per_sequence", "per_document", "hybrid", "balanced")
SOURCES = ("wlb_paper", "stdlib")
LAYOUTS = ((1, 4), (1, 8), (1, 16), (2, 8), (8, 2), (8, 4), (8, 8), (8, 16))
"""TP and CP degrees whose exchanges are priced: within a node, of several members a node, one."""
CHOICES = (*((name, "gather") for name in STRATEGIES), ("hybrid", "needed"), ("balanced", "needed"))
"""Strategies, and the exchange that they price; both static ones make one plan."""
COUNTED = ("received", "sent", "mean", "over bound")
TIMED = ((1, 4), (1, 8), (1, 16), (2, 8), (4, 8), (8, 4), (8, 16), (8, 32), (8, 64))
"""TP and CP degrees of the table of times: a node; several ranks a node; TP fills each node."""
CHOSEN = "1 to 4"
"""Stages of each micro-batch by price (`sharding.stages`)."""
WAYS = (
    *(("per_sequence", "gather", 0), ("per_document", "gather", 0), ("balanced", "gather", 0)),
    *(("balanced", "needed", 0), *(("balanced", "auto", stages) for stages in (0, 1, 2, 3, 4))),
    ("balanced", "auto", CHOSEN),
)
"""Strategy, exchange, and in how many stages it hides behind attention (`cp.overlap`,
`cp.stages`); 0: not at all."""
ROW_MULTIPLE = 128
"""Rows of a rank are a multiple of this in the large presets; an all-gather moves the padding."""
LARGEST, NEAREST = 0.35, 1.05
"""Targets: bytes of the busiest rank over the all-gather's with `balanced`, and over the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Rows of one strategy, summed over micro-batches.

    gathered: received by each rank in an all-gather
    received, sent: by the rank that receives or sends most
    mean: received by the mean rank
    least: of the rank that has to receive most, whatever the exchange
    """

    gathered: int
    received: int
    sent: int
    mean: float
    least: int


def traffic_of(plans: Sequence[ShardingPlan]) -> Traffic:
    moved = [rows_moved(plan) for plan in plans]
    gathered = (
        rows_gathered(
            plan, local_tokens=local_tokens(plan.num_tokens, cp=plan.cp, row_multiple=ROW_MULTIPLE)
        )
        for plan in plans
    )
    return Traffic(
        gathered=sum(gathered),
        received=sum(int(rows.sum(axis=1).max()) for rows in moved),
        sent=sum(int(rows.sum(axis=0).max()) for rows in moved),
        mean=float(sum(rows.sum() / len(rows) for rows in moved)),
        least=sum(int(least_rows_received(plan).max()) for plan in plans),
    )


def traffic(
    lengths: Sequence[IntArray], strategy: str, *, cp: int, cost: WorkloadModel, exchange: str
) -> Traffic:
    """Returns the traffic of micro-batches of these piece lengths, without padding."""
    how = {"cp": cp, "cost": cost, "exchange": exchange}
    return traffic_of([shard(pieces, strategy=strategy, **how) for pieces in lengths])


def table(
    sources: Sequence[str], *, count: int, seed: int, degrees: Sequence[int] = DEGREES
) -> Table:
    rows: list[list[object]] = []
    for source in sources:
        for policy in PACKERS:
            lengths = micro_batches(policy, window=WINDOW, count=count, seed=seed, source=source)
            for cp in degrees:
                cost = layer_cost(window=WINDOW, cp=cp)
                for strategy, chosen in CHOICES:
                    t = traffic(lengths, strategy, cp=cp, cost=cost, exchange=chosen)
                    shares = [x / t.gathered for x in (t.received, t.sent, t.mean)]
                    name = [title_of(source), policy, cp, strategy, chosen]
                    rows.append([*name, *shares, t.received / t.least])
    columns = ("stream", "packed by", "CP", "strategy", "priced", *COUNTED)
    return Table(
        name="traffic",
        title=f"Rows by need over those of an all-gather, {count} micro-batches each",
        columns=columns,
        rows=rows,
        formats=dict.fromkeys(COUNTED, ".3f"),
        note="`priced`: by attention alone, as for an all-gather, or with what is waited for an "
        "exchange by need (TP 8, nothing but products hides it). `received` and `sent` are of the "
        "busiest rank, `mean` of the mean rank.",
        most_rows=400,
    )


def prices(*, count: int, seed: int) -> Table:
    """Returns the predicted time of each exchange of `balanced`'s plans of the fitted stream."""
    lengths = micro_batches("bounded", window=WINDOW, count=count, seed=seed)
    rows: list[list[object]] = []
    for tp, cp in LAYOUTS:
        cost = replace(
            layer_cost(window=WINDOW, cp=cp), parallel=ParallelSpec(tp=tp, cp=cp, pp=1, dp=1)
        )
        plans = [shard(pieces, cp=cp, strategy="balanced", cost=cost) for pieces in lengths]
        ms: list[float] = []
        for choice in (ExchangeChoice.GATHER, ExchangeChoice.NEEDED, ExchangeChoice.AUTO):
            chosen = [cheapest([plan], cost, exchange=choice) for plan in plans]
            ms.append(sum(sum(exchange_ns(plan, cost)) for plan in chosen) / len(plans) * 1e-6)
        needed = sum(plan.exchange == KeyExchange.NEEDED for plan in chosen) / len(chosen)
        slowest = sum(plan.slowest_kernels_ns for plan in plans) / len(plans) * 1e-6
        rows.append([tp, cp, -(-tp * cp // cost.profile.ranks_per_node), slowest, *ms, needed])
    columns = ("TP", "CP", "nodes", "attention", "gather", "needed", "auto", "by need")
    return Table(
        name="prices",
        title="Predicted time of a layer's exchange, ms a micro-batch",
        columns=columns,
        rows=rows,
        formats=dict.fromkeys(columns[3:], ".2f"),
        note="Forward and backward of one layer of the 7B model, fitted stream, packed by `bounded`"
        ", sharded by `balanced`; `attention` of the slowest rank; `by need`: share of micro-"
        "batches for which auto takes that. Exchanges are priced as if nothing hid them.",
    )


def times(*, count: int, seed: int) -> Table:
    """Returns attention and what is waited for keys, of the slowest rank, over ideal attention."""
    lengths = micro_batches("bounded", window=WINDOW, count=count, seed=seed)
    rows: list[list[object]] = []
    for tp, cp in TIMED:
        layout = ParallelSpec(tp=tp, cp=cp, pp=1, dp=1)
        for strategy, exchange, stages in WAYS:
            base = layer_cost(window=WINDOW, cp=cp)
            is_chosen = stages == CHOSEN
            most = 4 if is_chosen else int(stages)
            hides = {"overlaps": most > 0, "stages": max(1, most), "stages_by_price": is_chosen}
            cost = replace(base, parallel=layout, **hides)
            how = {"cp": cp, "strategy": strategy, "cost": cost, "exchange": exchange}
            plans = [shard(pieces, **how) for pieces in lengths]
            ideal = sum(ideal_kernels_ns(pieces, cost, cp=cp) for pieces in lengths)
            kernels = sum(plan.slowest_kernels_ns for plan in plans)
            t = traffic_of(plans)
            row = [tp, cp, strategy, exchange, stages, kernels / ideal]
            whole = sum(slowest_ns(plan, cost) for plan in plans)
            by_need = sum(plan.exchange != KeyExchange.GATHER for plan in plans) / len(plans)
            relayed = sum(plan.exchange == KeyExchange.RELAYED for plan in plans) / len(plans)
            moved = by_need * t.received / t.gathered + 1 - by_need
            rows.append([*row, whole / ideal, moved, t.received / t.least, relayed])
    columns = ("TP", "CP", "strategy", "exchange", "stages")
    ratios = ("attention", "with waits", "rows", "over bound", "relayed")
    return Table(
        name="times",
        title="Slowest rank's attention and waits for keys, over ideal attention",
        columns=(*columns, *ratios),
        rows=rows,
        formats=dict.fromkeys(ratios, ".3f"),
        note="One layer of the 7B model, both passes, fitted stream, packed by `bounded`, profile "
        "`h100` (nodes of 8, 45 GB/s a rank between nodes). `stages`: of `cp.overlap`, 0 without; "
        "1 to 4: of each micro-batch by price. "
        "`rows`: received over an all-gather's; `over bound`: by need, over what these spans have "
        "to receive; `relayed`: share of micro-batches whose rows cross nodes once a node.",
        most_rows=100,
    )


def slowest_ns(plan: ShardingPlan, cost: WorkloadModel) -> float:
    """Returns the slowest rank's kernels and waits of both passes."""
    both = zip((plan.forward_ns, plan.backward_ns), waits_ns(plan, cost), strict=True)
    return sum(float((kernels + waits).max()) for kernels, waits in both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 micro-batches, and write nothing")
    parser.add_argument("--count", type=int, default=48, help="micro-batches of each stream")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", nargs="*", default=[], help="files of document lengths")
    options = parser.parse_args()
    count = 8 if options.quick else options.count
    found = table([*SOURCES, *options.lengths], count=count, seed=options.seed)
    priced = prices(count=count, seed=options.seed)
    timed = times(count=count, seed=options.seed)
    show(found, priced, timed)
    if options.quick:
        return
    write_results(
        FOLDER,
        title="Key rows that CP ranks need of each other",
        how=How.COMPUTED,
        profile=f"rows are counted; strategies choose, and exchanges are predicted, by "
        f"{priced_with(load_profile('h100'))}",
        text=TEXT + "\n".join(worst_cells(found)),
        seed=options.seed,
        tables=[timed, priced, found],
    )


TEXT = f"""
A rank's queries see the keys of their own documents up to themselves. An all-gather gives every
rank all rows of the micro-batch; an exchange by need gives it the rows that its spans read and that
it does not hold. Rows are of equal bytes, so these ratios hold for K and V on their way there in
forward and backward and for their gradients on their way back.

The lower bound is what the busiest rank has to receive with these spans: the prefixes of documents
that it reads less the rows that it holds. Ranks' rows are a multiple of {ROW_MULTIPLE}.

"""


def worst_cells(found: Table) -> list[str]:
    """Returns the worst busiest rank of `balanced` at CP 4 to 16 by stream and policy, as
    Markdown."""
    lines = [f"Worst of `balanced` at CP 4 to 16, beside a target of {LARGEST}:", ""]
    for stream, policy in dict.fromkeys((row[0], row[1]) for row in found.rows):
        mine = [
            row
            for row in found.rows
            if tuple(row[i] for i in (0, 1, 3)) == (stream, policy, "balanced") and row[2] >= 4
        ]
        blind, worst = (
            max((row for row in mine if row[4] == priced), key=lambda row: row[5])
            for priced in ("gather", "needed")
        )
        lines.append(
            f"- {stream}, packed by `{policy}`: {worst[5]:.3f} (CP {worst[2]}), by attention "
            f"alone {blind[5]:.3f}"
        )
    most = max(row[8] for row in found.rows)
    return [*lines, "", f"Received over the lower bound: at most {most:.3f} (target {NEAREST})."]


if __name__ == "__main__":
    main()
