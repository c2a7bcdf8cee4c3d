"""Exact sizes of the buffers in which CP ranks exchange keys and values in a sharded micro-batch.

The table lists the rows in the buffers of a rank. Own rows are all rows of this rank. They include
padding rows, and so do the rows of all ranks.

| exchange                         | received rows                    | sent rows                  |
|----------------------------------|----------------------------------|----------------------------|
| all-gather                       | rows of all ranks                | own rows                   |
| needed                           | needed rows of others, own rows  | rows others need, own rows |
| needed, with `cp.overlap_stages` | needed rows of others            | rows others need           |

If all layers have a sliding window, `cp.overlap_stages` has no effect on the buffers.
"""

from typing import NamedTuple

from wlb.cost.profile import DTYPE_BYTES
from wlb.plan import KeyExchange, ShardingPlan, exchange_of
from wlb.spec import RunSpec


class KeyBytes(NamedTuple):
    """Sizes of the buffers of one layer's exchange of K and V on one CP rank."""

    arrived: int  # bytes of the buffer of received rows
    sent: int  # bytes of the buffer of rows to send


def key_bytes(spec: RunSpec, sharding: ShardingPlan, *, rank: int, local_tokens: int) -> KeyBytes:
    """Return the sizes of the buffers of one micro-batch's exchange of keys on one CP rank.

    Args:
        spec: The run.
        sharding: The sharded micro-batch.
        rank: The CP rank.
        local_tokens: Rows of the rank's activations, padding included.
    """
    if sharding.cp == 1:
        return KeyBytes(0, 0)
    model, tp = spec.model, spec.parallel.tp
    kv_dim = model.with_kv_copies(tp).kv_dim // tp
    row_bytes = 2 * kv_dim * DTYPE_BYTES[spec.training.dtype]
    # A layer without a window has larger buffers than one with a window. So the window is ignored
    # unless all layers have it.
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
