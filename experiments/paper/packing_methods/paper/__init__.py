"""Reads the tables of the packing paper: Tables 2 and 3 by model and layout, 4 to 6 by method.

The CSV files have the numbers as printed, including times, throughput, memory and losses. The
counts are compared in `experiments.paper.packing_methods`, and all else in
`experiments.paper.packing_training`.

Two names differ from the tables. The 20K subsets are called FLAN, OrcaMath and Stack. The method
that Tables 4 to 6 print as RandomSampling+PosID is called `MiniBatchPacking+PosID`, as in the
paper's text.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

NUM_GPUS = 8
"""GPUs of the runs in Tables 2 and 3, whose Tok/s are of one GPU.

The numbers of Tables 4 to 6 show that those runs had only one GPU.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRow:
    """A row of Tables 4 to 6."""

    table: int  # number of the table
    dataset: str
    method: str
    bs: int  # rows of a micro-batch
    msl: int  # tokens of a row
    gas: int  # micro-batches of an optimiser step
    steps: int  # optimiser steps of the epoch
    time_s: int
    tokens_per_s: int  # tokens per second of one GPU
    train_loss: float
    validation_loss: float

    @property
    def tokens(self) -> int:
        """Returns the tokens of the epoch, computed as Time x Tok/s."""
        return self.time_s * self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRow:
    """A row of Tables 2 and 3."""

    table: int  # number of the table
    dataset: str
    model: str
    layout: str  # padding, basic packing, flat or mini
    rows: int  # rows of the epoch
    time_s: int
    tokens_per_s: int  # tokens per second of one GPU
    memory_mib: int
    validation_loss: float

    @property
    def tokens(self) -> int:
        """Returns the tokens of the epoch, computed as Time x Tok/s x GPUs.

        They are not exact, because Time is printed in whole seconds.
        """
        return self.time_s * self.tokens_per_s * NUM_GPUS


def steps_rows() -> list[StepsRow]:
    """Returns all rows of Tables 4, 5 and 6 in the paper's order."""
    rows = _read("tables_4_5_6.csv")
    for row in rows:
        row["method"] = row["method"].replace("RandomSampling+PosID", "MiniBatchPacking+PosID")
    return [StepsRow(**_typed(StepsRow, row)) for row in rows]


def rows_rows() -> list[RowsRow]:
    """Returns all rows of Tables 2 and 3 in the paper's order."""
    return [RowsRow(**_typed(RowsRow, row)) for row in _read("tables_2_3.csv")]


def _read(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _typed(of: type, row: dict[str, str]) -> dict[str, Any]:
    """Converts the cells of a row to the types of a record's fields."""
    return {name: kind(row[name]) for name, kind in get_type_hints(of).items()}
