"""Compares three libraries' own batches with ours and writes the results page.

`python -m experiments.hosts` needs the extras [hf,torchtitan,megatron] and takes some 12 minutes
on two cores. With --quick it runs one seed and writes nothing.
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
            f"{WINDOW}. Each library deals them by its own loader or scheduler and by wlb's "
            f"adapter. transformers and TRL train on two processes; what torchtitan's and "
            f"Megatron-Core's data sides deal is trained by one small LLaMA in one process, since "
            f"their own trainers need GPUs. Libraries differ in what they take for a row (rows of "
            f"at most a window, or documents cut with their next token as label), so losses are to "
            f"be compared within a library."
        ),
        tables=[table_of(rows)],
    )


if __name__ == "__main__":
    main()
