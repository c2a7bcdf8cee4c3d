"""One rank's rows of a micro-batch: tokens, labels, positions, and where its keys are. NumPy only.

Local rows are the tokens of the rank's spans in order, then padding to T_local. Padding is an
attention segment of its own with label IGNORE, so it affects neither loss nor gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from wlb.plan import IGNORE, IntArray, Layout, MicroBatch, RankSpans, ShardingPlan, ranges

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


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Index arrays of one rank's attention call, which a kernel needs besides q, k and v.

    positions: position of each row in its piece, shape [T_local]. cu_seqlens_q, cu_seqlens_k:
    offsets of the segments (spans, then padding), shape [num_segments + 1]. kv_index: shape [K],
    rows of the gathered K and V that form the segments' keys, one segment after the other; rank r's
    rows are [r * T_local, (r + 1) * T_local). inverse: shape [U, cp * T_local]; inverse[u, row] is
    the key that uses the row for the u-th time, or K if there is none (its gradient is zero).
    kv_index and inverse are None at CP 1, where the local rows are the keys.
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
    kv_index = inverse = None
    if sharding.cp > 1:
        base = spans.piece_offsets[spans.piece]
        prefix_tokens = ranges(base, base + spans.stop)
        rows = _gathered_rows(sharding, local_tokens)
        kv_index = np.concatenate([rows[prefix_tokens], rank * local_tokens + tail])
        inverse = _inverse(spans, kv_index, num_rows=sharding.cp * local_tokens)
    return AttentionRows(positions, cu_q, cu_k, kv_index, inverse)


def _gathered_rows(sharding: ShardingPlan, local_tokens: int) -> IntArray:
    """For each token of the packed sequence, its row in the gathered K and V; shape [S]."""
    rows = np.empty(sharding.num_tokens, np.int64)
    for r in range(sharding.cp):
        index = sharding.for_rank(r).token_index
        rows[index] = r * local_tokens + np.arange(index.size)
    return rows


def _inverse(spans: RankSpans, kv_index: IntArray, *, num_rows: int) -> npt.NDArray[np.int64]:
    """`AttentionRows.inverse`; U is the largest number of spans of a piece on this rank."""
    order = np.lexsort((spans.start, spans.piece))
    piece = spans.piece[order]
    first = np.searchsorted(piece, piece, side="left")
    nth = np.empty(piece.size, np.int64)
    nth[order] = np.arange(piece.size) - first
    use = np.zeros(kv_index.size, np.int64)
    use[: int(spans.stop.sum())] = np.repeat(nth, spans.stop)
    num_uses = int(nth.max(initial=0)) + 1
    inverse = np.full((num_uses, num_rows), kv_index.size, np.int64)
    inverse[use, kv_index] = np.arange(kv_index.size)
    return inverse


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
