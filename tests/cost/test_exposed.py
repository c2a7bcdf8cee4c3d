"""Tests what is waited for an exchange of keys: literal sums, and what hides it."""

from dataclasses import replace

import numpy as np
import pytest

from tests.models import LLAMA2_7B
from wlb.cost import (
    FlopsWorkload,
    ProfiledWorkload,
    Transfers,
    exchange_ns,
    load_profile,
    over_gather_ns,
    own_keys,
    waits_ns,
)
from wlb.plan import IntArray, KeyExchange, ShardingPlan, rows_moved
from wlb.sharding.paper import per_document, per_sequence
from wlb.spec import ParallelSpec

COST = ProfiledWorkload(
    model=LLAMA2_7B, parallel=ParallelSpec(tp=8, cp=4, pp=4), profile=load_profile("h100")
)


def by_need(plan: ShardingPlan) -> ShardingPlan:
    return replace(plan, exchange=KeyExchange.NEEDED)


def test_own_keys_by_hand() -> None:
    """Rank 0 holds [0, 2) and [6, 8) of the document: its tail has 4 keys there, its head 2."""
    plan = per_document([8, 4], cp=2)
    spans = [(span, r) for r in range(2) for span in plan.for_rank(r).spans]
    expected = {
        (0, 0, 2, 0): 2,
        (0, 6, 8, 0): 4,
        (1, 0, 1, 0): 1,
        (1, 3, 4, 0): 2,
        (0, 2, 6, 1): 4,
        (1, 1, 3, 1): 2,
    }
    found = {(*span, r): int(n) for (span, r), n in zip(spans, own_keys(plan), strict=True)}
    assert found == expected


class Waits(FlopsWorkload):
    """Transfers of 10, 20 and 30 ns, of which products hide 4, 5 and 6."""

    overlaps = False
    stages = 1
    cp_ranks_per_node = 8

    def transfers_ns(self, moved: IntArray | None, num_tokens: int, *, cp: int):
        return Transfers(10.0, 20.0, 30.0)

    def products_ns(self, num_tokens: int):
        return Transfers(4.0, 5.0, 6.0)


class OwnFirst(Waits):
    overlaps = True


def test_waits_are_transfers_less_what_hides_them() -> None:
    plan = by_need(per_document([8], cp=2))
    forward, backward = waits_ns(plan, Waits(quadratic_ns=0))
    assert forward.tolist() == [6, 6]
    assert backward.tolist() == [15 + 24] * 2
    # Own keys: rank 0's 2 x 2 and 2 of 4 keys are 4 + 12 units, rank 1's 4 x 4 are 16; of 7
    # units 2 are forward.
    forward, backward = waits_ns(plan, OwnFirst(quadratic_ns=7 / 16))
    assert forward.tolist() == [4, 4]
    assert backward.tolist() == [15 + 19] * 2
    # What hides more than there is gives nothing back.
    assert waits_ns(plan, OwnFirst(quadratic_ns=70))[0].tolist() == [0, 0]


class Staged(OwnFirst):
    """A row that rank 0 receives takes 1 ns there, 2 ns again, and 3 ns back."""

    stages = 2

    def transfers_ns(self, moved: IntArray | None, num_tokens: int, *, cp: int):
        rows = num_tokens // cp if moved is None else int(moved[0].sum())
        return Transfers(1.0 * rows, 2.0 * rows, 3.0 * rows)


def test_a_stage_hides_behind_the_attention_of_those_before() -> None:
    """Rank 0 has the second half of 1,024 tokens and rank 1 the first; 512 rows come to rank 0."""
    plan = by_need(
        ShardingPlan(
            strategy="balanced",
            lengths=np.array([1024]),
            piece=np.array([0, 0]),
            start=np.array([512, 0]),
            stop=np.array([1024, 512]),
            rank_offsets=np.array([0, 1, 2]),
        )
    )
    unit = 7 / 1024**2  # of the quadratic workload, of which two sevenths are forward
    # Forward, rank 0 computes 150 ns: its own keys 50, each stage 50. The first stage is there
    # after 256 ns, of which the products hide 4 and own keys 50, the second 256 later.
    forward, backward = waits_ns(plan, Staged(quadratic_ns=100 * unit))
    assert forward.tolist() == [256 - 54 + 256 - 50] * 2
    # In backward own keys and stages compute 125 ns each. Rows of the stages are there after 512
    # and 1,024 ns; then gradients travel 768 ns for each, longer than anything that is computed.
    assert backward.tolist() == [1024 + 2 * 768 - (5 + 6 + 3 * 125)] * 2
    # Behind much attention all hides but the first stage's rows in backward.
    forward, backward = waits_ns(plan, Staged(quadratic_ns=10_000 * unit))
    assert (forward.tolist(), backward.tolist()) == ([0, 0], [512 - 5] * 2)


def test_a_gather_in_stages_moves_all_rows_of_each() -> None:
    plan = per_document([1024], cp=2)
    forward, _ = waits_ns(plan, Staged(quadratic_ns=0))
    assert forward.tolist() == [512 - 4, 512 - 4]
    # Half of the rows are hidden behind the attention over the other half.
    one, two = (type("_", (Staged,), {"stages": n})(quadratic_ns=1.0) for n in (1, 2))
    assert np.all(waits_ns(plan, two)[0] <= waits_ns(plan, one)[0])


def test_all_is_waited_for_where_nothing_is_known_to_hide() -> None:
    plan = per_document([4096, 77], cp=4)

    class Plain:
        def kv_exchange_ns(self, num_tokens: int, *, cp: int):
            return 5, 7

    forward, backward = waits_ns(plan, Plain())  # type: ignore[arg-type]
    assert (forward.tolist(), backward.tolist()) == ([5] * 4, [7] * 4)


@pytest.mark.parametrize("exchange", [KeyExchange.GATHER, KeyExchange.NEEDED])
def test_products_hide_part_of_each_exchange(exchange: KeyExchange) -> None:
    plan = replace(per_document([40_000, 77], cp=4), exchange=exchange)
    moved = None if exchange == KeyExchange.GATHER else rows_moved(plan)
    there, again, back = COST.transfers_ns(moved, plan.num_tokens, cp=4)
    whole = exchange_ns(plan, COST)
    assert whole == (round(there), round(again + back))
    hidden = COST.products_ns(plan.num_tokens)
    assert hidden.repeated > hidden.gradients > hidden.forward > 0
    waits = waits_ns(plan, COST)
    assert np.all(waits[0] == pytest.approx(max(0.0, there - hidden.forward)))
    expected = max(0.0, again - hidden.repeated) + max(0.0, back - hidden.gradients)
    assert np.all(waits[1] == pytest.approx(expected))
    for one, other in zip(waits_ns(plan, replace(COST, overlaps=True)), waits, strict=True):
        assert np.all(one < other)


@pytest.mark.parametrize("num_rows", [None, 40_960])
def test_what_an_exchange_saves_is_what_is_waited_for_it_less_than_for_a_gather(
    num_rows: int | None,
) -> None:
    """An all-gather moves padding, too."""
    plan = per_document([40_000, 77], cp=4)
    assert over_gather_ns(plan, COST, num_rows=num_rows) == (0, 0)
    gather = waits_ns(plan, COST, num_rows=num_rows)
    for cost in (COST, replace(COST, overlaps=True)):
        for other in [by_need(plan), *([] if cost is COST else [plan])]:
            over = over_gather_ns(other, cost, num_rows=num_rows)
            waits = waits_ns(other, cost, num_rows=num_rows)
            expected = tuple(round(a.max() - b.max()) for a, b in zip(waits, gather, strict=True))
            assert over == expected
            assert max(over) < 0
    assert waits_ns(plan, COST)[0][0] < waits_ns(plan, COST, num_rows=40_960)[0][0]


def test_one_rank_waits_for_nobody() -> None:
    assert [w.tolist() for w in waits_ns(per_sequence([9], cp=1), COST)] == [[0.0], [0.0]]
