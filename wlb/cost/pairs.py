"""Query-key pairs of attention segments, and of the tiles in which kernels compute them."""

import numpy as np

from wlb.plan import FloatArray, IntArray
from wlb.plan.arrays import first_true

FORWARD_FLOPS_PER_PAIR = 4
"""Forward FLOPs per query-key pair, head and head_dim: a multiply-add each for QK^T and PV."""
BACKWARD_FLOPS_PER_PAIR = 10
"""The same in backward: a multiply-add each for QK^T again, dV, dP, dQ and dK."""


def causal_pairs(q: IntArray, kv: IntArray, *, sliding: int = 0) -> IntArray:
    """Query-key pairs of segments of `q` rows that end at key `kv` (bottom-right causal).

    Row i of q sees keys [0, kv - q + i]: q * kv - q * (q - 1) / 2 pairs, for q <= kv. With a
    sliding window it sees the latest `sliding` of them (0 = all). Shape [n].
    """
    q, kv = np.asarray(q, np.int64), np.asarray(kv, np.int64)
    if (i := first_true((q < 0) | (q > kv))) is not None:
        raise ValueError(
            f"segment {i} has q = {q.flat[i]} rows over kv = {kv.flat[i]} keys; a causal segment "
            f"needs 0 <= q <= kv"
        )
    pairs = q * kv - q * (q - 1) // 2
    if not sliding:
        return pairs
    # Row i leaves out kv - q + i + 1 - sliding keys, from the row on where that is above 0.
    hidden = kv - q + 1 - sliding
    first = np.clip(-hidden, 0, q)
    return pairs - ((q - first) * (2 * hidden + first + q - 1)) // 2


def tile_pairs(q: FloatArray, kv: FloatArray, *, tile_rows: int, sliding: int = 0) -> FloatArray:
    """Pairs that a kernel on whole tiles of `tile_rows` query rows computes (Section 5.3).

    Tile t of ceil(q / tile_rows) computes all its rows over the keys of its last row, kv - q +
    (t + 1) * tile_rows, at most kv: 16 rows cost as much as 128. Tiles of one row give
    `causal_pairs`. Floats, because mean lengths are allowed. With a sliding window a tile computes
    no keys before those of its first row's window.
    """
    num_tiles = np.ceil(q / tile_rows)
    full = (num_tiles - 1) * (kv - q) + tile_rows * (num_tiles * (num_tiles - 1) / 2)
    if sliding:
        # Tile t leaves out kv - q + t * tile_rows + 1 - sliding keys, where that is above 0.
        left_out = kv - q + 1 - sliding
        first = np.clip(np.ceil(-left_out / tile_rows), 0, num_tiles)
        last = np.maximum(first, num_tiles) - 1
        full = full - (num_tiles - first) * (left_out + tile_rows * (first + last) / 2)
    return np.where(q > 0, tile_rows * (full + kv), 0.0)
