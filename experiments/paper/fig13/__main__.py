"""Simulates Figure 13: what each part of WLB-LLM contributes on the 7B model, 128K window.

`python -m experiments.paper.fig13 [--steps 160] [--seed 1] [--quick]` adds parts to Plain-4D alone
and together: per-document sharding, adaptive sharding, variable-length packing with delayed
outliers, and that packing with adaptive sharding. Then come our parts, which the paper does not
have: `bounded` packing, `balanced` sharding, both together, and both with the `needed` exchange of
keys, without and with overlap. Everything is simulated with the prices of FlashAttention-2 and of
FlashAttention-3.
"""

from pathlib import Path
from typing import Any

from experiments.harness import constants
from experiments.harness.constants import FLASH_2, FLASH_3, KERNELS
from experiments.harness.evaluation import BY_NEED, Case, arguments, outcomes, steps_of
from experiments.harness.pages import Against, How, Picture, Table, show, write_results
from experiments.paper.fig13.waterfall import WaterfallRow, waterfall_figure

CONFIG = "7b_128k"
PLAIN = ("packing.policy=original", "packing.window_cut=short", "sharding.strategy=per_sequence")
SHARDS = "sharding.remainder=one_by_one"
BOUNDED = (
    "packing.policy=bounded",
    "packing.s_max=2.0",
    "packing.step_tokens=1.5",
    "packing.price_range=[0.7,1.6]",
)
PARTS: tuple[tuple[str, tuple[str, ...], float | None], ...] = (
    ("Plain-4D", PLAIN, 1.0),
    ("per-document sharding", (*PLAIN[:2], "sharding.strategy=per_document", SHARDS), 1.02),
    ("adaptive sharding", (*PLAIN[:2], "sharding.strategy=adaptive", SHARDS), 1.05),
    ("packing (Algorithm 1)", ("packing.policy=var_len", PLAIN[2]), 1.28),
    ("WLB-LLM: both", ("packing.policy=var_len", "sharding.strategy=adaptive", SHARDS), 1.33),
    ("bounded packing", (*BOUNDED, PLAIN[2]), None),
    ("balanced sharding", (*PLAIN[:2], "sharding.strategy=balanced"), None),
    ("bounded and balanced", (*BOUNDED, "sharding.strategy=balanced"), None),
    ("+ keys by need", (*BOUNDED, "sharding.strategy=balanced", BY_NEED[0]), None),
    ("+ overlap", (*BOUNDED, "sharding.strategy=balanced", *BY_NEED), None),
)


def draw(gain: list[float], papers: list[float | None]) -> Any:
    """Draws a bar for each part: the speed-up that it adds to the parts before it."""
    return waterfall_figure(
        [
            WaterfallRow("Plain-4D", 1.0, papers[0]),
            WaterfallRow("per-document sharding", gain[1] - 1, papers[1]),
            WaterfallRow("adaptive instead", gain[2] - gain[1], papers[2]),
            WaterfallRow("Algorithm 1's packing", gain[4] - gain[2], papers[4]),
            WaterfallRow("bounded and balanced instead", gain[7] - gain[4]),
            WaterfallRow("keys by need, overlapped", gain[9] - gain[7]),
        ],
        total="ours",
        ylabel="speed-up over Plain-4D",
    )


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    steps = steps_of(options)
    cases = [
        [Case(name=label, config=CONFIG, overrides=o, steps=steps, seed=options.seed, kernel=k)]
        for k in KERNELS
        for label, o, _ in PARTS
    ]
    everything = outcomes(cases)
    at = {k: everything[i * len(PARTS) : (i + 1) * len(PARTS)] for i, k in enumerate(KERNELS)}
    gains = {k: [one.over(own[0]) for one in own] for k, own in at.items()}
    gain = gains[FLASH_2]
    papers = [paper for _, _, paper in PARTS]
    rows = [
        [label, f"{paper:.2f}" if paper else "", g, other, o.imbalance, o.bubble, o.of_bound]
        for (label, _, paper), g, other, o in zip(
            PARTS, gain, gains[FLASH_3], at[FLASH_2], strict=True
        )
    ]
    titles = list(KERNELS.values())
    table = Table(
        name="breakdown",
        title="7B-128K, speed-up over Plain-4D",
        columns=["system", "paper", *titles, "imbalance", "bubble", "of bound"],
        rows=rows,
        formats=dict.fromkeys([*titles, "imbalance", "of bound"], ".3f") | {"bubble": ".1%"},
        note="imbalance: slowest micro-batch over mean, forward and backward, time-weighted. It, "
        f"bubble and of bound are FlashAttention-2's. {constants.worth_of_prices()}",
    )
    against = [
        Against(what=label, paper=paper, ours=round(g, 3))
        for (label, _, paper), g in zip(PARTS[1:], gain[1:], strict=True)
        if paper
    ]
    show(table, against=against)
    if options.quick:
        return
    text = (
        "Parts of WLB-LLM alone and together on 7B-128K (TP 8, CP 2, PP 4), then ours. In the "
        "picture parts are added one after the other, in the table each stands alone unless it "
        "says both. Behind packing, sharding gains more here than in the paper, and packing alone "
        "gains less: the fitted lengths leave per-sequence sharding of two CP ranks more "
        "imbalanced than the paper's corpus seems to have, and packing alone cannot shorten what "
        "the slower CP rank makes long. Packing alone agrees least with the paper: it lacks what "
        "one of two CP ranks waits for the other. WLB-LLM is "
        f"{gain[4]:.3f} times as fast with FlashAttention-2 and {gains[FLASH_3][4]:.3f} times with "
        "FlashAttention-3; the paper has 1.33 and does not name its kernel. `bounded` packs by "
        "S_max 2 and T 1.5, without a cap of memory, which both fit."
    )
    write_results(
        Path(__file__).parent,
        title="Figure 13: breakdown on 7B-128K",
        how=How.SIMULATED,
        profile=constants.profile(),
        seed=options.seed,
        text=text,
        against=against,
        tables=[table],
        figures=[
            Picture(
                name="breakdown",
                caption="From Plain-4D to ours, part by part (FlashAttention-2); marks are "
                "the paper's totals.",
                figure=draw(gain, papers),
            )
        ],
    )


if __name__ == "__main__":
    main()
