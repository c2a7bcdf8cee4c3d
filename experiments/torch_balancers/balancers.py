"""Turns torch's context-parallel load balancers into sharding plans, which are priced like ours.

They are private in torch 2.13 (`torch.distributed.tensor.experimental._context_parallel`). Each
gives a permutation of the packed sequence whose cp equal parts are the ranks' rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)

from wlb.plan import IntArray, ShardingPlan, offsets_of

BLOCK = 128
"""A block of flex_attention's mask has this many query rows and keys."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shuffled:
    """Holds a balancer's answer.

    lengths: tokens of the pieces it was given, padding included, shape [num_pieces]; padding at the
        sequence's end is one more piece
    index: token of each row, rank-major
    restore: row of each token
    """

    lengths: IntArray
    index: IntArray
    restore: IntArray

    @property
    def is_round_trip(self) -> bool:
        tokens = np.arange(self.index.size)
        is_restored = np.array_equal(self.index[self.restore], tokens)
        return is_restored and np.array_equal(self.restore[self.index], tokens)


def padded_sequence(lengths: IntArray, multiple: int) -> IntArray:
    """Returns `lengths`, with padding as one more piece where their sum is no multiple."""
    padding = -int(lengths.sum()) % multiple
    return np.append(lengths, padding) if padding else lengths


def padded_documents(lengths: IntArray, multiple: int) -> IntArray:
    return lengths + -lengths % multiple


def head_tail(lengths: IntArray, cp: int) -> Shuffled:
    balancer = _HeadTailLoadBalancer(int(lengths.sum()), cp, "cpu")
    index, restore = (balancer._generate_indices(r)[0].numpy() for r in (False, True))
    return Shuffled(lengths=lengths, index=index.astype(np.int64), restore=restore)


def per_document(lengths: IntArray, cp: int) -> Shuffled:
    balancer = _PerDocumentHeadTailLoadBalancer([lengths.tolist()], cp, "cpu")
    index, restore = (balancer._generate_indices(r)[0].numpy() for r in (False, True))
    return Shuffled(lengths=lengths, index=index, restore=restore)


def per_document_rank_major(lengths: IntArray, cp: int) -> Shuffled:
    """Returns the order that per_document's docstring draws: the same chunks by rank before
    document.

    torch orders them by document, so that equal parts of the permutation are whole documents.
    """
    by_document = np.split(per_document(lengths, cp).index, np.cumsum(lengths)[:-1])
    parts = [tokens.reshape(cp, -1) for tokens in by_document]
    index = np.concatenate([part[rank] for rank in range(cp) for part in parts])
    return Shuffled(lengths=lengths, index=index, restore=np.argsort(index))


def processing_time(lengths: IntArray, cp: int) -> Shuffled:
    """Returns PTRR's answer for the document-causal mask.

    Blocks of keys are counted here, not by a BlockMask: row block b needs every block from the one
    that its first token's document begins in.
    """
    balancer = _PTRRLoadBalancer(_DocumentCausal(lengths), cp)
    index, restore = (balancer._generate_indices(r)[0].numpy() for r in (False, True))
    return Shuffled(lengths=lengths, index=index, restore=restore)


class _DocumentCausal:
    """Provides the members of a BlockMask that PTRR reads."""

    def __init__(self, lengths: IntArray) -> None:
        offsets = offsets_of(lengths)
        num, rest = divmod(int(offsets[-1]), BLOCK)
        if rest:
            raise ValueError(f"{offsets[-1]} tokens are no multiple of {BLOCK}")
        first = np.searchsorted(offsets, np.arange(num) * BLOCK, side="right") - 1
        blocks = np.arange(num) - offsets[first] // BLOCK + 1
        self.kv_num_blocks = torch.from_numpy(blocks)[None, None]
        self.full_kv_num_blocks = None
        self.BLOCK_SIZE = (BLOCK, BLOCK)


def plan_of(shuffled: Shuffled, cp: int, *, strategy: str) -> ShardingPlan:
    """Returns the spans of a permutation: runs of consecutive tokens of one piece on one rank."""
    index, offsets = shuffled.index, offsets_of(shuffled.lengths)
    piece = np.searchsorted(offsets, index, side="right") - 1
    rank = np.arange(index.size) // (index.size // cp)
    breaks = (np.diff(index) != 1) | (np.diff(piece) != 0) | (np.diff(rank) != 0)
    first = np.flatnonzero(np.append(True, breaks))
    last = np.append(first[1:], index.size) - 1
    return ShardingPlan(
        strategy=strategy,
        lengths=shuffled.lengths,
        piece=piece[first],
        start=index[first] - offsets[piece[first]],
        stop=index[last] + 1 - offsets[piece[last]],
        rank_offsets=np.searchsorted(rank[first], np.arange(cp + 1)),
    ).validate()
