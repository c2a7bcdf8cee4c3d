"""Tests the rows of a rank and ranges of tokens."""

import json
from dataclasses import replace

import pytest

from wlb.plan import (
    KeyExchange,
    ShardingPlan,
    UserError,
    int_array,
    local_tokens,
    ranges,
    row_multiple,
)
from wlb.sharding.paper import per_document


@pytest.mark.parametrize(
    ("tokens", "cp", "q", "rows"),
    [(0, 4, 2, 2), (1, 1, 1, 1), (16, 2, 4, 8), (17, 2, 4, 12), (131072, 2, 128, 65536)],
)
def test_rows_of_a_rank(tokens: int, cp: int, q: int, rows: int) -> None:
    assert local_tokens(tokens, cp=cp, row_multiple=q) == rows


def test_row_multiple_is_the_least_common_multiple() -> None:
    assert row_multiple(4, 6) == 12
    with pytest.raises(ValueError, match="tp = 0"):
        row_multiple(0, 1)


def test_ranges() -> None:
    start, stop = int_array("a", [3, 0, 7]), int_array("b", [5, 1, 7])
    assert ranges(start, stop).tolist() == [3, 4, 0]


def test_the_exchange_is_part_of_a_plan() -> None:
    """Plans of files from before it, and their digests, are those of an all-gather."""
    plan = per_document([5, 3], cp=2)
    needed = replace(plan, exchange="needed")
    assert needed.exchange is KeyExchange.NEEDED
    assert needed.digest() != plan.digest()
    for one in (plan, needed):
        again = ShardingPlan.from_json(json.loads(json.dumps(one.to_json())))
        assert again.exchange == one.exchange
        assert again.digest() == one.digest()
    old = plan.to_json()
    del old["exchange"]
    assert ShardingPlan.from_json(old).digest() == plan.digest()
    with pytest.raises(UserError, match="'ring' must be one of gather, needed"):
        ShardingPlan.from_json(old | {"exchange": "ring"})
