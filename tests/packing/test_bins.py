"""Tests bin packing against literal bins, and what other packers lose or overfill."""

import re

import numpy as np
import pytest

from wlb.packing.bins import BinMethod, Bins, pack_bins
from wlb.plan import Documents, split_long

FFD, BFD = BinMethod.FIRST_FIT_DECREASING, BinMethod.BEST_FIT_DECREASING
NEXT_FIT, BEST_FIT = BinMethod.NEXT_FIT, BinMethod.BEST_FIT
LENGTHS = [6, 2, 5, 3, 4, 1]


def rows(bins: Bins) -> list[list[int]]:
    return [bins.rows(b).tolist() for b in range(bins.num_bins)]


def show(lengths: list[int], capacity: int, method: BinMethod, **options: int) -> list[list[int]]:
    """Returns the lengths in each bin."""
    bins = pack_bins(lengths, capacity, method=method, **options)
    out = [[lengths[row] for row in members] for members in rows(bins)]
    assert bins.tokens.tolist() == [sum(members) for members in out]
    return out


def web_like(num: int, window: int) -> np.ndarray:
    """Draws 99% lognormal of mean 800 and 1% Pareto from 8K; longer documents are split."""
    rng = np.random.default_rng(0)
    body = np.exp(rng.normal(np.log(800) - 0.72, 1.2, num - num // 100))
    tail = np.minimum(8192 * (1 + rng.pareto(1.0, num // 100)), 131072)
    lengths = np.maximum(1, rng.permutation(np.concatenate([body, tail]))).astype(np.int64)
    documents = Documents.from_lengths(lengths)
    return split_long(documents, window=window, long_documents="split").length


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (FFD, [[6, 4], [5, 3, 2], [1]]),
        (BFD, [[6, 4], [5, 3, 2], [1]]),
        (NEXT_FIT, [[6, 2], [5, 3], [4, 1]]),
        (BEST_FIT, [[6, 2, 1], [5, 3], [4]]),
    ],
)
def test_four_methods(method: BinMethod, expected: list[list[int]]) -> None:
    assert show(LENGTHS, 10, method) == expected


def test_first_fit_takes_the_first_bin_and_best_fit_the_fullest() -> None:
    assert show([1, 4, 7, 4], 10, FFD) == [[7, 1], [4, 4]]
    assert show([1, 4, 7, 4], 10, BFD) == [[7], [4, 4, 1]]


def test_the_record() -> None:
    bins = pack_bins(LENGTHS, 10, method=BFD)
    assert bins.order.tolist() == [0, 4, 2, 3, 1, 5]
    assert bins.offsets.tolist() == [0, 2, 5, 6]
    assert bins.tokens.tolist() == [10, 10, 1]
    assert (bins.num_bins, bins.capacity, bins.utilisation) == (3, 10, 0.7)


@pytest.mark.parametrize("method", [FFD, BFD, NEXT_FIT, BEST_FIT])
def test_equal_documents_fill_bins_in_the_order_of_their_rows(method: BinMethod) -> None:
    bins = pack_bins([3] * 7, 10, method=method)
    assert rows(bins) == [[0, 1, 2], [3, 4, 5], [6]]


def test_best_fit_closes_the_fullest_of_its_open_bins() -> None:
    lengths = [6, 7, 5, 4, 3, 9, 1, 4]
    # 5 closes the bin of 7, 9 that of 6 + 4, and the last 4 that of 9 + 1; 5 + 3 stays open.
    assert show(lengths, 10, BEST_FIT, window=2) == [[6, 4], [7], [5, 3], [9, 1], [4]]
    assert show(lengths, 10, BEST_FIT, window=8) == [[6, 4], [7, 3], [5, 4], [9, 1]]
    assert show(lengths, 10, BEST_FIT, window=1) == show(lengths, 10, NEXT_FIT)


def test_what_waited_is_placed_first() -> None:
    assert show([2, 3, 8, 7], 10, BFD) == [[8, 2], [7, 3]]
    assert show([2, 3, 8, 7], 10, BFD, num_first=2) == [[3, 2], [8], [7]]
    assert show([2, 3, 8, 5], 10, FFD, num_first=2) == [[3, 2, 5], [8]]


@pytest.mark.parametrize("method", list(BinMethod))
def test_nothing_and_one(method: BinMethod) -> None:
    nothing = pack_bins([], 5, method=method)
    assert (nothing.num_bins, nothing.order.size, nothing.utilisation) == (0, 0, 1.0)
    assert rows(pack_bins([5], 5, method=method)) == [[0]]


@pytest.mark.parametrize("method", list(BinMethod))
def test_a_document_over_the_capacity_is_refused_by_name(method: BinMethod) -> None:
    """In other packers it ends the epoch, overfills its bin, is truncated or is dropped."""
    message = "document 1 has 11 tokens, but a bin has at most 10; cut long documents first"
    with pytest.raises(ValueError, match=message):
        pack_bins([3, 11, 4], 10, method=method)


@pytest.mark.parametrize(
    ("lengths", "capacity", "options", "message"),
    [
        ([3, 0], 10, {}, "lengths[1] = 0 must be at least 1"),
        ([3], 0, {}, "capacity = 0 must be at least 1"),
        ([3], 10, {"window": 0}, "window = 0 must be at least 1"),
        ([3], 10, {"num_first": 2}, "num_first = 2 must be from 0 to the number of documents, 1"),
        ([3], 10, {"method": "worst_fit"}, "method = 'worst_fit' is unknown; use one of first"),
    ],
)
def test_refusals(lengths: list[int], capacity: int, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pack_bins(lengths, capacity, **options)


def test_a_record_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="bin 1 has 11 tokens, but a bin must have at most 10"):
        Bins(order=[0, 1], offsets=[0, 1, 2], tokens=[3, 11], capacity=10)
    with pytest.raises(ValueError, match="offsets must have 2 entries from 0 to 2,"):
        Bins(order=[0, 1], offsets=[0, 1], tokens=[3], capacity=10)


def test_a_bin_holds_any_number_of_documents() -> None:
    """A limit of 200 documents per bin would leave most of it empty on short conversations."""
    for method in BinMethod:
        assert pack_bins([2] * 4096, 4096, method=method).utilisation == 1.0


def test_a_capacity_beyond_all_tokens_costs_no_memory() -> None:
    for method in (FFD, BFD):
        assert show([3, 5, 4], 10**15, method) == [[5, 4, 3]]


@pytest.mark.parametrize("capacity", [4096, 65536, 131072])
def test_decreasing_methods_use_nearly_the_fewest_bins_possible(capacity: int) -> None:
    """Sorting takes one pass (keys of 13 bits) or two (17 and 18)."""
    lengths = web_like(20_000, capacity)
    fewest = -(-int(lengths.sum()) // capacity)
    for method in (FFD, BFD):
        bins = pack_bins(lengths, capacity, method=method)
        assert fewest <= bins.num_bins <= fewest + 1
        assert np.array_equal(np.sort(bins.order), np.arange(lengths.size))
        by_bin = np.add.reduceat(lengths[bins.order], bins.offsets[:-1])
        assert np.array_equal(by_bin, bins.tokens)


def test_one_packing_wastes_less_than_a_packing_for_every_1000_documents() -> None:
    capacity = 131072
    lengths = web_like(20_000, capacity)
    chunks = [pack_bins(lengths[i : i + 1000], capacity) for i in range(0, lengths.size, 1000)]
    by_chunk = int(lengths.sum()) / (capacity * sum(bins.num_bins for bins in chunks))
    assert pack_bins(lengths, capacity).utilisation > by_chunk + 0.03
