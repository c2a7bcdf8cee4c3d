"""Checks a finished store against its sidecar: checksum, and every token inside the vocabulary.

Cost: reads the tokens twice, a block at a time.
"""

import numpy as np

from wlb.data.store import TokenStore, store_path
from wlb.plan import UserError

_BLOCK_TOKENS = 1 << 22


def verify_store(prefix: str) -> None:
    """UserError unless the store has its checksum and only tokens of its vocabulary."""
    store = TokenStore(prefix)
    store.verify()
    size = store.vocab_size
    if size is None or not store.num_tokens:
        return
    path = store_path(prefix, ".bin")
    tokens = np.memmap(path, store.dtype, mode="r")
    for start in range(0, tokens.size, _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS]
        bad = np.flatnonzero((block < 0) | (block >= size))
        if bad.size:
            at = int(bad[0])
            raise UserError(
                f"{path}: token {start + at} is {block[at]}, outside the vocabulary [0, {size}) of "
                f"{prefix}.json; prepare the store again"
            )
