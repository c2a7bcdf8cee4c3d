"""Tests the ILP policies: literal optima, brute force, bounds, limits, what they carry."""

import itertools
import json
import sys
import time

import numpy as np
import pytest

from tests.sets import full
from wlb.cost import FlopsWorkload
from wlb.packing import FixedPacker, PackerOptions
from wlb.packing.fixed import Window, greedy
from wlb.packing.ilp.model import Objective
from wlb.packing.ilp.packers import (
    IlpFixedPacker,
    IlpOptions,
    IlpReport,
    IlpVarLenPacker,
    solve_fixed,
    solve_var_len,
)
from wlb.packing.ilp.solvers import Solver
from wlb.plan import Carry, Documents, GlobalBatch, PackingPlan, Pieces

BOTH_SOLVERS = pytest.mark.parametrize("solver", list(Solver))
BOTH_OBJECTIVES = pytest.mark.parametrize("objective", list(Objective))


def options(n: int = 2, window: int = 8) -> PackerOptions:
    cost = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=4)
    return PackerOptions(num_micro_batches=n, context_window=window, cost=cost)


def exact(solver: Solver = Solver.HIGHS, objective: str = "sum_of_step_max") -> IlpOptions:
    """Returns options by which every piece has binaries and the solver goes on to the optimum.

    It gets there however busy the machine is.
    """
    return IlpOptions(
        solver=solver,
        objective=Objective(objective),
        gap_limit=0,
        divisible_below=0,
        time_limit_s=3600,
    )


def pieces_of(lengths: list[int]) -> Pieces:
    return Pieces.whole(Documents.from_lengths(lengths))


def lengths_in(window: Window) -> list[list[int]]:
    return [sorted(window.pieces.length[row].tolist(), reverse=True) for row in window.rows]


def brute_force(
    lengths: list[int], costs: list[int], num: int, capacity: int, per_step: int
) -> int:
    """Returns the least sum over steps of the slowest micro-batch, over all placements of whole
    pieces.
    """
    best = sys.maxsize
    for bins in itertools.product(range(num), repeat=len(lengths)):
        tokens, loads = [0] * num, [0] * num
        for j, length, cost in zip(bins, lengths, costs, strict=True):
            tokens[j] += length
            loads[j] += cost
        if max(tokens) <= capacity:
            best = min(best, sum(sorted(loads, reverse=True)[::per_step]))
    return best


@BOTH_SOLVERS
def test_eq_1_fills_windows_and_balances_squares(solver: Solver) -> None:
    # Greedy puts the wrong pieces beside 11 and 10: 156 = 11^2 + 5^2 + 3^2 + 1.
    window, report = solve_fixed(
        pieces_of([11, 10, 5, 5, 4, 3, 1, 1]),
        options=options(window=20),
        ilp=exact(solver),
        num_micro_batches=2,
    )
    assert sorted(lengths_in(window)) == [[10, 5, 5], [11, 4, 3, 1, 1]]
    assert (report.greedy_objective_ns, report.objective_ns, report.bound_ns) == (156, 150, 150)
    assert report.optimal
    assert not report.kept_greedy
    assert report.num_binaries == 16


@BOTH_SOLVERS
def test_eq_2_balances_attention_and_the_rest(solver: Solver) -> None:
    window, report = solve_var_len(
        pieces_of([4, 4, 3, 3, 2]),
        options=options(),
        ilp=exact(solver),
        num_micro_batches=2,
        s_max=12,
    )
    assert lengths_in(window) == [[4, 4], [3, 3, 2]]  # 64 and 54; greedy: 4 + 3 + 2 = 65
    assert (report.greedy_objective_ns, report.objective_ns) == (65, 64)


def test_the_printed_objective_is_indifferent_once_an_outlier_dominates() -> None:
    # Two steps of two. 8 tokens cost 96 by themselves, so 96 is the least possible maximum...
    pieces = pieces_of([8, 7, 5, 4, 4, 3, 1])
    found = {
        objective: solve_var_len(
            pieces, options=options(), ilp=exact(objective=objective), num_micro_batches=4, s_max=12
        )
        for objective in ("max", "sum_of_step_max")
    }
    assert found["max"][1].objective_ns == 96
    # ... whereas the time of two steps is least with more beside it: 122 + 32, of which one packing
    # is [8, 3, 1] [7, 5] and [4] [4]. Others take as long.
    window, report = found["sum_of_step_max"]
    assert (report.objective_ns, report.greedy_objective_ns) == (154, 165)
    loads = [sum(n * n + 4 * n for n in row) for row in lengths_in(window)]
    assert sorted(max(loads[i : i + 2]) for i in (0, 2)) == [32, 122]


def tiny_windows(seed: int, num: int, capacity: int) -> list[int]:
    """Draws lengths that fill `num` micro-batches exactly; at most eight."""
    rng = np.random.default_rng(seed)
    while True:
        lengths: list[int] = []
        for _ in range(num):
            room = capacity
            while room:
                lengths.append(min(room, int(rng.integers(2, capacity + 1))))
                room -= lengths[-1]
        if len(lengths) <= 8:
            return lengths


@BOTH_SOLVERS
@BOTH_OBJECTIVES
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num", [2, 4])
def test_eq_1_equals_brute_force(solver: Solver, objective: Objective, seed: int, num: int) -> None:
    told = options(window=12)
    pieces = pieces_of(tiny_windows(seed, num, 12))
    start = greedy(pieces, told.attention(pieces), num_micro_batches=num, capacity=12)
    pieces = start.pieces  # where greedy cuts, its parts are what is packed
    window, report = solve_fixed(
        pieces, options=told, ilp=exact(solver, objective), num_micro_batches=num
    )
    per_step = num if objective == Objective.MAX else 2
    costs = told.attention(pieces).tolist()
    best = brute_force(pieces.length.tolist(), costs, num, 12, per_step)
    assert report.objective_ns == best
    assert report.bound_ns == best
    assert report.optimal
    assert report.status == "optimal"
    assert [sum(row) for row in lengths_in(window)] == [12] * num


@BOTH_SOLVERS
@BOTH_OBJECTIVES
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num", [2, 4])
def test_eq_2_equals_brute_force(solver: Solver, objective: Objective, seed: int, num: int) -> None:
    told = options(window=12)
    pieces = pieces_of(tiny_windows(100 + seed, num, 12))
    window, report = solve_var_len(
        pieces, options=told, ilp=exact(solver, objective), num_micro_batches=num, s_max=16
    )
    per_step = num if objective == Objective.MAX else 2
    costs = told.workloads(pieces).tolist()
    best = brute_force(pieces.length.tolist(), costs, num, 16, per_step)
    assert report.objective_ns == report.bound_ns == best
    assert max(sum(row) for row in lengths_in(window)) <= 16
    assert sorted(itertools.chain(*window.rows)) == list(range(len(pieces)))


@BOTH_SOLVERS
@pytest.mark.parametrize("seed", [0, *full(*range(1, 6))])
@pytest.mark.parametrize("below", [4, 8, 13])
def test_the_bound_with_a_fluid_holds_for_every_packing_of_whole_pieces(
    solver: Solver, seed: int, below: int
) -> None:
    told, num = options(window=12), 4
    pieces = pieces_of(tiny_windows(200 + seed, num, 12))
    ilp = IlpOptions(solver=solver, divisible_below=below, gap_limit=0)
    lengths, costs = pieces.length.tolist(), told.workloads(pieces).tolist()
    _, report = solve_var_len(pieces, options=told, ilp=ilp, num_micro_batches=num, s_max=16)
    best = brute_force(lengths, costs, num, 16, 2)
    assert report.bound_ns <= best <= report.objective_ns <= report.greedy_objective_ns
    assert report.num_binaries == num * sum(length >= below for length in lengths)
    _, report = solve_fixed(pieces, options=told, ilp=ilp, num_micro_batches=num)
    best = brute_force(lengths, told.attention(pieces).tolist(), num, 12, 2)
    assert report.bound_ns <= best
    assert report.bound_ns <= report.objective_ns <= report.greedy_objective_ns


def skewed(seed: int, num_tokens: int, window: int) -> list[int]:
    """Draws lengths of many short and few long documents that add up to `num_tokens`."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        draw = min(window, 1 + int(window * 0.03 * rng.lognormal(0, 1.5)))
        lengths.append(min(draw, num_tokens - sum(lengths)))
    return lengths


@pytest.mark.parametrize("num", [4, *full(8)])
def test_a_window_ends_full_with_few_cuts_and_close_to_its_bound(num: int) -> None:
    told = options(n=4, window=1024)
    ilp = IlpOptions(time_limit_s=600, gap_limit=0.05)  # ends by its gap, however busy the machine
    reports: list[IlpReport] = []
    for seed in range(4):
        pieces = pieces_of(skewed(seed, num * 1024, 1024))
        window, report = solve_fixed(pieces, options=told, ilp=ilp, num_micro_batches=num)
        reports.append(report)
        assert [sum(row) for row in lengths_in(window)] == [1024] * num
        assert len(pieces) <= len(window.pieces) < len(pieces) + num
        assert window.pieces.num_targets.sum() == pieces.num_targets.sum()
        assert np.array_equal(np.unique(window.pieces.document), pieces.document)
        loads = told.attention(window.pieces)
        slowest = sorted((int(loads[row].sum()) for row in window.rows), reverse=True)[::4]
        assert sum(slowest) == report.objective_ns
        assert report.bound_ns <= report.objective_ns <= report.greedy_objective_ns
        assert report.gap < 0.06
    if num == 8:  # with one step, greedy leaves little
        assert any(not report.kept_greedy for report in reports)


@BOTH_SOLVERS
def test_a_solve_stops_in_time_and_says_how_far_it_got(solver: Solver) -> None:
    told = options(n=4, window=4096)
    pieces = pieces_of(skewed(3, 8 * 4096, 4096))
    ilp = IlpOptions(solver=solver, time_limit_s=0.5, gap_limit=0, divisible_below=16)
    began = time.process_time()
    _, report = solve_fixed(pieces, options=told, ilp=ilp, num_micro_batches=8)
    assert time.process_time() - began < 5  # of processor time, whatever else runs here
    assert report.status == "feasible"
    assert not report.optimal
    assert report.gap > 0
    assert report.objective_ns <= report.greedy_objective_ns


@BOTH_SOLVERS
def test_a_solver_without_time_leaves_greedy(solver: Solver) -> None:
    told = options(n=4, window=4096)
    pieces = pieces_of(skewed(3, 8 * 4096, 4096))
    ilp = IlpOptions(solver=solver, time_limit_s=1e-3, gap_limit=0, divisible_below=16)
    window, report = solve_fixed(pieces, options=told, ilp=ilp, num_micro_batches=8)
    assert report.objective_ns <= report.greedy_objective_ns
    assert 0 < report.bound_ns <= report.objective_ns
    assert [sum(row) for row in lengths_in(window)] == [4096] * 8


def test_a_document_that_greedy_cuts_is_packed_as_its_parts() -> None:
    # Three documents of 6 tokens in two windows of 9: one of them has to be cut.
    window, report = solve_fixed(
        pieces_of([6, 6, 6]), options=options(window=9), ilp=exact(), num_micro_batches=2
    )
    assert lengths_in(window) == [[6, 3], [6, 3]]
    assert report.objective_ns == report.bound_ns == 45


def batches(seed: int, num_batches: int, tokens: int, window: int) -> list[GlobalBatch]:
    made: list[GlobalBatch] = []
    first = 0
    for index in range(num_batches):
        lengths = skewed(1000 * seed + index, tokens, window)
        documents = Documents.from_lengths(lengths, first_id=first)
        made.append(GlobalBatch(index=index, documents=documents))
        first += len(lengths)
    return made


Policy = IlpFixedPacker | IlpVarLenPacker


def packers(*, window_batches: int = 2, reports: list[IlpReport] | None = None) -> list[Policy]:
    told, sink = options(n=2, window=256), None if reports is None else reports.append
    ilp = IlpOptions(gap_limit=1e-3, time_limit_s=600)
    return [
        IlpFixedPacker(options=told, window_batches=window_batches, ilp=ilp, on_report=sink),
        IlpVarLenPacker(
            options=told, window_batches=window_batches, ilp=ilp, s_max=384, on_report=sink
        ),
    ]


def packed(packer: Policy, stream: list[GlobalBatch], *, resume: bool) -> list[PackingPlan]:
    carry, plans = packer.start(), list[PackingPlan]()
    for batch in [*stream, None]:
        made, carry = packer.push(batch, carry)
        plans += made
        if resume:
            carry = Carry.from_json(json.loads(json.dumps(carry.to_json())))
    assert not len(carry.pieces)
    return plans


@pytest.mark.parametrize("form", [0, 1], ids=["fixed", "var_len"])
def test_a_run_that_is_resumed_packs_the_same(form: int) -> None:
    stream = batches(1, 5, 512, 256)
    whole = packed(packers()[form], stream, resume=False)
    assert [plan.digest() for plan in whole] == [
        plan.digest() for plan in packed(packers()[form], stream, resume=True)
    ]
    assert [plan.step for plan in whole] == list(range(len(whole)))
    assert {plan.policy for plan in whole} == {["ilp_fixed", "ilp_var_len"][form]}


@pytest.mark.parametrize("form", [0, 1], ids=["fixed", "var_len"])
def test_every_token_is_packed_once(form: int) -> None:
    stream = batches(2, 5, 530, 256)
    reports: list[IlpReport] = []
    plans = packed(packers(reports=reports)[form], stream, resume=False)
    pieces = Pieces.concat(*(plan.pieces for plan in plans))
    order = np.lexsort((pieces.start, pieces.document))
    pieces = pieces.take(order)
    documents = Pieces.concat(*(Pieces.whole(batch.documents) for batch in stream))
    assert np.array_equal(np.unique(pieces.document), documents.document)
    lengths = np.bincount(pieces.document, weights=pieces.length)
    assert np.array_equal(lengths, documents.length)
    capacity = [256, 384][form]
    assert max(int(plan.tokens.max()) for plan in plans) <= capacity
    assert plans[-1].num_held_tokens == 0
    assert len(reports) == 3
    assert all(r.bound_ns <= r.objective_ns <= r.greedy_objective_ns for r in reports)
    if form:
        assert len(pieces) == len(documents)
        assert [plan.num_held_tokens > 0 for plan in plans] == [True, False, True, False, False]


def test_the_fixed_form_packs_the_same_windows_as_greedy() -> None:
    stream = batches(3, 4, 512, 256)
    greedy_packer = FixedPacker(options=options(n=2, window=256), window_batches=2)
    carry, plans = greedy_packer.start(), list[PackingPlan]()
    for batch in stream:
        made, carry = greedy_packer.push(batch, carry)
        plans += made
    solved = packed(packers()[0], stream, resume=False)
    for i in (0, 2):
        mine = Pieces.concat(*(plan.pieces for plan in solved[i : i + 2]))
        theirs = Pieces.concat(*(plan.pieces for plan in plans[i : i + 2]))
        assert set(mine.document.tolist()) == set(theirs.document.tolist())
        time_ns = [sum(int(p.workload_ns.max()) for p in x[i : i + 2]) for x in (solved, plans)]
        assert time_ns[0] <= time_ns[1]


def batch_of(index: int, lengths: list[int], first_id: int) -> GlobalBatch:
    documents = Documents.from_lengths(lengths, first_id=first_id)
    return GlobalBatch(index=index, documents=documents)


def test_var_len_waits_for_its_batches_and_leaves_over_what_does_not_fit() -> None:
    packer = IlpVarLenPacker(options=options(), s_max=8, window_batches=2, ilp=exact())
    plans, carry = packer.push(batch_of(0, [5, 5, 5], 0), packer.start())
    assert plans == ()
    assert carry.slot.tolist() == [1, 1, 1]
    plans, carry = packer.push(batch_of(1, [5, 5], 3), carry)
    assert [plan.tokens.tolist() for plan in plans] == [[5, 5], [5, 5]]
    assert carry.pieces.document.tolist() == [4]
    assert carry.slot.tolist() == [0]
    assert [plan.num_held_tokens for plan in plans] == [15, 5]
    # The leftover comes first: it is placed although it is the shortest.
    plans, carry = packer.push(batch_of(2, [6, 6, 6, 6], 5), carry)
    plans, carry = packer.push(batch_of(3, [], 9), carry)
    assert plans == ()  # a batch without documents does not count
    plans, carry = packer.push(batch_of(3, [1], 9), carry)
    assert 4 in Pieces.concat(*(plan.pieces for plan in plans)).document.tolist()
    assert carry.pieces.length.tolist() == [6]
    plans, carry = packer.push(None, carry)
    assert [plan.tokens.tolist() for plan in plans] == [[6, 0]]
    assert packer.push(None, carry)[0] == ()


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="time_limit_s = 0 "):
        IlpOptions(time_limit_s=0)
    with pytest.raises(ValueError, match="time_limit_s = nan"):
        IlpOptions(time_limit_s=float("nan"))
    with pytest.raises(ValueError, match="gap_limit = 1"):
        IlpOptions(gap_limit=1)
    with pytest.raises(ValueError, match="gurobi"):
        IlpOptions(solver="gurobi")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="threads"):
        IlpOptions(threads=0)
    with pytest.raises(ValueError, match="divisible_below"):
        IlpOptions(divisible_below=-1)
    with pytest.raises(ValueError, match="window_batches"):
        IlpFixedPacker(options=options(), window_batches=0)
    with pytest.raises(
        ValueError, match="s_max = 7 tokens must be at least the context window, 8 tokens"
    ):
        IlpVarLenPacker(options=options(), s_max=7)


def test_windows_that_cannot_be_packed_are_refused() -> None:
    told = options()
    with pytest.raises(ValueError, match=r"3 micro-batches cannot be packed, .* of 2 micro"):
        solve_fixed(pieces_of([4]), options=told, ilp=exact(), num_micro_batches=3)
    with pytest.raises(ValueError, match="17 tokens do not fit"):
        solve_fixed(pieces_of([8, 8, 1]), options=told, ilp=exact(), num_micro_batches=2)
    with pytest.raises(ValueError, match="1 of 3 pieces"):
        solve_var_len(pieces_of([8, 8, 1]), options=told, ilp=exact(), num_micro_batches=2, s_max=8)
    with pytest.raises(ValueError, match=r"at most 8 tokens \(s_max\)"):
        solve_var_len(pieces_of([9]), options=told, ilp=exact(), num_micro_batches=2, s_max=8)


@pytest.mark.parametrize(("solver", "package"), [(Solver.HIGHS, "highspy"), (Solver.CBC, "pulp")])
def test_a_missing_solver_is_named(
    solver: Solver, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"pip install {package}"):
        solve_fixed(pieces_of([4, 4]), options=options(), ilp=exact(solver), num_micro_batches=2)


def test_one_thread_after_several_is_no_error() -> None:
    for threads in (2, 1):
        _, report = solve_fixed(
            pieces_of([4, 4, 3, 3, 2]),
            options=options(),
            ilp=IlpOptions(threads=threads, divisible_below=0),
            num_micro_batches=2,
        )
        assert report.status == "optimal"


@BOTH_SOLVERS
def test_a_solver_prints_nothing(solver: Solver, capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output belongs to the caller: `wlb plan --ilp --json` prints JSON there."""
    sys.stdout.write("before")
    pieces = pieces_of([5, 4, 3])
    solve_fixed(pieces, options=options(), ilp=exact(solver), num_micro_batches=2)
    sys.stdout.write("after")
    assert capfd.readouterr().out == "beforeafter"
