"""Counts an epoch of each packing method: micro-batches, rows, tokens, positions.

No tensors are needed. A method is given the lengths of examples, each at most msl tokens long, in
the order of the data set, and orders and groups them itself. (bs, msl, gas) are as in the paper:
rows of a micro-batch on a GPU, tokens of a row, micro-batches per optimiser step. Only a method
that by its nature drops or truncates does so; `Count.left_out` says how much.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from wlb.packing import BinMethod, pack_bins
from wlb.plan import IntArray

MEGABATCHES = 50
"""transformers' sampler sorts this many batches together."""
LIBRARY_GPUS = 8
"""The paper's node has this many GPUs."""


class Method(StrEnum):
    """Names the methods: the paper's names for its methods, ours for the others."""

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
"""The paper does not have these methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Counts an epoch.

    rows: rows; with padding or a mini-batch a row is an example
    tokens: tokens of examples that are in micro-batches
    positions: positions that a model computes, padding included
    room: rows x msl, the positions that there is memory for
    num_broken: examples in more than one row
    left_out: tokens in no micro-batch
    """

    rows: int
    micro_batches: int
    tokens: int
    positions: int
    room: int
    num_broken: int = 0
    left_out: int = 0

    @property
    def utilisation(self) -> float:
        """Returns tokens over room."""
        return self.tokens / self.room

    @property
    def padding(self) -> float:
        """Returns the share of positions that hold no token."""
        return 1 - self.tokens / self.positions

    def steps(self, gas: int) -> int:
        """Returns whole optimiser steps, as the paper counts.

        `micro_batches % gas` micro-batches come after the last step.
        """
        return max(1, self.micro_batches // gas)


def count(method: Method, lengths: IntArray, *, bs: int, msl: int, gas: int, seed: int) -> Count:
    """Counts an epoch of `method` on examples of `lengths` tokens, shape [n], each at most msl.

    seed: seed of the shuffle, on which sorted and decreasing methods do not depend
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
    """Takes bs examples at a time in the order given and pads each to the longest of them."""
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
    """Takes bs examples at a time, one after the other in a single row as long as they are."""
    tokens = int(lengths.sum())
    return Count(
        rows=lengths.size,
        micro_batches=-(-lengths.size // bs),
        tokens=tokens,
        positions=tokens,
        room=lengths.size * msl,
    )


def fixed_length(lengths: IntArray, *, bs: int, msl: int) -> Count:
    """Joins the examples and cuts them every msl tokens; the last row is filled with padding."""
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
    """Takes whole examples in the order given; one that does not fit ends a row (next fit)."""
    bins = pack_bins(lengths, msl, method=BinMethod.NEXT_FIT)
    return in_rows(bins.num_bins, lengths, bs=bs, msl=msl)


def in_rows(rows: int, lengths: IntArray, *, bs: int, msl: int) -> Count:
    """Counts whole examples in rows as long as their examples: position ids need no padding."""
    tokens = int(lengths.sum())
    return Count(
        rows=rows, micro_batches=-(-rows // bs), tokens=tokens, positions=tokens, room=rows * msl
    )


def multipack(lengths: IntArray, *, bs: int, msl: int, num_gpus: int = 1) -> Count:
    """Counts the Multipack sampler as first published, which takes one row per GPU at a time.

    A group of rows takes as many of the next examples as first fit decreasing gets into num_gpus
    rows. A binary search finds how many; like the library's, it presumes that fewer examples fit
    where more do. Also as in the library, the last group is left out unless it fills a row for
    every GPU. For one GPU a row simply takes examples until one does not fit, which is
    `first_come`.
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
    """Returns how many rows first fit decreasing needs."""
    if int(lengths.sum()) <= msl:
        return 1
    return pack_bins(lengths, msl, method=BinMethod.FIRST_FIT_DECREASING).num_bins


def length_grouped(lengths: IntArray, *, batch: int, rng: np.random.Generator) -> IntArray:
    """Returns the order of transformers' LengthGroupedSampler, indices into `lengths`, shape [n].

    Examples are shuffled, then sorted from long to short within megabatches of 50 batches (fewer
    where there would be less than four megabatches). The longest example of all changes places with
    the first, so that memory runs out at once or not at all. transformers' Trainer passes bs * gas
    as `batch`.
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
