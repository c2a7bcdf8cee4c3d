"""Global batches: documents in shuffled order until a number of tokens, resumable anywhere.

The stream is the permutation of epoch 0, then that of epoch 1, and so on. Batch i ends with the
document that brings the stream to (i + 1) * tokens_per_batch: no token is dropped, and batches have
tokens_per_batch tokens on average. A document longer than a batch is followed by empty batches.
Guarantees: each document exactly once an epoch; `next` is a pure function of its state, which is a
JSON-able dict. tokens_per_batch and epochs may change on resume, corpus, seed and order may not.
Cost: 2 ms for a batch of 50,000 documents.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, SupportsIndex, cast, runtime_checkable

import numpy as np

from wlb.data.shuffle import permute, unpermute
from wlb.plan import (
    UNCOUNTED,
    BoolArray,
    DocumentIds,
    Documents,
    GlobalBatch,
    IntArray,
    IntLike,
    Pieces,
    UserError,
    digest,
    int_array,
    whole_number,
)
from wlb.plan.arrays import first_true

State = dict[str, Any]

BLOCK = 1 << 20
"""Most documents whose lengths are looked up in one call."""
IDENTITY = "store"
"""Key of a state's record of which tokens it is of."""
_COUNTS = ("epoch", "position", "batch", "surplus")
FILLED = "filled"
"""Key of a state's count of the tokens that fill its batches: those given, without the surplus.
States of earlier versions have none."""
MOST_COUNT = 2**62
"""Largest count of a state: sums of counts stay 64-bit integers."""
MOST_LENGTH = 1 << 62
EXACT_FLOATS = 2.0**53
"""From here on a float may stand for another whole number than its writer meant."""


@runtime_checkable
class Source(Protocol):
    """Anything with document lengths: `TokenStore`, `LengthSource`, or a class of your own."""

    @property
    def num_documents(self) -> int: ...

    @property
    def lengths(self) -> IntArray:
        """Tokens of each document, each at least 1, shape [num_documents]."""
        ...

    @property
    def source_id(self) -> int:
        """`Documents.source` of these documents."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthSource:
    """Document lengths (shape [num_documents]) without text; a `Source` of global batches.

    It plans, simulates and tunes as a token store does.

    name: for messages. source_id: `Documents.source` of its documents.
    """

    name: str
    lengths: IntArray
    source_id: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", checked_lengths(self.name, self.lengths))

    @property
    def num_documents(self) -> int:
        """Number of documents of the source."""
        return self.lengths.size

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())


@runtime_checkable
class TargetSource(Source, Protocol):
    """A source that knows which tokens are trained, such as `TokenStore`.

    has_targets: False where all tokens but a document's first are. num_targets: shape
    [num_documents].
    """

    @property
    def has_targets(self) -> bool: ...

    @property
    def num_targets(self) -> IntArray: ...

    def count_targets(self, document: IntLike, start: IntLike, stop: IntLike) -> IntArray: ...


@runtime_checkable
class IdentifiedSource(Protocol):
    """A source that knows which tokens it has, such as `TokenStore`: a state of one identity is
    refused by a stream of another. identity: plain values by their names; None = not known.
    """

    @property
    def identity(self) -> dict[str, Any]: ...


def identity_of(source: Source) -> dict[str, Any] | None:
    """Which tokens a source has; None for one that does not say."""
    return dict(source.identity) if isinstance(source, IdentifiedSource) else None


class BatchStream(ABC):
    """Global batches with explicit state."""

    @abstractmethod
    def start(self) -> State:
        """The state before the first document."""

    @abstractmethod
    def next(self, state: State) -> tuple[GlobalBatch, State] | None:
        """The batch after `state` and the state after the batch; None after the last one."""

    def iterate(self, state: State | None = None) -> Iterator[tuple[GlobalBatch, State]]:
        """(batch, state after it) from `state`, or from the start, to the end of data."""
        item = self.next(self.start() if state is None else state)
        while item is not None:
            yield item
            item = self.next(item[1])


@runtime_checkable
class AccountedStream(Protocol):
    """A stream that knows from a state alone what it has given: what a planner state that is
    loaded is held against. The three streams of wlb are such; one of your own may be.
    """

    def num_batches(self, state: State) -> int:
        """Global batches given before `state`."""
        ...

    def num_tokens(self, state: State) -> int:
        """Tokens of all documents given before `state`."""
        ...

    def may_have_ended(self, state: State) -> bool:
        """Whether the data ends at `state` for some number of epochs, not only for this run's."""
        ...

    def hold_pieces(self, state: State, pieces: Pieces) -> None:
        """UserError for a piece of a document that is not the stream's, is shorter than the piece,
        has other labels, or was not given before `state`.
        """
        ...


class SourceBatches(BatchStream):
    """Global batches of one source; `ids` tells a document's epoch and its row in the source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ids = DocumentIds(num_documents=source.num_documents)
        self._targets: TargetSource | None = None
        if isinstance(source, TargetSource) and source.has_targets:
            self._targets = source

    @property
    def has_targets(self) -> bool:
        """Whether the source says which tokens are trained; without, all but the first are."""
        return self._targets is not None

    def count_targets(self, pieces: Pieces) -> IntArray:
        """Trained labels of pieces of this source's documents, shape [num_pieces]."""
        if self._targets is None:
            return pieces.num_targets
        rows = self.ids.row(pieces.document)
        return self._targets.count_targets(rows, pieces.start, pieces.stop)

    def _rows_of(self, pieces: Pieces) -> IntArray:
        """Rows of pieces in the source, shape [num_pieces]; UserError unless they can be its."""
        rows = self.ids.row(pieces.document)
        hold_documents(
            pieces,
            np.asarray(self.source.lengths)[rows],
            source=np.full(len(pieces), self.source.source_id),
            is_masked=np.full(len(pieces), self.has_targets),
        )
        return rows

    def _num_targets(self, lengths: IntArray) -> IntArray:
        """Labels of whole documents, UNCOUNTED if the source trains only some of their tokens."""
        return lengths - 1 if self._targets is None else np.full(lengths.size, UNCOUNTED)


class GlobalBatches(SourceBatches):
    """Batches of `source`; epochs = 0 never ends, shuffle = False keeps the source's order."""

    def __init__(
        self,
        source: Source,
        *,
        tokens_per_batch: int,
        seed: int,
        epochs: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.tokens_per_batch, self.epochs = checked_settings(tokens_per_batch, epochs)
        self._lengths = np.asarray(source.lengths)
        if self._lengths.dtype != np.int64:
            self._lengths = int_array("lengths", self._lengths)
        if self._lengths.size != source.num_documents:
            raise UserError(
                f"the corpus has num_documents = {source.num_documents}, but "
                f"{self._lengths.size} lengths"
            )
        check_lengths(self._lengths)
        super().__init__(source)
        self._identity: State = {
            "num_documents": self._lengths.size,
            "num_tokens": int(self._lengths.sum()),
            "lengths": digest(self._lengths),
            "seed": whole_number("seed", seed),
            "shuffle": shuffle,
        }
        if self._targets is not None:
            self._identity["targets"] = digest(self._targets.num_targets)
        if (identity := identity_of(source)) is not None:
            self._identity[IDENTITY] = identity

    def start(self) -> State:
        """The state before the first document."""
        return {**dict.fromkeys((*_COUNTS, FILLED), 0), **self._identity}

    def next(self, state: State) -> tuple[GlobalBatch, State] | None:
        """The batch after `state` and the state after the batch; None after the last epoch."""
        num_documents, first = self._lengths.size, self._first(state)
        missing = self.tokens_per_batch - state["surplus"]
        ids, lengths = self._take(first, missing)
        has_ended = bool(self.epochs) and first >= self.epochs * num_documents
        if not ids.size and (missing > 0 or has_ended):
            return None
        documents = Documents(
            id=ids,
            length=lengths,
            num_targets=self._num_targets(lengths),
            source=np.full(ids.size, self.source.source_id, np.int64),
        )
        epoch, position = divmod(first + ids.size, num_documents)
        read = {"epoch": epoch, "position": position}
        is_last = bool(self.epochs) and first + ids.size >= self.epochs * num_documents
        identity = self._identity
        return batch_after(state, documents, read, missing, identity=identity, is_last=is_last)

    def _first(self, state: State) -> int:
        """Documents of the stream given before `state`; UserError for a state of another one."""
        check_state(state, {*_COUNTS}, self._identity, what="a corpus", keys="corpus")
        for name in (*_COUNTS, FILLED):
            value = state.get(name, 0)
            if type(value) is not int or not 0 <= value <= MOST_COUNT:
                raise UserError(
                    f"corpus state: {name} = {value!r} must be a whole number of at least 0"
                )
        if state["position"] >= self._lengths.size:
            raise UserError(
                f"corpus state: position = {state['position']} is past the corpus's "
                f"{self._lengths.size} documents"
            )
        first = state["epoch"] * self._lengths.size + state["position"]
        if first > MOST_COUNT:
            raise UserError(f"corpus state: epoch = {state['epoch']} is beyond 64-bit integers")
        return first

    def num_batches(self, state: State) -> int:
        """Global batches given before `state`."""
        self._first(state)
        return state["batch"]

    def num_tokens(self, state: State) -> int:
        """Tokens of all documents given before `state`; 30 ns for each of the epoch's."""
        first, size = self._first(state), self._lengths.size
        whole = first - first % size
        blocks = range(whole, first, BLOCK)
        partial = sum(int(self._block(b, min(BLOCK, first - b))[1].sum()) for b in blocks)
        tokens = first // size * self._identity["num_tokens"] + partial
        hold_surplus(state, tokens)
        return tokens

    def may_have_ended(self, state: State) -> bool:
        """Whether the data ends at `state` for some number of epochs."""
        first = self._first(state)
        return first > 0 and first % self._lengths.size == 0

    def hold_pieces(self, state: State, pieces: Pieces) -> None:
        """UserError for pieces that were not given, as `AccountedStream.hold_pieces`."""
        first, size = self._first(state), self._lengths.size
        rows, epoch = self._rows_of(pieces), pieces.document // size
        if self._identity["shuffle"]:
            rows = unpermute(rows, size, self._identity["seed"], epoch)
        hold_given(pieces, epoch * size + rows, np.full(len(pieces), first))

    def _take(self, first: int, missing: int) -> tuple[IntArray, IntArray]:
        """Ids and lengths of the documents from stream position `first` until `missing` tokens."""
        ids: list[IntArray] = []
        lengths: list[IntArray] = []
        mean = max(1, self._identity["num_tokens"] // self._lengths.size)
        end = self.epochs * self._lengths.size
        while missing > 0:
            size = min(BLOCK, missing // mean + missing // (8 * mean) + 64)
            if self.epochs:
                size = min(size, end - first)
            if size <= 0:
                break
            block_ids, block = self._block(first, size)
            running = np.cumsum(block)
            used = min(size, int(np.searchsorted(running, missing)) + 1)
            ids.append(block_ids[:used])
            lengths.append(block[:used])
            missing -= int(running[used - 1])
            first += used
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *ids]), np.concatenate([none, *lengths])

    def _block(self, first: int, size: int) -> tuple[IntArray, IntArray]:
        """Ids and lengths of `size` documents of the stream, shape [size] each."""
        identity = self._identity
        epoch, rows = stream_rows(
            first, size, self._lengths.size, seed=identity["seed"], shuffle=identity["shuffle"]
        )
        return self.ids.of(epoch, rows), self._lengths[rows]


def stream_rows(
    first: int, size: int, num_documents: int, *, seed: int, shuffle: bool = True
) -> tuple[IntArray, IntArray]:
    """Epoch and row of the stream positions [first, first + size) of a source, shape [size] each:
    the permutation of epoch 0, then that of epoch 1, and so on.
    """
    epoch, position = np.divmod(np.arange(first, first + size), num_documents)
    if not shuffle:
        return epoch, position
    is_one_epoch = epoch[0] == epoch[-1]
    return epoch, permute(position, num_documents, seed, epoch[:1] if is_one_epoch else epoch)


def checked_settings(tokens_per_batch: int, epochs: int) -> tuple[int, int]:
    """Both as plain ints; UserError for a batch without tokens, and for negative epochs."""
    return (
        whole_number("tokens_per_batch", tokens_per_batch, 1),
        whole_number("epochs", epochs, 0, " (0 = without end)"),
    )


def check_state(state: State, counts: set[str], identity: State, *, what: str, keys: str) -> None:
    """UserError unless `state` has these counts and this identity.

    what, keys: owner of the state and the keys that select the data, for the message.
    """
    expected = counts | identity.keys()
    # It may have been read from a file.
    if not isinstance(cast(object, state), dict):
        raise UserError(
            f"the state of {what} has {sorted(expected)}, this one is {type(state).__name__}; "
            f"resume with the {keys} of the checkpoint, or start a new run"
        )
    # A state of an earlier version has no identity of its stores, and not all counts.
    if (state.keys() | ({IDENTITY} & expected)) - {FILLED} != expected:
        raise UserError(
            f"the state of {what} has {sorted(expected)}, this one {sorted(state)}; resume with "
            f"the {keys} of the checkpoint, or start a new run"
        )
    for name, value in identity.items():
        if name == IDENTITY and name in state and state[name] != value:
            raise UserError(
                f"the state to resume from was made with other tokens or another tokenizer than "
                f"this run's ({_difference(state[name], value)}); resume with the {keys} of the "
                f"checkpoint, or start a new run"
            )
        if name != IDENTITY and state[name] != value:
            raise UserError(
                f"the state to resume from has {name} = {state[name]}, this run has {value}; "
                f"resume with the {keys} and seed of the checkpoint, or start a new run"
            )


def _difference(theirs: Any, ours: Any) -> str:
    """The first value in which two identities differ, of a store or of the stores of a blend."""
    before, now = _values_of(theirs), _values_of(ours)
    for name in [*now, *before]:
        if before.get(name) != now.get(name):
            return f"{name} {before.get(name, 'none')[:16]} and {now.get(name, 'none')[:16]}"
    return "other stores"


def _values_of(identity: Any) -> dict[str, str]:
    stores = cast("list[Any]", identity) if isinstance(identity, list) else [identity]
    numbered = len(stores) > 1
    return {
        f"store {i}: {name}" if numbered else name: str(value)
        for i, store in enumerate(stores)
        if isinstance(store, dict)
        for name, value in cast("dict[str, Any]", store).items()
    }


def batch_after(
    state: State, documents: Documents, read: State, missing: int, *, identity: State, is_last: bool
) -> tuple[GlobalBatch, State]:
    """The batch of these documents and the state after it.

    read: documents that its sources gave. missing: tokens that the batch needed to be complete.
    identity: of the stream. is_last: whether no batch follows.
    """
    surplus = max(0, documents.num_tokens - missing)
    after = {**read, "batch": state["batch"] + 1, "surplus": surplus}
    if FILLED in state:
        after[FILLED] = state[FILLED] + state["surplus"] + documents.num_tokens - surplus
    batch = GlobalBatch(index=state["batch"], documents=documents, is_last=is_last)
    return batch, {**state, **identity, **after}


def hold_surplus(state: State, tokens: int) -> None:
    """UserError where a state's surplus is not what its `tokens` have beyond its batches."""
    filled = state.get(FILLED)
    if filled is not None and filled + state["surplus"] != tokens:
        raise UserError(
            f"the state of the corpus has surplus = {state['surplus']}, but {tokens} tokens were "
            f"given and {filled} of them fill its batches"
        )


def check_lengths(lengths: IntArray) -> None:
    """UserError unless there is a document and each has a token."""
    if not lengths.size:
        raise UserError(
            "the corpus has no document; check data.store or data.corpus, and for held-out data "
            "raise data.heldout_fraction"
        )
    if (i := first_true(lengths < 1)) is not None:
        raise UserError(
            f"document {i} of the corpus has {lengths[i]} tokens; every document needs at least 1"
        )


def hold_documents(
    pieces: Pieces, lengths: IntArray, *, source: IntArray, is_masked: BoolArray
) -> None:
    """UserError for a piece that a document cannot have.

    lengths, source, is_masked: tokens of each piece's document, the number of its corpus and
    whether only some of its tokens are trained, shape [num_pieces] each.
    """
    counted = np.minimum(pieces.stop, lengths - 1) - pieces.start
    labels = np.where(is_masked, UNCOUNTED, counted)
    for wrong, what in (
        (pieces.document < 0, "has a negative id"),
        (pieces.source != source, "is of another corpus"),
        (pieces.stop > lengths, "ends behind its document"),
        (pieces.num_targets != labels, "has other labels than its tokens"),
    ):
        if (i := first_true(wrong)) is not None:
            raise UserError(f"{pieces[i]} {what} of {lengths[i]} tokens")


def hold_given(pieces: Pieces, at: IntArray, given: IntArray) -> None:
    """UserError for a piece whose document comes later in its stream.

    at: place of each piece's document in its stream. given: documents of that stream which were
    read. Shape [num_pieces] each.
    """
    if (i := first_true(at >= given)) is not None:
        raise UserError(
            f"{pieces[i]} is document {at[i]} of its stream, of which only {given[i]} were read"
        )


def checked_lengths(
    name: str, values: IntLike | list[Any], *, where: Callable[[int], str] = "length {}".format
) -> IntArray:
    """A read-only int64 copy of lengths, whoever gives them; UserError for the first entry that is
    none.

    A length is a whole number of tokens in [1, MOST_LENGTH]: an integer, or a float without a
    fraction that is below `EXACT_FLOATS`. True, None and text are none; files of text have numbers
    as `wlb.plan.numerals.number_of` reads them.

    Args:
        name: Of the source, for messages.
        values: The lengths, shape [n].
        where: Names the place of an entry by its index.
    """
    array = values if isinstance(values, np.ndarray) else np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise UserError(
            f"{name}: lengths are one axis of integers, not {array.dtype} of shape {array.shape}"
        )
    if not isinstance(values, np.ndarray):
        whole = [_whole(name, where, i, value) for i, value in enumerate(values)]
        array = np.array(whole, np.int64)
    elif array.dtype.kind == "f":
        # Floats of 16 bits cannot be compared with the limits.
        array = array.astype(np.promote_types(array.dtype, np.float64))
        is_whole = (array == np.round(array)) & (np.abs(array) < EXACT_FLOATS)
        if (i := first_true(~is_whole)) is not None:
            raise _no_length(name, where(i), array[i].item())
    if not array.size:
        raise UserError(f"{name} has no lengths; the corpus has no document")
    if (i := first_true((array < 1) | (array > MOST_LENGTH))) is not None:
        raise UserError(
            f"{name}: {where(i)} is {array[i]}; a length is at least 1 token and at most "
            f"{MOST_LENGTH}, so leave empty documents out"
        )
    out = array.astype(np.int64)
    out.flags.writeable = False
    return out


def _whole(name: str, where: Callable[[int], str], at: int, value: Any) -> int:
    """`value` as an int64; UserError for what is no whole number."""
    if isinstance(value, float | np.floating):
        exact = float(cast("float", value))
        if exact.is_integer() and abs(exact) < EXACT_FLOATS:
            return int(exact)
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = operator.index(value)
        if abs(number) < 1 << 63:
            return number
    raise _no_length(name, where(at), value)


def _no_length(name: str, where: str, value: Any) -> UserError:
    return UserError(
        f"{name}: {where} is {value!r}, not a whole number; give tokens of each document"
    )


class ListedBatches:
    """A planner's source of a list of global batches, of which it marks the last one."""

    def __init__(self, batches: Sequence[GlobalBatch]) -> None:
        self.batches: Sequence[GlobalBatch] = batches

    def start(self) -> State:
        return {"batch": 0}

    def next(self, state: State) -> tuple[GlobalBatch, State] | None:
        at = int(state["batch"])
        if at >= len(self.batches):
            return None
        batch = replace(self.batches[at], is_last=at + 1 == len(self.batches))
        return batch, {"batch": at + 1}
