"""Tests how pipelines that meet in every layer are dealt micro-batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wlb.planner.compose import assign_micro_batches, assign_rounds


def waits(work_ns: np.ndarray, dealt: np.ndarray, meets: int) -> int:
    """Returns the sum of the slowest work of each place of pipelines that meet."""
    dp, n = dealt.shape
    return int(work_ns[dealt].reshape(dp // meets, meets, n).max(1).sum())


def test_alike_micro_batches_run_at_the_same_place_literal() -> None:
    work, tokens = np.array([9, 1, 8, 2, 7, 3]), np.array([1, 4, 2, 2, 5, 1])
    dealt = assign_rounds(work, tokens, 2, 2)
    # Rounds 9 8, 7 3 and 2 1, in the order of their first micro-batches: of the most unequal one,
    # 5 and 1 tokens, the longer is on pipeline 0; then 4 and 2 go 2 to 0; 2 and 1 go 1 to 0.
    assert dealt.tolist() == [[0, 3, 4], [2, 1, 5]]
    assert waits(work, dealt, 2) == 9 + 2 + 7
    assert waits(work, np.array([[0, 3, 5], [1, 2, 4]]), 2) == 9 + 8 + 7


@settings(deadline=None, max_examples=60)
@given(data=st.data(), groups=st.integers(1, 3), meets=st.integers(2, 4), n=st.integers(1, 5))
def test_every_micro_batch_is_dealt_once_and_waits_are_least(
    data: st.DataObject, groups: int, meets: int, n: int
) -> None:
    dp = groups * meets
    numbers = st.lists(st.integers(0, 1000), min_size=dp * n, max_size=dp * n)
    work, tokens = np.array(data.draw(numbers)), np.array(data.draw(numbers))
    dealt = assign_rounds(work, tokens, dp, meets)
    assert dealt.shape == (dp, n)
    assert sorted(dealt.ravel().tolist()) == list(range(dp * n))
    assert np.array_equal(dealt, assign_rounds(work, tokens, dp, meets))
    # Sorted and cut, rounds have the least sum of their slowest work.
    assert waits(work, dealt, meets) == int(np.sort(work)[::-1][::meets].sum())
    assert waits(work, dealt, meets) <= waits(work, assign_micro_batches(work, tokens, dp), meets)


def test_numbers_that_do_not_divide_are_refused() -> None:
    six = np.arange(6)
    with pytest.raises(
        ValueError, match="the 6 micro-batches of a step cannot be divided equally among dp = 4"
    ):
        assign_rounds(six, six, 4, 2)
    with pytest.raises(
        ValueError, match="dp = 3 must be a multiple of 2, the number of pipelines that share an EP"
    ):
        assign_rounds(six, six, 3, 2)
