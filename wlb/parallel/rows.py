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
    gather_bounds,
    offsets_of,
    ranges,
    ranges_read,
    rows_read,
    stage_bounds,
)
from wlb.plan.exchange import rank_of_span, rows_read_of_others

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
class CallRows:
    """Index arrays of one attention call, which a kernel needs besides q, k and v.

    cu_seqlens_q, cu_seqlens_k: offsets of the segments, shape [num_segments + 1]. kv_index: shape
    [K], which of R rows of K and V form the segments' keys, one segment after the other. inverse:
    shape [U, R]; inverse[u, row] is the key that uses the row for the u-th time, or K if there is
    none (its gradient is zero). Both are None at CP 1, where the local rows are the keys.
    query_rows: the local rows of the queries, shape [T2]; None if they are all rows.
    """

    cu_seqlens_q: IntArray
    cu_seqlens_k: IntArray
    kv_index: IntArray | None
    inverse: npt.NDArray[np.int64] | None
    query_rows: IntArray | None = None


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """One rank's attention over a micro-batch: its rows, the exchange of keys, and the calls.

    positions: position of each row in its piece, shape [T_local]. sent: None with an all-gather.
    Without `own` there is one call, whose segments are the spans and then the padding, and R counts
    the rows that the exchange brings, rank after rank; an all-gather brings T_local of each. own: a
    call of all queries over keys that the rank holds itself, R = T_local, while others' rows
    travel. Then `calls` are over those alone, one a stage of the exchange, and R counts the stage's
    rows. Their queries are those of spans with keys in it, all of which come before the queries.
    """

    positions: IntArray
    calls: tuple[CallRows, ...]
    sent: "SentRows | None" = None
    own: CallRows | None = None

    @property
    def call(self) -> CallRows:
        """The only one of `calls`; ValueError if the exchange has several stages."""
        (only,) = self.calls
        return only


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows that one rank sends and receives in an exchange by need of one or more stages.

    splits: shape [stages, 2, cp], rows received from each rank, and sent to each. index: of each
    stage the local rows that are sent, rank after rank, N of all stages. Without `overlap` a rank
    sends all its rows to itself as well. returned: shape [W, T_local], where of N the row's
    gradient comes back for the w-th time, in the order of stages and ranks, or N if it does not.
    """

    splits: npt.NDArray[np.int64]
    index: tuple[IntArray, ...]
    returned: npt.NDArray[np.int64]


def attention_rows(
    sharding: ShardingPlan,
    rank: int,
    local_tokens: int,
    *,
    overlap: bool = False,
    stages: int = 1,
    sliding: int = 0,
) -> AttentionRows:
    """Index arrays of `rank` for T_local = `local_tokens`.

    overlap: own keys first, see `AttentionRows.own`. stages: of an exchange with overlap, by need
    or an all-gather of so many parts of all ranks' rows. Cost: a few passes over S tokens.
    """
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
        return AttentionRows(positions, (CallRows(cu_q, cu_k, None, None),))
    base, first_key = spans.piece_offsets[spans.piece], spans.first_keys(sliding)
    prefix_tokens = ranges(base + first_key, base + spans.stop)
    overlap = overlap and not sliding
    stages = stages if overlap else 1
    if sharding.exchange != KeyExchange.GATHER:
        kept = 0 if overlap else local_tokens
        if sliding:
            sent, rows = _by_window(sharding, rank, local_tokens, sliding)
        else:
            sent, rows = _by_need(sharding, rank, local_tokens, kept, stages)
        num_rows = sent.splits[:, 0].sum(axis=1)
        own = int(sent.splits[0, 0, :rank].sum())
    else:
        bounds, sent = gather_bounds(local_tokens, stages=stages), None
        rows = _gathered_rows(sharding, bounds)
        num_rows, own = sharding.cp * np.diff(bounds), rank * local_tokens
    arrived = rows[prefix_tokens]
    if overlap:
        first, calls = _own_first(spans, arrived, prefix_tokens, num_rows, local_tokens)
        return AttentionRows(positions, calls, sent, first)
    kv_index = np.concatenate([arrived, own + tail])
    num_keys = spans.stop - first_key
    if sliding:
        cu_k = offsets_of(np.append(num_keys, padding) if padding else num_keys)
    inverse = _inverse(spans, kv_index, num_keys, num_rows=int(num_rows[0]))
    return AttentionRows(positions, (CallRows(cu_q, cu_k, kv_index, inverse),), sent)


def _own_first(
    spans: RankSpans,
    arrived: IntArray,
    prefix_tokens: IntArray,
    num_rows: IntArray,
    local_tokens: int,
) -> tuple[CallRows, tuple[CallRows, ...]]:
    """The call over own keys, and those over the `num_rows` rows of each stage. arrived: of each
    key of the spans its row among those of all stages; prefix_tokens: its packed token."""
    held = np.full(int(spans.piece_offsets[-1]), -1, np.int64)
    held[spans.token_index] = np.arange(spans.num_tokens)
    local = held[prefix_tokens]
    first_row = offsets_of(num_rows)
    stage = np.where(local >= 0, -1, np.searchsorted(first_row[1:], arrived, side="right"))
    begin, end = spans.cu_seqlens_q[:-1], spans.cu_seqlens_q[1:]
    calls: list[CallRows] = []
    for s, num in enumerate(num_rows.tolist()):
        is_here = stage == s
        num_keys = np.diff(offsets_of(is_here)[spans.cu_seqlens_k])
        index, used = arrived[is_here] - first_row[s], np.flatnonzero(num_keys)
        calls.append(
            CallRows(
                cu_seqlens_q=offsets_of((end - begin)[used]),
                cu_seqlens_k=offsets_of(num_keys[used]),
                kv_index=index,
                inverse=_inverse(spans, index, num_keys, num_rows=num),
                query_rows=ranges(begin[used], end[used]),
            )
        )
    is_own = local >= 0
    num_own = np.diff(offsets_of(is_own)[spans.cu_seqlens_k])
    tail = np.arange(spans.num_tokens, local_tokens)
    index = np.concatenate([local[is_own], tail])
    inverse = _inverse(spans, index, num_own, num_rows=local_tokens)
    cu_q, cu_k = (
        offsets_of(np.append(x, tail.size) if tail.size else x) for x in (end - begin, num_own)
    )
    return CallRows(cu_q, cu_k, index, inverse), tuple(calls)


def _gathered_rows(sharding: ShardingPlan, bounds: IntArray) -> IntArray:
    """For each token of the packed sequence, its row in the gathered K and V, stage after stage;
    shape [S]. bounds: `gather_bounds`."""
    num_local = int(bounds[-1])
    rank, local = np.divmod(sharding.gathered_rows(num_local), num_local)
    stage = np.searchsorted(bounds[1:-1], local, side="right")
    return sharding.cp * bounds[stage] + rank * np.diff(bounds)[stage] + local - bounds[stage]


def _by_need(
    sharding: ShardingPlan, rank: int, local_tokens: int, kept: int, stages: int
) -> tuple[SentRows, IntArray]:
    """What the rank sends and receives, and for each token of the packed sequence its row among
    those that arrive, stage after stage, shape [S], -1 for tokens that do not. kept: rows that the
    rank sends to itself, all or none."""
    # Every rank's own rows are left out: stage bounds depend on all rows that a rank receives.
    read = rows_read(sharding) if kept else rows_read_of_others(sharding)
    offsets = sharding.rank_offsets
    own = slice(int(offsets[rank]), int(offsets[rank + 1]))
    bounds = stage_bounds(sharding, read, stages=stages)
    rows = np.full(sharding.num_tokens, -1, np.int64)
    token = offsets_of(sharding.lengths)[sharding.piece] + sharding.start
    held = offsets_of(sharding.stop[own] - sharding.start[own])
    # The rank's own rows end with its padding.
    padding = max(0, kept - int(held[-1]))
    after = np.arange(token.size) >= offsets[rank + 1]
    splits = np.zeros((stages, 2, sharding.cp), np.int64)
    index: list[IntArray] = []
    at = 0
    for s in range(stages):
        first, last = bounds[s], bounds[s + 1]
        here = last[:, rank] - first[:, rank]
        begin = at + offsets_of(here)[:-1] + padding * after
        rows[ranges(token + first[:, rank], token + last[:, rank])] = ranges(begin, begin + here)
        splits[s, 0] = np.diff(offsets_of(here)[offsets])
        splits[s, 0, rank] = kept
        # To every rank rows of each span, and to itself the padding as well.
        sizes = np.zeros((sharding.cp, held.size), np.int64)
        sizes[:, :-1] = (last - first)[own].T
        sizes[rank, -1] = padding
        start = np.broadcast_to(held, sizes.shape).copy()
        start[:, :-1] += first[own].T
        index.append(ranges(start.ravel(), (start + sizes).ravel()))
        splits[s, 1] = sizes.sum(axis=1)
        at += int(splits[s, 0].sum())
    returned = _uses(np.concatenate(index), num_rows=local_tokens)
    return SentRows(splits=splits, index=tuple(index), returned=returned), rows


def _by_window(
    sharding: ShardingPlan, rank: int, local_tokens: int, sliding: int
) -> tuple[SentRows, IntArray]:
    """`_by_need` in one stage for layers with a sliding window, whose ranks read several ranges of
    a span; all own rows are kept."""
    read, offsets, cp = ranges_read(sharding, sliding=sliding), sharding.rank_offsets, sharding.cp
    own = slice(int(offsets[rank]), int(offsets[rank + 1]))
    held = offsets_of(sharding.stop[own] - sharding.start[own])
    padding = local_tokens - int(held[-1])
    rows = np.full(sharding.num_tokens, -1, np.int64)
    mine = read.of(read.reader == rank)
    size = mine.last - mine.first
    token = (offsets_of(sharding.lengths)[sharding.piece] + sharding.start)[mine.span]
    # The rank's own rows end with its padding.
    begin = offsets_of(size)[:-1] + padding * (mine.span >= own.stop)
    rows[ranges(token + mine.first, token + mine.last)] = ranges(begin, begin + size)
    splits = np.zeros((1, 2, cp), np.int64)
    np.add.at(splits[0, 0], rank_of_span(sharding)[mine.span], size)
    theirs = read.of((read.span >= own.start) & (read.span < own.stop))
    start = np.append(held[theirs.span - own.start] + theirs.first, held[-1])
    size = np.append(theirs.last - theirs.first, padding)
    # To itself the rank sends its padding as well.
    reader = np.append(theirs.reader, rank)
    order = np.argsort(reader, kind="stable")
    index = ranges(start[order], (start + size)[order])
    np.add.at(splits[0, 1], reader, size)
    splits[0, 0, rank] = local_tokens
    returned = _uses(index, num_rows=local_tokens)
    return SentRows(splits=splits, index=(index,), returned=returned), rows


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
