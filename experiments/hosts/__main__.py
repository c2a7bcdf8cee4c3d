"""Compares batches that other training libraries make with batches from wlb's adapters.

`python -m experiments.hosts` writes the results page for transformers with TRL, torchtitan and
Megatron-Core. It needs the extras [hf,torchtitan,megatron] and takes some 12 minutes on two cores.
With --quick it runs one seed and writes nothing.
"""

from pathlib import Path

from experiments.harness.arguments import experiment_parser
from experiments.harness.pages import How, show, write_results
from experiments.hosts import hugging_face, megatron, torchtitan
from experiments.hosts.common import ACCUMULATION, NUM_RANKS, WINDOW, table_of

SEEDS = 3


def main() -> None:
    parser = experiment_parser(__doc__, quick="run one seed")
    options = parser.parse_args()
    seeds = 1 if options.quick else SEEDS
    rows = [row for of in (hugging_face, torchtitan, megatron) for row in of.compare(seeds)]
    show(table_of(rows))
    if options.quick:
        return
    write_results(
        Path(__file__).parent,
        title="The planner in other people's loops",
        how=How.PREDICTED,
        profile="attention of a window takes 1.67 times its linear layers' time, as the 7B model's "
        "at 128K does",
        seed=0,
        text=(
            f"Functions and methods of standard-library modules, some 700 documents and 206,000 "
            f"tokens, once: {NUM_RANKS} data-parallel ranks x {ACCUMULATION} micro-batches, window "
            f"{WINDOW}. In each library they are assigned to ranks once by its own loader or "
            f"scheduler and once by wlb's adapter. transformers and TRL train on two processes. "
            f"The trainers of torchtitan and Megatron-Core need GPUs, so one small LLaMA trains "
            f"their batches in one process. Libraries differ in how they cut long documents (into "
            f"rows of at most a window, or with the next token as the last label), so compare "
            f"losses only within a library."
        ),
        tables=[table_of(rows)],
    )


if __name__ == "__main__":
    main()
