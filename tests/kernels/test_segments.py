"""Segments: literal offsets, and what is refused."""

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


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 3, 5], [0, 3], "cu_q has 2 segments, cu_k 1"),
        ([0, 3, 5], [0, 3, 4], "segment 1 has 2 queries but only 1 keys"),
        ([0, 3, 2], [0, 3, 6], "cu_q falls from 3 to 2 at segment 1"),
        ([0, 3], [1, 6], "cu_k begins with 1, not with 0"),
        ([], [], "cu_q must be a list of whole numbers"),
        ([0, 1.5], [0, 2], "cu_q must be a list of whole numbers"),
        ([0, 2**31], [0, 2**31], "cu_q ends at 2147483648"),
    ],
)
def test_bad_offsets_are_refused(cu_q, cu_k, message):
    with pytest.raises(ValueError, match=message):
        Segments.from_offsets(cu_q, cu_k, device="cpu")
