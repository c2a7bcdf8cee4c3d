"""Draws Figure 9: which tokens of a micro-batch each rank computes under each sharding strategy.

    python -m experiments.paper.fig09 [--lengths 9001,2503,...] [--cp 4]

The micro-batch has one long and several short documents, none a multiple of 2 * CP tokens. The
table has each rank's tokens, segments and query-key pairs, and the predicted time of its attention
kernels (forward and backward of one layer of the 7B model, profile h100). Pairs only count the
work; predicted times also include what it costs to cut documents into short segments.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.harness.arguments import at_least, experiment_parser
from experiments.harness.pages import How, Picture, Table, show, write_results
from experiments.paper.fig09.draw import draw_plans
from experiments.paper.fig15.case import layer_cost
from wlb.cost import ProfiledWorkload, attention_latency
from wlb.plan import IntArray, ShardingPlan
from wlb.sharding import shard
from wlb.spec import Remainder

LENGTHS = (9001, 2411, 1733, 1301, 883, 557, 498)
ROWS = {
    "per_sequence": ("per_sequence", Remainder.MERGED),
    "per_document": ("per_document", Remainder.MERGED),
    "per_document, one by one": ("per_document", Remainder.ONE_BY_ONE),
    "hybrid": ("hybrid", Remainder.MERGED),
    "balanced": ("balanced", Remainder.MERGED),
}


def plans_of(lengths: IntArray, *, cp: int, cost: ProfiledWorkload) -> dict[str, ShardingPlan]:
    return {
        label: shard(lengths, cp=cp, strategy=name, cost=cost, remainder=remainder)
        for label, (name, remainder) in ROWS.items()
    }


def pairs_of(plan: ShardingPlan) -> IntArray:
    """Returns the query-key pairs of each rank, shape [cp].

    Token i of a document attends to i + 1 keys.
    """
    pairs = (plan.stop * (plan.stop + 1) - plan.start * (plan.start + 1)) // 2
    ends = plan.rank_offsets
    return np.array([pairs[ends[r] : ends[r + 1]].sum() for r in range(plan.cp)])


def ranks_table(plans: Mapping[str, ShardingPlan], cost: ProfiledWorkload) -> Table:
    records: list[dict[str, object]] = []
    for label, plan in plans.items():
        latency, pairs = attention_latency(plan, cost), pairs_of(plan)
        for rank in range(plan.cp):
            spans = plan.for_rank(rank)
            records.append(
                {
                    "strategy": label,
                    "rank": rank,
                    "tokens": spans.num_tokens,
                    "segments": len(spans.piece),
                    "query-key pairs": int(pairs[rank]),
                    "forward us": latency.forward_ns[rank] / 1e3,
                    "backward us": latency.backward_ns[rank] / 1e3,
                }
            )
    formats = dict.fromkeys(("tokens", "query-key pairs"), ",d")
    formats |= dict.fromkeys(("forward us", "backward us"), ".1f")
    return Table.of("ranks", "Each rank", records, formats=formats)


def summary_table(plans: Mapping[str, ShardingPlan], cost: ProfiledWorkload) -> Table:
    """Returns the table that compares the slowest rank with the mean rank."""
    records: list[dict[str, object]] = []
    for label, plan in plans.items():
        pairs, latency = pairs_of(plan), attention_latency(plan, cost)
        records.append(
            {
                "strategy": label,
                "segments": len(plan.piece),
                "pairs, most / mean": float(pairs.max() / pairs.mean()),
                "time, slowest / mean": latency.imbalance,
                "slowest us": latency.slowest_kernels_ns / 1e3,
            }
        )
    formats = dict.fromkeys(("pairs, most / mean", "time, slowest / mean"), ".3f")
    return Table.of("slowest", "Slowest rank", records, formats=formats | {"slowest us": ".1f"})


def lengths_of(text: str) -> tuple[int, ...]:
    lengths = tuple(int(part) for part in text.split(","))
    if min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"{text}: each length must be at least 1")
    return lengths


def main() -> None:
    parser = experiment_parser(__doc__)
    parser.add_argument(
        "--lengths", type=lengths_of, default=LENGTHS, help="document lengths, as in 9001,2411"
    )
    parser.add_argument("--cp", type=at_least(1), default=4)
    options = parser.parse_args()
    lengths = np.array(options.lengths, np.int64)
    cost = replace(layer_cost(window=65536, cp=options.cp), micro_batch_tokens=int(lengths.sum()))
    plans = plans_of(lengths, cp=options.cp, cost=cost)
    tables = [summary_table(plans, cost), ranks_table(plans, cost)]
    show(*tables)
    imbalance = {label: attention_latency(plan, cost).imbalance for label, plan in plans.items()}
    write_results(
        Path(__file__).parent,
        title="Figure 9: sharding one micro-batch",
        how=How.PREDICTED,
        profile=cost.profile,
        text=f"{lengths.sum():,} tokens, documents of {', '.join(map(str, lengths))}; CP "
        f"{options.cp}. Times are of one layer of the 7B model at TP 4: attention kernels and "
        "launches, no collectives. Slowest is the slowest rank's forward and the slowest rank's "
        "backward, mean is over ranks.",
        tables=tables,
        figures=[
            Picture(
                name="sharding", caption="Spans of each rank", figure=draw_plans(plans, imbalance)
            )
        ],
    )


if __name__ == "__main__":
    main()
