"""Simulates each part of wlb that goes beyond the paper, alone and together with the others.

`python -m experiments.beyond.parts [--steps 160] [--seed 1] [--take] [--quick]` simulates the
configurations of Table 1 with `bounded` packing, hybrid and balanced sharding, zero-bubble
schedules and more micro-batches than windows, at the prices of FlashAttention-3. `--take` writes
the page anew from the table of earlier results.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import constants
from experiments.harness.constants import FLASH_3, KERNELS, TABLE_1, configuration, title
from experiments.harness.drawing import COLOURS, HATCHES, new_figure
from experiments.harness.evaluation import (
    BY_NEED,
    EARLIER_GIB,
    GIB,
    Case,
    Outcome,
    arguments,
    mean,
    outcomes,
    steps_of,
)
from experiments.harness.pages import (
    Against,
    How,
    Picture,
    Table,
    commit_of,
    read_table,
    show,
    write_results,
)

FOLDER = Path(__file__).parent
ZERO_BUBBLE = "pp.schedule=interleaved_zero_bubble"
LATE = "pp.weight_delay=2"
BOUNDED = (
    "packing.policy=bounded",
    "packing.s_max=2.0",
    "packing.step_tokens=1.5",
    "packing.price_range=[0.7,1.6]",
)
MEMORY = f"packing.memory_gib={EARLIER_GIB:g}"
PLAIN = ("packing.policy=original", "packing.window_cut=short", "sharding.strategy=per_sequence")
HYBRID, BALANCED = "sharding.strategy=hybrid", "sharding.strategy=balanced"
RECOMPUTE = ("training.recompute=none", "training.recompute=selective")
CHUNKS, MORE, NEED = "+ all chunks", "+ more micro-batches", "bounded + balanced + keys by need"
PLAIN_TOO = "Plain-4D, zero-bubble, late weights, all chunks"
DELAYS = ("pp.weight_delay=2", "pp.weight_delay=4")
NUMBERS = (4, 5, 6)
"""Micro-batches per pipeline to try; a global batch has 4 windows per pipeline."""


def chunks(config: str) -> str:
    """Returns the setting that makes every layer of a pipeline rank a virtual stage."""
    spec = configuration(config)
    return f"pp.virtual_stages={spec.model.num_layers // spec.parallel.pp}"


def variants(config: str) -> dict[str, tuple[str, ...]]:
    """Returns the overrides of the compared variants, by name; the first is the baseline.

    A variant whose name begins with "+" has everything of the variant before it, too.
    """
    ours = (*BOUNDED, MEMORY)
    return {
        "Plain-4D": PLAIN,
        "zero-bubble": (*PLAIN, ZERO_BUBBLE),
        "hybrid": (*PLAIN[:2], HYBRID),
        "balanced": (*PLAIN[:2], BALANCED),
        "bounded": (*ours, PLAIN[2]),
        "bounded + hybrid": (*ours, HYBRID),
        "bounded + balanced": (*ours, BALANCED),
        "+ zero-bubble": (*ours, BALANCED, ZERO_BUBBLE),
        "+ late weights": (*ours, BALANCED, ZERO_BUBBLE, LATE),
        CHUNKS: (*ours, BALANCED, ZERO_BUBBLE, LATE, chunks(config)),
        MORE: (*ours, BALANCED, ZERO_BUBBLE, LATE, chunks(config)),
        NEED: (*ours, BALANCED),
        f"bounded + balanced {MORE}": (*ours, BALANCED),
        PLAIN_TOO: (*PLAIN, ZERO_BUBBLE, LATE, chunks(config)),
    }


def group(name: str, config: str, overrides: Sequence[str], **options: Any) -> list[Case]:
    """Returns the alternatives of a variant; the fastest that fits into memory counts.

    With `bounded` packing, each is tried without and with recomputed MLPs; others never recompute.
    Variants with all chunks are tried with each of DELAYS, and variants with more micro-batches
    with each of NUMBERS.
    """
    recomputes = RECOMPUTE if "packing.policy=bounded" in overrides else RECOMPUTE[:1]
    delays = DELAYS if name in (CHUNKS, MORE) else ()
    dp = max(1, configuration(config).parallel.dp)
    numbers = [f"packing.num_micro_batches={n * dp}" for n in NUMBERS if MORE in name]
    ways = (BY_NEED,) if name == NEED else ((),)
    return [
        Case(name=name, config=config, overrides=(*overrides, *way, *chosen), **options)
        for way in ways
        for chosen in product(recomputes, *(some for some in (delays, numbers) if some))
    ]


ABOUT: dict[str, Any] = {
    "name": "parts",
    "title": f"Speed-up over Plain-4D with interleaved 1F1B, {KERNELS[FLASH_3]}",
    "formats": dict.fromkeys([*map(title, TABLE_1), "mean", "of bound", "least"], ".3f")
    | {"GiB": ".1f"},
    "note": "A row that begins with + adds to the one above. of bound, least: mean and least of "
    "configurations: time with every micro-batch and CP rank at its step's mean over time, same "
    f"schedule and tokens. GiB: the fullest GPU. {constants.worth_of_prices()}",
}
"""Fields of the `Table` apart from its columns and rows."""


def parts(steps: int, seed: int) -> Table:
    """Simulates all variants on the configurations of Table 1 and returns their table.

    Zero-bubble is torch's ZB1P; "late weights" computes weight gradients later than ZB1P does, and
    "all chunks" makes every layer a virtual stage.
    """
    keys = [(c, name) for c in TABLE_1 for name in variants(c)]
    options = {"steps": steps, "seed": seed, "kernel": FLASH_3}
    groups = [group(name, c, variants(c)[name], **options) for c, name in keys]
    found: dict[str, dict[str, Outcome]] = {c: {} for c in TABLE_1}
    for (config, name), result in zip(keys, outcomes(groups), strict=True):
        found[config][name] = result
    names = list(variants(TABLE_1[0]))
    rows = [
        [
            name,
            *(found[c][name].over(found[c][names[0]]) for c in TABLE_1),
            mean(found[c][name].over(found[c][names[0]]) for c in TABLE_1),
            mean(found[c][name].of_bound for c in TABLE_1),
            min(found[c][name].of_bound for c in TABLE_1),
            max(found[c][name].memory_bytes for c in TABLE_1) / GIB,
        ]
        for name in names
    ]
    columns = ["system", *map(title, TABLE_1), "mean", "of bound", "least", "GiB"]
    return Table(columns=columns, rows=rows, **ABOUT)


def earlier_parts() -> Table:
    """Reads the table of earlier results and recomputes its means, which the CSV has rounded."""
    table = read_table(FOLDER, **ABOUT)
    at, num = table.columns.index("mean"), len(TABLE_1)
    rows = [[*row[:at], mean(row[1 : 1 + num]), *row[at + 1 :]] for row in table.rows]
    return replace(table, rows=rows)


def draw(table: Table) -> Any:
    """Draws the mean speed-up of each variant as a bar, and each configuration as a dot."""
    names = [row[0] for row in table.rows]
    figure, (axes,) = new_figure(height=4.2)
    at = np.arange(len(names))
    gains = np.array([row[1 : 1 + len(TABLE_1)] for row in table.rows], float).T
    colours = [COLOURS[1 if n.startswith("Plain") else 0] for n in names]
    bars = axes.barh(at, gains.mean(axis=0), color=colours, edgecolor="white")
    for bar, name in zip(bars, names, strict=True):
        bar.set_hatch(HATCHES[1] if name.startswith("Plain") else HATCHES[0])
    for row in gains:
        axes.plot(row, at, "o", color="#000000", markersize=2.5, alpha=0.7)
    for y, gain in zip(at, gains.mean(axis=0), strict=True):
        axes.text(0.91, y, f"{gain:.2f}", color="white", va="center", fontsize=9, weight="bold")
    axes.set_yticks(at, names)
    axes.invert_yaxis()
    axes.set(xlabel="speed-up over Plain-4D (bars: mean of 8 configurations; dots: each)")
    axes.set_xlim(0.9, None)
    return figure


def by_system(table: Table) -> dict[str, dict[str, Any]]:
    """Returns the rows of the table by the variant's name, each as values by column."""
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def text_of(table: Table) -> str:
    """Returns the page's text about the parts."""
    of = by_system(table)
    hybrid, need, plain = of["bounded + hybrid"], of[NEED], of[PLAIN_TOO]["mean"]
    alone, best = of[CHUNKS]["mean"], of[MORE]["mean"]
    own = need["mean"] / of["bounded + balanced"]["mean"]
    return (
        f"`bounded` with hybrid sharding reaches {hybrid['of bound']:.1%} of the bound of perfect "
        f"balance on average and {hybrid['least']:.1%} at least (held and flushed tokens counted). "
        f"With balanced sharding, zero-bubble, weights' gradients that wait longer "
        f"(`pp.weight_delay = 2` or 4, whichever is faster) and as many virtual stages as a "
        f"rank has layers it is {alone:.2f} times as fast as Plain-4D with interleaved 1F1B "
        f"and 4 virtual stages, on average, and packed into more micro-batches "
        f"(`packing.num_micro_batches`: 4, 5 or 6 a pipeline, whichever is fastest, of the 4 "
        f"windows that Plain-4D has to run as 4) {best:.2f} times: bubbles get shorter, and "
        f"documents of a window still find company.\n\n"
        f"Not all of it is balance. Plain-4D with the same schedule (zero-bubble, "
        f"`pp.weight_delay = 2`, all chunks) is {plain:.2f} times as fast as without, so that "
        f"balance alone is worth {alone / plain:.2f} of the {alone:.2f}. Keys by need make ours "
        f"{own:.2f} times as fast ({need['mean']:.2f} without the schedule), where all-gathers of "
        f"keys are priced as exposed; they stand in a row of their own and in no other, and "
        f"Plain-4D gains from them too (`experiments/paper/fig12/results`).\n\n"
        f"Memory stays under 80 GiB: packing is told {EARLIER_GIB:g}, and MLPs are recomputed "
        f"where a larger S_max or T is worth it (`training.recompute = selective`, tried for "
        f"each)."
    )


def main(arguments_: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", takes="write the page again from earlier results")
    options = parser.parse_args(arguments_)
    table = earlier_parts() if options.take else parts(steps_of(options), options.seed)
    taken = f"\n\nThe table is of commit {commit_of(FOLDER)}." if options.take else ""
    best = by_system(table)[MORE]["mean"]
    against = [
        Against(
            what="average with everything but keys by need (the paper's system)",
            paper=1.23,
            ours=round(best, 3),
        )
    ]
    show(table, against=against, width=180)
    if options.quick:
        return
    write_results(
        FOLDER,
        title="Beyond the paper: parts and schedules",
        how=How.SIMULATED,
        profile=constants.profile(),
        seed=options.seed,
        text=text_of(table) + taken,
        against=against,
        tables=[table],
        figures=[
            Picture(
                name="parts",
                caption="Parts of ours alone and together, over Plain-4D with interleaved 1F1B "
                "(FlashAttention-3).",
                figure=draw(table),
            )
        ],
    )


if __name__ == "__main__":
    main()
