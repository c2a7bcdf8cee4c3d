"""Counts an epoch of each packing method: micro-batches, rows, tokens and computed positions.

A method gets the lengths of examples in the order of the data set, and orders and groups them
itself. No example is longer than a row. The names are the paper's:

- bs: rows of a micro-batch on a GPU,
- msl (maximum sequence length): tokens of a row,
- gas (gradient accumulation steps): micro-batches of an optimiser step.

Methods that drop tokens say how many (`Count.left_out`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from wlb.packing import BinMethod, pack_bins
from wlb.plan import IntArray

MEGABATCHES = 50
"""Number of batches that the sampler of transformers sorts together."""
LIBRARY_GPUS = 8
"""Number of GPUs of the paper's node."""


class Method(StrEnum):
    """The packing methods. Methods of the paper have the paper's names."""

    RANDOM_PADDING = "RandomSampling+Padding"
    GROUPED_PADDING = "GroupByLength+Padding"
    MINI_BATCH = "MiniBatchPacking+PosID"
    FIXED_LENGTH = "FixedLengthPacking"
    FIXED_LENGTH_POSID = "FixedLengthPacking+PosID"
    MULTIPACK = "Multipack+PosID"
    SORTED = "SortedPacking+PosID"
    RANDOM = "RandomPacking+PosID"
    MULTIPACK_GROUPS = f"Multipack+PosID, groups of {LIBRARY_GPUS}"
    FIRST_FIT_DECREASING = "FirstFitDecreasing+PosID"
    BEST_FIT_DECREASING = "BestFitDecreasing+PosID"


OURS = (Method.MULTIPACK_GROUPS, Method.FIRST_FIT_DECREASING, Method.BEST_FIT_DECREASING)
"""Methods that the paper does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Counts of an epoch."""

    rows: int  # rows of all micro-batches; in padded and mini-batch methods a row is an example
    micro_batches: int
    tokens: int  # tokens that are trained
    positions: int  # positions that the model computes, including padding
    room: int  # rows x msl: the positions that all rows could have
    num_broken: int = 0  # examples that are cut into more than one row
    left_out: int = 0  # tokens that are not trained

    @property
    def utilisation(self) -> float:
        """Returns tokens over the positions that all rows could have."""
        return self.tokens / self.room

    @property
    def padding(self) -> float:
        """Returns the share of computed positions that are padding."""
        return 1 - self.tokens / self.positions

    def steps(self, gas: int) -> int:
        """Returns the number of complete optimiser steps, as the paper counts them.

        The last `micro_batches % gas` micro-batches belong to no complete step.
        """
        return max(1, self.micro_batches // gas)


def count(method: Method, lengths: IntArray, *, bs: int, msl: int, gas: int, seed: int) -> Count:
    """Counts an epoch of a method.

    Args:
        method: The packing method.
        lengths: Tokens of each example, at most msl, shape [n].
        bs: Rows of a micro-batch.
        msl: Tokens of a row.
        gas: Micro-batches of an optimiser step.
        seed: Seed of the shuffle. Sorted and decreasing methods do not shuffle.

    Raises:
        ValueError: If there are no examples, or one is longer than a row.
    """
    if not lengths.size:
        raise ValueError("no examples to pack")
    if lengths.max() > msl:
        i = int(np.argmax(lengths > msl))
        raise ValueError(
            f"example {i} has {lengths[i]} tokens, more than a row of {msl}; cut it or leave it out"
        )
    rng = np.random.default_rng(seed)
    match method:
        case Method.GROUPED_PADDING:
            order = length_grouped(lengths, batch=bs * gas, rng=rng)
            return padded(lengths[order], bs=bs, msl=msl)
        case Method.SORTED:
            return first_come(np.sort(lengths)[::-1], bs=bs, msl=msl)
        case Method.FIRST_FIT_DECREASING | Method.BEST_FIT_DECREASING:
            is_first = method == Method.FIRST_FIT_DECREASING
            kind = BinMethod.FIRST_FIT_DECREASING if is_first else BinMethod.BEST_FIT_DECREASING
            return in_rows(pack_bins(lengths, msl, method=kind).num_bins, lengths, bs=bs, msl=msl)
        case _:
            return _OF_SHUFFLED[method](rng.permutation(lengths), bs=bs, msl=msl)


def padded(lengths: IntArray, *, bs: int, msl: int) -> Count:
    """Counts padded micro-batches: bs examples in order, padded to the longest of them."""
    starts = np.arange(0, lengths.size, bs)
    widths = np.maximum.reduceat(lengths, starts)
    sizes = np.diff(starts, append=lengths.size)
    return Count(
        rows=lengths.size,
        micro_batches=starts.size,
        tokens=int(lengths.sum()),
        positions=int((widths * sizes).sum()),
        room=lengths.size * msl,
    )


def mini_batch(lengths: IntArray, *, bs: int, msl: int) -> Count:
    """Counts mini-batch packing: bs examples are joined into one row without padding."""
    tokens = int(lengths.sum())
    return Count(
        rows=lengths.size,
        micro_batches=-(-lengths.size // bs),
        tokens=tokens,
        positions=tokens,
        room=lengths.size * msl,
    )


def fixed_length(lengths: IntArray, *, bs: int, msl: int) -> Count:
    """Counts fixed-length packing: all examples are joined and cut every msl tokens.

    Padding fills the last row.
    """
    ends = np.cumsum(lengths)
    tokens = int(ends[-1])
    rows = -(-tokens // msl)
    is_broken = (ends - lengths) // msl != (ends - 1) // msl
    return Count(
        rows=rows,
        micro_batches=-(-rows // bs),
        tokens=tokens,
        positions=rows * msl,
        room=rows * msl,
        num_broken=int(is_broken.sum()),
    )


def first_come(lengths: IntArray, *, bs: int, msl: int) -> Count:
    """Counts next fit: whole examples in order, where one that does not fit starts a new row."""
    bins = pack_bins(lengths, msl, method=BinMethod.NEXT_FIT)
    return in_rows(bins.num_bins, lengths, bs=bs, msl=msl)


def in_rows(rows: int, lengths: IntArray, *, bs: int, msl: int) -> Count:
    """Counts whole examples that fill a known number of rows.

    With position ids rows need no padding, so only the tokens are computed.
    """
    tokens = int(lengths.sum())
    return Count(
        rows=rows, micro_batches=-(-rows // bs), tokens=tokens, positions=tokens, room=rows * msl
    )


def multipack(lengths: IntArray, *, bs: int, msl: int, num_gpus: int = 1) -> Count:
    """Counts the Multipack sampler as first published, which packs one row per GPU at a time.

    A group has num_gpus rows. It takes as many of the next examples as first fit decreasing packs
    into these rows. A binary search finds that number. Like the library's search, it assumes that
    if some number of examples fits, every smaller number fits too.

    The last group is dropped, as in the library, unless it has a row for every GPU. With one GPU
    the method is next fit (`first_come`).
    """
    ends = np.cumsum(lengths)
    begin, rows = 0, 0
    while begin < lengths.size:
        before = int(ends[begin - 1]) if begin else 0
        low, high = 1, int(np.searchsorted(ends, before + msl * num_gpus, "right")) - begin + 1
        while high - low > 1:
            middle = (low + high) // 2
            if num_rows(lengths[begin : begin + middle], msl) <= num_gpus:
                low = middle
            else:
                high = middle
        if num_rows(lengths[begin : begin + low], msl) < num_gpus:
            break
        begin += low
        rows += num_gpus
    made = in_rows(rows, lengths[:begin], bs=bs, msl=msl)
    return Count(
        rows=rows,
        micro_batches=made.micro_batches,
        tokens=made.tokens,
        positions=made.positions,
        room=made.room,
        left_out=int(lengths[begin:].sum()),
    )


def num_rows(lengths: IntArray, msl: int) -> int:
    """Returns the number of rows that first fit decreasing needs."""
    if int(lengths.sum()) <= msl:
        return 1
    return pack_bins(lengths, msl, method=BinMethod.FIRST_FIT_DECREASING).num_bins


def length_grouped(lengths: IntArray, *, batch: int, rng: np.random.Generator) -> IntArray:
    """Returns the order in which transformers' LengthGroupedSampler takes examples.

    Examples are shuffled, then sorted from long to short within megabatches of 50 batches, or of
    fewer if there would be less than four megabatches. Finally the longest example and the first
    one are swapped, so that a run that lacks memory fails at once.

    Args:
        lengths: Tokens of each example, shape [n].
        batch: Examples of a batch. transformers' Trainer passes bs * gas.
        rng: Generator of the shuffle.

    Returns:
        Indices into `lengths`, shape [n].
    """
    megabatch = batch * max(1, min(lengths.size // (4 * batch), MEGABATCHES))
    order = rng.permutation(lengths.size)
    parts = [order[i : i + megabatch] for i in range(0, order.size, megabatch)]
    order = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    longest = int(np.argmax(lengths[order]))
    order[[0, longest]] = order[[longest, 0]]
    return order


def _groups(lengths: IntArray, *, bs: int, msl: int) -> Count:
    return multipack(lengths, bs=bs, msl=msl, num_gpus=LIBRARY_GPUS)


_OF_SHUFFLED: dict[Method, Callable[..., Count]] = {
    Method.RANDOM_PADDING: padded,
    Method.MINI_BATCH: mini_batch,
    Method.FIXED_LENGTH: fixed_length,
    Method.FIXED_LENGTH_POSID: fixed_length,
    Method.MULTIPACK: multipack,
    Method.MULTIPACK_GROUPS: _groups,
    Method.RANDOM: first_come,
}
