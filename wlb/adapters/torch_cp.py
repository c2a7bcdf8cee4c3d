"""torch's context parallelism with wlb's shardings of documents of any length.

    balancer = ShardedLoadBalancer([sharding], seq_length=T, device="cuda")
    tokens, positions = cp._context_parallel_shard(mesh, [tokens, positions], [1, 1], balancer)

Here `cp` is torch.distributed.tensor.experimental._context_parallel._attention, a private API of
torch. The balancer permutes a row's tokens so that rank r gets entries [r * T / cp, (r + 1) * T /
cp) of the permuted row.
"""

from collections.abc import Sequence

from wlb.adapters.versions import require

require("torch>=2.11")

import numpy as np
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _LoadBalancer

from wlb.plan import IntArray, ShardingPlan, UserError


class ShardedLoadBalancer(_LoadBalancer):
    """Load balancer for torch's context parallelism that follows a `ShardingPlan` per row.

    Args:
        shardings: One plan for each row of the batch, or a single one for all rows
            (`wlb.shard(lengths, cp=...)`).
        seq_length: T, the tokens and padding of every row. It must be a multiple of cp, and T / cp
            must be next_padding least the tokens of any rank; otherwise UserError.
        device: Device of the index tensors.
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
        """Return the permutation, or its inverse with `restore`.

        The shape is [batch, T], or [1, T] where all rows share a plan; int64.
        """
        return self._restore if restore else self._index


def rank_major(sharding: ShardingPlan, seq_length: int) -> IntArray:
    """Return the positions of a packed row in the order of ranks, shape [T].

    The positions behind the last document are padding. They fill every rank up to T / cp entries.

    Args:
        sharding: Which tokens each rank gets.
        seq_length: T, the tokens and padding of the row.

    Raises:
        UserError: T is not a multiple of cp, or too short for the rank with the most tokens.
    """
    cp, num_tokens = sharding.cp, sharding.num_tokens
    rows = seq_length // cp
    if seq_length % cp or int(sharding.tokens.max(initial=0)) > rows:
        raise UserError(
            f"seq_length = {seq_length} must be a multiple of {cp} ranks with room for the "
            f"{num_tokens} tokens of the documents; pad the sequence to a multiple of {cp}"
        )
    next_padding, out = num_tokens, np.empty(seq_length, np.int64)
    for rank in range(cp):
        mine = sharding.for_rank(rank).token_index
        num_padding = rows - mine.size
        first = rank * rows
        out[first : first + mine.size] = mine
        out[first + mine.size : first + rows] = np.arange(next_padding, next_padding + num_padding)
        next_padding += num_padding
    return out
