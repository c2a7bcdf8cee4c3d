"""What an epoch of each packing method holds: micro-batches, rows, tokens, positions. No tensors.

A method is given the lengths of examples that are at most msl tokens long, in the order of the data
set, and orders and groups them itself. (bs, msl, gas) as in the paper: rows of a micro-batch on a
GPU, tokens of a row, micro-batches of an optimiser step. Nothing is dropped or truncated but where
a method does so by its nature; `Count.left_out` says how much.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from wlb.packing import BinMethod, pack_bins
from wlb.plan import IntArray

MEGABATCHES = 50
"""Batches that transformers' sampler sorts together."""
LIBRARY_GPUS = 8
"""Of the paper's node."""


class Method(StrEnum):
    """The paper's names for what it compares, and ours for what it does not."""

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
"""Not in the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """An epoch. tokens: of examples, in micro-batches. left_out: tokens in none.

    positions: that a model computes, padding included. room: rows x msl, what the memory is for
    (with padding or a mini-batch a row is an example). num_broken: examples in more than one row.
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
        """Tokens over room."""
        return self.tokens / self.room

    @property
    def padding(self) -> float:
        """Share of positions that hold no token."""
        return 1 - self.tokens / self.positions

    def steps(self, gas: int) -> int:
        """Whole optimiser steps, as the paper counts; `micro_batches % gas` come after the last."""
        return max(1, self.micro_batches // gas)


def count(method: Method, lengths: IntArray, *, bs: int, msl: int, gas: int, seed: int) -> Count:
    """An epoch of `method` on examples of `lengths` tokens, shape [n], each at most msl.

    seed: shuffles them; sorted and decreasing methods do not depend on it.
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
    """bs examples at a time in the order given, each padded to the longest of them."""
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
    """bs examples at a time, one after the other in a single row as long as they are."""
    tokens = int(lengths.sum())
    return Count(
        rows=lengths.size,
        micro_batches=-(-lengths.size // bs),
        tokens=tokens,
        positions=tokens,
        room=lengths.size * msl,
    )


def fixed_length(lengths: IntArray, *, bs: int, msl: int) -> Count:
    """Examples one after the other, cut every msl tokens. The last row is filled with padding."""
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
    """Whole examples in the order given; one that does not fit ends a row (next fit)."""
    bins = pack_bins(lengths, msl, method=BinMethod.NEXT_FIT)
    return in_rows(bins.num_bins, lengths, bs=bs, msl=msl)


def in_rows(rows: int, lengths: IntArray, *, bs: int, msl: int) -> Count:
    """Whole examples in rows that are as long as what they hold: position ids need no padding."""
    tokens = int(lengths.sum())
    return Count(
        rows=rows,
        micro_batches=-(-rows // bs),
        tokens=tokens,
        positions=tokens,
        room=rows * msl,
    )


def multipack(lengths: IntArray, *, bs: int, msl: int, num_gpus: int = 1) -> Count:
    """The Multipack sampler as first published: a row for each GPU at a time.

    A group of rows takes as many of the next examples as a binary search finds that first fit
    decreasing gets into num_gpus rows. The search presumes that fewer examples fit where more do,
    as the library's does. The last group is left out unless it fills a row for every GPU, also as
    there. For one GPU a row simply takes examples until one does not fit, which is `first_come`.
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
    """Rows that first fit decreasing needs."""
    if int(lengths.sum()) <= msl:
        return 1
    return pack_bins(lengths, msl, method=BinMethod.FIRST_FIT_DECREASING).num_bins


def length_grouped(lengths: IntArray, *, batch: int, rng: np.random.Generator) -> IntArray:
    """Order of transformers' LengthGroupedSampler; rows of `lengths`, shape [n].

    Shuffled, then sorted from long to short within megabatches of 50 batches (fewer where there
    would be less than four megabatches). The longest example of all changes places with the first,
    so that memory runs out at once or not at all. transformers' Trainer takes bs * gas for `batch`.
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
