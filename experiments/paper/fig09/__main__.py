"""Draws Figure 9: which tokens of a micro-batch each rank computes under each sharding strategy.

    python -m experiments.paper.fig09 [--lengths 9001,2503,...] [--cp 4]

The micro-batch packs a long and several short documents, none a multiple of 2 * CP tokens. For each
rank the tokens, segments and query-key pairs are printed, and the predicted time of its attention
kernels (forward and backward of one layer of the 7B model, h100 profile). Pairs tell how much there
is to compute, the prediction also what cutting costs. Results are a picture and a table.
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.harness.pages import commit
from experiments.paper.fig15.case import layer_cost
from wlb.cost import ProfiledWorkload, attention_latency
from wlb.plan import IntArray, ShardingPlan
from wlb.sharding import shard
from wlb.spec import Remainder

RESULTS = Path(__file__).parent / "results"
LENGTHS = (9001, 2411, 1733, 1301, 883, 557, 498)
ROWS = {
    "per_sequence": ("per_sequence", Remainder.MERGED),
    "per_document": ("per_document", Remainder.MERGED),
    "per_document, one by one": ("per_document", Remainder.ONE_BY_ONE),
    "hybrid": ("hybrid", Remainder.MERGED),
    "balanced": ("balanced", Remainder.MERGED),
}
COLUMNS = ("strategy", "rank", "tokens", "segments", "query-key pairs", "forward us", "backward us")


def plans_of(lengths: IntArray, *, cp: int, cost: ProfiledWorkload) -> dict[str, ShardingPlan]:
    return {
        label: shard(lengths, cp=cp, strategy=name, cost=cost, remainder=remainder)
        for label, (name, remainder) in ROWS.items()
    }


def pairs_of(plan: ShardingPlan) -> IntArray:
    """Returns each rank's query-key pairs, shape [cp]; token i of a document sees i + 1 keys."""
    pairs = (plan.stop * (plan.stop + 1) - plan.start * (plan.start + 1)) // 2
    ends = plan.rank_offsets
    return np.array([pairs[ends[r] : ends[r + 1]].sum() for r in range(plan.cp)])


def rows_of(label: str, plan: ShardingPlan, cost: ProfiledWorkload) -> list[list[str]]:
    latency = attention_latency(plan, cost)
    pairs = pairs_of(plan)
    rows = []
    for rank in range(plan.cp):
        spans = plan.for_rank(rank)
        numbers = (spans.num_tokens, len(spans.piece), int(pairs[rank]))
        times = (latency.forward_ns[rank] / 1e3, latency.backward_ns[rank] / 1e3)
        rows.append(
            [
                label,
                str(rank),
                *(f"{number:,}" for number in numbers),
                *(f"{time:.1f}" for time in times),
            ]
        )
    return rows


def summary(plans: dict[str, ShardingPlan], cost: ProfiledWorkload) -> list[list[str]]:
    """Compares the slowest rank with the mean rank, in pairs and in predicted time."""
    rows = []
    for label, plan in plans.items():
        pairs, latency = pairs_of(plan), attention_latency(plan, cost)
        rows.append(
            [
                label,
                str(len(plan.piece)),
                f"{pairs.max() / pairs.mean():.3f}",
                f"{latency.imbalance:.3f}",
                f"{latency.slowest_kernels_ns / 1e3:.1f}",
            ]
        )
    return rows


SUMMARY = ("strategy", "segments", "pairs, most / mean", "time, slowest / mean", "slowest us")


def table_of(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "strategy" else "right")
    last = None
    for row in rows:
        if last not in (None, row[0]) and columns is COLUMNS:
            table.add_section()
        table.add_row("" if last == row[0] else row[0], *row[1:])
        last = row[0]
    return table


def markdown(columns: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def draw(path: Path, plans: dict[str, ShardingPlan], cost: ProfiledWorkload) -> bool:
    """Draws the picture; returns False without matplotlib."""
    try:
        from experiments.paper.fig09.draw import draw as draw_plans
    except ImportError:
        return False
    imbalance = {label: attention_latency(plan, cost).imbalance for label, plan in plans.items()}
    draw_plans(path, plans, imbalance)
    return True


def lengths_of(text: str) -> tuple[int, ...]:
    lengths = tuple(int(part) for part in text.split(","))
    if min(lengths) < 1:
        raise ValueError(f"lengths {text}: each must be at least 1")
    return lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", type=lengths_of, default=LENGTHS, help="document lengths, as in 9001,2411"
    )
    parser.add_argument("--cp", type=int, default=4)
    options = parser.parse_args()
    lengths = np.array(options.lengths, np.int64)
    cost = replace(layer_cost(window=65536, cp=options.cp), micro_batch_tokens=int(lengths.sum()))
    plans = plans_of(lengths, cp=options.cp, cost=cost)
    console = Console(width=120)
    ranks = [row for label, plan in plans.items() for row in rows_of(label, plan, cost)]
    sums = summary(plans, cost)
    title = (
        f"{lengths.sum():,} tokens, documents of {', '.join(map(str, lengths))}; CP {options.cp}"
    )
    console.print(table_of(title, COLUMNS, ranks))
    console.print(table_of("Slowest rank", SUMMARY, sums))
    RESULTS.mkdir(exist_ok=True)
    has_plot = draw(RESULTS / "sharding.png", plans, cost)
    command = shlex.join(["python", "-m", "experiments.paper.fig09", *sys.argv[1:]])
    lines = [
        "# Figure 9: sharding one micro-batch",
        "",
        f"`{command}` at commit {commit()}. {title}.",
        "",
        "Times are predicted for one layer of the 7B model at TP 4 with the h100 profile: "
        "attention kernels and launches, no collectives. Slowest is the slowest rank's forward and "
        "the slowest rank's backward, mean is over ranks.",
        "",
        *(["![spans of each rank](sharding.png)", ""] if has_plot else []),
        *markdown(SUMMARY, sums),
        "",
        *markdown(COLUMNS, ranks),
    ]
    (RESULTS / "README.md").write_text("\n".join(lines) + "\n")
    console.print("written to experiments/paper/fig09/results")


if __name__ == "__main__":
    main()
