"""Bytes of the keys and values that CP ranks exchange, to the byte, from a sharding."""

from collections.abc import Sequence
from typing import NamedTuple

from wlb.cost.profile import DTYPE_BYTES
from wlb.plan import IntArray, KeyExchange, Relay, ShardingPlan, rows_moved
from wlb.spec import RunSpec


class KeyBytes(NamedTuple):
    """Bytes of K and V of one layer on one rank: rows that its exchange brings together, and rows
    on their way to others. Own ones are among both, but with an all-gather those that are sent are
    own ones only, and by need with cp.overlap there are none. Rows of other nodes that are passed
    on (`wlb.plan.relay`) count where they land and where they are read."""

    arrived: int
    sent: int


def key_bytes(spec: RunSpec, sharding: ShardingPlan, *, rank: int, local_tokens: int) -> KeyBytes:
    """Buffers of the exchange of a micro-batch's keys on CP rank `rank`, to the byte; of a layer
    without a sliding window, if the model has one."""
    if sharding.cp == 1:
        return KeyBytes(0, 0)
    row_bytes = 2 * spec.model.kv_dim * DTYPE_BYTES[spec.training.dtype] // spec.parallel.tp
    if sharding.exchange == KeyExchange.GATHER:
        return KeyBytes(sharding.cp * local_tokens * row_bytes, local_tokens * row_bytes)
    model = spec.model
    slides = model.num_sliding_layers == model.num_layers
    moved = rows_moved(sharding, sliding=model.sliding_window if slides else 0)
    own = 0 if spec.cp.overlap and not slides else local_tokens
    rows = (own + int(moved[rank].sum()), own + int(moved[:, rank].sum()))
    if sharding.exchange == KeyExchange.RELAYED and not slides:
        relay = Relay(sharding=sharding, near=sharding.ranks_per_node)
        legs = (relay.landed, relay.moved_near, relay.passed_on)
        there, away = _both_ways(legs, rank)
        rows = (sum(int(x.sum()) for x in there), sum(int(x.sum()) for x in away))
    return KeyBytes(*(n * row_bytes for n in rows))


def _both_ways(legs: Sequence[IntArray], rank: int) -> tuple[list[IntArray], list[IntArray]]:
    """What a rank receives and sends in each exchange of rows, [cp, cp] each."""
    return [leg[rank] for leg in legs], [leg[:, rank] for leg in legs]
