"""Predicts how well CP groups are balanced, and times the planning of shardings.

`python -m experiments.sharding_balance [--quick]` has three parts: balance for CP 2 to 16 and
windows of 64K and 128K of the fitted stream, packed by the Plain-4D loader and by `bounded`; the
cost of the paper's remainder (one kernel segment per leftover token) beside merged chunks; and
planning time of 1,000 documents, 128K tokens, CP 16, best of several calls on this machine, where
static strategies compute their spans alone, the others also the prices that they choose by.
"""

import argparse
import datetime
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.paper.fig15.case import (
    PACKERS,
    STATIC,
    STRATEGIES,
    layer_cost,
    micro_batches,
)
from experiments.harness.pages import commit
from wlb.cost import ProfiledWorkload, attention_latency, ideal_kernels_ns
from wlb.plan import IntArray
from wlb.sharding import adaptive, balanced, hybrid, per_document, per_sequence, shard

RESULTS = Path(__file__).parent / "results"
DEGREES = (2, 4, 8, 16)
WINDOWS = (65536, 131072)
CALLS = {f.__name__: f for f in (per_sequence, per_document, adaptive, hybrid, balanced)}
TARGETS_MS = {
    "per_sequence": 2.0,
    "per_document": 2.0,
    "adaptive": 10.0,
    "hybrid": 25.0,
    "balanced": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Holds the balance of one strategy over all micro-batches.

    over_mean, over_ideal: slowest rank over the mean rank and over ideal, means of micro-batches
    weighted: sum of the slowest ranks' times over the sum of ideal times
    worst: largest slowest over ideal
    segments: kernel segments per rank
    """

    strategy: str
    over_mean: float
    over_ideal: float
    weighted: float
    worst: float
    segments: float


def balance_of(
    strategy: str, lengths: list[IntArray], cp: int, cost: ProfiledWorkload, remainder: str
) -> Balance:
    plans = [
        shard(pieces, cp=cp, strategy=strategy, cost=cost, remainder=remainder)
        for pieces in lengths
    ]
    latencies = [attention_latency(plan, cost) for plan in plans]
    slowest = np.array([latency.slowest_kernels_ns for latency in latencies])
    ideal = np.array([ideal_kernels_ns(pieces, cost, cp=cp) for pieces in lengths])
    return Balance(
        strategy=strategy,
        over_mean=float(np.mean([latency.imbalance for latency in latencies])),
        over_ideal=float((slowest / ideal).mean()),
        weighted=float(slowest.sum() / ideal.sum()),
        worst=float((slowest / ideal).max()),
        segments=float(np.mean([plan.piece.size / cp for plan in plans])),
    )


def balance_table(
    policy: str, window: int, lengths: list[IntArray]
) -> tuple[list[str], dict[tuple[int, str], Balance]]:
    """Returns Markdown rows, and the balances by (cp, strategy).

    Balance is the slowest rank over the mean rank, and over ideal (the uncut documents' kernel time
    / CP plus launches, `ideal_kernels_ns`), mean and worst micro-batch. Times are predicted with
    the h100 profile for one layer of the 7B model at Table 1's TP degree, forward plus backward,
    without collectives.
    """
    documents = np.mean([pieces.size for pieces in lengths])
    lines = [
        f"### {window // 1024}K, packed by `{policy}` ({len(lengths)} micro-batches, "
        f"{documents:.0f} documents on average)",
        "",
        "| CP | strategy | slowest / mean | slowest / ideal | worst | time-weighted | segments a "
        "rank |",
        "|---|---|---|---|---|---|---|",
    ]
    found: dict[tuple[int, str], Balance] = {}
    for cp in DEGREES:
        cost = layer_cost(window=window, cp=cp)
        for strategy in STRATEGIES:
            b = balance_of(strategy, lengths, cp, cost, "merged")
            found[cp, strategy] = b
            lines.append(
                f"| {cp} | {strategy} | {b.over_mean:.3f} | {b.over_ideal:.3f} | {b.worst:.3f} | "
                f"{b.weighted:.3f} | {b.segments:.0f} |"
            )
    return [*lines, ""], found


def remainder_table(lengths: list[IntArray]) -> list[str]:
    lines = [
        "## The paper's remainder",
        "`per_document` at 128K, tokens over merged into chunks, or dealt one by one (Section "
        "5.1).",
        "",
        "| CP | remainder | segments a rank | slowest / ideal |",
        "|---|---|---|---|",
    ]
    for cp in DEGREES:
        for remainder in ("merged", "one_by_one"):
            b = balance_of("per_document", lengths, cp, layer_cost(window=131072, cp=cp), remainder)
            lines.append(f"| {cp} | {remainder} | {b.segments:.0f} | {b.over_ideal:.3f} |")
    return [*lines, ""]


def speed_table(repeats: int) -> list[str]:
    draw = np.random.default_rng(0).lognormal(4, 1, 1000)
    lengths = np.maximum(1, draw / draw.sum() * 131072).astype(np.int64)
    lengths[0] += 131072 - lengths.sum()
    cost = layer_cost(window=131072, cp=16)
    lines = [
        "## Planning time",
        "1,000 documents, 131,072 tokens, CP 16; best of several calls.",
        "",
        "| strategy | ms | target |",
        "|---|---|---|",
    ]
    for strategy, target in TARGETS_MS.items():
        priced = {} if strategy in STATIC else {"cost": cost}
        best = float("inf")
        for _ in range(repeats):
            began = time.perf_counter()
            CALLS[strategy](lengths, cp=16, **priced)
            best = min(best, time.perf_counter() - began)
        lines.append(f"| {strategy} | {best * 1e3:.2f} | {f'< {target:g}' if target else ''} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the micro-batches; write nothing"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count = 20 if options.quick else 200
    console = Console(width=160)
    lines: list[str] = []
    verdicts: list[str] = []
    for policy in PACKERS:
        for window in WINDOWS:
            lengths = micro_batches(policy, window=window, count=count, seed=options.seed)
            with console.status(f"{policy} {window}"):
                made, found = balance_table(policy, window, lengths)
            lines += made
            if window == 131072:
                verdicts += [
                    f"- {policy}: hybrid at 128K, CP {cp}: {found[cp, 'hybrid'].over_ideal:.3f} of "
                    f"ideal, at most 1.04: "
                    f"{'yes' if found[cp, 'hybrid'].over_ideal <= 1.04 else 'no'}"
                    for cp in (2, 4)
                ]
    lengths = micro_batches("original", window=131072, count=count, seed=options.seed)
    text = "\n".join(
        [
            "# Balance of sharding strategies",
            f"`python -m experiments.sharding_balance{' --quick' if options.quick else ''}`, "
            f"{datetime.date.today()}, commit {commit()}, seed {options.seed}. Predicted (h100 "
            "profile), forward plus backward kernels of one 7B layer; ideal = uncut documents / "
            "CP. Means over micro-batches; time-weighted is sum over sum, where the documents of a "
            "whole window rule, which any strategy but per_sequence divides well (a little below "
            "1, because chunks over a long prefix run better than a whole document).",
            "",
            *verdicts,
            "",
            *lines,
            *remainder_table(lengths),
            *speed_table(3 if options.quick else 20),
        ]
    )
    console.print(text, markup=False, highlight=False)
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "README.md").write_text(text.rstrip() + "\n", "utf-8")


if __name__ == "__main__":
    main()
