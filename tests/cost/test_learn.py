"""Tests a rank's vote on prices, the count of votes, and the prices that follow."""

from dataclasses import replace

import numpy as np
import pytest

from tests.cost.test_stages import first_plan, priced
from wlb.cost import (
    Measured,
    RankCells,
    RankVote,
    StageLayers,
    ballot,
    counted_votes,
    next_prices,
    price_base,
    repriced,
    stage_times,
)
from wlb.cost.learn import LoadPrices
from wlb.cost.workload import workload_for
from wlb.plan import AS_PROFILED, TERMS, PriceFactors
from wlb.plan.prices import UNIT
from wlb.spec import load

STEP = 2 ** (1 / 128)
"""Votes are counted in bins of 2^(1/64), so that a median is off by at most this factor."""


def cells(factors: dict[str, float], *, slow: float = 1.0, constant_ns: float = 0.0) -> RankCells:
    """Returns a rank's cells of varied size; linear layers take `constant_ns` more a layer."""
    made = RankCells()
    for size in (10, 14, 18, 22, 26, 30, 34, 38, 42, 46):
        for name in TERMS:
            extra = constant_ns if name.startswith("linear") else 0
            base, layers = size * 1000.0, 4
            took = slow * (factors[name] * base * layers + extra * layers)
            made.add(name, base * layers, took, layers=layers)
    return made


FACTORS = dict(zip(TERMS, (1.8, 1.5, 1.2, 0.9), strict=True))


def vote_of(made: RankCells) -> RankVote:
    vote = made.vote()
    assert vote is not None
    return vote


def test_a_rank_votes_for_what_it_measured() -> None:
    vote = vote_of(cells(FACTORS))
    assert vote.factors == pytest.approx(FACTORS)
    assert vote.extra_ns == (0.0, 0.0)


def test_a_constant_of_each_call_does_not_become_a_price_per_token() -> None:
    vote = vote_of(cells(FACTORS, constant_ns=9000))
    assert vote.factors == pytest.approx(FACTORS)
    assert vote.extra_ns == pytest.approx((9000, 9000))


def test_calls_that_cost_less_than_their_price_do_not_make_tokens_cheaper() -> None:
    vote = vote_of(cells(FACTORS, constant_ns=-4000))
    assert vote.factors == pytest.approx(FACTORS)
    assert vote.extra_ns == (0.0, 0.0)


def test_outliers_do_not_count() -> None:
    made = cells(FACTORS)
    for name in TERMS:
        made.add(name, 100_000, 9e9)
        made.add(name, 90_000, 1)
    assert vote_of(made).factors == pytest.approx(FACTORS)


def test_cells_that_are_alike_give_a_ratio() -> None:
    made = RankCells()
    for name in TERMS:
        for i in range(20):
            made.add(name, 1000 + i % 2, 1700)
    assert vote_of(made).factors["linear_forward"] == pytest.approx(1.7, rel=0.01)
    assert vote_of(made).extra_ns == (0.0, 0.0)


def test_noise_too_large_for_a_line_gives_a_ratio() -> None:
    draw = np.random.default_rng(1)
    made = RankCells()
    for name in TERMS:
        for size in draw.uniform(900, 1100, 40).tolist():
            made.add(name, size, 1.3 * size * float(np.exp(draw.normal(0, 0.2))))
    assert vote_of(made).factors["linear_forward"] == pytest.approx(1.3, rel=0.08)
    assert vote_of(made).extra_ns == (0.0, 0.0)


def test_without_a_time_of_some_term_a_rank_does_not_vote() -> None:
    made = RankCells()
    assert made.vote() is None
    for name in TERMS[:3]:
        made.add(name, 1000, 1000)
    made.add(TERMS[3], 1000, 0)  # not measured
    made.add(TERMS[3], 0, 1000)  # without a price
    assert made.vote() is None
    made.add(TERMS[3], 1000, 900)
    assert vote_of(made).factors["linear_backward"] == 0.9
    made.clear()
    assert made.vote() is None
    assert not ballot(None).any()


def test_passes_with_fsdps_collectives_tell_a_slope_where_there_are_no_others() -> None:
    def shifted(*sizes: int) -> RankCells:
        made = RankCells()
        for size in sizes:
            for name in TERMS:
                held = 50_000 if name.startswith("linear") else 0
                took = FACTORS[name] * size + held
                made.add(name, size, took, is_shifted=held > 0)
        return made

    vote = vote_of(shifted(*range(1000, 3000, 100)))
    assert vote.factors == pytest.approx(FACTORS)
    assert vote.extra_ns == (0.0, 0.0)  # FSDP's, not the layers'
    assert shifted(*[1000] * 20).vote() is None  # nothing tells price and constant apart
    assert shifted(1000, 2000).vote() is None
    both = shifted(*range(1000, 3000, 100))
    for name in TERMS:
        both.add(name, 1000, 2000)
    assert vote_of(both).factors["linear_forward"] == 2.0


def count(votes: list[RankVote | None]) -> Measured:
    measured = counted_votes(np.sum([ballot(vote) for vote in votes], axis=0))
    assert measured is not None
    return measured


def test_a_slow_rank_votes_for_the_same_prices() -> None:
    """It is 20% slower in everything, so its factors relative to each other are the others'."""
    quick, slow = vote_of(cells(FACTORS)), vote_of(cells(FACTORS, slow=1.2))
    assert slow.factors["attention_forward"] == pytest.approx(1.2 * 1.8)
    alone, together = count([slow]), count([quick, quick, slow])
    assert alone.relative == together.relative == count([quick]).relative
    assert together.linear_forward == count([quick]).linear_forward
    assert together.num_votes == 3


def test_the_median_vote_counts() -> None:
    votes = [
        RankVote(dict(zip(TERMS, (factor, 1.0, 1.0, 1.0), strict=True)), (extra, 0.0))
        for factor, extra in ((0.5, 100), (1.7, 3000), (1.9, 4000), (30.0, 5000), (1e9, 1e12))
    ]
    measured = count([*votes, None])
    assert measured.num_votes == 5
    assert measured.relative[0] / UNIT == pytest.approx(1.9, rel=STEP - 1)
    assert measured.extra_ns[0] == pytest.approx(4000, rel=0.02)
    assert measured.extra_ns[1] == 0
    # Of two in the middle, the value between.
    assert count(votes[:4]).relative[0] / UNIT == pytest.approx((1.7 * 1.9) ** 0.5, rel=STEP - 1)
    assert counted_votes(ballot(None)) is None


def follow(
    now: PriceFactors, *relative: float, common: float = 1.0, first: bool = False
) -> PriceFactors | None:
    factors = tuple(round(UNIT * f) for f in relative)
    measured = Measured(4, round(UNIT * common), (factors[0], factors[1], factors[2]), (0, 50))
    return next_prices(now, measured, threshold=0.05, max_change=0.5, is_first=first)


def test_prices_follow_by_bounded_steps_and_stay_where_they_are_right() -> None:
    one = follow(AS_PROFILED, 2.0, 0.5, 1.02, common=3.0)
    assert one is not None
    assert one.linear_forward == 3 * UNIT
    assert one.relative["attention_forward"] == pytest.approx(1.5)
    assert one.relative["attention_backward"] == pytest.approx(1 / 1.5)
    assert one.relative["linear_backward"] == pytest.approx(1.02)
    assert one.linear_backward_extra_ns == 50
    two = follow(one, 2.0, 0.5, 1.02, common=3.0)
    assert two is not None
    assert two.relative["attention_forward"] == pytest.approx(2.0)
    assert two.relative["attention_backward"] == pytest.approx(0.5)
    assert follow(two, 2.0, 0.5, 1.02, common=3.0) is None
    assert follow(two, 2.08, 0.48, 1.06, common=3.0) is None
    assert follow(two, 2.12, 0.5, 1.02, common=3.0) is not None


def test_a_slower_machine_changes_prices_once_at_most() -> None:
    """No plan depends on the common factor; predictions do."""
    first = follow(AS_PROFILED, 1.0, 1.0, 1.0, common=3.0, first=True)
    assert first == PriceFactors(**dict.fromkeys(TERMS, 3 * UNIT), linear_backward_extra_ns=50)
    assert follow(first, 1.0, 1.0, 1.0, common=4.0) is None
    assert follow(AS_PROFILED, 1.0, 1.0, 1.0, common=1.2, first=True) is None


def test_the_load_of_experts_changes_as_a_price_does() -> None:
    measured = Measured(4, UNIT, (UNIT, UNIT, UNIT), (0, 0))

    def to(before: float, now: float) -> int | None:
        found = next_prices(
            AS_PROFILED,
            measured,
            threshold=0.05,
            max_change=0.5,
            is_first=False,
            loads=LoadPrices(held=round(before * UNIT), measured=round(now * UNIT)),
        )
        return found and found.expert_load

    assert to(1.0, 1.04) is None
    assert [to(1.0, 1.2), to(1.0, 3.0), to(3.0, 1.0)] == [1_200_000, 1_500_000, 2_000_000]
    spec = load("qwen3_30b_a3b_128k", ["model.vocab_size=151936", "cost.expert_load=1.5"])
    cost = workload_for(spec, "cuda")
    held = [repriced(cost, PriceFactors(expert_load=n), device="cuda") for n in (0, 1_200_000)]
    assert held[0].expert_load == 1.5
    assert held[1].ns_per_token == replace(cost, expert_load=1.2).ns_per_token


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_workload_at_other_prices_predicts_times_by_them(device: str) -> None:
    cost = priced("h100")
    assert repriced(cost, AS_PROFILED, device=device) is cost
    prices = PriceFactors(
        attention_forward=2 * UNIT, attention_backward=3 * UNIT, linear_forward=UNIT // 2
    )
    made = repriced(cost, prices, device=device)
    assert price_base(made) == price_base(cost) == f"h100 {cost.table.backends[0]}"
    layers = cost.num_layers_per_rank
    before, after = (stage_times(first_plan(), c, StageLayers(layers=layers)) for c in (cost, made))
    assert after.attention_forward_ns == pytest.approx(2 * before.attention_forward_ns, rel=1e-4)
    assert after.attention_backward_ns == pytest.approx(3 * before.attention_backward_ns, rel=1e-4)
    assert made.linear.call_ns[0] < cost.linear.call_ns[0]
    more = replace(AS_PROFILED, linear_forward_extra_ns=700)
    call_ns = repriced(cost, more, device=device).linear.call_ns
    assert call_ns[0] - cost.linear.call_ns[0] == 700 * layers
