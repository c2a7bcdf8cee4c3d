"""Simulates the settings from which the defaults of the system `wlb` are chosen.

`python -m experiments.beyond.system_defaults [--steps 160] [--seed 1] [--quick]` simulates whole
runs of the configurations of Table 1: with Algorithm 1 (S_max 2, `balanced` sharding), and with
`bounded` over several ranges of attention's price. The table has the speed-up over Algorithm 1, the
share of perfect balance and the delay. Planner and simulator use the same prices, those of profile
`h100_runs`, so no price is wrong.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.harness import constants
from experiments.harness.constants import FLASH_3, TABLE_1, title
from experiments.harness.evaluation import Case, Outcome, arguments, outcomes, steps_of
from experiments.harness.pages import How, Table, show, write_results

SHARED = ("packing.s_max=2.0", "packing.memory_gib=76", "sharding.strategy=balanced")
BOUNDED = (*SHARED, "packing.policy=bounded", "packing.step_tokens=1.5")
SETTINGS = {
    "Algorithm 1": (*SHARED, "packing.policy=var_len"),
    "one price": BOUNDED,
    "0.7 to 1.25": (*BOUNDED, "packing.price_range=[0.7,1.25]"),
    "0.7 to 1.6": (*BOUNDED, "packing.price_range=[0.7,1.6]"),
}
RECOMPUTE = ("training.recompute=none", "training.recompute=selective")
TEXT = """All documents are trained, including those that are delayed. Each setting is tried without
and with recomputed MLPs, and the faster that fits 80 GiB counts. Perfect balance: every micro-batch
and CP rank takes the mean time of its step, with documents priced whole. wlb/spec/README.md has the
defaults that follow from this table."""


def main(arguments_: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "").parse_args(arguments_)
    configs = TABLE_1 if not options.quick else tuple(TABLE_1)[:2]
    pairs = [(config, name) for config in configs for name in SETTINGS]
    groups = [
        [
            Case(
                name=name,
                config=config,
                overrides=(*SETTINGS[name], recompute),
                steps=steps_of(options),
                seed=options.seed,
                kernel=FLASH_3,
            )
            for recompute in RECOMPUTE
        ]
        for config, name in pairs
    ]
    found = dict(zip(pairs, outcomes(groups), strict=True))
    table = table_of(found)
    if options.quick:
        show(table)
        return
    write_results(
        Path(__file__).parent,
        title="Defaults of the system wlb",
        how=How.SIMULATED,
        profile=constants.profile(),
        seed=options.seed,
        text=TEXT.replace("\n", " "),
        tables=[table],
    )


def table_of(found: dict[tuple[str, str], Outcome]) -> Table:
    """Returns the table with a row for each configuration and a last row of means."""
    rows: list[list[object]] = []
    for config in dict.fromkeys(config for config, _ in found):
        base = found[config, "Algorithm 1"]
        row: list[object] = [title(config)]
        for name in SETTINGS:
            one = found[config, name]
            row += [round(one.over(base), 4), round(one.of_bound, 4), round(one.mean_delay, 3)]
        rows.append(row)
    numbers = np.array([row[1:] for row in rows], float)
    rows.append(["mean", *(round(float(x), 4) for x in numbers.mean(0))])
    columns = [f"{name}: {what}" for name in SETTINGS for what in ("speed-up", "of bound", "delay")]
    return Table(
        name="settings",
        title="Speed-up over Algorithm 1, share of perfect balance, mean delay in steps",
        columns=("configuration", *columns),
        rows=rows,
    )


if __name__ == "__main__":
    main()
