"""Compares how wlb and other frameworks balance one training step, and writes the results page.

`python -m experiments.beyond.step_balance --peers FOLDER [--lengths FOLDER]` takes the other
frameworks from wheels and source trees in the first folder, or from installed packages. It names
frameworks that are missing, and the command that gets them. Files of real lengths in the second
folder add rows. It takes some 10 minutes. With --quick it runs small cells only and writes nothing.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.beyond.step_balance.cells import MINI_BATCHES, SHAPES, cell, timed
from experiments.beyond.step_balance.families import FAMILIES, draw, files
from experiments.beyond.step_balance.peers import MAKERS, found_peers
from experiments.beyond.step_balance.sources import Sources
from experiments.beyond.step_balance.tables import FREE, aims, rows_of, speed, summary
from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, Table, show, this_machine, write_results
from wlb.plan import IntArray

SEED = 0
ONE_THREAD = "OPENBLAS_NUM_THREADS"
"""This variable limits NumPy to one thread. Waiting threads would count as CPU time of a call."""
QUICK = ((8, 128), (8, 768))
WITH_MINI_BATCHES = ((8, 768), (8, 2048), (64, 2048), (64, 8192))


def steps(
    shapes: Sequence[tuple[int, int]], given: Path | None
) -> Iterator[tuple[str, int, IntArray]]:
    """Yields (name, ranks, lengths) of every step.

    Args:
        shapes: (ranks, samples) of the steps.
        given: Folder with files of real lengths. A step takes the first samples of a file.
    """
    for ranks, samples in shapes:
        print(f"{samples:,} samples on {ranks} ranks", file=sys.stderr, flush=True)
        for family in FAMILIES:
            yield family, ranks, draw(family, samples, seed=SEED)
        for name, lengths in files(given) if given else ():
            if lengths.size >= samples:
                yield name, ranks, lengths[:samples]


def once(shapes: Sequence[tuple[int, int]], given: Path | None) -> Table:
    """Returns the table of wlb's divisions for ranks that wait for each other once per step."""
    rows = []
    for name, ranks, lengths in steps(shapes, given):
        for caps in (1, 2):
            balance, ms = timed(lengths, ranks, int(lengths.max()) * caps, 1, wait="step")
            found = balance.lower_bound, balance.imbalance
            rows.append([name, ranks, lengths.size, f"{caps}x", *found, ms])
    return Table(
        name="once_a_step",
        title="Ranks that wait once a step (DDP, ZeRO-1 and 2)",
        columns=("lengths", "ranks", "samples", "cap", "bound", "wlb", "ms"),
        rows=rows,
        formats={"bound": ".4f", "wlb": ".4f", "ms": ".1f"},
        most_rows=100,
    )


def main() -> None:
    parser = experiment_parser(__doc__, quick="run small cells")
    parser.add_argument("--peers", type=Path, help="folder of wheels and source trees")
    parser.add_argument("--lengths", type=Path, help="folder of files of real lengths")
    options = parser.parse_args()
    if ONE_THREAD not in os.environ:  # OpenBLAS reads it on import, so restart the process
        command = [sys.executable, "-m", "experiments.beyond.step_balance", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {ONE_THREAD: "1"})
    peers, missing = found_peers(Sources(options.peers))
    for name, how in missing.items():
        print(f"{name} is missing; get it with: {how}")
    shapes, with_several = (QUICK, QUICK[1:]) if options.quick else (SHAPES, WITH_MINI_BATCHES)
    cells = [
        cell(name, lengths, ranks, caps, peers)
        for name, ranks, lengths in steps(shapes, options.lengths)
        for caps in (1, 2)
    ]
    several = [
        cell(name, lengths, ranks, caps, peers, mini_batches=MINI_BATCHES)
        for name, ranks, lengths in steps(with_several, options.lengths)
        for caps in (1, 2)
    ]
    free = [c for c in cells if c.bound < FREE]
    wait_once = once(shapes, options.lengths)
    bounds, waits = np.array([row[4:6] for row in wait_once.rows], float).T
    tables = [
        aims(cells, several, bounds, waits),
        summary("summary", "All cells", cells, peers),
        summary("balanceable", "Cells whose bound is 1.000", free, peers),
        summary(
            "mini_batches", f"{MINI_BATCHES} mini-batches, equal counts of wlb", several, peers
        ),
        speed(cells),
        rows_of(cells, peers),
        wait_once,
    ]
    show(*tables)
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="Balance within one training step",
        how=How.PREDICTED,
        profile="verl's workload of a 7B model, 24,576 tokens + tokens^2, prices all divisions; "
        f"CPU times of calls are measured ({this_machine()}, other work beside)",
        seed=SEED,
        text=text(missing),
        tables=tables,
        figures=[],
    )


def text(missing: dict[str, str]) -> str:
    families = "\n".join(f"- **{name}**: {what}." for name, what in FAMILIES.items())
    lacking = "".join(f" {name} was not there (`{how}`)." for name, how in missing.items())
    return f"""Every sample of a step is trained in that step. Lengths are drawn from families
with the shapes of rollouts and fine-tuning data:

{families}

The other divisions are made by the frameworks' own functions, called as their trainers call them
({", ".join(MAKERS)}); all are judged by the same prices.{lacking}

**Wait** is the slowest rank's time in each slot (the micro-batches that ranks run at once), summed,
over the mean rank's time in all; where ranks wait once a step, the slowest rank's time over the
mean. **Over bound** is that over the lowest wait possible with this cap, these ranks and these
mini-batches (`StepBalance.lower_bound`). A step whose longest sample fills the cap alone cannot be
balanced: ranks that train shorter samples in its slot have no room for as much work, and the bound
is 1.3 to 1.7."""


if __name__ == "__main__":
    main()
