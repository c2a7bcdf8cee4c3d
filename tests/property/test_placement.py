"""Tests that the heaps of Algorithm 1 place exactly what its printed minima place."""

from hypothesis import given
from hypothesis import strategies as st

from wlb.packing.var_len import place


def place_as_printed(
    lengths: list[int], workloads: list[int], *, num_micro_batches: int, s_max: int
) -> tuple[list[list[int]], list[int]]:
    """Runs lines 22-37 with minima over all micro-batches; ties go to the lowest index."""
    rows: list[list[int]] = [[] for _ in range(num_micro_batches)]
    rest: list[int] = []
    for row, length in enumerate(lengths):
        work = [sum(workloads[r] for r in members) for members in rows]
        size = [sum(lengths[r] for r in members) for members in rows]
        lightest, shortest = work.index(min(work)), size.index(min(size))
        if size[lightest] + length <= s_max:
            rows[lightest].append(row)
        elif size[shortest] + length <= s_max:
            rows[shortest].append(row)
        else:
            rest.append(row)
    return rows, rest


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), max_size=25),
    st.integers(1, 5),
    st.integers(12, 40),
)
def test_heaps_and_minima_agree(
    documents: list[tuple[int, int]], num_micro_batches: int, s_max: int
) -> None:
    lengths, workloads = [n for n, _ in documents], [w for _, w in documents]
    options = {"num_micro_batches": num_micro_batches, "s_max": s_max}
    assert place(lengths, workloads, **options) == place_as_printed(lengths, workloads, **options)
