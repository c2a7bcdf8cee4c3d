"""One rank's rows of a micro-batch: tokens, labels, positions, and where its keys are. NumPy only.

Local rows are the tokens of the rank's spans in order, then padding to T_local. Padding is an
attention segment of its own with label IGNORE, so it affects neither loss nor gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from wlb.plan import (
    IGNORE,
    IntArray,
    KeyExchange,
    Layout,
    MicroBatch,
    RankSpans,
    ShardingPlan,
    offsets_of,
    ranges,
    rows_read,
)

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
    which of the R rows of K and V that the exchange brings form the segments' keys, one segment
    after the other; the ranks' rows follow each other, after an all-gather T_local each. inverse:
    shape [U, R]; inverse[u, row] is the key that uses the row for the u-th time, or K if there is
    none (its gradient is zero). kv_index and inverse are None at CP 1, where the local rows are the
    keys. sent: None with an all-gather. own: None if one call computes everything.
    """

    positions: IntArray
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    kv_index: IntArray | None
    inverse: npt.NDArray[np.int64] | None
    sent: "SentRows | None" = None
    own: "OwnRows | None" = None


@dataclass(frozen=True, slots=True)
class OwnRows:
    """A first call, of all queries over keys that the rank holds itself, while others' rows travel.

    The second call, which the fields of `AttentionRows` then describe, has the local query rows
    `query_rows`, shape [T2], of the spans that have keys on other ranks, and those keys only, all
    of which come before all queries of their segment. cu_seqlens_q, cu_seqlens_k, kv_index,
    inverse: of the first call, as in `AttentionRows`, with the T local rows in place of R.
    """

    query_rows: IntArray
    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    kv_index: IntArray
    inverse: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows that one rank sends and receives in an exchange by need.

    splits: shape [2, cp], rows received from each rank, and sent to each. index: shape [N], the
    local rows that are sent, rank after rank; a rank sends all its rows to itself, or none of them
    where `AttentionRows.own` computes with them before. returned: shape
    [W, T_local], where of N the row's gradient comes back for the w-th time, in the order of ranks,
    or N if it does not.
    """

    splits: npt.NDArray[np.int64]
    index: IntArray
    returned: npt.NDArray[np.int64]


def attention_rows(
    sharding: ShardingPlan, rank: int, local_tokens: int, *, overlap: bool = False
) -> AttentionRows:
    """Index arrays of `rank` for T_local = `local_tokens`. overlap: in two calls, see `OwnRows`.
    Cost: a few passes over S tokens."""
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
        return AttentionRows(positions, cu_q, cu_k, None, None)
    base = spans.piece_offsets[spans.piece]
    prefix_tokens = ranges(base, base + spans.stop)
    rows, sent = _gathered_rows(sharding, local_tokens), None
    num_rows, own = sharding.cp * local_tokens, rank * local_tokens
    if sharding.exchange == KeyExchange.NEEDED:
        read = rows_read(sharding)
        if overlap:
            read[sharding.rank_offsets[rank] : sharding.rank_offsets[rank + 1], rank] = 0
        kept = 0 if overlap else local_tokens
        sent = _sent_rows(sharding, read, rank, kept, local_tokens)
        rows = _received_rows(sharding, read[:, rank], rank, 0 if overlap else padding)
        num_rows, own = int(sent.splits[0].sum()), int(sent.splits[0, :rank].sum())
    if overlap:
        made = AttentionRows(positions, cu_q, cu_k, None, None, sent)
        return _in_two_calls(made, spans, rows[prefix_tokens], prefix_tokens, num_rows=num_rows)
    kv_index = np.concatenate([rows[prefix_tokens], own + tail])
    inverse = _inverse(spans, kv_index, spans.stop, num_rows=num_rows)
    return AttentionRows(positions, cu_q, cu_k, kv_index, inverse, sent)


def _in_two_calls(
    whole: AttentionRows,
    spans: RankSpans,
    arrived: IntArray,
    prefix_tokens: IntArray,
    *,
    num_rows: int,
) -> AttentionRows:
    """`whole`, which is one call, as two. arrived: which of the `num_rows` rows that come here each
    key of the spans is; prefix_tokens: the key's token of the packed sequence."""
    held = np.full(int(spans.piece_offsets[-1]), -1, np.int64)
    held[spans.token_index] = np.arange(spans.num_tokens)
    local = held[prefix_tokens]
    is_own = local >= 0
    at = offsets_of(is_own)[spans.cu_seqlens_k]
    num_own = np.diff(at)
    num_others = spans.stop - num_own
    num_local = whole.positions.size
    tail = np.arange(spans.num_tokens, num_local)
    own_index = np.concatenate([local[is_own], tail])
    cu_own = offsets_of(np.append(num_own, tail.size) if tail.size else num_own)
    begin, end = spans.cu_seqlens_q[:-1], spans.cu_seqlens_q[1:]
    has_others = np.flatnonzero(num_others)
    index = arrived[~is_own]
    return AttentionRows(
        positions=whole.positions,
        cu_seqlens_q=offsets_of((end - begin)[has_others]),
        cu_seqlens_k=offsets_of(num_others[has_others]),
        kv_index=index,
        inverse=_inverse(spans, index, num_others, num_rows=num_rows),
        sent=whole.sent,
        own=OwnRows(
            query_rows=ranges(begin[has_others], end[has_others]),
            cu_seqlens_q=whole.cu_seqlens_q,
            cu_seqlens_k=cu_own,
            kv_index=own_index,
            inverse=_inverse(spans, own_index, num_own, num_rows=num_local),
        ),
    )


def _gathered_rows(sharding: ShardingPlan, local_tokens: int) -> IntArray:
    """For each token of the packed sequence, its row in the gathered K and V; shape [S]."""
    rows = np.empty(sharding.num_tokens, np.int64)
    for r in range(sharding.cp):
        index = sharding.for_rank(r).token_index
        rows[index] = r * local_tokens + np.arange(index.size)
    return rows


def _received_rows(sharding: ShardingPlan, read: IntArray, rank: int, padding: int) -> IntArray:
    """For each token of the packed sequence, its row in what an exchange by need brings; shape [S],
    -1 for tokens that stay where they are. read: of each span the rows that `rank` reads."""
    rows = np.full(sharding.num_tokens, -1, np.int64)
    first = offsets_of(sharding.lengths)[sharding.piece] + sharding.start
    # The rank's own rows end with its padding.
    after = np.arange(read.size) >= sharding.rank_offsets[rank + 1]
    begin = offsets_of(read)[:-1] + padding * after
    rows[ranges(first, first + read)] = ranges(begin, begin + read)
    return rows


def _sent_rows(
    sharding: ShardingPlan, read: IntArray, rank: int, kept: int, local_tokens: int
) -> SentRows:
    """read: `rows_read`. kept: rows that the rank sends to itself, all or none."""
    offsets = sharding.rank_offsets
    own = slice(int(offsets[rank]), int(offsets[rank + 1]))
    held = offsets_of(sharding.stop[own] - sharding.start[own])
    # To every rank the first rows of each span, and to itself the padding as well.
    sizes = np.zeros((sharding.cp, held.size), np.int64)
    sizes[:, :-1] = read[own].T
    sizes[rank, -1] = max(0, kept - int(held[-1]))
    begin = np.broadcast_to(held, sizes.shape).ravel()
    index = ranges(begin, begin + sizes.ravel())
    received = np.diff(offsets_of(read[:, rank])[offsets])
    received[rank] = kept
    return SentRows(
        splits=np.stack([received, sizes.sum(axis=1)]),
        index=index,
        returned=_uses(index, num_rows=local_tokens),
    )


def _uses(index: IntArray, *, num_rows: int) -> npt.NDArray[np.int64]:
    """uses[w, row] is where `index` names the row for the w-th time, index.size if it does not."""
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=num_rows)
    nth = np.arange(index.size) - np.repeat(offsets_of(counts)[:-1], counts)
    uses = np.full((int(counts.max(initial=1)), num_rows), index.size, np.int64)
    uses[nth, index[order]] = order
    return uses


def _inverse(
    spans: RankSpans, kv_index: IntArray, num_keys: IntArray, *, num_rows: int
) -> npt.NDArray[np.int64]:
    """`AttentionRows.inverse`; U is the largest number of spans of a piece on this rank. num_keys:
    of each span, shape [num_spans]; keys behind them are padding."""
    order = np.lexsort((spans.start, spans.piece))
    piece = spans.piece[order]
    first = np.searchsorted(piece, piece, side="left")
    nth = np.empty(piece.size, np.int64)
    nth[order] = np.arange(piece.size) - first
    use = np.zeros(kv_index.size, np.int64)
    use[: int(num_keys.sum())] = np.repeat(nth, num_keys)
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
