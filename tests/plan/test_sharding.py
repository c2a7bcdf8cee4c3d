"""Tests the rows of a rank and ranges of tokens."""

import pytest

from wlb.plan import int_array, local_tokens, ranges, row_multiple


@pytest.mark.parametrize(
    ("tokens", "cp", "q", "rows"),
    [(0, 4, 2, 2), (1, 1, 1, 1), (16, 2, 4, 8), (17, 2, 4, 12), (131072, 2, 128, 65536)],
)
def test_rows_of_a_rank(tokens: int, cp: int, q: int, rows: int) -> None:
    assert local_tokens(tokens, cp=cp, row_multiple=q) == rows


def test_row_multiple_is_the_least_common_multiple() -> None:
    assert row_multiple(4, 6) == 12
    with pytest.raises(ValueError, match="tp = 0"):
        row_multiple(0, 1)


def test_ranges() -> None:
    start, stop = int_array("a", [3, 0, 7]), int_array("b", [5, 1, 7])
    assert ranges(start, stop).tolist() == [3, 4, 0]
