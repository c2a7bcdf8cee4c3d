"""Tests how ranks are filled: tokens and work of each by hand, and every token once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.sharding.fill import TILE, FillCut, FillOptions, FillPart, HeadWork, fill, parts_of

FLOPS = FlopsWorkload(quadratic_ns=1)
HEADS = HeadWork(100_000, FLOPS)


def show(filled: list[list[FillPart]]) -> list[list[tuple[int, int, str]]]:
    return [[(part.piece, part.size, part.cut.name) for part in mine] for mine in filled]


def filled(
    parts: list[FillPart], rooms: list[int], scale: list[float] | None = None, **options: float
) -> list[list[FillPart]]:
    return fill(parts, rooms, scale or [1.0] * len(rooms), HEADS, FillOptions(**options))


def test_dense_documents_come_first_and_light_ones_fill_up() -> None:
    """300 tokens of 4 and 900 of 0 ns: with a share of 400 ns each rank has 100 and 300."""
    parts = [FillPart(piece=i, size=100, density=4) for i in range(3)]
    parts += [FillPart(piece=3 + i, size=300, density=0) for i in range(3)]
    assert show(filled(parts, [400] * 3)) == [
        [(0, 100, "WHOLE"), (5, 300, "WHOLE")],
        [(1, 100, "WHOLE"), (4, 300, "WHOLE")],
        [(2, 100, "WHOLE"), (3, 300, "WHOLE")],
    ]


def test_a_long_document_is_cut_over_as_few_ranks_as_it_fills() -> None:
    """Its 1,280 tokens are all the work: two tiles and a half a rank, whole tiles are cut."""
    parts = [
        FillPart(piece=0, size=10 * TILE, density=1),
        FillPart(piece=1, size=30 * TILE, density=0),
    ]
    found = filled(parts, [10 * TILE] * 4)
    assert [[part.size // TILE for part in mine] for mine in found] == [
        [2, 8],
        [3, 7],
        [2, 8],
        [3, 7],
    ]
    assert {part.cut for mine in found for part in mine if part.piece == 0} == {FillCut.SYMMETRIC}
    # Two ranks may have twice their share.
    found = filled(parts, [10 * TILE] * 4, share=2)
    sizes = [sum(part.size for part in mine if part.piece == 0) // TILE for mine in found]
    assert sizes == [5, 5, 0, 0]


def test_ranks_have_the_work_that_they_are_scaled_to() -> None:
    parts = [
        FillPart(piece=0, size=30 * TILE, density=1),
        FillPart(piece=1, size=30 * TILE, density=0),
    ]
    found = filled(parts, [30 * TILE] * 2, [2.0, 1.0])
    assert [sum(part.work for part in mine) // TILE for mine in found] == [20, 10]


def test_short_documents_are_cut_in_runs_whose_later_tokens_cost_more() -> None:
    found = filled(parts_of(np.array([512]), np.array([512 * 512])), [256, 256])
    assert show(found) == [[(0, 256, "RUN")], [(0, 256, "RUN")]]
    assert [part.start for mine in found for part in mine] == [0, 256]
    first, second = (mine[0].work for mine in found)
    assert (first, second) == (256 * 256, 3 * 256 * 256)


@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from([1.0, 0.3, 0.0]),
    st.sampled_from([1.0, 2.0]),
)
def test_every_token_goes_to_one_rank(
    lengths: list[int], num_ranks: int, whole: float, share: float
) -> None:
    pieces = np.array(lengths)
    base, over = divmod(sum(lengths), num_ranks)
    rooms = [base + (rank < over) for rank in range(num_ranks)]
    parts = parts_of(pieces, pieces * pieces)
    before = show([parts])
    found = filled(parts, rooms, whole=whole, share=share)
    assert [sum(part.size for part in mine) for mine in found] == rooms
    held = np.zeros(pieces.size, np.int64)
    for part in (part for mine in found for part in mine):
        assert part.size > 0
        held[part.piece] += part.size
    assert held.tolist() == lengths
    assert show([parts]) == before
    total = sum(part.work for mine in found for part in mine)
    assert total == pytest.approx(float((pieces * pieces).sum()), rel=0.2, abs=1e6)
