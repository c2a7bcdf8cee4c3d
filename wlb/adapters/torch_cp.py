"""Use wlb's sharding of packed documents in PyTorch's own context parallelism.

    balancer = ShardedLoadBalancer([sharding], seq_length=T, device="cuda")
    tokens, positions = cp._context_parallel_shard(mesh, [tokens, positions], [1, 1], balancer)

Here `cp` is torch.distributed.tensor.experimental._context_parallel._attention, a private API of
torch. PyTorch gives rank r the r-th of cp equal parts of a row. The balancer permutes the T tokens
of the row, so that this part holds the tokens that the sharding assigns to rank r.
"""

from collections.abc import Sequence

from wlb.adapters.versions import require

require("torch>=2.11")

import numpy as np
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _LoadBalancer

from wlb.plan import IntArray, ShardingPlan, UserError


class ShardedLoadBalancer(_LoadBalancer):
    """Load balancer for PyTorch's context parallelism that follows a `ShardingPlan` for each row.

    Args:
        shardings: One plan for each row of the batch, or a single one for all rows
            (`wlb.shard(lengths, cp=...)`).
        seq_length: T, the length of every row with padding. It must be a multiple of cp, and T / cp
            must be at least the number of tokens of every rank; otherwise UserError is raised.
        device: Device of the index tensors.
    """

    def __init__(
        self, shardings: Sequence[ShardingPlan], *, seq_length: int, device: str | torch.device
    ) -> None:
        if not shardings:
            raise UserError(
                "shardings is empty, but the load balancer needs one plan for each row, or one "
                "for all rows; give at least one"
            )
        index = np.stack([rank_major(sharding, seq_length) for sharding in shardings])
        self._index = torch.from_numpy(index).to(device)
        self._restore = torch.from_numpy(np.argsort(index, axis=1)).to(device)

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        """Return the permutation that PyTorch applies to the tokens of each row of the batch.

        Args:
            restore: Whether to return the inverse permutation.

        Returns:
            int64 [batch, T], or [1, T] if all rows share a plan.
        """
        return self._restore if restore else self._index


def rank_major(sharding: ShardingPlan, seq_length: int) -> IntArray:
    """Return the positions of a packed row, sorted by the rank that computes them, shape [T].

    Each rank has T / cp entries: first the positions of its tokens, then positions of padding,
    which are those after the last document.

    Args:
        sharding: Which tokens each rank computes.
        seq_length: T, the length of the row with padding.

    Raises:
        UserError: T is not a multiple of cp, or too short for the rank with the most tokens.
    """
    cp, num_tokens = sharding.cp, sharding.num_tokens
    rows = seq_length // cp
    most = int(sharding.tokens.max(initial=0))
    if seq_length % cp or most > rows:
        raise UserError(
            f"seq_length = {seq_length} must be a multiple of cp = {cp} and at least {cp * most}, "
            f"because one of the ranks has {most} of the {num_tokens} tokens; pad the row to such "
            "a length"
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
