"""Counts the rows of an epoch by model and layout, beside the paper's Tables 2 and 3.

Models differ here only by their tokenizer. The tables give their examples (Rows of mini-batches)
and their tokens (Time x Tok/s x 8 GPUs).

With padding and in mini-batches, a row is an example, so there is nothing to count. Two layouts are
counted: basic packing, in rows of 4,096 tokens that cut examples anywhere; and flat rows of
bs x msl tokens, which take whole examples in order. Each is counted in two ways: so that nothing is
lost, and as the tables seem to be counted (`by_thousands`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from experiments.paper.packing_methods.counting import Count, first_come, fixed_length
from experiments.paper.packing_methods.lengths import DATASETS, MSL
from experiments.paper.packing_methods.paper import RowsRow, rows_rows
from wlb.plan import IntArray

NUM_EXAMPLES = 20_000
MAPPED = 1000
"""Examples that `datasets.map` passes to the packing function at a time."""
BATCH = 4
"""Examples of a GPU's mini-batch, by the paper's text."""
SMALLER_BATCHES = {"gemma": 2, "QwenMOE": 2}
"""Models whose mini-batches must have been smaller, and their examples.

They have twice as many flat rows as mini-batches of 4 examples can give.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """A row of the paper's tables beside our counts, which are means over shuffles."""

    paper: RowsRow
    row_tokens: int | None  # tokens of a row; None if a row is an example
    nothing_lost: float  # rows if no token is lost
    utilisation: float | None  # share of these rows that tokens fill
    as_printed: float | None = None  # rows as the tables seem to be counted
    lost: float | None = None  # tokens that are dropped or cut off if counted as printed

    def difference(self, *, as_printed: bool) -> float:
        """Returns our rows over the paper's, minus 1."""
        ours = self.as_printed if as_printed and self.as_printed is not None else self.nothing_lost
        return ours / self.paper.rows - 1


def row_counts(seeds: range) -> list[RowCounts]:
    """Counts all rows of Tables 2 and 3, in the paper's order, as means over shuffles."""
    groups = groupby(rows_rows(), key=lambda row: (row.table, row.model))
    return [found for _, rows in groups for found in _of_model(list(rows), seeds)]


def _of_model(printed: list[RowsRow], seeds: range) -> list[RowCounts]:
    mini = next(row for row in printed if row.layout == "mini")
    dataset = replace(
        DATASETS[mini.dataset],
        num_examples=mini.rows,
        tokens=mini.tokens,
        num_left_out=NUM_EXAMPLES - mini.rows,
    )
    trained, all_of_them = dataset.lengths(), np.append(dataset.lengths(), dataset.left_out())
    flat_tokens = MSL * SMALLER_BATCHES.get(mini.model, BATCH)
    out: list[RowCounts] = []
    for row in printed:
        match row.layout:
            case "basic packing":
                out.append(_counted(row, MSL, fixed_length, trained, all_of_them, seeds))
            case "flat":
                cut = np.minimum(all_of_them, MSL)
                made = _counted(row, flat_tokens, first_come, trained, cut, seeds)
                over = int((all_of_them - cut).sum())
                out.append(replace(made, lost=(made.lost or 0) + over))
            case _:
                out.append(
                    RowCounts(paper=row, row_tokens=None, nothing_lost=mini.rows, utilisation=None)
                )
    return out


def _counted(
    row: RowsRow,
    row_tokens: int,
    how: Callable[..., Count],
    trained: IntArray,
    examples: IntArray,
    seeds: range,
) -> RowCounts:
    whole = [
        how(np.random.default_rng(seed).permutation(trained), bs=1, msl=row_tokens)
        for seed in seeds
    ]
    printed = [
        by_thousands(np.random.default_rng(seed).permutation(examples), row_tokens, how)
        for seed in seeds
    ]
    return RowCounts(
        paper=row,
        row_tokens=row_tokens,
        nothing_lost=float(np.mean([made.rows for made in whole])),
        utilisation=float(np.mean([made.utilisation for made in whole])),
        as_printed=float(np.mean([rows for rows, _ in printed])),
        lost=float(np.mean([lost for _, lost in printed])),
    )


def by_thousands(examples: IntArray, row_tokens: int, how: Callable[..., Count]) -> tuple[int, int]:
    """Returns (rows, dropped tokens) if examples are packed 1,000 at a time.

    `datasets.map` works in this way, and the paper's tables turn out to be counted so. From each
    thousand, the last row is dropped unless it is full. Examples longer than msl are included:
    basic packing cuts them at the ends of rows, and for flat rows they are cut at msl before.

    Args:
        examples: Tokens of all 20,000 examples, shuffled.
        row_tokens: Tokens of a row.
        how: Function that counts the layout.
    """
    rows = dropped = 0
    for begin in range(0, examples.size, MAPPED):
        part = examples[begin : begin + MAPPED]
        rows += how(part, bs=1, msl=row_tokens).rows
        last = _last_row(part, row_tokens, how)
        if last < row_tokens:
            rows -= 1
            dropped += last
    return rows, dropped


def _last_row(examples: IntArray, row_tokens: int, how: Callable[..., Count]) -> int:
    """Returns the tokens of the last row, which may be incomplete."""
    if how is fixed_length:
        return (int(examples.sum()) - 1) % row_tokens + 1
    filled = 0
    for length in examples.tolist():
        filled = filled + length if filled + length <= row_tokens else length
    return filled
