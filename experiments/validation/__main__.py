"""Is the simulator right? `python -m experiments.validation [replay|training|all] [--quick]`

replay: random plans, simulated and run as timed waits on real processes. Each part keeps its
numbers in `results/<part>.json`, and the page is made of the parts that are there. Wants a machine
that does nothing else: 2 cores are enough for 32 processes that sleep.
"""

import argparse
from pathlib import Path

from rich.console import Console

from experiments.results import How, Picture, Table, show, write_results
from experiments.validation import record, replay

PARTS = ("replay",)
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.validation", description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=(*PARTS, "all"))
    parser.add_argument("--quick", action="store_true", help="fewer, and writes nothing")
    options = parser.parse_args()
    console = Console(highlight=False, markup=False)
    chosen = PARTS if options.part == "all" else (options.part,)
    found = {part: record.saved(part) for part in PARTS}
    for part in chosen:
        found[part] = replay.measure(3 if options.quick else 20, seed=SEED, say=console.print)
        if not options.quick:
            record.save(part, found[part])
    texts: list[str] = []
    tables: list[Table] = []
    pictures: list[Picture] = []
    if (made := found["replay"]) is not None:
        at, plans = replay.parse(made)
        texts.append(replay.text(at, plans))
        tables.append(replay.table(plans))
        pictures.append(replay.picture(plans))
    show(*tables)
    if not options.quick:
        write_results(
            Path(__file__).parent,
            title="Validation of the simulator",
            how=How.MEASURED,
            profile="see each part",
            seed=SEED,
            text="\n\n".join(texts),
            tables=tables,
            figures=pictures,
        )


if __name__ == "__main__":
    main()
