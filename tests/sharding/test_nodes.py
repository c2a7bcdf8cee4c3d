"""Tests how documents are split over nodes: whole where a node can have them, tokens equal."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.sharding.fill import FillCut, FillPart, HeadWork, parts_of
from wlb.sharding.nodes import split

HEADS = HeadWork(200_000, FlopsWorkload(quadratic_ns=1))


def parts(lengths: list[int]) -> list[FillPart]:
    pieces = np.array(lengths)
    return parts_of(pieces, pieces * pieces)


def show(nodes: list[list[FillPart]]) -> list[list[tuple[int, int]]]:
    return [sorted((part.piece, part.size) for part in mine) for mine in nodes]


def test_documents_stay_whole_where_nodes_can_have_them() -> None:
    found = split(parts([800, 800, 100, 100, 100, 100]), [1000, 1000], [1, 1], HEADS, share=1)
    assert show(found) == [[(0, 800), (2, 100), (3, 100)], [(1, 800), (4, 100), (5, 100)]]


def test_the_longest_document_leaves_the_work_of_others_to_the_other_node() -> None:
    """Half of the work is the document of 1,000 tokens; its node is filled up with short ones."""
    lengths = [1000, 600, 600, 500, *[50] * 26]
    found = split(parts(lengths), [2000, 2000], [1, 1], HEADS, share=1)
    whole = [[part.piece for part in mine if part.size > 50] for mine in found]
    assert whole == [[0], [1, 2, 3]]
    assert [sum(part.size for part in mine) for mine in found] == [2000, 2000]


def test_swaps_of_short_documents_level_tokens_before_one_is_cut() -> None:
    """Whole, nodes have 1,010 and 990 tokens; 60 against 40 levels them, and 61 all but one."""
    for short, moved in ((60, 0), (61, 1)):
        lengths = [900, 900, short, 50, 40, 140 - short - 90 + 60]
        nodes = [sum(lengths) // 2, sum(lengths) - sum(lengths) // 2]
        found = split(parts(lengths), nodes, [1, 1], HEADS, share=1)
        assert [sum(part.size for part in mine) for mine in found] == nodes
        runs = [
            part for mine in found for part in mine if part.cut == FillCut.RUN and not part.start
        ]
        assert sum(part.size for part in runs) <= moved + 10


def test_a_document_that_no_node_can_have_is_shared_by_several() -> None:
    found = split(parts([1000, 8, 8]), [508, 508], [1, 1], HEADS, share=1)
    assert [sum(p.size for p in mine if p.piece == 0) for mine in found] == [508, 492]
    # A node may have more work than its share, if its tokens fit.
    longest = split(parts([1000, *[100] * 10]), [1000, 1000], [1, 1], HEADS, share=4)
    assert (0, 1000) in show(longest)[0]


@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=14),
    st.integers(2, 5),
    st.sampled_from([1.0, 1.5, 4.0]),
)
def test_every_token_goes_to_one_node(lengths: list[int], num_nodes: int, share: float) -> None:
    base, over = divmod(sum(lengths), num_nodes)
    rooms = [base + (node < over) for node in range(num_nodes)]
    found = split(parts(lengths), rooms, [1.0] * num_nodes, HEADS, share=share)
    assert [sum(part.size for part in mine) for mine in found] == rooms
    held = [0] * len(lengths)
    runs: dict[int, list[tuple[int, int]]] = {}
    for part in (part for mine in found for part in mine):
        held[part.piece] += part.size
        if part.cut == FillCut.RUN:
            runs.setdefault(part.piece, []).append((part.start, part.start + part.size))
    assert held == lengths
    for spans in runs.values():
        joined = sorted(spans)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(joined))
