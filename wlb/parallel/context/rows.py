"""One rank's part of a K/V exchange: what it sends and receives, and which rows attention reads.

Attention of a micro-batch has one call for each stage of the exchange. The first call is causal and
has all queries. A later call has only the queries that see keys of its stage; all these keys come
before the queries, so the call needs no mask. The results of the calls are merged. The stages have
one of three forms:

    gather                one stage: an all-gather, then one attention call over all keys
    needed                one stage: an all-to-all of the rows that are read, then the same call
    own, then gather      first a call over local keys, which needs no transfer; then
    or needed             `cp.overlap_stages` stages, each travelling while the call before it runs

Local rows are the tokens of the rank's spans in order, then padding up to T rows. The padding is
an attention segment by itself, so that no token attends to it. NumPy only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from wlb.plan import ContextExchange, IntArray, KeyExchange, RankSpans, offsets_of, ranges


class Transfer(StrEnum):
    """How the rows of a stage reach this rank."""

    OWN = "own"  # no transfer: the rows are local
    GATHER = "gather"  # an all-gather: every rank sends the same range of its rows to all ranks
    NEEDED = "needed"  # an all-to-all of the rows that are read


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStage:
    """A stage on one rank: a transfer of R rows of K and V, and an attention call over K keys.

    A row that several segments attend to is copied once for each of them, so there can be more keys
    than rows. With one CP rank kv_index and inverse are None, because the local rows are the keys.
    """

    transfer: Transfer
    received: IntArray  # number of rows from each rank, shape [cp]; they arrive in rank order
    sent: IntArray  # number of rows to each rank, shape [cp]
    # Local rows to send, sorted by receiver, shape [num_sent]. None unless `transfer` is NEEDED.
    sent_rows: IntArray | None
    cu_seqlens_q: IntArray  # offsets of the queries of each segment, shape [num_segments + 1]
    cu_seqlens_k: IntArray  # offsets of the keys of each segment, shape [num_segments + 1]
    query_rows: IntArray | None  # local rows of the attention call's queries; None means all rows
    # the row from which each key is copied, segment by segment, shape [K]
    kv_index: IntArray | None
    # inverse[u, r] is the (u + 1)-th key that is copied from row r, or K if there are fewer.
    # Backward adds up the gradients of these keys. Shape [U, R], where U is the largest number of
    # copies of any row.
    inverse: IntArray | None


ON_DEVICE = ("kv_index", "inverse", "query_rows", "sent_rows")
"""Fields of `RankStage` that are copied to the device for custom ops, in `DeviceStage`'s order."""
STAGE_ARRAYS = ("received", "sent", "sent_rows", "query_rows", "cu_seqlens_q", "cu_seqlens_k")
STAGE_ARRAYS += ("kv_index", "inverse")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExchange:
    """One rank's stages, in the order in which attention calls them."""

    positions: IntArray  # position of each local row in its document, shape [T]
    stages: tuple[RankStage, ...]
    # Only for NEEDED: which of the gradients that other ranks return belong to which local row. A
    # row that was sent to several ranks gets a gradient from each of them. Gradients have the order
    # in which the rows were sent, over all stages. returned[w, t] is the index of the (w + 1)-th
    # gradient of row t in this order, or the number of all sent rows if row t has fewer gradients.
    # Shape [most ranks that get the same row, T].
    returned: IntArray | None = None

    @property
    def only(self) -> RankStage:
        """The only stage of this exchange. Raises ValueError if there are several stages."""
        (stage,) = self.stages
        return stage

    def __str__(self) -> str:
        """Return a text with every array of every stage on a line of its own."""
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
        """Yield (name, array) of all index arrays that attention needs on the device.

        The name is "returned", or a field of `RankStage` and the stage's number, such as
        "kv_index 0".
        """
        for s, stage in enumerate(self.stages):
            for name in ON_DEVICE:
                if (array := getattr(stage, name)) is not None:
                    yield f"{name} {s}", array
        if self.returned is not None:
            yield "returned", self.returned


def rank_exchange(exchange: ContextExchange, rank: int) -> RankExchange:
    """Compute one CP rank's part of a micro-batch's exchange of keys and values.

    Costs a few numpy passes over the micro-batch's tokens.

    Args:
        exchange: The exchange of the micro-batch, for all ranks.
        rank: The CP rank.
    """
    sharding, num_rows = exchange.sharding, exchange.local_tokens
    cp, spans = sharding.cp, exchange.sharding.for_rank(rank)
    num = spans.num_tokens
    if num > num_rows:
        raise ValueError(
            f"CP rank {rank} has {num} tokens, but the exchange plans only {num_rows} rows for "
            "each rank; local_tokens must be at least the number of tokens of every rank"
        )
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

    # 1. Find the row of every key that the rank's spans attend to. Rows are numbered over all
    # ranks.
    base = spans.piece_offsets[spans.piece]
    key = sharding.gathered_rows(num_rows)[ranges(base + first_key, base + spans.stop)]
    # 2. Find the index of those rows among the rows that arrive in all stages.
    here = exchange.travels.of(exchange.travels.reader == rank)
    came = ranges(here.holder * num_rows + here.first, here.holder * num_rows + here.last)
    place = np.full(cp * num_rows, -1, np.int64)
    place[came] = np.arange(came.size)
    rows = exchange.rows
    first_row = offsets_of(rows[:, rank].sum(axis=1))
    # 3. Assign each key to an attention call, and find its row among that call's rows. Padding
    # belongs to the first call.
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

    # 4. Build the transfer and the segments of each call.
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
            # Leave out spans without keys in this stage, because attention kernels need at least
            # one key in every segment.
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
    # 5. For each local row, find the gradients that other ranks return.
    sent_rows = [stage.sent_rows for stage in stages if stage.sent_rows is not None]
    returned = _uses(np.concatenate(sent_rows), num_rows=num_rows) if sent_rows else None
    return RankExchange(positions=positions, stages=tuple(stages), returned=returned)


def _written(array: IntArray) -> str:
    """Format an array as text, with blanks between numbers and slashes between rows of a matrix."""
    return " / ".join(" ".join(map(str, row.tolist())) for row in np.atleast_2d(array))


def _offsets(sizes: IntArray, padding: int) -> IntArray:
    """Return the offsets of segments of these sizes, and of a last segment of `padding` rows.

    If `padding` is 0, there is no last segment.
    """
    return offsets_of(np.append(sizes, padding) if padding else sizes)


def _uses(index: IntArray, *, num_rows: int) -> IntArray:
    """Return where each row occurs in `index`, shape [most occurrences of a row, num_rows].

    Entry [w, row] is the position of the row's (w + 1)-th occurrence, or index.size if the row
    occurs less often.
    """
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=num_rows)
    nth = np.arange(index.size) - np.repeat(offsets_of(counts)[:-1], counts)
    uses = np.full((int(counts.max(initial=1)), num_rows), index.size, np.int64)
    uses[nth, index[order]] = order
    return uses


def _inverse(
    spans: RankSpans, kv_index: IntArray, num_keys: IntArray, *, num_rows: int
) -> IntArray:
    """Return for each row the indices of the keys copied from it (`RankStage.inverse`), [U, R].

    Where a row has fewer than U copies, the result has K, the length of `kv_index`. U is the
    largest number of spans of one piece on this rank, because each of these spans copies the
    piece's rows once.

    Args:
        spans: The rank's spans.
        kv_index: Row of each key, span by span, then the rows of padding.
        num_keys: Number of keys of each span in this attention call, shape [num_spans].
        num_rows: R, the number of rows from which the call copies its keys.
    """
    order = np.lexsort((spans.start, spans.piece))
    piece = spans.piece[order]
    first = np.searchsorted(piece, piece, side="left")
    nth = np.empty(piece.size, np.int64)
    nth[order] = np.arange(piece.size) - first
    # The n-th span of a document on this rank makes the n-th copy of that document's rows.
    use = np.zeros(kv_index.size, np.int64)
    use[: int(num_keys.sum())] = np.repeat(nth, num_keys)
    num_uses = int(nth.max(initial=0)) + 1
    inverse = np.full((num_uses, num_rows), kv_index.size, np.int64)
    inverse[use, kv_index] = np.arange(kv_index.size)
    return inverse
