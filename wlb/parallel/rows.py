"""One rank's rows of a micro-batch: tokens and labels. NumPy only.

Local rows are the tokens of the rank's spans in order, then padding to T_local. Padding is an
attention segment of its own with label IGNORE, so it affects neither loss nor gradients.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from wlb.plan import IGNORE, IntArray, Layout, MicroBatch, RankSpans, ShardingPlan

Read = Callable[[int, int, int], npt.NDArray[np.integer]]


class TokenReader(Protocol):
    """Source of document tokens; `wlb.data.reader` has implementations."""

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.integer]:
        """Tokens [start, stop) of a document by its id in the plan."""
        ...

    def length(self, document: int) -> int: ...


@runtime_checkable
class LabelReader(TokenReader, Protocol):
    """A reader that knows which tokens are trained."""

    def labels(self, document: int, start: int, stop: int) -> npt.NDArray[np.integer]:
        """Tokens [start, stop) of a document, IGNORE for those that are not trained."""
        ...


def rank_tokens(
    micro_batch: MicroBatch,
    sharding: ShardingPlan,
    rank: int,
    local_tokens: int,
    reader: TokenReader,
) -> IntArray:
    """Input tokens of the rank's rows, shape [T_local]; padding holds token 0."""
    out = np.zeros(local_tokens, np.int64)
    return _read_into(out, micro_batch, sharding.for_rank(rank), reader, reader.read, shift=0)


def rank_labels(
    micro_batch: MicroBatch,
    sharding: ShardingPlan,
    rank: int,
    local_tokens: int,
    reader: TokenReader,
) -> IntArray:
    """Labels of the rank's rows, shape [T_local]: each token's next token in its document.

    This also holds if the piece ends before the document. IGNORE for padding, for a document's last
    token (with Layout.JOINED, the next document's first token) and for tokens that a `LabelReader`
    does not train.
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
            # A following piece that starts inside its document has no first token to predict.
            is_followed = index + 1 < len(pieces) and pieces[index + 1].start == 0
            if is_joined and end > length and is_followed:
                after = pieces[index + 1]
                out[put - 1] = read(after.document, after.start, after.start + 1)[0]
        at += span.stop - span.start
    return out
