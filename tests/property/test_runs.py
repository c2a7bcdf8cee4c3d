"""Tests that equal documents placed together go where they would go one by one."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.packing import placement
from wlb.packing.fixed import greedy
from wlb.packing.placement import least_loaded
from wlb.plan import Documents, Pieces
from wlb.sharding import shard

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=30)
T = TypeVar("T")
some_runs = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=6)


def both(make: Callable[[], T]) -> list[T]:
    """Returns what `make` returns without runs, and with runs of any length."""
    found: list[T] = []
    for least in (1 << 60, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement, "LEAST", least)
            found.append(make())
    return found


@given(some_runs, st.integers(1, 6), st.integers(0, 30))
def test_greedy_windows_are_the_same(
    documents: list[tuple[int, int]], num: int, spare: int
) -> None:
    lengths = [length for length, count in documents for _ in range(count)]
    pieces = Pieces.whole(Documents.from_lengths(lengths))
    work = pieces.length * pieces.length
    capacity = max(20, -(-sum(lengths) // num) + spare)
    one, other = both(lambda: greedy(pieces, work, num_micro_batches=num, capacity=capacity))
    assert one.rows == other.rows
    assert one.pieces.to_json() == other.pieces.to_json()


@given(some_runs, st.sampled_from([2, 3, 4, 8]))
def test_balanced_sharding_is_the_same(documents: list[tuple[int, int]], cp: int) -> None:
    lengths = np.array([length for length, count in documents for _ in range(count)])
    one, other = both(lambda: shard(lengths, cp=cp, strategy="balanced", cost=COST))
    assert one.to_json() == other.to_json()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 6)), min_size=1),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 40),
)
@example([(0, 0, 4), (0, 0, 5), (0, 0, 5), (0, 5, 1), (5, 0, 1), *[(0, 0, 0)] * 2], 0, 1, 15)
def test_the_least_loaded_bin_with_room_is_chosen_each_time(
    bins: list[tuple[int, int, int]], work: int, other: int, num: int
) -> None:
    one, two, room = (list(column) for column in zip(*bins, strict=True))
    expected: list[int] = []
    first, second, left = list(one), list(two), list(room)
    for _ in range(num):
        free = [i for i in range(len(left)) if left[i]]
        if not free:
            break
        i = min(free, key=lambda i: max(first[i], second[i]))
        expected.append(i)
        first[i], second[i], left[i] = first[i] + work, second[i] + other, left[i] - 1
    found = least_loaded(one, work, num, room=room, other=(two, other))
    assert found.tolist() == expected
