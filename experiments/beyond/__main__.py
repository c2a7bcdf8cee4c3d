"""Simulates more than the paper: each part of ours alone and together, schedules, tails.

`python -m experiments.beyond [--steps 160] [--seed 1] [--quick]` has two parts:

1. `parts`: Table 1's configurations with each part of ours, alone and together.
2. `tail`: 7B-128K with longer and shorter tails of the length distribution.

Numbers of pipelines and of GPUs are `experiments.many_pipelines`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments import constants
from experiments.configurations import TABLE_1, configuration, title
from experiments.drawing import COLOURS, HATCHES, new_figure
from experiments.evaluation import (
    EARLIER_GIB,
    GIB,
    WAYS_BY_NEED,
    Case,
    Outcome,
    arguments,
    mean,
    outcomes,
    steps_of,
    system,
)
from experiments.results import Against, How, Picture, Table, show, write_results

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
CHUNKS, MORE, NEED = "+ all chunks", "+ more micro-batches", "+ keys by need"
DELAYS = ("pp.weight_delay=2", "pp.weight_delay=4")
NUMBERS = (4, 5, 6)
"""A global batch of 4 windows per pipeline is packed into this many micro-batches per pipeline."""


def chunks(config: str) -> str:
    """Returns the setting of as many virtual stages as a pipeline rank has layers."""
    spec = configuration(config)
    return f"pp.virtual_stages={spec.model.num_layers // spec.parallel.pp}"


def variants(config: str) -> dict[str, tuple[str, ...]]:
    """Returns the variants that are compared, by name; the first is the baseline."""
    ours = (*BOUNDED, MEMORY)
    return {
        "Plain-4D": PLAIN,
        "zero-bubble": (*PLAIN, ZERO_BUBBLE),
        "hybrid": (*PLAIN[:2], HYBRID),
        "balanced": (*PLAIN[:2], BALANCED),
        "bounded": (*ours, PLAIN[2]),
        "bounded + hybrid": (*ours, HYBRID),
        "bounded + balanced": (*ours, BALANCED),
        NEED: (*ours, BALANCED),
        "+ zero-bubble": (*ours, BALANCED, ZERO_BUBBLE),
        "+ late weights": (*ours, BALANCED, ZERO_BUBBLE, LATE),
        CHUNKS: (*ours, BALANCED, ZERO_BUBBLE, LATE, chunks(config)),
        MORE: (*ours, BALANCED, ZERO_BUBBLE, LATE, chunks(config)),
        f"bounded + balanced {MORE}": (*ours, BALANCED),
        "Plain-4D, all of these": (*PLAIN, ZERO_BUBBLE, LATE, chunks(config)),
    }


def group(name: str, config: str, overrides: Sequence[str], **options: Any) -> list[Case]:
    """Returns a variant's alternatives, of which the fastest that fits counts.

    They are without and with recomputed MLPs, though baselines never recompute. With all chunks,
    weight gradients may also wait longer, and each of NUMBERS is tried where there may be more
    micro-batches.
    """
    recomputes = RECOMPUTE if "packing.policy=bounded" in overrides else RECOMPUTE[:1]
    delays = DELAYS if name in (CHUNKS, MORE) else ()
    dp = max(1, configuration(config).parallel.dp)
    numbers = [f"packing.num_micro_batches={n * dp}" for n in NUMBERS if MORE in name]
    ways = WAYS_BY_NEED if name == NEED else ((),)
    return [
        Case(name=name, config=config, overrides=(*overrides, *way, *chosen), **options)
        for way in ways
        for chosen in product(recomputes, *(some for some in (delays, numbers) if some))
    ]


def parts(steps: int, seed: int) -> tuple[Table, dict[str, dict[str, Outcome]]]:
    """Simulates part 1: the parts of ours on Table 1's configurations, alone and together.

    These are `bounded` packing, hybrid and balanced sharding, zero-bubble (torch's ZB1P; weights
    that wait twice as long; also with as many virtual stages as a rank has layers), and packing
    into more micro-batches than the global batch has windows. The bound of perfect balance and
    Plain-4D with zero-bubble stand beside them.
    """
    keys = [(c, name) for c in TABLE_1 for name in variants(c)]
    groups = [group(name, c, variants(c)[name], steps=steps, seed=seed) for c, name in keys]
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
    table = Table(
        name="parts",
        title="Speed-up over Plain-4D with interleaved 1F1B",
        columns=columns,
        rows=rows,
        formats=dict.fromkeys(columns[1:-1], ".3f") | {"GiB": ".1f"},
        note="of bound, least: mean and least of configurations: time with every micro-batch and "
        "CP rank at its step's mean over time, same schedule and tokens. GiB: the fullest GPU.",
    )
    return table, found


def tails(steps: int, seed: int) -> Table:
    """Simulates part 2: WLB-LLM and ours over Plain-4D by the tail of the lengths."""
    base = constants.FAMILY
    families = {
        "as fitted": base,
        "no document at the window": replace(base, atom_token_share=0.0),
        "half of them": replace(base, atom_token_share=base.atom_token_share / 2),
        "half as many again": replace(base, atom_token_share=base.atom_token_share * 1.5),
        "no tail": replace(base, tail_token_share=0.0),
        "tail of twice the tokens": replace(base, tail_token_share=base.tail_token_share * 2),
        "neither": replace(base, tail_token_share=0.0, atom_token_share=0.0),
    }
    systems = ("plain_4d", "paper", "wlb")
    groups = [
        system(name, "7b_128k", gib=EARLIER_GIB, steps=steps, seed=seed, family=family)
        for family in families.values()
        for name in systems
    ]
    found = iter(outcomes(groups))
    rows: list[list[Any]] = []
    for label in families:
        plain, paper, ours = (next(found) for _ in systems)
        gains = [paper.over(plain), ours.over(plain), plain.time_s / ours.bound_s]
        rows.append([label, plain.step_s, *gains, ours.of_bound, ours.bubble])
    columns = ["", "Plain-4D s/step", "WLB-LLM", "ours", "perfect balance", "of bound", "bubble"]
    formats = dict.fromkeys(columns[1:6], ".3f") | {"bubble": ".1%"}
    title = "7B-128K by the tail of the lengths"
    return Table(name="tail", title=title, columns=columns, rows=rows, formats=formats)


def draw(found: dict[str, dict[str, Outcome]]) -> Any:
    """Draws the mean over configurations, one bar per system, and each configuration's dot."""
    names = list(next(iter(found.values())))
    figure, (axes,) = new_figure(height=4.2)
    at = np.arange(len(names))
    gains = np.array([[o[n].over(o[names[0]]) for n in names] for o in found.values()])
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


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    steps = steps_of(options)
    table, found = parts(steps, options.seed)
    best = mean(o[MORE].over(o["Plain-4D"]) for o in found.values())
    alone = mean(o[CHUNKS].over(o["Plain-4D"]) for o in found.values())
    hybrid = [o["bounded + hybrid"].of_bound for o in found.values()]
    against = [
        Against(
            what="average with everything (the paper's system)", paper=1.23, ours=round(best, 3)
        )
    ]
    tables = [table, tails(steps, options.seed)]
    show(*tables, against=against, width=180)
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="Beyond the paper: parts, schedules, tails",
        how=How.SIMULATED,
        profile=constants.profile(),
        seed=options.seed,
        text=(
            f"`bounded` with hybrid sharding reaches {mean(hybrid):.1%} of the bound of perfect "
            f"balance on average and {min(hybrid):.1%} at least (held and flushed tokens counted). "
            f"With balanced sharding, zero-bubble, weights' gradients that wait longer "
            f"(`pp.weight_delay = 2` or 4, whichever is faster) and as many virtual stages as a "
            f"rank has layers it is {alone:.2f} times as fast as Plain-4D with interleaved 1F1B "
            f"and 4 virtual stages, on average, and packed into more micro-batches "
            f"(`packing.num_micro_batches`: 4, 5 or 6 a pipeline, whichever is fastest, of the 4 "
            f"windows that Plain-4D has to run as 4) {best:.2f} times: bubbles get shorter, and "
            f"documents of a window still find company. Plain-4D gains from the schedule too "
            f"(last row).\n\n"
            f"Memory stays under 80 GiB: packing is told 76, and MLPs are recomputed where a "
            f"larger S_max or T is worth it (`training.recompute = selective`, tried for each). "
            f"Many pipelines and GPUs: `experiments/many_pipelines/results`."
        ),
        against=against,
        tables=tables,
        figures=[
            Picture(
                name="parts",
                caption="Parts of ours alone and together, over Plain-4D with interleaved 1F1B.",
                figure=draw(found),
            )
        ],
    )


if __name__ == "__main__":
    main()
