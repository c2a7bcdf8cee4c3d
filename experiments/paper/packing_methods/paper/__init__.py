"""Reads the packing paper's tables: 2 and 3 by model and layout, 4 to 6 by method.

The CSV files hold its numbers as printed, including times, throughput, memory and losses. Counts
are compared with `experiments.paper.packing_methods`, the rest with the runs of
`experiments.paper.packing_training`. Two things are ours: the names FLAN, OrcaMath and
Stack for the 20K subsets, and the name `MiniBatchPacking+PosID`, by which the paper's text calls
it, for the method that Tables 4 to 6 print as RandomSampling+PosID.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

NUM_GPUS = 8
"""Tok/s of Tables 2 and 3 are of one of eight GPUs; the numbers of Tables 4 to 6 fit one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRow:
    """Holds a row of Tables 4 to 6.

    bs: rows of a micro-batch
    msl: tokens of a row
    gas: micro-batches per optimiser step
    tokens_per_s: tokens per second of one GPU
    """

    table: int
    dataset: str
    method: str
    bs: int
    msl: int
    gas: int
    steps: int
    time_s: int
    tokens_per_s: int
    train_loss: float
    validation_loss: float

    @property
    def tokens(self) -> int:
        """Returns the tokens of the epoch, which Time x Tok/s gives."""
        return self.time_s * self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRow:
    """Holds a row of Tables 2 and 3.

    layout: padding, basic packing, flat or mini
    tokens_per_s: tokens per second of one GPU
    """

    table: int
    dataset: str
    model: str
    layout: str
    rows: int
    time_s: int
    tokens_per_s: int
    memory_mib: int
    validation_loss: float

    @property
    def tokens(self) -> int:
        """Returns the tokens of the epoch on all GPUs, which Time x Tok/s gives.

        Time is printed in whole seconds.
        """
        return self.time_s * self.tokens_per_s * NUM_GPUS


def steps_rows() -> list[StepsRow]:
    """Returns Tables 4, 5 and 6 in the paper's order."""
    rows = _read("tables_4_5_6.csv")
    for row in rows:
        row["method"] = row["method"].replace("RandomSampling+PosID", "MiniBatchPacking+PosID")
    return [StepsRow(**_typed(StepsRow, row)) for row in rows]


def rows_rows() -> list[RowsRow]:
    """Returns Tables 2 and 3 in the paper's order."""
    return [RowsRow(**_typed(RowsRow, row)) for row in _read("tables_2_3.csv")]


def _read(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _typed(of: type, row: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of a record with the types that it declares."""
    return {name: kind(row[name]) for name, kind in get_type_hints(of).items()}
