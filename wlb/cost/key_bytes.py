"""Bytes of the keys and values that CP ranks exchange, to the byte, from a sharding."""

from typing import NamedTuple

from wlb.cost.profile import DTYPE_BYTES
from wlb.plan import KeyExchange, ShardingPlan, exchange_of
from wlb.spec import RunSpec


class KeyBytes(NamedTuple):
    """Bytes of K and V of one layer on one rank: rows that its exchange brings together, and rows
    on their way to others. Own ones are among both, but with an all-gather those that are sent are
    own ones only, and by need with cp.overlap_stages there are none.
    """

    arrived: int
    sent: int


def key_bytes(spec: RunSpec, sharding: ShardingPlan, *, rank: int, local_tokens: int) -> KeyBytes:
    """Buffers of the exchange of a micro-batch's keys on CP rank `rank`, to the byte; of a layer
    without a sliding window, if the model has one.
    """
    if sharding.cp == 1:
        return KeyBytes(0, 0)
    model, tp = spec.model, spec.parallel.tp
    kv_dim = model.with_kv_copies(tp).kv_dim // tp
    row_bytes = 2 * kv_dim * DTYPE_BYTES[spec.training.dtype]
    slides = model.num_sliding_layers == model.num_layers
    exchange = exchange_of(
        sharding,
        local_tokens=local_tokens,
        own_first=spec.cp.overlap,
        stages=spec.cp.stages,
        sliding=model.sliding_window if slides else 0,
    )
    rows = exchange.rows.sum(axis=0)
    is_gather = sharding.exchange == KeyExchange.GATHER
    sent = local_tokens if is_gather else int(rows[:, rank].sum())
    return KeyBytes(int(rows[rank].sum()) * row_bytes, sent * row_bytes)
