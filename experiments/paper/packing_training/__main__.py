"""Fine-tunes a small model with every packing method of the packing paper and compares them.

`python -m experiments.paper.packing_training` first trains a model of 5 million parameters on the
sources of Python packages. Then it fine-tunes the model for one epoch on conversations about the
docstrings of the standard library: with each of the paper's methods, at layouts like those of its
Tables 4 to 6, with several seeds each.

Everything is stored in --folder, so the same command resumes after an interruption. When all runs
are finished, it writes `results`. It takes about 75 minutes on two cores.
"""

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, show, write_results
from experiments.paper.packing_training.cases import Case, Result, Study, all_cases, rate_cases
from experiments.paper.packing_training.page import (
    against_rows,
    pictures,
    rates_table,
    training_table,
)
from experiments.paper.packing_training.summary import groups_of
from experiments.paper.packing_training.words import words

SEEDS = 3
QUICK_STEPS = 4


def run_all(study: Study, cases: list[Case], *, jobs: int) -> dict[Case, Result]:
    """Trains the runs that have no result yet, `jobs` at a time, and returns all results."""
    missing = [case for case in cases if study.result(case) is None]
    print(f"{len(cases) - len(missing)} of {len(cases)} runs are there", flush=True)
    pool = ThreadPoolExecutor(jobs)
    try:
        for case, made in zip(missing, pool.map(study.run, missing), strict=True):
            print(
                f"{case.name}: {made.steps} steps, held-out loss {made.heldout_before:.3f} -> "
                f"{made.heldout_after:.3f}, {made.tokens_per_s:,.0f} tokens/s",
                flush=True,
            )
    finally:
        # Ctrl-C ends the running trainings, which receive it as well. Start no others.
        pool.shutdown(cancel_futures=True)
    return {case: study.run(case) for case in cases}


def best_rate(rates: dict[Case, Result]) -> float:
    """Returns the learning rate with the lowest held-out loss of mini-batch packing.

    Mini-batch packing is the paper's method, and takes many small steps.
    """
    found = [
        (r.heldout_after, c.learning_rate)
        for c, r in rates.items()
        if c.method == "mini_batch_posid" and r.heldout_after is not None
    ]
    return min(found)[1]


def study_of(options: argparse.Namespace) -> None:
    study = Study.open(options.folder.absolute())
    study.train_base()
    rates = run_all(study, rate_cases(), jobs=options.jobs)
    cases = all_cases(range(options.seeds), best_rate(rates))
    found = run_all(study, cases, jobs=options.jobs)
    groups = groups_of(found)
    tables = [training_table(groups), rates_table(rates)]
    against = against_rows(groups)
    show(*tables, against=against, width=200)
    write_results(
        Path(__file__).parent,
        title="Packing with position ids: training",
        how=How.MEASURED,
        command=f"python -m experiments.paper.packing_training --seeds {options.seeds}",
        profile="two runs at a time on two CPU cores, one thread each; tokens/s by the processor "
        "time of the model's passes, peak memory by the operating system. Runs of commit "
        f"{', '.join(sorted({made.commit for made in found.values()}))}.",
        text=words(groups, rates),
        against=against,
        tables=tables,
        figures=pictures(groups),
    )


def quick() -> None:
    """Trains a few steps of three methods from random weights, only to check that they run."""
    with tempfile.TemporaryDirectory() as folder:
        study = Study.open(Path(folder))
        for method in ("random_padding", "mini_batch_posid", "multipack_bfd_posid"):
            case = Case(method=method, gas=1, seed=0, learning_rate=1e-3)
            made = study.try_out(case, steps=QUICK_STEPS)
            print(
                f"{case.title}: {made.tokens:,} tokens in {made.positions:,} positions, "
                f"{made.tokens_per_s:,.0f} tokens/s, peak {made.peak_mib:,.0f} MiB, loss "
                f"{made.train_loss:.3f}",
                flush=True,
            )


def main() -> None:
    parser = experiment_parser(__doc__, quick="train a few steps")
    parser.add_argument("--folder", type=Path, default=Path("runs/packing_methods"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs, one thread each")
    options = parser.parse_args()
    run: Callable[[], None] = quick if options.quick else lambda: study_of(options)
    run()


if __name__ == "__main__":
    main()
