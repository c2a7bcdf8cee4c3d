"""torch's context parallel with our shardings: rank-major indices, documents of any length.

    balancer = ShardedLoadBalancer([sharding], seq_length=T, device="cuda")
    tokens, positions = cp._context_parallel_shard(mesh, [tokens, positions], [1, 1], balancer)

with cp = torch.distributed.tensor.experimental._context_parallel._attention, a private API. Rank r
has rows [r * T / cp, (r + 1) * T / cp) of the index.
"""

from collections.abc import Sequence

from wlb.adapters.versions import require

require("torch>=2.11")

import numpy as np
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _LoadBalancer

from wlb.plan import IntArray, ShardingPlan, UserError


class ShardedLoadBalancer(_LoadBalancer):
    """Shards each row of a batch by its `ShardingPlan`.

    shardings: one per batch row, or one for all (`wlb.shard(lengths, cp=...)`). seq_length: T,
    tokens and padding of every row; UserError unless it is a multiple of cp that holds the tokens.
    """

    def __init__(
        self, shardings: Sequence[ShardingPlan], *, seq_length: int, device: str | torch.device
    ) -> None:
        if not shardings:
            raise UserError("a load balancer needs the sharding of at least one row, got none")
        index = np.stack([rank_major(sharding, seq_length) for sharding in shardings])
        self._index = torch.from_numpy(index).to(device)
        self._restore = torch.from_numpy(np.argsort(index, axis=1)).to(device)

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        """Shape [batch or 1, T], int64."""
        return self._restore if restore else self._index


def rank_major(sharding: ShardingPlan, seq_length: int) -> IntArray:
    """Positions of a packed sequence in the order of ranks, shape [T].

    Padding, the positions behind the documents, fills each rank up to T / cp.
    """
    cp, num_tokens = sharding.cp, sharding.num_tokens
    rows = seq_length // cp
    if seq_length % cp or int(sharding.tokens.max(initial=0)) > rows:
        raise UserError(
            f"seq_length = {seq_length} must be a multiple of {cp} ranks with room for the "
            f"{num_tokens} tokens of the documents; pad the sequence to a multiple of {cp}"
        )
    at, out = num_tokens, np.empty(seq_length, np.int64)
    for rank in range(cp):
        mine = sharding.for_rank(rank).token_index
        num_padding = rows - mine.size
        first = rank * rows
        out[first : first + mine.size] = mine
        out[first + mine.size : first + rows] = np.arange(at, at + num_padding)
        at += num_padding
    return out
