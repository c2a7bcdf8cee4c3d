"""Counts rows of an epoch by model and layout, beside the paper's Tables 2 and 3.

Models differ only by their tokenizer here. Their examples and tokens come from the tables: Rows of
the mini-batches, and their Time x Tok/s x 8 GPUs. Rows of padding and of mini-batches are examples,
and so need no counting. Rows of basic packing (of 4,096 tokens, cut anywhere) and flat rows (whole
examples, first come first served, in rows of bs x msl) are counted with nothing lost (every trained
example is packed and the last row is kept) and as printed (`by_thousands`).
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
BATCH = 4
SMALLER_BATCHES = {"gemma": 2, "QwenMOE": 2}
"""These models have this many examples in a GPU's mini-batch.

The text says 4 of all models; these two have twice the flat rows that 4 can give.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Holds a row of the paper beside our counts, which are means over shuffles.

    row_tokens: tokens of a row, None where a row is an example
    nothing_lost: rows if no token is lost
    utilisation: share of tokens in these rows
    as_printed: rows as the tables seem to be counted
    lost: tokens that are then dropped or cut
    """

    paper: RowsRow
    row_tokens: int | None
    nothing_lost: float
    utilisation: float | None
    as_printed: float | None = None
    lost: float | None = None

    def difference(self, *, as_printed: bool) -> float:
        """Returns our rows over the paper's, minus 1."""
        ours = self.as_printed if as_printed and self.as_printed is not None else self.nothing_lost
        return ours / self.paper.rows - 1


def row_counts(seeds: range) -> list[RowCounts]:
    """Returns means over shuffles, in the paper's order."""
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
    """Returns rows and dropped tokens where each 1,000 examples drop the row they do not fill.

    The tables turn out to be counted in this way (as printed): the 20,000 examples, those over msl
    as well, are packed 1,000 at a time, as `datasets` maps. Basic packing cuts long examples at row
    ends; flat rows have them cut at msl.
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
    """Returns the tokens of the row that is being filled when the examples end."""
    if how is fixed_length:
        return (int(examples.sum()) - 1) % row_tokens + 1
    filled = 0
    for length in examples.tolist():
        filled = filled + length if filled + length <= row_tokens else length
    return filled
