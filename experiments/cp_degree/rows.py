"""What CP ranks would gain that hold unequal numbers of a micro-batch's rows.

`python -m experiments.cp_degree.rows [--quick] [--lengths FILE ...]`. Ranks that share a long
document could hold fewer rows of linear work, and the others more. No executor does it: this prices
such plans beside `balanced`, whose ranks hold equally many rows, in the stages that are fastest for
each micro-batch. Waits are those of `wlb.cost.exposed`, but for this: a rank meets only ranks that
it exchanges rows with, and its products take the time of its own rows.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.cp_degree.prices import Prices
from experiments.cp_degree.steps import S_MAX, Layout, steps_of
from experiments.harness.pages import How, Table, priced_with, show, write_results
from experiments.harness.streams import title_of
from wlb.cost import ProfiledWorkload, kernels_ns, load_profile
from wlb.cost.exposed import attention_in_stages_ns, keys_in_stages
from wlb.plan import (
    FloatArray,
    IntArray,
    KeyExchange,
    ShardingPlan,
    offsets_of,
    rows_moved_in_stages,
)
from wlb.sharding import shard
from wlb.sharding.by_need import WHOLE, spans_of
from wlb.sharding.fill import FillOptions, HeadWork, fill, parts_of
from wlb.sharding.spans import from_spans

FOLDER = Path(__file__).parent / "rows"
SOURCES = ("wlb_paper", "stdlib")
CELLS = ((8, 4), (8, 8))
"""TP and CP degrees where each rank is a node, so that what is left to gain is more than 1%."""
STAGES = (1, 2, 3, 4)
TOWARDS = (1 / 4, 1 / 2, 3 / 4, 1)
"""How far rows are moved from equal ones to those of ranks that take documents by falling work a
token, each for the same time."""
ROUNDS = 3
LEAST = 0.02
"""Least share of the mean rank's attention that a rank is asked to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrices:
    """Prices ranks with rows of their own. linear: ns a row, forward and backward."""

    prices: Prices
    cp: int
    linear: tuple[float, float]

    @classmethod
    def of(cls, layout: Layout) -> "RankPrices":
        prices = Prices(tp=layout.tp, rows=layout.rows)
        terms = replace(prices.cost(1).linear, micro_batch_tokens=layout.rows).ns_per_token
        forward = sum(ns for name, ns in terms.items() if name.endswith("_forward"))
        linear = (forward, sum(terms.values()) - forward)
        return cls(prices=prices, cp=layout.cp, linear=linear)

    def cost(self, stages: int, *, cp: int = 0) -> ProfiledWorkload:
        return replace(self.prices.cost(cp or self.cp, overlaps=True), stages=stages)

    def times_ns(self, plan: ShardingPlan, stages: int) -> FloatArray:
        """Returns each rank's forward and backward with linear work and waits, shape [2, cp]."""
        cost, ranks = self.cost(stages), np.arange(plan.cp)
        moved = rows_moved_in_stages(plan, stages=stages)
        travels = [cost.transfers_ns(rows, 0, cp=plan.cp) for rows in moved]
        own, parts, calls = attention_in_stages_ns(plan, cost, keys_in_stages(plan, stages))
        kernels = np.stack([times[0] for times in kernels_ns([plan], cost, cp=plan.cp)])
        launches = kernels - own - parts.sum(axis=0) + calls
        hidden = np.array([cost.products_ns(int(n) * plan.cp) for n in plan.tokens]).T
        work = np.outer(self.linear, plan.tokens)
        meets = [(rows > 0) | (rows.T > 0) | (ranks[:, None] == ranks) for rows in moved]
        waits = [rows.any(axis=1) for rows in moved]
        arrived = np.cumsum([[t.there, t.again] for t in travels], axis=0)
        at = hidden[0] + own[0]
        for s, part in enumerate(parts):
            at = np.maximum(at, np.where(waits[s], arrived[s, 0], 0)) + part[0]
        forward = work[0] - hidden[0] + at
        at, ends = hidden[1], list[FloatArray]()
        for s, part in enumerate(parts):
            at = np.maximum(at, np.where(waits[s], arrived[s, 1], 0)) + part[1]
            ends.append(at)
        returned = np.where(np.any(meets, axis=0).sum(axis=1) > 1, arrived[-1, 1], 0)
        for s, end in enumerate(ends):
            last = np.where(meets[s], end, 0).max(axis=1)
            is_sent = meets[s].sum(axis=1) > 1
            returned = np.where(is_sent, np.maximum(returned, last) + travels[s].back, returned)
        done = np.maximum(at + own[1] + hidden[2], returned)
        backward = work[1] - hidden[1] - hidden[2] + done
        return np.stack([forward, backward]) + launches

    def best(self, plans: Sequence[ShardingPlan]) -> tuple[float, ShardingPlan]:
        """Returns the time and the plan of the one whose slowest rank is done first, in any number
        of stages."""
        passes = np.stack(kernels_ns(plans, self.cost(1), cp=self.cp), axis=1)
        work = np.stack([np.outer(self.linear, plan.tokens) for plan in plans])
        least = (passes + work).max(axis=2).sum(axis=1)
        best = np.inf, plans[0]
        for i in np.argsort(least, kind="stable").tolist():
            # Waits only add to work, so no plan from here on can be the fastest.
            if least[i] > best[0]:
                break
            plan = replace(plans[i], exchange=KeyExchange.NEEDED, stages=0)
            times = [float(self.times_ns(plan, s).max(axis=1).sum()) for s in STAGES]
            best = min(best, (min(times), plan), key=lambda one: one[0])
        return best


def equal(pieces: IntArray, priced: RankPrices) -> list[ShardingPlan]:
    """Returns what `balanced` makes for each number of stages."""
    how = {"cp": priced.cp, "strategy": "balanced", "exchange": "needed"}
    return [shard(pieces, cost=priced.cost(stages), **how) for stages in STAGES]


def filled(
    pieces: IntArray, priced: RankPrices, *, most: int, stages: int = 2
) -> Iterator[ShardingPlan]:
    """Yields plans whose ranks are filled by time, at most `most` rows each, in rounds that correct
    each rank's attention by what it came to."""
    cp, cost, tokens = priced.cp, priced.cost(stages), int(pieces.sum())
    forward, backward = cost.segment_times_ns(pieces, pieces)
    parts, heads = parts_of(pieces, forward + backward), HeadWork(int(pieces.max()), cost)
    row_ns, attention = sum(priced.linear), sum(part.work for part in parts)
    sizes = np.array([part.size for part in parts])
    times = np.cumsum([0, *((part.density + row_ns) * part.size for part in parts)])
    share = times[-1] / cp
    by_time = np.diff(np.interp(np.arange(cp + 1) * share, times, offsets_of(sizes)))
    for towards in TOWARDS:
        rooms = _limited(towards * by_time + (1 - towards) * tokens / cp, most, tokens)
        for whole in WHOLE:
            wanted = share - row_ns * rooms
            for _ in range(ROUNDS):
                wanted = np.maximum(wanted, LEAST * attention / cp)
                wanted *= attention / wanted.sum()
                scale = wanted / attention * tokens / np.maximum(rooms, 1)
                options = FillOptions(whole=whole)
                ranks = fill(parts, rooms.tolist(), scale.tolist(), heads, options)
                spans = spans_of(pieces, ranks, cp)
                plan = from_spans(pieces, spans, cp=cp, strategy="balanced")
                yield plan
                took = priced.times_ns(replace(plan, exchange=KeyExchange.NEEDED), stages).sum(0)
                wanted = wanted + 0.8 * (took.mean() - took)


def _limited(rooms: FloatArray, most: int, tokens: int) -> IntArray:
    """Whole rows of each rank, at most `most`, `tokens` in all."""
    for _ in range(rooms.size):
        over = np.maximum(0.0, rooms - most).sum()
        rooms = np.minimum(rooms, most)
        free = most - rooms
        if over > 0 and free.sum() > 0:
            rooms = rooms + free * min(1.0, over / free.sum())
    bounds = np.rint(np.concatenate([[0], np.cumsum(rooms)])).astype(np.int64)
    bounds[-1] = tokens
    return np.diff(bounds)


def grouped(
    pieces: IntArray, priced: RankPrices, *, most: int, stages: int = 2
) -> Iterator[ShardingPlan]:
    """Yields plans of two groups of ranks, each with `balanced` for its own documents: the longest
    ones with as many of the shortest as make both groups take equally long, and all others."""
    cp, row_ns = priced.cp, sum(priced.linear)
    order = np.argsort(-pieces, kind="stable")
    lengths, num = pieces[order], pieces.size
    forward, backward = priced.cost(stages, cp=1).segment_times_ns(lengths, lengths)
    times = np.cumsum([0, *(forward + backward + row_ns * lengths)])
    for k in range(1, cp):
        fits = (times[1:num] <= 1.05 * times[-1] * k / cp) & (np.cumsum(lengths)[:-1] <= most * k)
        longest = (np.flatnonzero(fits) + 1).tolist()
        for n in sorted({*longest[:1], *longest[-2:]}):
            more = 0.0
            for _ in range(ROUNDS):
                wanted = times[-1] * k / cp - times[n] + more
                short = int(np.searchsorted(times[-1] - times[::-1][: num - n], wanted))
                cut = num - min(short, num - n - 1)
                parts = (np.concatenate([order[:n], order[cut:]]), k), (order[n:cut], cp - k)
                if any(int(pieces[mine].sum()) > most * ranks for mine, ranks in parts):
                    break
                plan = _merged(pieces, parts, priced, stages)
                yield plan
                took = priced.times_ns(plan, stages).sum(axis=0)
                more += float(took[k:].max() - took[:k].max()) * k * (cp - k) / cp


def _merged(
    pieces: IntArray, parts: Sequence[tuple[IntArray, int]], priced: RankPrices, stages: int
) -> ShardingPlan:
    """One plan of groups of ranks, each with documents of its own."""
    plans: list[ShardingPlan] = []
    for mine, ranks in parts:
        how = {"cp": ranks, "cost": priced.cost(stages, cp=ranks), "exchange": "needed"}
        plans.append(shard(pieces[mine], strategy="balanced", **how))
    return ShardingPlan(
        strategy="balanced",
        lengths=pieces,
        piece=np.concatenate([m[p.piece] for (m, _), p in zip(parts, plans, strict=True)]),
        start=np.concatenate([plan.start for plan in plans]),
        stop=np.concatenate([plan.stop for plan in plans]),
        rank_offsets=offsets_of(np.concatenate([np.diff(plan.rank_offsets) for plan in plans])),
        exchange=KeyExchange.NEEDED,
    )


@dataclass(frozen=True, slots=True)
class Found:
    """Of one micro-batch: ns of `balanced` in each number of stages, and in the best number with
    equal and with unequal rows, [3]; and the fullest rank's rows over the mean."""

    in_stages: list[float]
    best: list[float]
    most_rows: float


def found_of(pieces: IntArray, priced: RankPrices, *, most: int) -> Found:
    plans = equal(pieces, priced)
    in_stages = [
        float(priced.times_ns(plan, stages).max(axis=1).sum())
        for plan, stages in zip(plans, STAGES, strict=True)
    ]
    found = [priced.best(plans)]
    for way in (filled, grouped):
        made = list(way(pieces, priced, most=most))
        found.append(min(found[0], priced.best(made or plans), key=lambda one: one[0]))
    tokens = min(found, key=lambda one: one[0])[1].tokens
    return Found(in_stages, [time for time, _ in found], float(tokens.max() / tokens.mean()))


def table(
    sources: Sequence[str], cells: Sequence[tuple[int, int]], *, count: int, seed: int
) -> Table:
    """Returns times over ideal of `count` steps of four micro-batches, each of which ranks end
    together."""
    lines: list[list[object]] = []
    for source, (tp, cp) in itertools.product(sources, cells):
        layout = Layout(tp=tp, num_ranks=cp, cp=cp)
        priced = RankPrices.of(layout)
        steps = steps_of(layout, priced.prices, source, count=count, seed=seed)
        batches = [
            step.lengths[list(step.members(i))]
            for step in steps
            for i in range(step.offsets.size - 1)
        ]
        found = [found_of(pieces, priced, most=layout.rows) for pieces in batches]
        ideal = sum(priced.prices.ideal_ns(pieces, num_ranks=cp) for pieces in batches)
        one_number = float(np.sum([f.in_stages for f in found], axis=0).min()) / ideal
        best = (np.sum([f.best for f in found], axis=0) / ideal).tolist()
        gain, most = best[0] / min(best) - 1, max(f.most_rows for f in found)
        lines.append([title_of(source), tp, cp, one_number, *best, gain, most])
    ratios = ("one number", "equal", "filled", "grouped")
    return Table(
        name="rows",
        title="Unequal rows on top of `balanced` in stages",
        columns=("stream", "TP", "CP", *ratios, "gain", "most rows"),
        rows=lines,
        formats=dict.fromkeys((*ratios, "most rows"), ".3f") | {"gain": ".1%"},
        note="Time over ideal of micro-batches that all ranks end together. `one number`: "
        "`balanced` with the best number of stages for the whole cell; `equal`: each micro-batch "
        "has its own. `filled`: ranks filled by time; `grouped`: two groups of ranks with documents"
        " of their own; each, or equal rows, whichever is faster. `gain`: over `equal`. `most "
        "rows`: of a rank of the fastest plan, over the mean.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one step of one layout, no page")
    parser.add_argument("--count", type=int, default=1, help="steps of each stream and layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", nargs="*", default=[], help="files of document lengths")
    options = parser.parse_args()
    sources = [*SOURCES[: 1 if options.quick else None], *options.lengths]
    cells, count = (CELLS[:1], 1) if options.quick else (CELLS, options.count)
    found = table(sources, cells, count=count, seed=options.seed)
    show(found)
    if options.quick:
        return
    names = " ".join(Path(name).name for name in options.lengths)
    command = "python -m experiments.cp_degree.rows" + (f" --lengths {names}" if names else "")
    write_results(
        FOLDER,
        title="Unequal numbers of rows on CP ranks",
        how=How.PREDICTED,
        profile=priced_with(load_profile("h100")),
        text=TEXT,
        seed=options.seed,
        tables=[found],
        command=command if count == 1 else f"{command} --count {count}",
    )


TEXT = f"""
Would it pay if ranks that share a long document held fewer rows of linear work, and the others
more? `balanced` with an exchange by need in 1 to 4 stages, one layer of the 7B model, forward and
backward, each rank a node of eight GPUs, four micro-batches of a step packed by `bounded`; a rank
holds at most {S_MAX:g} windows over the CP degree, which is what memory allows today.

Hardly: what is left is not that ranks have as many rows, but that whoever holds the end of a
document receives its keys over one link, with rows of its own or without. A micro-batch that is one
long document has nothing to give to other ranks, and that of the next micro-batch is not theirs;
where documents are many, equal rows in groups of ranks (`wlb/sharding/by_need.py`) have most of it.
A dynamic degree gains more because its ranks work on other micro-batches meanwhile.
"""


if __name__ == "__main__":
    main()
