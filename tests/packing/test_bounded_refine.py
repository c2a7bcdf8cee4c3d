"""Tests moves and swaps after the greedy: never slower, never beyond S_max, literal exchanges."""

from hypothesis import given
from hypothesis import strategies as st

from wlb.packing.bounded import refine


def loads(rows: list[list[int]], work: list[int]) -> list[int]:
    return [sum(work[d] for d in members) for members in rows]


def test_a_document_is_moved() -> None:
    work = [5, 3, 4]
    made = refine([[0, 1], [2]], [1, 1, 1], work, s_max=9)
    assert sorted(loads(made, work)) == [5, 7]


def test_two_documents_are_swapped() -> None:
    work = [7, 3, 6, 2]
    made = refine([[0, 2], [1, 3]], [1] * 4, work, s_max=2)  # no room to move one
    assert sorted(loads(made, work)) == [9, 9]


def test_no_exchange_beyond_s_max() -> None:
    work, lengths = [7, 6, 1], [4, 4, 8]
    assert refine([[0, 1], [2]], lengths, work, s_max=8) == [[0, 1], [2]]
    made = refine([[0, 1], [2]], lengths, work, s_max=12)
    assert sorted(loads(made, work)) == [7, 7]


def test_one_document_alone_can_not_be_improved() -> None:
    assert refine([[0], [1, 2]], [1] * 3, [9, 1, 1], s_max=9) == [[0], [1, 2]]


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), max_size=24),
    st.data(),
)
def test_every_document_stays_and_the_slowest_gets_no_slower(
    num: int, documents: list[tuple[int, int]], data: st.DataObject
) -> None:
    lengths, work = [d[0] for d in documents], [d[1] for d in documents]
    rows: list[list[int]] = [[] for _ in range(num)]
    for row in range(len(documents)):
        rows[data.draw(st.integers(0, num - 1))].append(row)
    s_max = max([sum(lengths[d] for d in members) for members in rows])
    made = refine(rows, lengths, work, s_max=s_max)
    assert sorted(d for members in made for d in members) == list(range(len(documents)))
    assert max(loads(made, work)) <= max(loads(rows, work))
    assert all(sum(lengths[d] for d in members) <= s_max for members in made)
