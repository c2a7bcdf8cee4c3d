"""Tokens and labels of one rank's rows of a micro-batch. NumPy only.

Local rows are the tokens of the rank's spans in order, then padding up to T_local. Padding is an
attention segment by itself and has the label IGNORE, so it affects neither loss nor gradients.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from wlb.plan import IGNORE, IntArray, Layout, MicroBatch, RankSpans, ShardingPlan

Read = Callable[[int, int, int], npt.NDArray[np.integer]]
"""A function (document, start, stop) that returns the tokens [start, stop) of a document."""


class TokenReader(Protocol):
    """Reads tokens of documents; `wlb.data.reader` has implementations."""

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.integer]:
        """Return tokens [start, stop) of a document, given its id in plans (`Pieces.document`)."""
        ...

    def length(self, document: int) -> int:
        """Return the number of tokens of a document, given its id in plans (`Pieces.document`)."""
        ...


@runtime_checkable
class LabelReader(TokenReader, Protocol):
    """A reader that knows which tokens are targets."""

    def labels(self, document: int, start: int, stop: int) -> npt.NDArray[np.integer]:
        """Return tokens [start, stop) of a document, with IGNORE for tokens that are no targets."""
        ...


def rank_tokens(
    micro_batch: MicroBatch,
    sharding: ShardingPlan,
    rank: int,
    local_tokens: int,
    reader: TokenReader,
) -> IntArray:
    """Return the input tokens of a CP rank's rows, shape [T_local]; padding is token 0.

    Args:
        micro_batch: The micro-batch.
        sharding: The micro-batch's spans on all CP ranks.
        rank: The CP rank.
        local_tokens: T_local, padding included.
        reader: Source of tokens.
    """
    out = np.zeros(local_tokens, np.int64)
    return _read_into(out, micro_batch, sharding.for_rank(rank), reader, reader.read, shift=0)


def rank_labels(
    micro_batch: MicroBatch,
    sharding: ShardingPlan,
    rank: int,
    local_tokens: int,
    reader: TokenReader,
) -> IntArray:
    """Return the labels of a CP rank's rows, shape [T_local]: for each token the next token.

    The next token is read from the document even if the piece or span ends before it. The label is
    IGNORE for padding, for the last token of a document, and where a `LabelReader` says that the
    next token is no target. With Layout.JOINED the label of a document's last token is the next
    document's first token.

    Args:
        micro_batch: The micro-batch.
        sharding: The micro-batch's spans on all CP ranks.
        rank: The CP rank.
        local_tokens: T_local, padding included.
        reader: Source of tokens.
    """
    out = np.full(local_tokens, IGNORE, np.int64)
    read = reader.labels if isinstance(reader, LabelReader) else reader.read
    return _read_into(out, micro_batch, sharding.for_rank(rank), reader, read, shift=1)


def _read_into(
    out: IntArray,
    micro_batch: MicroBatch,
    spans: RankSpans,
    reader: TokenReader,
    read: Read,
    *,
    shift: int,
) -> IntArray:
    pieces, is_joined = micro_batch.pieces, micro_batch.layout == Layout.JOINED
    at = 0
    for span in spans.spans:
        put = at
        for index, start, stop in micro_batch.parts(span.piece, span.start, span.stop):
            piece = pieces[index]
            length = reader.length(piece.document)
            end = piece.start + stop + shift
            tokens = read(piece.document, piece.start + start + shift, min(end, length))
            out[put : put + tokens.size] = tokens
            put += stop - start
            # With Layout.JOINED, the label of a document's last token is the first token of the
            # next piece. There is no label if that piece does not start at its document's first
            # token.
            is_followed = index + 1 < len(pieces) and pieces[index + 1].start == 0
            if is_joined and end > length and is_followed:
                after = pieces[index + 1]
                out[put - 1] = read(after.document, after.start, after.start + 1)[0]
        at += span.stop - span.start
    return out
