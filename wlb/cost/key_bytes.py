"""Bytes of the keys and values that CP ranks exchange, to the byte, from a sharding."""

from typing import NamedTuple

from wlb.cost.profile import DTYPE_BYTES
from wlb.plan import KeyExchange, ShardingPlan, rows_moved
from wlb.spec import RunSpec


class KeyBytes(NamedTuple):
    """Bytes of K and V of one layer on one rank: rows that its exchange brings together, and rows
    on their way to others. Own ones are among both, but with an all-gather those that are sent are
    own ones only, and by need with cp.overlap_stages there are none."""

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
    return KeyBytes(*(n * row_bytes for n in rows))
