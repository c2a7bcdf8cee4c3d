"""Compares the simulator with replays and with real training.

`python -m experiments.beyond.validation [replay|training|all] [--quick]` has two parts:

- replay: random plans are simulated, and executed by real processes that sleep instead of
  computing.
- training: each step of real training runs on a CPU is compared with its simulation, by a profile
  that was calibrated on another run.

Each part stores its numbers in `results/<part>.json`, and the page is made from both files. The
machine should have 2 cores and be idle. With --only, some of the training runs are made and nothing
is written.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.beyond.validation import record, replay, training
from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, Picture, Table, show, write_results

PARTS = ("replay", "training")
SEED = 0
PLANS, QUICK_PLANS = 20, 3
STEPS, QUICK_STEPS = 23, 6
QUICK_RUNS = ("one", "plain", "two", "pp_1f1b")


def main() -> None:
    parser = experiment_parser(__doc__, quick="run less")
    parser.add_argument("part", nargs="?", default="all", choices=(*PARTS, "all"))
    parser.add_argument("--only", nargs="+", choices=[run.name for run in training.RUNS])
    options = parser.parse_args()
    console = Console(highlight=False, markup=False, width=120)
    is_partial = options.quick or options.only
    chosen = PARTS if options.part == "all" else (options.part,)
    found = {part: None if is_partial else record.saved(part) for part in PARTS}
    for part in chosen:
        found[part] = _measured(part, options, console)
        if not is_partial:
            record.save(part, found[part])
    texts, tables, pictures = _page(found)
    show(*tables, width=200)
    if not is_partial:
        write_results(
            Path(__file__).parent,
            title="Validation of the simulator",
            how=How.MEASURED,
            profile="what ran where, and which profile simulated it, is said of each part.",
            seed=SEED,
            text="\n\n".join(texts),
            tables=tables,
            figures=pictures,
        )


def _measured(part: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    if part == "replay":
        count = QUICK_PLANS if options.quick else PLANS
        return replay.measure(count, seed=SEED, say=console.print)
    names = options.only or (QUICK_RUNS if options.quick else [r.name for r in training.RUNS])
    processes = {r.processes for r in training.RUNS if r.name in names}
    runs = [
        r for r in training.RUNS if r.name in names or (r.calibrates and r.processes in processes)
    ]
    steps = QUICK_STEPS if options.quick else STEPS
    return training.measure(runs, steps=steps, say=console.print)


def _page(found: dict[str, Any]) -> tuple[list[str], list[Table], list[Picture]]:
    texts: list[str] = []
    tables: list[Table] = []
    pictures: list[Picture] = []
    if found["replay"] is not None:
        at, plans = replay.parse(found["replay"])
        texts.append(replay.text(at, plans))
        tables.append(replay.table(plans))
        pictures.append(replay.picture(plans))
    if found["training"] is not None:
        at, runs = training.parse(found["training"])
        texts.append(training.text(at, runs))
        tables.append(training.table(runs))
        pictures.append(training.picture(runs))
    return texts, tables, pictures


if __name__ == "__main__":
    main()
