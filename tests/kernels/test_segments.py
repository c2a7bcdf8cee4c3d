"""Tests segments: literal offsets, and what is refused."""

import copy

import numpy as np
import pytest
import torch

from wlb.kernels import Segments


def test_offsets_live_on_the_device_and_on_the_host():
    segments = Segments.from_offsets([0, 3, 3, 5], [0, 3, 7, 13], device="cpu")
    assert segments.cu_seqlens_q.dtype == segments.cu_seqlens_k.dtype == torch.int32
    assert segments.cu_seqlens_q.tolist() == list(segments.offsets_q) == [0, 3, 3, 5]
    assert segments.cu_seqlens_k.tolist() == list(segments.offsets_k) == [0, 3, 7, 13]
    assert (segments.max_q, segments.max_k) == (3, 6)
    assert (segments.num_segments, segments.num_queries, segments.num_keys) == (3, 5, 13)


def test_no_segments():
    segments = Segments.from_offsets(np.zeros(1, np.int32), [0], device="cpu")
    assert (segments.num_segments, segments.max_q, segments.max_k) == (0, 0, 0)


def test_derived_values_are_made_once():
    segments = Segments.from_offsets([0, 3], [0, 3], device="cpu")
    made = [segments.derive("list", lambda s: list(s.offsets_q)) for _ in range(2)]
    assert made[0] is made[1]


def test_tensors_lead_back_to_their_segments():
    key_rows = np.array([3, 4, 5, 9])
    segments = Segments.from_offsets([0, 2, 3], [0, 3, 4], device="cpu", key_rows=key_rows)
    again = Segments.of(
        segments.cu_seqlens_q, segments.cu_seqlens_k, segments.max_q, segments.max_k
    )
    assert again.host is segments.host
    assert again.key_rows is key_rows


def test_other_tensors_are_read():
    """What belongs to the tensors they are mixed with is left alone."""
    segments = Segments.from_offsets(
        [0, 2, 3], [0, 3, 4], device="cpu", key_rows=np.array([3, 4, 5, 9])
    )
    for cu_q in (segments.cu_seqlens_q, segments.cu_seqlens_q.clone()):
        other = Segments.of(cu_q, torch.tensor([0, 3, 5], dtype=torch.int32), 2, 3)
        assert (other.offsets_q, other.offsets_k) == ((0, 2, 3), (0, 3, 5))
        assert other.key_rows is None
    assert (segments.offsets_k, segments.num_segments) == ((0, 3, 4), 2)
    again = Segments.of(segments.cu_seqlens_q, segments.cu_seqlens_k, 2, 3)
    assert again.host is segments.host


@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
def test_tensors_that_were_changed_are_read_again(which):
    segments = Segments.from_offsets([0, 2, 4], [0, 3, 6], device="cpu")
    getattr(segments, which)[1] -= 1
    where = (segments.cu_seqlens_q, segments.cu_seqlens_k)
    again = Segments.of(*where, 3, 4)
    assert (again.offsets_q, again.offsets_k) == tuple(tuple(x.tolist()) for x in where)
    assert Segments.of(*where, 3, 4).host is again.host or which == "cu_seqlens_k"


def test_copies_of_segments_are_themselves():
    segments = Segments.from_offsets([0, 3], [0, 3], device="cpu")
    assert copy.deepcopy([segments])[0] is segments


@pytest.mark.parametrize(
    ("key_rows", "message"),
    [
        (
            [0, 1],
            r"key_rows must be an array of 3 whole numbers, one row "
            r"number for each key, not int64 of shape \(2,\)",
        ),
        ([0.0, 1.0, 2.0], "not float64 of shape"),
        ([0, -1, 2], r"key_rows\[1\] = -1 must be at least 0"),
    ],
)
def test_bad_key_rows_are_refused(key_rows, message):
    with pytest.raises(ValueError, match=message):
        Segments.from_offsets([0, 2], [0, 3], device="cpu", key_rows=np.array(key_rows))


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 3, 5], [0, 3], "cu_q has 2 segments, but cu_k has 1"),
        ([0, 3, 5], [0, 3, 4], "segment 1 has 2 queries but only 1 keys"),
        ([0, 3, 2], [0, 3, 6], "cu_q must never decrease, but falls from 3 to 2 at segment 1"),
        ([0, 3], [1, 6], "cu_k must begin with 0, but begins with 1"),
        ([], [], "cu_q must be a one-dimensional array of whole numbers"),
        ([0, 1.5], [0, 2], "cu_q must be a one-dimensional array of whole numbers"),
        ([0, 2**31], [0, 2**31], "cu_q ends at 2147483648"),
    ],
)
def test_bad_offsets_are_refused(cu_q, cu_k, message):
    with pytest.raises(ValueError, match=message):
        Segments.from_offsets(cu_q, cu_k, device="cpu")
