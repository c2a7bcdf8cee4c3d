"""Compares three libraries' own batches with ours and writes the results page.

`python -m experiments.hosts` needs the extras [hf,torchtitan,megatron] and takes some 12 minutes
on two cores. With --quick it runs one seed and writes nothing.
"""

import argparse
from dataclasses import asdict, fields
from pathlib import Path

from experiments.harness.pages import How, Table, write_results
from experiments.hosts import hugging_face, megatron, torchtitan
from experiments.hosts.common import ACCUMULATION, NUM_RANKS, WINDOW, Row, print_rows

SEEDS = 3


def table(rows: list[Row]) -> Table:
    columns = tuple(field.name for field in fields(Row))
    return Table(
        name="adapters",
        title="An epoch by three libraries' own batches and by wlb's",
        columns=columns,
        rows=[list(asdict(row).values()) for row in rows],
        formats={
            "imbalance": ".3f", "worst": ".2f", "utilisation": ".1%", "num_labels": ",d",
            "num_left_out": ",d", "num_twice": ",d", "loss": ".3f", "loss_sd": ".3f",
        },
        note="imbalance: slowest / mean rank of a step's predicted work, mean of the steps; worst: "
        "of a step. num_left_out, num_twice: labels that were not trained, or more than once. "
        f"loss: held-out, in nats a label, mean of {SEEDS} initial weights; loss_sd: over them.",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run one seed and write nothing")
    options = parser.parse_args()
    seeds = 1 if options.quick else SEEDS
    rows = [row for of in (hugging_face, torchtitan, megatron) for row in of.compare(seeds)]
    print_rows(rows)
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
        tables=[table(rows)],
        figures=[],
    )


if __name__ == "__main__":
    main()
