"""Tests the integer program of sharding against all assignments of small cases, and its bounds."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pulp")
pytest.importorskip("highspy")

from experiments.sharding_solver.__main__ import case_of, every, row_of, summary
from experiments.sharding_solver.case import Case
from experiments.sharding_solver.program import solve
from wlb.cost import waits_ns
from wlb.plan import IntArray, UserError


def price_of(case: Case, rank: IntArray) -> float:
    """What the program minimises, from a plan's own rows and waits; all documents are chunks."""
    plan = case.plan(rank, np.zeros((0, case.cp)))
    work = np.bincount(rank, weights=case.work, minlength=case.cp).max()
    waits = sum(float(x.max()) for x in waits_ns(plan, case.cost))
    share = int(case.lengths.sum()) / case.cp
    rows = max(share, float(plan.tokens.max()))
    return case.linear_ns * rows + work + case.launches_ns + waits


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("lengths", [[60_000, 20_000], [30_000, 30_000, 9000, 700], [50_000]])
def test_no_assignment_of_chunks_is_better(lengths: list[int], tp: int) -> None:
    case = case_of(np.array(lengths), tp=tp, cp=2)
    found = solve(case, time_limit_s=30)
    every_one = (np.array(ranks) for ranks in product(range(2), repeat=case.piece.size - 1))
    best = min(price_of(case, np.append(0, ranks)) for ranks in every_one)
    assert found.is_proven
    assert found.placed
    assert found.objective == pytest.approx(best, rel=1e-3)
    assert found.bound <= best * (1 + 1e-9)
    assert price_of(case, found.placed[0]) == pytest.approx(found.objective, rel=1e-3)


@pytest.mark.full
@settings(max_examples=10)
@given(
    st.lists(st.integers(200, 40_000), min_size=2, max_size=10),
    st.sampled_from([(1, 2), (8, 2), (8, 4)]),
    st.sampled_from([3, 12]),
)
def test_balanced_is_an_answer_and_bounds_are_above_the_known_ones(
    lengths: list[int], layout: tuple[int, int], num_long: int
) -> None:
    tp, cp = layout
    case = case_of(np.array(lengths), tp=tp, cp=cp, num_long=num_long)
    rank, fluid = case.of_ours()
    assert fluid.sum() + case.sizes.sum() == sum(lengths)
    found = solve(case, time_limit_s=2)
    row = row_of(case, found, tp=tp)
    assert row.best <= row.ours
    assert row.bound >= row.known_bound
    if num_long == 12:
        assert found.objective <= price_of(case, rank) * (1 + 1e-6)
        plan = case.plan(rank, fluid)
        assert case.time_ns(plan) == pytest.approx(case.time_ns(case.ours))
    assert found.placed
    assert int(case.plan(*found.placed).tokens.sum()) == sum(lengths)


def test_what_the_program_cannot_say() -> None:
    case = case_of(np.array([30_000, 30_000]), tp=1, cp=2)
    with pytest.raises(UserError, match="own attention hides"):
        solve(replace(case, cost=replace(case.cost, overlaps=True)), time_limit_s=1)
    mixed = case_of(np.array([30_000] * 4), tp=4, cp=4)
    with pytest.raises(UserError, match="4 ranks are on nodes of 2"):
        solve(mixed, time_limit_s=1)


def test_tables_of_one_small_case() -> None:
    case = case_of(np.array([50_000, 9000, 300]), tp=8, cp=2)
    rows = [row_of(case, solve(case, time_limit_s=5), tp=8)]
    (line,) = summary(rows).rows
    assert line[:3] == [8, 2, 1]
    assert 1 <= float(line[5]) <= float(line[3]) * (1 + 1e-9)
    assert every(rows).rows[0][2] == 3
