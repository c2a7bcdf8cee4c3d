"""Trains a small model with every packing policy, to see whether balance costs quality.

`python -m experiments.run fig16` trains it on the same documents with every policy and several
seeds. Where steps have different numbers of tokens, both normalisers of the loss are tried. Other
runs force long documents to wait 1 to 128 steps. The study takes about 11 hours on two cores;
`main` says how runs can be shared between machines and resumed.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, priced_with, show, write_results
from experiments.paper.fig16.arms import ARMS, QUICK, SMALL, Arm, arm_of
from experiments.paper.fig16.page import (
    classes_table,
    curves_table,
    order_table,
    pictures,
    quality_table,
    runs_table,
)
from experiments.paper.fig16.study import Case, Study, cases_of
from experiments.paper.fig16.summary import groups_of
from experiments.paper.fig16.words import against_rows, words
from wlb.cost import load_profile

SEEDS = 3


def train_all(study: Study, cases: list[Case], *, jobs: int) -> None:
    """Trains the runs that have no result yet, in order and `jobs` at a time."""
    missing = [case for case in cases if study.result(case) is None]
    print(f"{len(cases) - len(missing)} of {len(cases)} runs are there", flush=True)
    pool = ThreadPoolExecutor(jobs)
    try:
        for case, made in zip(missing, pool.map(study.run, missing), strict=True):
            said = f"{made.num_steps} steps, held-out loss {made.final:.4f}"
            print(f"{case.name}: {said}", flush=True)
    finally:
        # Ctrl-C ends the running trainings, which receive it as well. Start no others.
        pool.shutdown(cancel_futures=True)


def write_page(study: Study, cases: list[Case], options: argparse.Namespace) -> None:
    """Writes the page from all finished runs; with `--quick`, only prints the tables."""
    ended = [(c, r) for c in cases if (r := study.result(c)) is not None]
    results = {(c.arm.name, c.seed): r for c, r in ended}
    books = {(c.arm.packing, c.seed): study.books(c) for c, _ in ended}
    groups = groups_of(results, books)
    if not groups:
        raise SystemExit(
            f"{len(ended)} runs have ended in {study.folder}, none of them beside the run that it "
            f"is compared with (original, or hold-0 for forced delays); nothing to show"
        )
    every = study.scale.eval_tokens
    grid = range(0, groups[0].results[0].num_tokens + 1, every)
    tables = [quality_table(groups, grid[-1]), order_table(groups)]
    against = against_rows(groups)
    show(*tables, against=against, width=220)
    if options.quick:
        return
    commits = ", ".join(sorted({r.commit for r in results.values()}))
    missing = ""
    if len(ended) < len(cases):
        missing = (
            f"**Not finished: {len(ended)} of {len(cases)} runs have ended.** `python -m "
            f"experiments.paper.fig16 --take experiments/paper/fig16/results/runs` goes on.\n\n"
        )
    written = write_results(
        Path(__file__).parent,
        title="Convergence: does balance cost quality?",
        how=How.MEASURED,
        command="python -m experiments.run fig16",
        profile=f"{study.scale_spec().training.dtype} on CPU, one thread a run; runs of commit "
        f"{commits}. Packing is priced with {priced_with(load_profile(str(study.profile)))}",
        text=missing + words(study, groups, grid),
        against=against,
        tables=[*tables, classes_table(groups), runs_table(groups), curves_table(groups)],
        figures=pictures(groups, grid),
    )
    study.keep(written / "runs", cases)


def chosen(names: str) -> tuple[Arm, ...]:
    """Returns the arms that a comma-separated list names, in the study's order.

    An empty list stands for all arms.

    Raises:
        ValueError: If there is no arm of a name.
    """
    wanted = [name for name in names.split(",") if name]
    known = [arm.name for arm in ARMS]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--arms {name!r} is not known; known: {', '.join(known)}")
    return tuple(arm_of(name) for name in known if name in wanted or not wanted)


def main() -> None:
    """Trains the chosen runs and writes the page from all finished runs.

    Runs are stored in --folder, so the same command resumes an interrupted study.

    Several machines can share the work: --arms and --seeds choose the runs of a machine. Each
    finished run leaves a small file in `results/runs`, and --take FOLDER imports such files. So
    --take experiments/paper/fig16/results/runs resumes from the committed runs.
    """
    parser = experiment_parser(__doc__, quick="train a tiny model")
    parser.add_argument(
        "--folder", type=Path, default=None, help="for the runs; default: runs/convergence-small"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds of each arm")
    parser.add_argument(
        "--arms", default="", help="arms to train, separated by commas; default: all"
    )
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs, one thread each")
    parser.add_argument(
        "--take", type=Path, help="folder like results/runs, to import finished runs from"
    )
    parser.add_argument(
        "--page-only", action="store_true", help="train nothing; write the page of finished runs"
    )
    options = parser.parse_args()
    scale = QUICK if options.quick else SMALL
    seeds = 1 if options.quick else options.seeds
    folder = options.folder or Path("runs", f"convergence-{scale.name}")
    study = Study.open(scale, folder.absolute())
    every = cases_of(range(seeds if options.quick else max(seeds, SEEDS)))
    if options.take is not None:
        taken = study.take(options.take, every)
        print(f"{len(taken)} runs taken from {options.take}", flush=True)
    if not options.page_only:
        train_all(study, cases_of(range(seeds), chosen(options.arms)), jobs=options.jobs)
    write_page(study, every, options)


if __name__ == "__main__":
    main()
