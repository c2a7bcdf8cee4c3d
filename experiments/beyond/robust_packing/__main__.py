"""Measures balance and delay where attention's price is wrong.

`python -m experiments.beyond.robust_packing [--lengths FILE ...] [--quick]` packs
the same global batches of N windows of 128K tokens (7B, profile `h100`, D 10) with Algorithm 1 (two
queues, same caps) and `bounded`, each at one price and over a range of prices. N counts the
micro-batches of all pipelines: 4 is one pipeline of 4, 64 one of 64 or 16 of 4, 256 64 of 4.
"""

import argparse
from functools import partial
from pathlib import Path

from experiments.beyond.robust_packing.cases import (
    CAPS,
    FACTORS,
    NARROW,
    ONE_PRICE,
    POLICIES,
    PROFILE,
    STREAMS,
    WIDE_RANGE,
    batches_of,
    bounded,
    measure,
    time_ratio,
    title_of,
)
from experiments.harness.pages import How, Table, show, write_results

TABLES = """
1. Imbalance of the forward pass, of forward + backward (F+B), and of F+B if attention costs 0.7 to
   1.6 times its price, beside the delay.
2. The front: the delay price swept, N = 4, T 1.5, three ranges.
3. The time of a push against one price, the default.
"""
"""What each table of the page holds."""
SEED = 1
N = 4
STEPS = {4: 640, 16: 120, 64: 30, 256: 12}
SWEPT = (0.3, 0.2, 0.15, 0.1, 0.05)
"""Delay prices, times sqrt(N)."""
NUMBERS = ("forward", *(f"F+B x {factor:g}" for factor in FACTORS), "mean delay")
FORMATS = dict.fromkeys(NUMBERS, ".4f") | {"mean delay": ".3f"}


def table_1(streams: list[str], steps: dict[int, int]) -> Table:
    rows: list[list[object]] = []
    for n, num in steps.items():
        for name in streams:
            batches = batches_of(name, n, num, SEED)
            for caps in CAPS:
                for label, make in POLICIES.items():
                    m = measure(make(caps, n), batches)
                    numbers = [m.forward, *m.mispriced.values(), m.mean_delay, m.max_delay]
                    rows.append([title_of(name), n, caps.step_tokens, label, *numbers])
    columns = ("stream", "N", "T", "policy", *NUMBERS, "max delay")
    title = "Imbalance by price, and delay in steps"
    return Table(
        name="prices", title=title, columns=columns, rows=rows, formats=FORMATS, most_rows=400
    )


def table_2(streams: list[str], num: int) -> Table:
    rows: list[list[object]] = []
    for name in streams:
        batches = batches_of(name, N, num, SEED)
        for prices in (ONE_PRICE, NARROW, WIDE_RANGE):
            for price in SWEPT:
                m = measure(bounded(CAPS[0], N, prices, price), batches)
                numbers = [m.forward, *m.mispriced.values(), m.mean_delay]
                rows.append([title_of(name), f"{prices.low} to {prices.high}", price, *numbers])
    columns = ("stream", "range", "delay price x sqrt(N)", *NUMBERS)
    title = "The front of balance against delay, N = 4, T 1.5"
    return Table(
        name="front", title=title, columns=columns, rows=rows, formats=FORMATS, most_rows=200
    )


def table_3(steps: dict[int, int]) -> Table:
    rows: list[list[object]] = []
    for n, num in steps.items():
        ratio, longest = time_ratio(n, steps=num, seed=SEED)
        rows.append([n, ratio, "yes" if longest < (0.005 if n == 4 else 0.5) else "no"])
    return Table(
        name="time",
        title="Time of a push over that at one price",
        columns=("N", "ratio", "longest below 5 ms (N = 4), 500 ms"),
        rows=rows,
        formats={"ratio": ".2f"},
    )


def main() -> None:
    doc = f"{__doc__}{TABLES}"
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--lengths", nargs="*", default=[], help="files of document lengths")
    parser.add_argument("--quick", action="store_true", help="pack a tenth and write nothing")
    options = parser.parse_args()
    streams = [*STREAMS, *options.lengths]
    shrink = 10 if options.quick else 1
    steps = {n: max(8, num // shrink) for n, num in STEPS.items()}
    parts = [
        partial(table_1, streams, steps),
        partial(table_2, streams, 320 // shrink),
        partial(table_3, {4: 80 // shrink, 1024: 8}),
    ]
    tables: list[Table] = []
    for part in parts:
        tables.append(part())
        show(tables[-1], width=170)
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="Balance over a range of prices",
        how=How.PREDICTED,
        profile=PROFILE,
        seed=SEED,
        text=doc,
        tables=tables,
    )


if __name__ == "__main__":
    main()
