"""Tests lengths, cu_seqlens, position ids and masks against literal values, and what is refused."""

import re

import numpy as np
import pytest

from wlb.adapters.collate import (
    block_mask,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    lengths_from_cu_seqlens,
    lengths_from_position_ids,
    position_ids_from_lengths,
)


def test_three_ways_to_say_the_same() -> None:
    offsets = cu_seqlens_from_lengths([3, 1, 2])
    assert offsets.tolist() == [0, 3, 4, 6]
    assert offsets.dtype == np.int32
    assert lengths_from_cu_seqlens(offsets).tolist() == [3, 1, 2]
    ids = position_ids_from_lengths([3, 1, 2])
    assert ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert cu_seqlens_from_position_ids(ids).tolist() == [0, 3, 4, 6]
    assert lengths_from_position_ids(ids).tolist() == [3, 1, 2]


def test_long_documents_are_copied_to_the_same_positions() -> None:
    lengths = [700, 1, 300]
    ids = position_ids_from_lengths(lengths, start=2, dtype=np.int32)
    assert ids.dtype == np.int32
    assert ids.tolist() == [*range(2, 702), 2, *range(2, 302)]


def test_nothing_has_no_documents() -> None:
    assert cu_seqlens_from_lengths([]).tolist() == [0]
    assert lengths_from_cu_seqlens([0]).tolist() == []
    assert position_ids_from_lengths([]).tolist() == []
    assert cu_seqlens_from_position_ids(np.zeros((0, 4), np.int64)).tolist() == [0]


def test_rows_of_position_ids_each_begin_with_a_document() -> None:
    rows = [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert cu_seqlens_from_position_ids(rows).tolist() == [0, 4, 6, 8]


def test_positions_of_a_model_that_begins_at_two() -> None:
    ids = position_ids_from_lengths([3, 2], start=2)
    assert ids.tolist() == [2, 3, 4, 2, 3]
    assert lengths_from_position_ids(ids, start=2).tolist() == [3, 2]
    with pytest.raises(
        ValueError, match=r"position_ids begin with 2, but in a packed row they must begin with 0"
    ):
        lengths_from_position_ids(ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 4, 5], "position_ids begin with 3"),
        ([0, 1, 3], "position_ids[2] = 3 follows 1, but in a packed row it must be 0 or 2"),
        ([0, 1, 1, 2], "position_ids[2] = 1 follows 1"),
        ([0, 1, -1, 0], "position_ids[2] = -1 follows 1"),
        ([[0, 1, 2], [1, 2, 3]], "position_ids[1] begin with 1"),
        ([[0, 1, 2], [0, 2, 0]], "position_ids[1][1] = 2 follows 0"),
        ([[[0, 1]]], "position_ids have shape (1, 1, 2)"),
        ([0.0, 0.5], "is not a whole number"),
    ],
)
def test_position_ids_that_are_no_packing(ids: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cu_seqlens_from_position_ids(ids)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([], "cu_seqlens are empty"),
        ([1, 4], "cu_seqlens begin with 1"),
        ([0, 4, 3], "cu_seqlens[1] = 4 and cu_seqlens[2] = 3"),
        ([0, 4, 4], "remove repeated offsets"),
    ],
)
def test_offsets_that_are_none(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        lengths_from_cu_seqlens(offsets)


def test_lengths_that_are_none() -> None:
    with pytest.raises(
        ValueError, match=r"lengths\[1\] = 0, but a document must have at least 1 token"
    ):
        cu_seqlens_from_lengths([4, 0])
    with pytest.raises(ValueError, match=r"4294967296 tokens is too large for int32 offsets"):
        cu_seqlens_from_lengths([2**31, 2**31])


def drawn(mask: np.ndarray) -> list[str]:
    return ["".join(".x"[int(seen)] for seen in row) for row in mask]


def test_a_mask_is_a_triangle_for_each_document() -> None:
    assert drawn(block_mask([0, 3, 5])) == ["x....", "xx...", "xxx..", "...x.", "...xx"]
    assert drawn(block_mask([0, 1, 3], causal=False)) == ["x..", ".xx", ".xx"]


def test_a_window_cuts_what_is_far_behind() -> None:
    assert drawn(block_mask([0, 4, 5], window=2)) == ["x....", "xx...", ".xx..", "..xx.", "....x"]


def test_a_large_mask_is_refused_with_its_bytes() -> None:
    with pytest.raises(ValueError, match=r"100000 x 100000 tokens takes 10000000000 bytes"):
        block_mask([0, 100_000])
    with pytest.raises(ValueError, match=r"takes 25 bytes, more than max_bytes = 24"):
        block_mask([0, 5], max_bytes=24)
    assert block_mask([0, 5], max_bytes=25).shape == (5, 5)
