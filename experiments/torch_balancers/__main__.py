"""Compares torch's load balancers for context parallelism with ours.

torch.distributed.tensor.experimental has three: `_HeadTailLoadBalancer` (our per_sequence),
`_PerDocumentHeadTailLoadBalancer` (our per_document) and `_PTRRLoadBalancer` (blocks of
flex_attention's mask dealt by work). For each CP degree, on micro-batches of the fitted stream at
128K, `python -m experiments.torch_balancers [--quick]` shows what they accept, what must be padded
otherwise, how balanced the ranks are, and whether permutation and restoration are exact.
"""

import argparse
import csv
import datetime
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from experiments.paper.fig15.case import PACKERS, STRATEGIES, layer_cost, micro_batches
from experiments.harness.pages import commit
from experiments.harness.streams import WINDOW
from experiments.torch_balancers import balancers
from experiments.torch_balancers.balancers import BLOCK, Shuffled, plan_of
from wlb.cost import ProfiledWorkload, attention_latency, causal_pairs
from wlb.plan import IntArray, ShardingPlan, offsets_of
from wlb.sharding import shard

RESULTS = Path(__file__).parent / "results"
DEGREES = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancer:
    """Describes a balancer of torch.

    call: returns its answer for lengths and cp ranks
    pad: pads lengths so that it accepts them for cp ranks
    ours: our strategy that does the same, "" if there is none
    """

    call: Callable[[IntArray, int], Shuffled]
    pad: Callable[[IntArray, int], IntArray]
    ours: str


TORCH = {
    "torch head-tail": Balancer(
        call=balancers.head_tail,
        pad=lambda lengths, cp: balancers.padded_sequence(lengths, 2 * cp),
        ours="per_sequence",
    ),
    "torch per document": Balancer(
        call=balancers.per_document,
        pad=lambda lengths, cp: balancers.padded_documents(lengths, 2 * cp),
        ours="per_document",
    ),
    "the same, rank-major": Balancer(
        call=balancers.per_document_rank_major,
        pad=lambda lengths, cp: balancers.padded_documents(lengths, 2 * cp),
        ours="per_document",
    ),
    "torch PTRR": Balancer(
        call=balancers.processing_time,
        pad=lambda lengths, cp: balancers.padded_sequence(lengths, BLOCK * cp),
        ours="",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Measures one micro-batch under one balancer.

    is_accepted: whether the balancer takes it without padding
    padding: padding over the real tokens
    segments: kernel segments per rank
    key_rows: key rows per rank, in tokens of the micro-batch
    pairs: query-key pairs of the fullest rank over the mean rank
    latency: slowest over mean rank, predicted
    slowest_ms: predicted time of the slowest rank, in ms
    is_round_trip: whether permutation and restoration are exact
    equals_ours: whether each rank has the rows of our plan, None if there is none to compare
    """

    is_accepted: bool
    padding: float
    segments: float
    key_rows: float
    pairs: float
    latency: float
    slowest_ms: float
    is_round_trip: bool
    equals_ours: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Holds means over micro-batches; counts are "n/all"."""

    packer: str
    cp: int
    balancer: str
    accepted: str
    padding: float
    segments: float
    key_rows: float
    pairs: float
    worst_pairs: float
    latency: float
    slowest_ms: float
    round_trip: str
    equals_ours: str


def sample_of(
    plan: ShardingPlan, lengths: IntArray, cost: ProfiledWorkload, **checks: bool | None
) -> Sample:
    latency = attention_latency(plan, cost)
    running = offsets_of(causal_pairs(plan.stop - plan.start, plan.stop))
    pairs = running[plan.rank_offsets[1:]] - running[plan.rank_offsets[:-1]]
    return Sample(
        padding=plan.num_tokens / int(lengths.sum()) - 1,
        segments=plan.piece.size / plan.cp,
        key_rows=int(plan.stop.sum()) / plan.cp / int(lengths.sum()),
        pairs=float(pairs.max() / pairs.mean()),
        latency=latency.imbalance,
        slowest_ms=latency.slowest_kernels_ns * 1e-6,
        **checks,
    )


def owners(plan: ShardingPlan) -> IntArray:
    """Returns the rank of each token of the packed sequence, shape [num_tokens]."""
    out = np.empty(plan.num_tokens, np.int64)
    for rank in range(plan.cp):
        out[plan.for_rank(rank).token_index] = rank
    return out


def of_torch(name: str, lengths: IntArray, cp: int, cost: ProfiledWorkload) -> Sample:
    balancer = TORCH[name]
    try:
        shuffled, is_accepted = balancer.call(lengths, cp), True
    except (AssertionError, ValueError, NotImplementedError):
        shuffled, is_accepted = balancer.call(balancer.pad(lengths, cp), cp), False
    plan = plan_of(shuffled, cp, strategy=name)
    equals_ours = None
    if balancer.ours:
        mine = shard(shuffled.lengths, cp=cp, strategy=balancer.ours, cost=cost)
        equals_ours = np.array_equal(owners(plan), owners(mine))
    return sample_of(
        plan,
        lengths,
        cost,
        is_accepted=is_accepted,
        is_round_trip=shuffled.is_round_trip,
        equals_ours=equals_ours,
    )


def of_ours(name: str, lengths: IntArray, cp: int, cost: ProfiledWorkload) -> Sample:
    plan = shard(lengths, cp=cp, strategy=name, cost=cost)
    index = np.concatenate([plan.for_rank(r).token_index for r in range(cp)])
    restore = np.empty(index.size, np.int64)
    restore[index] = np.arange(index.size)
    shuffled = Shuffled(lengths=plan.lengths, index=index, restore=restore)
    return sample_of(plan, lengths, cost, is_accepted=True, is_round_trip=shuffled.is_round_trip)


def row_of(packer: str, cp: int, balancer: str, samples: list[Sample]) -> Row:
    def count(flags: list[bool | None]) -> str:
        known = [f for f in flags if f is not None]
        return f"{sum(known)}/{len(known)}" if known else ""

    def mean(name: str) -> float:
        return float(np.mean([getattr(s, name) for s in samples]))

    return Row(
        packer=packer,
        cp=cp,
        balancer=balancer,
        accepted=count([s.is_accepted for s in samples]),
        padding=mean("padding"),
        segments=mean("segments"),
        key_rows=mean("key_rows"),
        pairs=mean("pairs"),
        worst_pairs=max(s.pairs for s in samples),
        latency=mean("latency"),
        slowest_ms=mean("slowest_ms"),
        round_trip=count([s.is_round_trip for s in samples]),
        equals_ours=count([s.equals_ours for s in samples]),
    )


def rows_of(packer: str, cp: int, batches: list[IntArray]) -> list[Row]:
    """Returns a row for each balancer and each of our strategies, means over micro-batches.

    "torch per document" is the behaviour of torch 2.13: its permutation goes by document, and its
    equal parts, which ranks get, are not balanced. "rank-major" is the order that its docstring
    draws.

    Padded rows are computed, so they are priced. PTRR runs under flex_attention; it is priced as if
    its runs of blocks were segments of a varlen kernel. It would need a copy of many more keys (key
    rows per rank, in tokens of the micro-batch), which is not priced.
    """
    cost = layer_cost(window=WINDOW, cp=cp)
    rows = [row_of(packer, cp, n, [of_torch(n, x, cp, cost) for x in batches]) for n in TORCH]
    rows += [row_of(packer, cp, n, [of_ours(n, x, cp, cost) for x in batches]) for n in STRATEGIES]
    return rows


COLUMNS = (
    "cp",
    "balancer",
    "accepted",
    "padding",
    "segments",
    "key rows",
    "pairs",
    "worst",
    "latency",
    "slowest ms",
    "to balanced",
    "round trip",
    "as ours",
)


def cells(row: Row, rows: list[Row]) -> list[str]:
    best = [r for r in rows if r.cp == row.cp and r.packer == row.packer][-1]
    return [
        str(row.cp),
        row.balancer,
        row.accepted,
        f"{row.padding:.2%}",
        f"{row.segments:.1f}",
        f"{row.key_rows:.2f}",
        f"{row.pairs:.3f}",
        f"{row.worst_pairs:.2f}",
        f"{row.latency:.3f}",
        f"{row.slowest_ms:.3f}",
        f"{row.slowest_ms / best.slowest_ms:.3f}",
        row.round_trip,
        row.equals_ours,
    ]


def table_of(title: str, rows: list[Row]) -> Table:
    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "balancer" else "right")
    for i, row in enumerate(rows):
        ends = i + 1 < len(rows) and rows[i + 1].cp != row.cp
        table.add_row(*cells(row, rows), end_section=ends)
    return table


def example() -> str:
    """Describes the least example of the order that is wrong."""
    lengths, cp = np.array([4, 12]), 2
    plan = plan_of(balancers.per_document(lengths, cp), cp, strategy="torch")
    running = offsets_of(causal_pairs(plan.stop - plan.start, plan.stop))
    pairs = running[plan.rank_offsets[1:]] - running[plan.rank_offsets[:-1]]
    return (
        f"torch {torch.__version__}, per document, documents of 4 and 12 tokens on 2 ranks: "
        f"{pairs.tolist()} pairs (balanced would be 44 each)"
    )


def titles(parts: dict[str, list[IntArray]]) -> dict[str, str]:
    return {
        packer: f"{packer}: {len(batches)} micro-batches, "
        f"{np.mean([x.sum() for x in batches]):,.0f} tokens and "
        f"{np.mean([x.size for x in batches]):.0f} documents on average"
        for packer, batches in parts.items()
    }


def page(command: str, heads: dict[str, str], rows: list[Row]) -> str:
    lines = [
        "# Torch's balancers and ours",
        "",
        f"`{command}` at commit {commit()}, {datetime.date.today()}, torch {torch.__version__}: "
        f"window {WINDOW}, fitted stream, one layer of the 7B model at TP 8, h100 profile "
        f"(predicted).",
        "",
        example() + ".",
        "",
        "accepted: micro-batches it takes without padding. padding: in tokens of the micro-batch; "
        "padded rows are computed, so they are priced, and every other layer computes them too. "
        "segments: of a rank. key rows: copied for a rank's segments, in tokens of the "
        "micro-batch; not priced. pairs, latency: fullest or slowest rank over the mean, mean of "
        "micro-batches; worst: the worst micro-batch's pairs. as ours: micro-batches (padded, "
        "where they had to be) in which each rank has the rows that our plan of the same name "
        "gives it.",
        "",
        "torch per document orders its permutation by document, and the equal parts that ranks "
        "get are then whole documents, not a share of each; rank-major is what its docstring "
        "draws. PTRR runs under flex_attention; it is priced as if its runs of blocks were "
        "segments of a varlen kernel.",
    ]
    for packer, head in heads.items():
        mine = [row for row in rows if row.packer == packer]
        body = ["| " + " | ".join(cells(row, mine)) + " |" for row in mine]
        lines += ["", f"## {head}", "", "| " + " | ".join(COLUMNS) + " |"]
        lines += ["|---" * len(COLUMNS) + "|", *body]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="micro-batches per packer")
    parser.add_argument("--quick", action="store_true", help="run less and write nothing")
    options = parser.parse_args()
    # On a busy machine argsort's threads would wait for each other.
    torch.set_num_threads(1)
    count = 10 if options.quick else options.count
    parts = {p: micro_batches(p, window=WINDOW, count=count, seed=options.seed) for p in PACKERS}
    console = Console(width=150)
    console.print(example())
    heads, rows = titles(parts), []
    for packer, batches in parts.items():
        mine = [row for cp in DEGREES for row in rows_of(packer, cp, batches)]
        console.print(table_of(heads[packer], mine))
        rows += mine
    if options.quick:
        return
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "torch_balancers.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([f.name for f in fields(Row)])
        writer.writerows(asdict(row).values() for row in rows)
    command = f"python -m experiments.torch_balancers --seed {options.seed} --count {count}"
    (RESULTS / "README.md").write_text(page(command, heads, rows))
    console.print("written to experiments/torch_balancers/results")


if __name__ == "__main__":
    main()
