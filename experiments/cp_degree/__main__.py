"""Compares fixed CP degrees with dynamic ones, by ours and by Megatron's own schedulers.

`python -m experiments.cp_degree [--megatron FOLDER] [--quick] [--lengths FILE ...]` gives the same
steps of 128K windows to all. The hybrid scheduler is that of the installed package megatron-core;
the dynamic one is on Megatron-LM's branch dev, of which FOLDER holds a source tree. What is missing
is named, with how to get it.
"""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.cp_degree.megatron import DevSchedulers, Failed, hybrid_scheduler
from experiments.cp_degree.methods import BASELINE, FIXED, Method, Outcome, methods, outcome
from experiments.cp_degree.prices import TP_OVERLAP, Exchange, Prices
from experiments.cp_degree.steps import S_MAX, Layout, steps_of
from experiments.harness.pages import How, Table, priced_with, show, write_results
from experiments.beyond.step_balance.sources import Missing, Sources
from experiments.harness.streams import title_of
from wlb.cost import load_profile

FOLDER = Path(__file__).parent
SOURCES = ("wlb_paper", "stdlib")
LAYOUTS = tuple(
    Layout(tp=tp, num_ranks=num_ranks, cp=cp)
    for tp, num_ranks, cp in (
        *((1, 8, 4), (1, 16, 8), (1, 32, 8)),
        *((8, 8, 2), (8, 8, 4), (8, 16, 4), (8, 16, 8), (8, 32, 8)),
    )
)
"""Ranks in a node, over nodes of eight ranks, and with a node for each rank."""
QUICK = (LAYOUTS[0], LAYOUTS[4])
CELL = ("stream", "TP", "ranks", "CP")


@dataclass(frozen=True, slots=True)
class Row:
    """One method in one cell."""

    stream: str
    layout: Layout
    method: Method
    found: Outcome | Failed

    @property
    def cell(self) -> tuple[str, int, int, int]:
        return self.stream, self.layout.tp, self.layout.num_ranks, self.layout.cp


def rows_of(
    sources: Sequence[str],
    layouts: Sequence[Layout],
    found: Sequence[Method],
    *,
    count: int,
    seed: int,
) -> Iterator[Row]:
    for source in sources:
        for layout in layouts:
            prices = Prices(tp=layout.tp, rows=layout.rows)
            steps = steps_of(layout, prices, source, count=count, seed=seed)
            for method in found:
                got = outcome(method, steps, layout, prices)
                yield Row(title_of(source), layout, method, got)


def table(rows: Sequence[Row]) -> Table:
    """Returns all rows, with speed-ups over the fixed degree per document with an all-gather."""
    usual = {row.cell: row.found for row in rows if _is(row, BASELINE, Exchange.GATHER)}
    lines: list[list[object]] = []
    for row in rows:
        name = [*row.cell, row.method.name, str(row.method.exchange)]
        if isinstance(row.found, Failed):
            lines.append([*name, "fails", *[None] * 5])
            continue
        o, base = row.found, usual[row.cell]
        assert isinstance(base, Outcome)
        faster = base.time / o.time
        lines.append([*name, o.over_ideal, faster, o.waits, o.idle, o.calls, o.degree])
    ratios = ("over ideal", "speed-up", "waits", "idle")
    return Table(
        name="schedules",
        title="Predicted time of a step, forward and backward",
        columns=(*CELL, "schedule", "exchange", *ratios, "calls", "degree"),
        rows=lines,
        formats=dict.fromkeys(ratios, ".3f") | {"calls": ".1f", "degree": ".1f"},
        note="`over ideal`: over attention and linear work shared evenly, without waits. `speed-up`"
        ": over per_document with an all-gather. `waits`, `idle`: for keys and for other ranks, "
        "share of all ranks' time. `calls`: micro-batches of a rank. `degree`: of the mean token.",
        most_rows=400,
    )


def gains(rows: Sequence[Row]) -> Table:
    """Returns what dynamic degrees gain on top of `balanced` at the configured degree."""
    lines: list[list[object]] = []
    for cell in dict.fromkeys(row.cell for row in rows):
        mine = [row for row in rows if row.cell == cell and isinstance(row.found, Outcome)]

        def least(prefix: str, mine: Sequence[Row] = mine) -> float | None:
            # Another way to hide the exchange is not a schedule to choose.
            times = [
                row.found.over_ideal
                for row in mine
                if row.method.name.startswith(prefix)
                and row.method.exchange in (Exchange.OVERLAP, Exchange.RING)
                and isinstance(row.found, Outcome)
            ]
            return min(times, default=None)

        fixed = next(r.found for r in mine if _is(r, FIXED, Exchange.OVERLAP))
        assert isinstance(fixed, Outcome)
        staged = [
            row.found.over_ideal
            for name in (FIXED, "dynamic")
            for row in mine
            if _is(row, name, Exchange.STAGED) and isinstance(row.found, Outcome)
        ]
        ways = [least(name) for name in ("all ranks", "dynamic, equal", "dynamic")]
        theirs = [least(f"Megatron {name}") for name in ("hybrid", "dynamic")]
        best = min(time for time in (fixed.over_ideal, *ways) if time is not None)
        gain = fixed.over_ideal / best - 1
        lines.append([*cell, fixed.over_ideal, *ways, gain, *staged, *theirs])
    columns = (
        *("fixed", "pooled", "equal counts", "dynamic", "gain"),
        *("fixed, staged", "dynamic, staged", "hybrid", "Megatron dynamic"),
    )
    return Table(
        name="gains",
        title="What dynamic degrees gain on top of `balanced` with overlap",
        columns=(*CELL, *columns),
        rows=lines,
        formats=dict.fromkeys(columns, ".3f") | {"gain": ".1%"},
        note="Time over ideal. `fixed` to `dynamic`: ours, keys by need behind own attention; "
        "`dynamic` is the better of both kinds, and `gain` the best one's over `fixed`. `staged`: "
        "keys in stages. `hybrid`: Megatron's, the better of its own estimate of work and our "
        "prices.",
        most_rows=100,
    )


def _is(row: Row, name: str, exchange: Exchange) -> bool:
    return (row.method.name, row.method.exchange) == (name, exchange)


def found_methods(folder: Path | None) -> tuple[list[Method], list[str]]:
    """Returns the methods that can be run, and what is missing."""
    missing: list[str] = []
    dev: DevSchedulers | None = None
    version = ""
    try:
        dev = DevSchedulers(Sources(folder))
    except Missing as how:
        missing.append(f"Megatron-LM's dynamic scheduler is not here: {how}")
    try:
        with warnings.catch_warnings():  # it says that Transformer Engine and Apex are missing
            warnings.simplefilter("ignore", UserWarning)
            version = hybrid_scheduler()[1]
    except Missing as how:
        missing.append(f"Megatron-Core's hybrid scheduler is not here: {how}")
    return methods(dev, has_hybrid=bool(version)), missing


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron", type=Path, help="folder with a source tree of branch dev")
    parser.add_argument("--quick", action="store_true", help="one step of two layouts, no page")
    parser.add_argument("--count", type=int, default=6, help="steps of each stream and layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", nargs="*", default=[], help="files of document lengths")
    options = parser.parse_args()
    ways, missing = found_methods(options.megatron)
    for line in missing:
        print(line)
    sources = [*SOURCES[: 1 if options.quick else None], *options.lengths]
    layouts, count = (QUICK, 1) if options.quick else (LAYOUTS, options.count)
    rows = list(rows_of(sources, layouts, ways, count=count, seed=options.seed))
    found = gains(rows), table(rows)
    show(*found)
    if options.quick:
        return
    write_results(
        FOLDER,
        title="Fixed and dynamic degrees of context parallelism",
        how=How.PREDICTED,
        profile=priced_with(load_profile("h100")),
        text=TEXT + "".join(f"\n{line}" for line in missing),
        seed=options.seed,
        tables=list(found),
    )


TEXT = f"""
Every schedule trains the same pieces of a step: what `bounded` packs of the stream into four
micro-batches a replica. A rank holds at most {S_MAX:g} windows over the configured CP degree,
whoever schedules. One layer of the 7B model, forward and backward: matrix products at the
throughput of a call's rows, {TP_OVERLAP:.0%} of TP's collectives hidden, the slowest rank's
attention, and what is waited for keys. All are priced by the same functions.

- **fixed degree**: replicas of CP ranks run their micro-batches; **pooled**: all ranks are one CP
  group, in which `balanced` gives each document ranks of its own. Both are what wlb trains today.
- **dynamic**: an analysis, which no executor runs. Documents that one rank cannot hold are
  micro-batches of their own on as many ranks as the price asks for, any number; single ranks run
  the others. Ranks run different numbers of micro-batches. With **equal counts** (`balance_step`,
  powers of two) all run as many, as sharded weights need it; where a step has too few samples for
  that, the fixed degree is taken.
- **Megatron hybrid** (`BalancedCPScheduler`, megatron-core): each sample alone on the power of two
  that holds it; ranks meet at the end of each group. It balances tokens^2 over the degree, or, so
  that its method is judged apart from that estimate, our prices. It has no pipelines.
- **Megatron dynamic** (`DefaultDynamicCPScheduler`, branch dev): one packed micro-batch for each
  sub-group and group; a sub-group begins when its ranks are free. **in order**: its packing at the
  fixed degree (`DpBalancedScheduler`), of the same pieces in a random order.

Megatron's calls shard each document on all ranks of their sub-group, and a ring hides keys behind
the attention of all chunks but one; between nodes it has the bandwidth of an all-gather.
**staged** says what an exchange by need would be waited for if it went in as many stages and were
hidden likewise; so it parts what a ring hides from what a schedule gains. It is what `cp.stages`
(built since) would give without launches; `cp_traffic` has it with them, in one to four stages.

What ranks of one micro-batch with unequal numbers of rows would gain, and a number of stages for
each micro-batch, is in [rows](../rows/results/README.md).

Not modelled: launches of linear layers, which the hybrid scheduler's many calls have most of; what
barriers and the first use of a group cost; padding of samples to multiples of 2 CP; broadcast of
samples to their ranks; pipelines; gradients among replicas, the same for all. Prices of exchanges
are unmeasured.
"""


if __name__ == "__main__":
    main()
