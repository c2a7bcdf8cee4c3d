"""Counts rows, steps, utilisation and padding of the methods that pack with position ids.

`python -m experiments.paper.packing_methods` counts an epoch of each method in Tables 2 to 6 of the
packing paper ("Enhancing Training Efficiency Using Packing with Flash Attention"). Examples have
lengths like those of its three data sets (`lengths`). Tables 2 and 3 have rows by model and layout
(`rows`), and Tables 4 to 6 optimiser steps by method and (bs, msl, gas) (`steps`).

Three methods are added that the paper does not have: Multipack in groups of 8 rows, and exact first
fit and best fit decreasing. Nothing is trained here; `experiments.paper.packing_training` trains.
"""

from pathlib import Path

import numpy as np

from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import Against, How, Picture, Table, show, write_results
from experiments.paper.packing_methods.counting import Method
from experiments.paper.packing_methods.draw import draw_lengths, draw_rows, draw_steps
from experiments.paper.packing_methods.lengths import DATASETS, MSL
from experiments.paper.packing_methods.rows import RowCounts, row_counts
from experiments.paper.packing_methods.steps import StepCounts, step_counts

SHUFFLES = 9
SMALL_GAS = {
    (name, msl): gas
    for name, gases in (("FLAN", (4, 2)), ("OrcaMath", (4, 2)), ("Stack", (12, 6)))
    for msl, gas in zip((8192, 16384), gases, strict=True)
}
"""The smaller value of gas (gradient accumulation steps) in each table, by data set and msl.

With it, one step is less than 1% of an epoch.
"""
LAYOUTS = ("basic packing", "flat")


def datasets_table() -> Table:
    records: list[dict[str, object]] = []
    for dataset in DATASETS.values():
        lengths, uncut = dataset.lengths(), dataset.uncut()
        records.append(
            {
                "data set": dataset.title,
                "examples": lengths.size,
                "tokens": int(lengths.sum()),
                "sigma": dataset.sigma,
                "mean": float(lengths.mean()),
                "median": float(np.median(lengths)),
                "longest": int(lengths.max()),
                "examples left out over msl": dataset.num_left_out,
                "examples cut at msl": int((uncut > lengths).sum()),
                "tokens cut off": int((uncut - lengths).sum()),
            }
        )
    whole = ("examples", "tokens", "longest", "examples cut at msl", "tokens cut off")
    return Table.of(
        "datasets",
        "Lengths",
        records,
        formats=dict.fromkeys(whole, ",d") | {"mean": ",.0f", "median": ",.0f"},
        note="Lognormals whose total is the paper's Time x Tok/s. What is left out or cut over "
        f"msl = {MSL:,} tokens was so before any method sees it; the tokens cut off are the "
        "lognormal's, the paper does not say them.",
    )


def steps_table(found: list[StepCounts], *, number: int) -> Table:
    """Returns Table 4, 5 or 6."""
    records = [
        {
            "method": str(s.method),
            "bs, msl, gas": f"{s.bs}, {s.msl}, {s.gas}",
            "paper": s.paper.steps if s.paper else None,
            "ours": s.steps[1],
            "shuffles": f"{s.steps[0]} to {s.steps[2]}",
            "difference": s.difference,
            "rows": s.mean("rows"),
            "tokens": s.mean("tokens"),
            "utilisation": s.mean("utilisation"),
            "padding": s.mean("padding"),
            "broken examples": s.mean("num_broken"),
            "tokens left out": s.mean("left_out"),
            "micro-batches after the last step": s.after_last_step,
        }
        for s in found
    ]
    whole = ("rows", "tokens", "broken examples", "tokens left out", list(records[0])[-1])
    return Table.of(
        f"table{number}",
        f"Table {number}: steps of an epoch of {found[0].dataset} 20K",
        records,
        formats=dict.fromkeys(("utilisation", "padding"), ".1%")
        | {"difference": "+.1%"}
        | dict.fromkeys(whole, ",.0f"),
        note="Ours: the median of the shuffles; other numbers are their means. Utilisation: tokens "
        "over rows x msl. Padding: share of computed positions. Without a number of the paper: "
        "methods that it does not have.",
    )


def padding_table(found: list[StepCounts]) -> Table:
    """Returns the table of padding beside how much longer the paper's padded runs took.

    The paper prints times, but not the share of padding.
    """
    by = {(s.dataset, s.bs, s.method): s for s in found if s.paper and s.msl == MSL}
    records: list[dict[str, object]] = []
    for dataset in DATASETS:
        for bs in (2, 4):
            mini = by[dataset, bs, Method.MINI_BATCH].paper
            for method in (Method.RANDOM_PADDING, Method.GROUPED_PADDING):
                s = by[dataset, bs, method]
                if s.paper and mini:
                    share = s.mean("padding")
                    records.append(
                        {
                            "data set": dataset,
                            "bs": bs,
                            "method": str(method),
                            "padding": share,
                            "positions over tokens": 1 / (1 - share),
                            "paper: Time over MiniBatchPacking's": s.paper.time_s / mini.time_s,
                        }
                    )
    return Table.of(
        "padding",
        "Padding, and how long the paper's padded runs took",
        records,
        formats={"padding": ".1%"} | dict.fromkeys(list(records[0])[-2:], ".2f"),
        note="Mini-batches of the same examples without padding. Time holds what does not depend "
        "on positions as well, so it grows less than they do.",
    )


def rows_table(found: list[RowCounts]) -> Table:
    records = [
        {
            "data set": f.paper.dataset,
            "model": f.paper.model,
            "layout": f.paper.layout,
            "row (tokens)": f.row_tokens if f.row_tokens else "an example",
            "paper": f.paper.rows,
            "nothing lost": f.nothing_lost,
            "difference": f.difference(as_printed=False) if f.row_tokens else None,
            "utilisation": f.utilisation,
            "as printed": f.as_printed,
            "difference, as printed": f.difference(as_printed=True) if f.row_tokens else None,
            "tokens lost, as printed": f.lost,
        }
        for f in found
    ]
    return Table.of(
        "tables2_3",
        "Tables 2 and 3: rows",
        records,
        formats=dict.fromkeys(("difference", "difference, as printed"), "+.1%")
        | dict.fromkeys(("nothing lost", "as printed", "tokens lost, as printed"), ",.0f")
        | {"utilisation": ".1%"},
        note="Rows of padding and mini are the examples, which the counts are given. "
        "As printed: 1,000 examples at a time, the unfinished row dropped, examples over msl "
        "packed too (flat: cut at msl). Tokens lost: dropped with those rows, or cut.",
        most_rows=80,
    )


def against_rows(steps: list[StepCounts], rows: list[RowCounts]) -> list[Against]:
    """Compares steps at the smaller gas, and row counts with Mistral's tokenizer."""
    out: list[Against] = []
    for s in steps:
        is_shown = s.paper and s.bs == 1 and SMALL_GAS.get((s.dataset, s.msl)) == s.gas
        if is_shown and s.paper and s.method != Method.FIXED_LENGTH:
            out.append(
                Against(
                    what=f"steps, {s.dataset}, {s.method} ({s.bs}, {s.msl}, {s.gas})",
                    paper=s.paper.steps,
                    ours=s.steps[1],
                )
            )
    for dataset in ("FLAN", "OrcaMath"):
        for layout in LAYOUTS:
            f = next(
                f
                for f in rows
                if (f.paper.dataset, f.paper.model, f.paper.layout) == (dataset, "mistral", layout)
            )
            out.append(
                Against(
                    what=f"rows, {dataset}, Mistral, {layout}",
                    paper=f.paper.rows,
                    ours=f.as_printed or f.nothing_lost,
                    note=f"{f.nothing_lost:,.0f} if nothing is lost",
                )
            )
    return out


def words(steps: list[StepCounts], rows: list[RowCounts]) -> str:
    compared = [s for s in steps if s.difference is not None]
    worst = max(compared, key=lambda s: abs(s.difference or 0))
    exact = sum(s.difference == 0 for s in compared)
    over = {
        layout: [abs(f.difference(as_printed=True)) for f in rows if f.paper.layout == layout]
        for layout in LAYOUTS
    }
    lossless = max(abs(f.difference(as_printed=False)) for f in rows if f.row_tokens)
    best = {
        name: next(
            s
            for s in steps
            if s.method == Method.BEST_FIT_DECREASING
            and (s.dataset, s.msl, s.gas) == (name, 8192, SMALL_GAS[name, 8192])
        )
        for name in DATASETS
    }
    savings = ", ".join(f"{name} {s.steps[1]}" for name, s in best.items())
    return (
        f"**Steps**: {exact} of the {len(compared)} steps of Tables 4 to 6 come out exactly, all "
        f"within {abs(worst.difference or 0):.1%} (worst: {worst.dataset}, {worst.method}). Of the "
        "lengths, the totals and the spread were fitted to these tables, so this shows that the "
        "counts and the tables are consistent with each other, on one GPU: shared by the "
        "paper's 8 GPUs they would be an eighth.\n\n"
        "**Rows** of Tables 2 and 3 were not fitted to, beyond each model's examples and tokens. "
        "They come out if the 20,000 examples, those over msl too, are packed 1,000 at a time "
        f"and the row that each thousand ends in is dropped: basic packing within "
        f"{max(over['basic packing']):.1%} for all ten models, flat rows within "
        f"{max(over['flat']):.1%} (Falcon and Phi-2, which have 2,048 positions, on FLAN; the "
        f"others within 1.1%). Counted without losing anything they are up to {lossless:.1%} off. "
        "So the printed flat runs on OrcaMath trained on 1 to 3% fewer tokens than the padded "
        "ones, as their Time x Tok/s says as well.\n\n"
        "**Multipack** packs a row for each GPU at a time. On one GPU, which the steps say was "
        "used, that is next fit in random order, the same as RandomPacking; in groups of 8 rows it "
        "fills 98 to 99.7%, and leaves out the examples of its last, incomplete group. Exact best "
        f"fit decreasing needs, at rows of 8,192: {savings} steps, as few as cutting examples does "
        "(FixedLengthPacking), and cuts none. The paper does not have this method.\n\n"
        "**GroupByLength** sorts megabatches of 50 x bs x gas examples, as transformers' Trainer "
        "asks for. **Padding** is the one number that can be checked beyond counts: with bs 4, "
        "padded runs of random order compute 1.7 to 2.1 positions a token here, and took 1.3 to "
        "2.1 times as long as mini-batches without padding in the paper; with bs 2, 1.3 to 1.5 "
        "and 1.1 to 1.4.\n\n"
        "Left out: the tables' throughput, memory and losses, which need training. Printed in the "
        "paper and doubtful: FixedLengthPacking with and without position ids at (2, 4096, 32) "
        "in Table 6 share Time and Tok/s, and the losses of the latter are those of "
        "the former at (1, 8192, 32)."
    )


def main() -> None:
    parser = experiment_parser(__doc__, quick="count one shuffle")
    options = parser.parse_args()
    seeds = range(1 if options.quick else SHUFFLES)
    steps, rows = step_counts(seeds), row_counts(seeds)
    tables = [datasets_table()]
    for number, name in zip((4, 5, 6), DATASETS, strict=True):
        tables.append(steps_table([s for s in steps if s.dataset == name], number=number))
    tables += [padding_table(steps), rows_table(rows)]
    against = against_rows(steps, rows)
    show(*tables, against=against, width=200)
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="Packing with position ids: rows and steps",
        how=How.COMPUTED,
        profile="examples are drawn from lognormals with the paper's totals, and counted; no "
        "time is in it.",
        seed=0,
        text=words(steps, rows),
        against=against,
        tables=tables,
        figures=[
            Picture(
                name="lengths",
                caption="Lengths of the three data sets' examples, as drawn here (the paper's "
                "Figure 1)",
                figure=draw_lengths(),
            ),
            Picture(
                name="steps",
                caption="Optimiser steps of an epoch at the smaller gas of each table: diamonds "
                f"the paper's, dots ours with the range of {SHUFFLES} shuffles; below the line "
                "what the paper does not have",
                figure=draw_steps(steps, gas=SMALL_GAS),
            ),
            Picture(
                name="rows",
                caption="Rows of Tables 2 and 3 over the paper's, by model",
                figure=draw_rows(rows),
            ),
        ],
    )


if __name__ == "__main__":
    main()
