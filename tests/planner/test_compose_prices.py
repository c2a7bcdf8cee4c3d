"""Tests plans at prices that change: pure in the state, and planned again by the process."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.planner.test_compose import COST, fingerprint, planner
from wlb.cost import FlopsWorkload
from wlb.plan import NO_CHANGES, PlannerState, PriceChange, PriceFactors, PriceSchedule, StepPlan
from wlb.plan.prices import UNIT
from wlb.planner import Planner
from wlb.planner.service import PlanClient, PlannerProcess
from wlb.planner.signs import PlanningError

DEAR = PriceFactors(attention_forward=8 * UNIT)
S = 5
LEARNED = PriceSchedule(base="flops", changes=(PriceChange(step=S, prices=DEAR),))


def at_prices(prices: PriceFactors) -> FlopsWorkload:
    factor = prices.attention_forward / UNIT
    return replace(COST, quadratic_ns=COST.quadratic_ns * factor)


def learning(policy: str = "bounded") -> Planner:
    return replace(planner(policy=policy), reprice=at_prices)


def without_change() -> list[StepPlan]:
    return list(learning().steps())


def with_change(policy: str = "bounded") -> list[StepPlan]:
    made = learning(policy)
    return list(made.steps(made.start().with_prices(LEARNED)))


@pytest.mark.parametrize("policy", ["original", "fixed", "var_len", "bounded", "capacity"])
def test_every_policy_plans_at_the_prices_of_the_step(policy: str) -> None:
    made, before, after = learning(policy), list(learning(policy).steps()), with_change(policy)
    assert [fingerprint(made, p) for p in after[:S]] == [fingerprint(made, p) for p in before[:S]]
    assert {p.prices for p in after[:S]} == {PriceFactors()}
    assert {p.prices for p in after[S:]} == {DEAR}
    # From there on it is what a planner of these prices does with what waited.
    other = replace(made, cost=at_prices(DEAR))
    packer, baseline = (
        replace(p, options=replace(p.options, cost=at_prices(DEAR)))  # type: ignore[type-var, union-attr]
        for p in (made.packer, made.baseline)
    )
    other = replace(other, packer=packer, baseline=baseline)
    rest = list(other.steps(before[S - 1].state.with_prices(NO_CHANGES)))
    assert [p.packing.digest() for p in after[S:]] == [p.packing.digest() for p in rest]
    assert [other.shard(p, 1).digest() for p in rest] == [
        made.shard(p, 1).digest() for p in after[S:]
    ]
    documents = sorted(d for p in after for d in p.packing.pieces.document.tolist())
    assert documents == sorted(d for p in before for d in p.packing.pieces.document.tolist())


def test_prices_change_plans() -> None:
    pairs = list(zip(with_change()[S:], without_change()[S:], strict=False))
    assert any(a.packing.offsets.tolist() != b.packing.offsets.tolist() for a, b in pairs)


@pytest.mark.parametrize("at", [1, S - 1, S, S + 2])
def test_a_state_read_back_plans_the_same(at: int) -> None:
    """Also before the change, once it is known."""
    plans, made = with_change(), learning()
    state = plans[at - 1].state.with_prices(LEARNED)
    again = PlannerState.from_json(json.loads(json.dumps(state.to_json())))
    rest = list(made.steps(again))
    assert [fingerprint(made, p) for p in rest] == [fingerprint(made, p) for p in plans[at:]]


def test_a_planner_of_fixed_prices_refuses_others() -> None:
    made = planner()
    with pytest.raises(ValueError, match=r"prices that a run learned .* this planner's are fixed"):
        list(made.steps(made.start().with_prices(LEARNED)))


@contextmanager
def process(*, clients: int = 1, ahead: int = 3) -> Iterator[PlannerProcess]:
    made = PlannerProcess(learning, (), state=None, ahead=ahead, num_clients=clients)
    try:
        yield made
    finally:
        made.close()


def digests(plans: list[StepPlan]) -> list[int]:
    return [plan.digest() for plan in plans]


def rest_of(client: PlanClient) -> list[StepPlan]:
    return [item[0] for item in iter(client.next, None)]


@pytest.mark.process
@pytest.mark.parametrize("ahead", [3, 40])
@pytest.mark.parametrize("taken", [0, 2, S])
def test_the_process_plans_again_from_the_change_on(taken: int, ahead: int) -> None:
    """With 40 steps ahead it has planned to the end of data, and drops that end as well."""
    with process(ahead=ahead) as made:
        client = PlanClient(made.address, 0)
        got = [client.next() for _ in range(taken)]
        plans = [item[0] for item in got if item is not None]
        client.announce(LEARNED)
        plans += rest_of(client)
        client.close()
    assert digests(plans) == digests(with_change())
    # The state that comes with them goes on the same way.
    assert plans[S].state.prices == LEARNED


@pytest.mark.process
def test_every_rank_announces_and_the_first_one_counts() -> None:
    with process(clients=2) as made:
        clients = [PlanClient(made.address, d) for d in (0, 1)]
        for client in clients:
            assert client.next() is not None
            client.peek(2)
        clients[0].announce(LEARNED)
        found = [rest_of(clients[0])]  # to the end of data, before the other says anything
        clients[1].announce(LEARNED)
        found.append(rest_of(clients[1]))
        for client in clients:
            client.close()
    assert [digests(plans) for plans in found] == [digests(with_change()[1:])] * 2


@pytest.mark.process
def test_a_change_after_the_end_of_data_changes_nothing() -> None:
    late = PriceSchedule(base="flops", changes=(PriceChange(step=500, prices=DEAR),))
    with process(ahead=40) as made:
        client = PlanClient(made.address, 0)
        first = client.next()
        assert first is not None
        client.announce(late)
        assert digests([first[0], *rest_of(client)]) == digests(without_change())
        client.close()


@pytest.mark.process
def test_a_second_change_follows_the_first() -> None:
    second = PriceSchedule(
        base="flops",
        changes=(
            *LEARNED.changes,
            PriceChange(step=S + 3, prices=PriceFactors(attention_forward=UNIT)),
        ),
    )
    made = learning()
    expected = digests(list(made.steps(made.start().with_prices(second))))
    with process() as server:
        client = PlanClient(server.address, 0)
        client.announce(LEARNED)
        plans = [item[0] for _ in range(S + 1) if (item := client.next()) is not None]
        client.announce(second.from_step(S))
        plans += rest_of(client)
        client.close()
    assert digests(plans) == expected


@pytest.mark.process
def test_prices_for_a_step_that_a_rank_has_already_are_refused() -> None:
    with process(clients=2) as made:
        clients = [PlanClient(made.address, d) for d in (0, 1)]
        assert clients[0].peek(S + 1) is not None
        with pytest.raises(ValueError, match=f"prices for step {S} come after its plan was"):
            clients[0].announce(LEARNED)
        clients[1].announce(LEARNED)
        with pytest.raises(PlanningError, match=f"a rank has a plan of step {S} at other prices"):
            rest_of(clients[1])
