"""Tests a rank's tokens and labels by literal values.

The example: two documents of 5 and 3 tokens, a0..a4 and b0..b2, per_document on two ranks with rows
of a multiple of 3. Rank 0 holds a0 a1 a4 b0 and rank 1 a2 a3 b1 b2, then padding.
"""

import numpy as np

from wlb.parallel.rows import rank_labels, rank_tokens
from wlb.plan import IGNORE, Documents, MicroBatch, Pieces, ShardingPlan, split_long
from wlb.sharding.paper import per_document, per_sequence

ROWS = 6


def example() -> ShardingPlan:
    return per_document([5, 3], cp=2)


class Letters:
    """Reads documents of 5, 3 and 12 tokens; token i of document d is 100 * d + i."""

    sizes = (5, 3, 12)

    def length(self, document: int) -> int:
        return self.sizes[document]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.sizes[document]
        return np.arange(100 * document + start, 100 * document + stop)


def micro_batch(pieces: Pieces) -> MicroBatch:
    return MicroBatch(index=0, pieces=pieces, workload_ns=0)


def test_labels_are_the_next_tokens() -> None:
    batch = micro_batch(Pieces.whole(Documents.from_lengths([5, 3])))
    made = [
        (
            rank_tokens(batch, example(), rank, ROWS, Letters()).tolist(),
            rank_labels(batch, example(), rank, ROWS, Letters()).tolist(),
        )
        for rank in range(2)
    ]
    assert made == [
        # a4 ends its document; the labels of a1 and b0 lie on the other rank.
        ([0, 1, 4, 100, 0, 0], [1, 2, IGNORE, 101, IGNORE, IGNORE]),
        # b2 ends its document; the last two rows are padding.
        ([2, 3, 101, 102, 0, 0], [3, 4, 102, IGNORE, IGNORE, IGNORE]),
    ]


def test_a_piece_that_ends_before_its_document_is_labelled_to_its_end() -> None:
    whole = split_long(
        Documents.from_lengths([12], first_id=2), window=5, long_documents="split"
    )  # [0, 5), [5, 10), [10, 12)
    batch = micro_batch(whole.slice(1, 3))
    sharding = per_sequence(batch.lengths, cp=1)
    tokens = rank_tokens(batch, sharding, 0, 7, Letters()).tolist()
    labels = rank_labels(batch, sharding, 0, 7, Letters()).tolist()
    assert tokens == [205, 206, 207, 208, 209, 210, 211]
    assert labels == [206, 207, 208, 209, 210, 211, IGNORE]
    assert sum(label != IGNORE for label in labels) == batch.num_targets == 6
