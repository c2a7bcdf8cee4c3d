"""torch's context parallel with our sharding: rank-major indices, documents of any length.

    from torch.distributed.tensor.experimental._context_parallel import _attention as cp

    balancer = ShardedLoadBalancer([sharding], seq_length=T, device="cuda")
    tokens, positions = cp._context_parallel_shard(mesh, [tokens, positions], [1, 1], balancer)

torch's own per-document balancer (`_PerDocumentHeadTailLoadBalancer`) needs documents of multiples
of 2 x cp tokens, and lays ranks' chunks out document by document, so that what `Shard` then gives
a rank are not the chunks meant for it. Here rank r's rows are [r * T / cp, (r + 1) * T / cp) of the
index. torch marks this API private; the tests run on every torch that wlb supports.
"""

from collections.abc import Sequence

from wlb.adapters.versions import require

require("torch>=2.11")

import numpy as np
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _LoadBalancer

from wlb.plan import IntArray, ShardingPlan


class ShardedLoadBalancer(_LoadBalancer):
    """Rows of a batch as their shardings say.

    shardings: one for every row of the batch, or one for all (`wlb.shard(lengths, cp=...)`).
    seq_length: T, rows of documents and padding, the same for all. ValueError unless T is a
    multiple of the ranks and holds the documents.
    """

    def __init__(
        self,
        shardings: Sequence[ShardingPlan],
        *,
        seq_length: int,
        device: str | torch.device,
    ) -> None:
        if not shardings:
            raise ValueError("a load balancer needs the sharding of at least one row, got none")
        index = np.stack([rank_major(sharding, seq_length) for sharding in shardings])
        self._index = torch.from_numpy(index).to(device)
        self._restore = torch.from_numpy(np.argsort(index, axis=1)).to(device)

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        """Shape [batch or 1, T], int64."""
        return self._restore if restore else self._index


def rank_major(sharding: ShardingPlan, seq_length: int) -> IntArray:
    """All rows of a packed sequence in the order of ranks; shape [T].

    Real tokens of ranks differ by at most one; padding (the rows behind the documents) fills every
    rank up to T / cp.
    """
    cp, num_tokens = sharding.cp, sharding.num_tokens
    rows = seq_length // cp
    if seq_length % cp or int(sharding.tokens.max(initial=0)) > rows:
        raise ValueError(
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
