"""One rank's part of an exchange of keys: what it sends and receives, and what attention reads.

Attention of a micro-batch has a call for each stage. The first is causal and has all queries; each
later one has the queries whose keys it brings and, as these lie before the queries, no mask. The
stages' results are merged. An exchange is one of three:

    gather                one stage: an all-gather, and a call over all keys
    needed                one stage: an all-to-all of the rows that are read, and the same call
    own, then either      a call over the keys that the rank holds, which needs no transfer; then
                          as many stages as `cp.overlap_stages`, each hidden by the call before

Local rows are the tokens of the rank's spans in order, then padding to T. Padding is an attention
segment of its own. NumPy only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from wlb.plan import ContextExchange, IntArray, KeyExchange, RankSpans, offsets_of, ranges


class Transfer(StrEnum):
    """How the rows of a stage come here."""

    OWN = "own"  # not at all: they are the rank's own
    GATHER = "gather"  # by an all-gather of the same part of every rank's rows
    NEEDED = "needed"  # by an all-to-all of the rows that are read


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStage:
    """A stage on one rank: a transfer that brings R rows of K and V, and a call over K keys.

    kv_index and inverse are None with one CP rank, where the R = T local rows are the keys.
    """

    transfer: Transfer
    received: IntArray  # rows that come from each rank, shape [cp]; they arrive in this order
    sent: IntArray  # rows that go to each rank, shape [cp]
    sent_rows: IntArray | None  # which local rows go, rank after rank, shape [N]; NEEDED only
    cu_seqlens_q: IntArray  # offsets of the call's segments, shape [num_segments + 1]
    cu_seqlens_k: IntArray
    query_rows: IntArray | None  # local rows of the queries, shape [T2]; None: all rows
    kv_index: IntArray | None  # the row of each key, one segment after the other, shape [K]
    inverse: IntArray | None  # the key that uses a row for the u-th time, else K, shape [U, R]


ON_DEVICE = ("kv_index", "inverse", "query_rows", "sent_rows")
"""Arrays of a stage that custom ops take, in their order behind its offsets (`DeviceStage`)."""
STAGE_ARRAYS = ("received", "sent", "sent_rows", "query_rows", "cu_seqlens_q", "cu_seqlens_k")
STAGE_ARRAYS += ("kv_index", "inverse")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExchange:
    """One rank's stages, in the order in which attention calls them."""

    positions: IntArray  # position of each local row in its document, shape [T]
    stages: tuple[RankStage, ...]
    # Of the rows sent by need, one stage and rank after the other, N in all: where a local row's
    # gradient comes back for the w-th time, else N; shape [W, T].
    returned: IntArray | None = None

    @property
    def only(self) -> RankStage:
        """The one stage; ValueError if there are more."""
        (stage,) = self.stages
        return stage

    def __str__(self) -> str:
        """Every array of every stage, a line each."""
        lines: list[str] = []
        for s, stage in enumerate(self.stages):
            lines.append(f"stage {s}: {stage.transfer}")
            lines += [
                f"  {name:12} {_written(array)}"
                for name in STAGE_ARRAYS
                if (array := getattr(stage, name)) is not None
            ]
        if self.returned is not None:
            lines.append(f"returned       {_written(self.returned)}")
        return "\n".join(lines)

    def arrays(self) -> Iterator[tuple[str, IntArray]]:
        """The index arrays that attention needs on the device, with their names."""
        for s, stage in enumerate(self.stages):
            for name in ON_DEVICE:
                if (array := getattr(stage, name)) is not None:
                    yield f"{name} {s}", array
        if self.returned is not None:
            yield "returned", self.returned


def rank_exchange(exchange: ContextExchange, rank: int) -> RankExchange:
    """Index arrays of one rank. Cost: a few passes over the micro-batch's tokens."""
    sharding, num_rows = exchange.sharding, exchange.local_tokens
    cp, spans = sharding.cp, exchange.sharding.for_rank(rank)
    num = spans.num_tokens
    if num > num_rows:
        raise ValueError(f"rank {rank} holds {num} tokens, more than its {num_rows} rows")
    positions = np.concatenate([spans.positions, np.arange(num_rows - num)])
    first_key = spans.first_keys(exchange.sliding)
    num_keys = spans.stop - first_key
    nothing = np.zeros(cp, np.int64)
    if cp == 1:
        stage = RankStage(
            transfer=Transfer.OWN,
            received=nothing,
            sent=nothing,
            sent_rows=None,
            cu_seqlens_q=_offsets(spans.stop - spans.start, num_rows - num),
            cu_seqlens_k=_offsets(num_keys, num_rows - num),
            query_rows=None,
            kv_index=None,
            inverse=None,
        )
        return RankExchange(positions=positions, stages=(stage,))

    # Each key of each span, one span after the other: its row among all ranks' rows.
    base = spans.piece_offsets[spans.piece]
    key = sharding.gathered_rows(num_rows)[ranges(base + first_key, base + spans.stop)]
    # Those rows among the ones that arrive here in all stages.
    here = exchange.travels.of(exchange.travels.reader == rank)
    came = ranges(here.holder * num_rows + here.first, here.holder * num_rows + here.last)
    place = np.full(cp * num_rows, -1, np.int64)
    place[came] = np.arange(came.size)
    rows = exchange.rows
    first_row = offsets_of(rows[:, rank].sum(axis=1))
    # The call that has each key, and its row there. The first call has the padding as well.
    padding = rank * num_rows + np.arange(num, num_rows)
    call, row, padding_row = np.zeros_like(key), place[key], place[padding]
    if exchange.own_first:
        is_own = key // num_rows == rank
        stage_of = np.searchsorted(first_row[1:], row, side="right")
        call = np.where(is_own, 0, 1 + stage_of)
        row = np.where(
            is_own, key - rank * num_rows, row - first_row[np.where(is_own, 0, stage_of)]
        )
        padding_row = padding - rank * num_rows

    theirs = exchange.travels.of(exchange.travels.holder == rank)
    is_gather = sharding.exchange == KeyExchange.GATHER
    stages: list[RankStage] = []
    for c in range(exchange.num_stages + exchange.own_first):
        s = c - exchange.own_first
        if s < 0:
            transfer, received, sent, sent_rows = Transfer.OWN, nothing, nothing, None
        else:
            transfer = Transfer.GATHER if is_gather else Transfer.NEEDED
            received, sent = rows[s, rank], rows[s, :, rank]
            leaving = theirs.of(theirs.stage == s)
            sent_rows = None if is_gather else ranges(leaving.first, leaving.last)
        is_here = call == c
        of_span = np.diff(offsets_of(is_here)[offsets_of(num_keys)])
        size, index = spans.stop - spans.start, row[is_here]
        if c == 0:
            index, query_rows = np.concatenate([index, padding_row]), None
            cu_q, cu_k = _offsets(size, padding.size), _offsets(of_span, padding.size)
        else:
            begin, used = offsets_of(size)[:-1], of_span > 0
            query_rows = ranges(begin[used], (begin + size)[used])
            cu_q, cu_k = offsets_of(size[used]), offsets_of(of_span[used])
        here_rows = num_rows if s < 0 else int(received.sum())
        stages.append(
            RankStage(
                transfer=transfer,
                received=received,
                sent=sent,
                sent_rows=sent_rows,
                cu_seqlens_q=cu_q,
                cu_seqlens_k=cu_k,
                query_rows=query_rows,
                kv_index=index,
                inverse=_inverse(spans, index, of_span, num_rows=here_rows),
            )
        )
    sent_rows = [stage.sent_rows for stage in stages if stage.sent_rows is not None]
    returned = _uses(np.concatenate(sent_rows), num_rows=num_rows) if sent_rows else None
    return RankExchange(positions=positions, stages=tuple(stages), returned=returned)


def _written(array: IntArray) -> str:
    """Numbers with blanks, rows of a matrix with a slash between."""
    return " / ".join(" ".join(map(str, row.tolist())) for row in np.atleast_2d(array))


def _offsets(sizes: IntArray, padding: int) -> IntArray:
    """Offsets of segments of these sizes and, if there is padding, of its segment."""
    return offsets_of(np.append(sizes, padding) if padding else sizes)


def _uses(index: IntArray, *, num_rows: int) -> IntArray:
    """uses[w, row] is where `index` names the row for the w-th time, index.size if it does not."""
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=num_rows)
    nth = np.arange(index.size) - np.repeat(offsets_of(counts)[:-1], counts)
    uses = np.full((int(counts.max(initial=1)), num_rows), index.size, np.int64)
    uses[nth, index[order]] = order
    return uses


def _inverse(
    spans: RankSpans, kv_index: IntArray, num_keys: IntArray, *, num_rows: int
) -> IntArray:
    """`RankStage.inverse`; U is the largest number of spans of a piece on this rank. num_keys: of
    each span, shape [num_spans]; keys behind them are padding.
    """
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
