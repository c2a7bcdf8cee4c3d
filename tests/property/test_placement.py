"""Tests that the heaps of Algorithm 1 place exactly what its printed minima place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.packing import placement
from wlb.packing.placement import place


def place_as_printed(
    lengths: list[int],
    workloads: list[int],
    *,
    num_micro_batches: int,
    s_max: int,
    step_tokens: int | None = None,
    second: list[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Runs lines 22-37 with minima over all micro-batches; ties go to the lowest index."""
    rows: list[list[int]] = [[] for _ in range(num_micro_batches)]
    rest: list[int] = []
    prices = [workloads, second or workloads]
    for row, length in enumerate(lengths):
        work = [max(sum(price[r] for r in members) for price in prices) for members in rows]
        size = [sum(lengths[r] for r in members) for members in rows]
        if step_tokens is not None and sum(size) + length > step_tokens:
            rest.append(row)
            continue
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


equal_runs = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 5), st.integers(1, 30)),
    max_size=6,
)


@given(
    equal_runs,
    st.integers(1, 5),
    st.integers(12, 40),
    st.none() | st.integers(12, 100),
    st.booleans(),
)
def test_runs_of_equal_documents_are_placed_as_one_by_one(
    runs: list[tuple[int, int, int, int]],
    num_micro_batches: int,
    s_max: int,
    step_tokens: int | None,
    has_second: bool,
) -> None:
    documents = [run[:3] for run in runs for _ in range(run[3])]
    lengths, workloads, second = ([d[i] for d in documents] for i in range(3))
    options = {
        "num_micro_batches": num_micro_batches,
        "s_max": s_max,
        "step_tokens": step_tokens,
        "second": second if has_second else None,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "LEAST", 2)
        assert place(lengths, workloads, **options) == place_as_printed(
            lengths, workloads, **options
        )
