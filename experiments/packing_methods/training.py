"""Real fine-tuning by every method at equal epochs: `python -m experiments.packing_methods.training`.

A model of 5 million parameters is trained on Python sources of other packages, then fine-tuned for
one epoch on conversations about the standard library's docstrings, by each of the paper's methods
at the layouts of its Tables 4 to 6, three seeds each. Everything is kept in --folder: the same
command goes on where it was interrupted, and writes `training/results` when all is there.
"""

import argparse
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.packing_methods.cases import Case, Study, all_cases, rate_cases

SEEDS = 3
LEARNING_RATE = 2e-3


def run_all(study: Study, cases: list[Case], *, jobs: int) -> None:
    """Trains what is missing, `jobs` at a time, in order."""
    missing = [case for case in cases if study.result(case) is None]
    print(f"{len(cases) - len(missing)} of {len(cases)} runs are there", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        for case, made in zip(missing, pool.map(study.run, missing), strict=True):
            print(
                f"{case.name}: {made.steps} steps, held-out loss {made.heldout_before:.3f} -> "
                f"{made.heldout_after:.3f}, {made.tokens_per_s:,.0f} tokens/s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/packing_methods"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--rates-only", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    study = Study.open(options.folder.absolute())
    study.train_base()
    run_all(study, rate_cases(), jobs=options.jobs)
    if options.rates_only:
        return
    run_all(study, all_cases(range(options.seeds), LEARNING_RATE), jobs=options.jobs)


if __name__ == "__main__":
    main()
