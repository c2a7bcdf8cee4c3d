"""Tests of the caching allocator's rules."""

from hypothesis import given
from hypothesis import strategies as st

from wlb.rehearse import allocator
from wlb.rehearse.allocator import MIB
from wlb.rehearse.gpu import AllocatorRequest
from wlb.rehearse.results import Reserved

KIB = 1024


def reserved(asked: list[tuple[int, int, int]], *, limit: int, expandable: bool) -> Reserved:
    """Replays requests of (number, bytes, stream); the index of one that fails is its step."""
    requests = [AllocatorRequest(*one, step=i, where="a.py:1") for i, one in enumerate(asked)]
    return allocator.reserved(requests, limit=limit, expandable=expandable)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Requests of two streams, each freed later or never."""
    sizes = st.integers(1, 60 * MIB // 512).map(lambda blocks: 512 * blocks)
    out: list[tuple[int, int, int]] = []
    living: list[tuple[int, int]] = []
    for number in range(draw(st.integers(1, 30))):
        if living and draw(st.booleans()):
            freed, stream = living.pop(draw(st.integers(0, len(living) - 1)))
            out.append((freed, -1, stream))
        stream = draw(st.integers(0, 1))
        out.append((number, draw(sizes), stream))
        living.append((number, stream))
    return out


@given(requests(), st.booleans())
def test_it_reserves_what_is_allocated_or_more(
    asked: list[tuple[int, int, int]], expandable: bool
) -> None:
    living: dict[int, int] = {}
    most = 0
    for number, size, _ in asked:
        living[number] = max(0, size)
        most = max(most, sum(living.values()))
    taken = reserved(asked, limit=1 << 60, expandable=expandable)
    assert taken.peak_bytes >= taken.allocated_bytes >= most
    assert taken.failed_bytes == taken.retries == 0


@given(requests(), st.booleans())
def test_with_just_what_it_reserved_it_never_fails(
    asked: list[tuple[int, int, int]], expandable: bool
) -> None:
    free = reserved(asked, limit=1 << 60, expandable=expandable)
    assert reserved(asked, limit=free.peak_bytes, expandable=expandable) == free


def test_small_and_large_requests_share_segments() -> None:
    small = [(i, 512, 0) for i in range(4096)]  # 2 MiB
    assert reserved(small, limit=1 << 40, expandable=False).peak_bytes == 2 * MIB
    medium = [(i, 5 * MIB, 0) for i in range(4)]
    assert reserved(medium, limit=1 << 40, expandable=False).peak_bytes == 20 * MIB
    assert reserved([(0, 21 * MIB, 0)], limit=1 << 40, expandable=False).peak_bytes == 22 * MIB


def test_a_freed_block_is_taken_again_by_its_own_stream_alone() -> None:
    again = [(0, 30 * MIB, 0), (0, -1, 0), (1, 29 * MIB, 0)]
    assert reserved(again, limit=1 << 40, expandable=False).peak_bytes == 30 * MIB
    other = [(0, 30 * MIB, 0), (0, -1, 0), (1, 30 * MIB, 1)]
    assert reserved(other, limit=1 << 40, expandable=False).peak_bytes == 60 * MIB


def test_varying_lengths_leave_gaps_that_expandable_segments_fill() -> None:
    asked: list[tuple[int, int, int]] = []
    number = 0
    for size in (100, 104, 108, 112):
        for _ in range(4):
            asked.append((number, size * MIB, 0))
            number += 1
        asked += [(n, -1, 0) for n in range(number - 4, number)]
    plain = reserved(asked, limit=1 << 40, expandable=False)
    grown = reserved(asked, limit=1 << 40, expandable=True)
    assert plain.peak_bytes > 1.8 * plain.allocated_bytes
    assert grown.peak_bytes < 1.1 * grown.allocated_bytes


def test_a_full_device_gives_back_free_segments_before_it_fails() -> None:
    asked = [(0, 30 * MIB, 0), (0, -1, 0), (1, 40 * MIB, 0)]
    taken = reserved(asked, limit=50 * MIB, expandable=False)
    assert (taken.retries, taken.failed_bytes) == (1, 0)
    failed = reserved([(0, 60 * MIB, 0)], limit=50 * MIB, expandable=False)
    assert failed.failed_bytes == 60 * MIB
