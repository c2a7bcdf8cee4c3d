"""One rank's rows of a micro-batch: tokens, labels, positions and where its keys lie.

NumPy only. A rank's local rows are its spans' tokens in order, then padding to T_local. Padding is
a segment of its own, with label IGNORE, so it touches neither loss nor gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from wlb.plan import IGNORE, IntArray, Layout, MicroBatch, Piece, RankSpans, ShardingPlan, ranges

Read = Callable[[int, int, int], npt.NDArray[np.integer]]


class TokenReader(Protocol):
    """Where document tokens come from (`wlb.data`)."""

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.integer]:
        """Tokens [start, stop) of a document by its id in the plan."""
        ...

    def length(self, document: int) -> int: ...


@runtime_checkable
class LabelReader(TokenReader, Protocol):
    """A reader of documents of which only some tokens are trained."""

    def labels(self, document: int, start: int, stop: int) -> npt.NDArray[np.integer]:
        """Tokens [start, stop) of a document, IGNORE where they are not trained."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """Index arrays of one rank's attention call; everything a kernel needs but q, k and v.

    positions: position of each row in its piece, shape [T_local]. cu_seqlens_q, cu_seqlens_k:
    offsets of the segments (spans, then padding), shape [num_segments + 1]. kv_index: rows of the
    gathered K and V (rank r's rows are [r * T_local, (r + 1) * T_local)) that make up every
    segment's keys one after the other, shape [K]; None where the local rows are those keys already
    (CP 1). inverse: shape [U, cp * T_local]; inverse[u, row] is where the row is used as a key for
    the u-th time, or K where it is not (then the gradient is zero).
    """

    positions: IntArray
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    kv_index: IntArray | None
    inverse: npt.NDArray[np.int64] | None


def attention_rows(sharding: ShardingPlan, rank: int, local_tokens: int) -> AttentionRows:
    """Index arrays of `rank` for T_local = `local_tokens`. Cost: a few passes over S tokens."""
    spans = sharding.for_rank(rank)
    num = spans.num_tokens
    if num > local_tokens:
        raise ValueError(f"rank {rank} holds {num} tokens, more than its {local_tokens} rows")
    padding = local_tokens - num
    tail = np.arange(num, local_tokens)
    cu_q, cu_k = spans.cu_seqlens_q, spans.cu_seqlens_k
    if padding:
        cu_q = np.append(cu_q, cu_q[-1] + padding)
        cu_k = np.append(cu_k, cu_k[-1] + padding)
    positions = np.concatenate([spans.positions, np.arange(padding)])
    if sharding.cp == 1:
        return AttentionRows(
            positions=positions, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, kv_index=None, inverse=None
        )
    base = spans.piece_offsets[spans.piece]
    prefix_tokens = ranges(base, base + spans.stop)
    rows = _gathered_rows(sharding, local_tokens)
    kv_index = np.concatenate([rows[prefix_tokens], rank * local_tokens + tail])
    return AttentionRows(
        positions=positions,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        kv_index=kv_index,
        inverse=_inverse(spans, kv_index, num_rows=sharding.cp * local_tokens),
    )


def _gathered_rows(sharding: ShardingPlan, local_tokens: int) -> IntArray:
    """Row in the gathered K and V of each token of the packed sequence, shape [S]."""
    rows = np.empty(sharding.num_tokens, np.int64)
    for r in range(sharding.cp):
        index = sharding.for_rank(r).token_index
        rows[index] = r * local_tokens + np.arange(index.size)
    return rows


def _inverse(spans: RankSpans, kv_index: IntArray, *, num_rows: int) -> npt.NDArray[np.int64]:
    """Where each gathered row is used: one layer for each span that a piece has on this rank."""
    order = np.lexsort((spans.start, spans.piece))
    piece = spans.piece[order]
    first = np.searchsorted(piece, piece, side="left")
    nth = np.empty(piece.size, np.int64)
    nth[order] = np.arange(piece.size) - first
    use = np.zeros(kv_index.size, np.int64)
    use[: int(spans.stop.sum())] = np.repeat(nth, spans.stop)
    layers = int(nth.max(initial=0)) + 1
    inverse = np.full((layers, num_rows), kv_index.size, np.int64)
    inverse[use, kv_index] = np.arange(kv_index.size)
    return inverse


def rank_tokens(
    micro_batch: MicroBatch,
    sharding: ShardingPlan,
    rank: int,
    local_tokens: int,
    reader: TokenReader,
) -> IntArray:
    """Input tokens of the rank's rows, shape [T_local]; all padding holds token 0."""
    out = np.zeros(local_tokens, np.int64)
    _read(out, micro_batch, sharding.for_rank(rank), reader, reader.read, shift=0)
    return out


def rank_labels(
    micro_batch: MicroBatch,
    sharding: ShardingPlan,
    rank: int,
    local_tokens: int,
    reader: TokenReader,
) -> IntArray:
    """Label of each of the rank's rows, shape [T_local]: the document's next token.

    IGNORE for padding, a document's last token (where pieces are joined, that has the first
    token of the document that follows) and, with a `LabelReader`, where the next token is not
    trained. The last token of a piece that ends before its document does is labelled with the
    document's next token.
    """
    out = np.full(local_tokens, IGNORE, np.int64)
    read = reader.labels if isinstance(reader, LabelReader) else reader.read
    _read(out, micro_batch, sharding.for_rank(rank), reader, read, shift=1)
    return out


def _first_token(piece: Piece, read: Read) -> int:
    return int(read(piece.document, piece.start, piece.start + 1)[0])


def _read(
    out: IntArray,
    micro_batch: MicroBatch,
    spans: RankSpans,
    reader: TokenReader,
    read: Read,
    *,
    shift: int,
) -> None:
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
            # Of a document that goes on from elsewhere the label is another piece's.
            is_followed = index + 1 < len(pieces) and pieces[index + 1].start == 0
            if is_joined and end > length and is_followed:
                out[put - 1] = _first_token(pieces[index + 1], read)
        at += span.stop - span.start
