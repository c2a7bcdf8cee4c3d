"""Group the documents of one corpus into global batches, in a shuffled order.

The stream is a permutation of the corpus for epoch 0, then another one for epoch 1, and so on.
Batch i ends with the document that brings the stream to (i + 1) * tokens_per_batch tokens. So no
token is dropped, and batches have tokens_per_batch tokens on average. For example, documents of 3,
4, 2 and 5 tokens in batches of 6 give [3, 4], [2, 5], with 7 tokens each: the first batch has 1
token too many (its surplus), so the second one needs only 5 more. A document longer than a batch is
followed by empty batches.
Guarantees: each document comes exactly once per epoch. `next` is a pure function of a state, which
is a dict that can be saved as JSON. A run that resumes from a state may change tokens_per_batch and
the number of epochs, but not the corpus, the seed or whether the corpus is shuffled.
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
"""Position in a stream of documents, and the identity of that stream. Checkpoints contain it."""

BLOCK = 1 << 20
"""The most documents whose lengths are looked up in one call, which bounds the memory."""
# Keys of a state. "epoch" and "position" say how many documents were read and "batch" says how many
# global batches they filled. "surplus" is the number of tokens that were read beyond those that
# these batches should have together.
_COUNTS = ("epoch", "position", "batch", "surplus")
IDENTITY = "store"
"""The state's key for the identity of the corpus (`TokenStore.identity`)."""
FILLED = "filled"
"""The state's key for the number of tokens that were read, minus the surplus.

`check_surplus` finds damaged states with it. States of earlier versions do not have this key.
"""
MOST_COUNT = 2**62
"""The largest number that a state may contain; sums of two such numbers fit into int64."""
MOST_LENGTH = 1 << 62
"""The longest document, in tokens."""
EXACT_FLOATS = 2.0**53
"""Floats below this represent every whole number exactly; larger ones may have been rounded."""


@runtime_checkable
class Source(Protocol):
    """A corpus with known document lengths: `TokenStore`, `LengthSource`, or a user's class."""

    @property
    def num_documents(self) -> int:
        """Number of documents of the source."""
        ...

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each document, at least 1, shape [num_documents]."""
        ...

    @property
    def source_id(self) -> int:
        """Index of this source in a blend. It is in the field `source` of each of its documents."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthSource:
    """A corpus of which only the document lengths are known.

    It can replace a token store to plan, simulate and tune a run, but not to train.
    """

    name: str  # name of the corpus in error messages
    lengths: IntArray  # tokens of each document, shape [num_documents]
    source_id: int = 0  # number of this source, the value of `Documents.source`

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", checked_lengths(self.name, self.lengths))

    @property
    def num_documents(self) -> int:
        """Number of documents of the source."""
        return self.lengths.size

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.lengths.sum())


@runtime_checkable
class TargetSource(Source, Protocol):
    """A source that knows which of its tokens are trained, such as `TokenStore`."""

    @property
    def has_targets(self) -> bool:
        """Whether only some tokens are trained.

        If False, every token is trained except the first one of each document.
        """
        ...

    @property
    def num_targets(self) -> IntArray:
        """Number of trained tokens of each document, shape [num_documents]."""
        ...

    def count_targets(self, document: IntLike, start: IntLike, stop: IntLike) -> IntArray:
        """Count the trained labels of pieces [start, stop) of documents.

        Args:
            document: Index of each piece's document in the source, shape [num_pieces].
            start: First token of each piece, shape [num_pieces].
            stop: End of each piece, shape [num_pieces].

        Returns:
            Number of trained labels of each piece, shape [num_pieces]. The label of a token is the
            next token of its document.
        """
        ...


@runtime_checkable
class IdentifiedSource(Protocol):
    """A source with an identity, such as `TokenStore`.

    States contain the identity, and a stream refuses a state with a different identity. So a run
    cannot resume with other tokens by mistake, even if all documents have the same lengths.
    """

    @property
    def identity(self) -> dict[str, Any]:
        """Values that identify the tokens, such as checksums. A value that is unknown is None."""
        ...


def identity_of(source: Source) -> dict[str, Any] | None:
    """Return `source.identity` (for example checksums), or None if the source has no identity."""
    return dict(source.identity) if isinstance(source, IdentifiedSource) else None


class BatchStream(ABC):
    """A stream of global batches whose position is a state that the caller keeps and passes."""

    @abstractmethod
    def start(self) -> State:
        """Return the state before the first document."""

    @abstractmethod
    def next(self, state: State) -> tuple[GlobalBatch, State] | None:
        """Return the batch after `state` and the new state, or None at the end of the data."""

    def iterate(self, state: State | None = None) -> Iterator[tuple[GlobalBatch, State]]:
        """Yield each batch with the state after it, from `state` (None = the start) to the end."""
        item = self.next(self.start() if state is None else state)
        while item is not None:
            yield item
            item = self.next(item[1])


@runtime_checkable
class AccountedStream(Protocol):
    """A stream that can tell from a state alone what it returned before that state.

    The planner checks checkpoints with these methods. For example, documents that wait in the
    packer must have been read before the checkpoint's state. All streams of wlb have these methods,
    and a user's stream may have them.
    """

    def num_batches(self, state: State) -> int:
        """Return the number of global batches before `state`."""
        ...

    def num_tokens(self, state: State) -> int:
        """Return the number of tokens of all documents that were read before `state`."""
        ...

    def may_have_ended(self, state: State) -> bool:
        """Return whether `state` is a point at which the data may end, such as the end of an epoch.

        This run's number of epochs does not matter, because the state may have been saved by a run
        with another number of epochs.
        """
        ...

    def check_pieces(self, state: State, pieces: Pieces) -> None:
        """Check that pieces can come from documents that were read before `state`.

        Raises:
            UserError: A piece's document is not in the corpus or was not read yet, the piece ends
                after the end of its document, or its number of labels is wrong.
        """
        ...


class SourceBatches(BatchStream):
    """Base class of the streams that read a single source.

    Attributes:
        source: The corpus.
        ids: Converts between a document's id, which differs in each epoch, and its index in the
            source.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ids = DocumentIds(num_documents=source.num_documents)
        self._targets: TargetSource | None = None
        if isinstance(source, TargetSource) and source.has_targets:
            self._targets = source

    @property
    def has_targets(self) -> bool:
        """Whether only some tokens are trained.

        If False, every token is trained except the first one of each document.
        """
        return self._targets is not None

    def count_targets(self, pieces: Pieces) -> IntArray:
        """Return the number of trained labels of each piece, shape [num_pieces]."""
        if self._targets is None:
            return pieces.num_targets
        rows = self.ids.row(pieces.document)
        return self._targets.count_targets(rows, pieces.start, pieces.stop)

    def _rows_of(self, pieces: Pieces) -> IntArray:
        """Return the index in the source of each piece's document, shape [num_pieces].

        Raises:
            UserError: A piece does not fit its document (`check_documents`).
        """
        rows = self.ids.row(pieces.document)
        check_documents(
            pieces,
            np.asarray(self.source.lengths)[rows],
            source=np.full(len(pieces), self.source.source_id),
            is_masked=np.full(len(pieces), self.has_targets),
        )
        return rows

    def _num_targets(self, lengths: IntArray) -> IntArray:
        """Return the number of trained labels of each document, or UNCOUNTED for each.

        The numbers are UNCOUNTED if only some tokens are trained. The planner then counts the
        labels of each piece with `count_targets`, after packing has decided the pieces.

        Args:
            lengths: Tokens of each document, shape [num_documents].
        """
        return lengths - 1 if self._targets is None else np.full(lengths.size, UNCOUNTED)


class GlobalBatches(SourceBatches):
    """A stream of global batches of one source, in shuffled order.

    Args:
        source: The corpus.
        tokens_per_batch: Tokens of a global batch, on average.
        seed: Seed of the shuffled order.
        epochs: How many times the corpus is read. 0 means without end.
        shuffle: Whether each epoch is shuffled. If not, each has the order of the source.
    """

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
                f"num_documents of the corpus is {source.num_documents}, but lengths has "
                f"{self._lengths.size} entries; give one length for each document"
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
        """Return the state before the first document."""
        return {**dict.fromkeys((*_COUNTS, FILLED), 0), **self._identity}

    def next(self, state: State) -> tuple[GlobalBatch, State] | None:
        """Return the batch after `state` and the new state, or None after the last epoch."""
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
        """Check a state, and return how many documents were read before it, over all epochs.

        Raises:
            UserError: The state belongs to another stream, or it is damaged.
        """
        check_state(state, {*_COUNTS}, self._identity, what="a corpus", keys="corpus")
        for name in (*_COUNTS, FILLED):
            value = state.get(name, 0)
            if type(value) is not int or not 0 <= value <= MOST_COUNT:
                raise UserError(
                    f"the state of the corpus has {name} = {value!r}, which must be a whole number "
                    f"from 0 to 2**62; resume from another checkpoint"
                )
        if state["position"] >= self._lengths.size:
            raise UserError(
                f"the state of the corpus has position = {state['position']}, which must be below "
                f"{self._lengths.size}, the number of documents; resume from another checkpoint"
            )
        first = state["epoch"] * self._lengths.size + state["position"]
        if first > MOST_COUNT:
            raise UserError(
                f"the state of the corpus has epoch = {state['epoch']}, after which {first} "
                f"documents would have been read, more than {MOST_COUNT}; resume from another "
                "checkpoint"
            )
        return first

    def num_batches(self, state: State) -> int:
        """Return the number of global batches before `state`."""
        self._first(state)
        return state["batch"]

    def num_tokens(self, state: State) -> int:
        """Return the number of tokens that were read before `state`.

        Cost: 30 ns for each document that was read in the current epoch.
        """
        first, size = self._first(state), self._lengths.size
        whole = first - first % size
        blocks = range(whole, first, BLOCK)
        partial = sum(int(self._block(b, min(BLOCK, first - b))[1].sum()) for b in blocks)
        tokens = first // size * self._identity["num_tokens"] + partial
        check_surplus(state, tokens)
        return tokens

    def may_have_ended(self, state: State) -> bool:
        """Return whether `state` is at the end of an epoch, where the data may end."""
        first = self._first(state)
        return first > 0 and first % self._lengths.size == 0

    def check_pieces(self, state: State, pieces: Pieces) -> None:
        """Raise UserError unless the pieces' documents were read before `state`.

        See `AccountedStream.check_pieces`.
        """
        first, size = self._first(state), self._lengths.size
        rows, epoch = self._rows_of(pieces), pieces.document // size
        if self._identity["shuffle"]:
            rows = unpermute(rows, size, self._identity["seed"], epoch)
        check_were_read(pieces, epoch * size + rows, np.full(len(pieces), first))

    def _take(self, first: int, missing: int) -> tuple[IntArray, IntArray]:
        """Return ids and lengths of the next documents, until they have `missing` tokens together.

        They have fewer tokens only if the data ends.

        Args:
            first: Position in the stream, which is the number of documents that were read before.
            missing: Tokens that the batch still needs. The last document may bring more.
        """
        ids: list[IntArray] = []
        lengths: list[IntArray] = []
        mean = max(1, self._identity["num_tokens"] // self._lengths.size)
        end = self.epochs * self._lengths.size
        while missing > 0:
            # Look up slightly more documents than are needed on average, so one look-up is enough.
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
        """Return ids and lengths of the documents at stream positions [first, first + size)."""
        identity = self._identity
        epoch, rows = stream_rows(
            first, size, self._lengths.size, seed=identity["seed"], shuffle=identity["shuffle"]
        )
        return self.ids.of(epoch, rows), self._lengths[rows]


def stream_rows(
    first: int, size: int, num_documents: int, *, seed: int, shuffle: bool = True
) -> tuple[IntArray, IntArray]:
    """Return which documents are at the positions [first, first + size) of a stream.

    The stream is the permutation of the source for epoch 0, then the one for epoch 1, and so on.

    Args:
        first: First position, counted from the beginning of epoch 0.
        size: Number of positions.
        num_documents: Number of documents of the source.
        seed: Seed of the permutations.
        shuffle: Whether epochs are shuffled. If not, each has the order of the source.

    Returns:
        The epoch of each position, and the index in the source of its document, shape [size] each.
    """
    epoch, position = np.divmod(np.arange(first, first + size), num_documents)
    if not shuffle:
        return epoch, position
    is_one_epoch = epoch[0] == epoch[-1]
    return epoch, permute(position, num_documents, seed, epoch[:1] if is_one_epoch else epoch)


def checked_settings(tokens_per_batch: int, epochs: int) -> tuple[int, int]:
    """Return the arguments as ints; raise UserError if they are out of range.

    Args:
        tokens_per_batch: Tokens of a global batch, at least 1.
        epochs: How many times the data is read. 0 means without end.
    """
    return (
        whole_number("tokens_per_batch", tokens_per_batch, 1),
        whole_number("epochs", epochs, 0, " (0 = without end)"),
    )


def check_state(state: State, counts: set[str], identity: State, *, what: str, keys: str) -> None:
    """Raise UserError unless `state` has the required keys and the values of `identity`.

    Args:
        state: The state to check, perhaps read from a file.
        counts: Keys that the state must have, besides the keys of `identity`.
        identity: Keys and values of the stream that is read, such as its seed. The state must have
            the same.
        what: What the state belongs to, such as "a corpus", for error messages.
        keys: The configuration keys that select the data, for messages.
    """
    expected = counts | identity.keys()
    # A state that was read from a file may be of any type.
    if not isinstance(cast(object, state), dict):
        raise UserError(
            f"the state of {what} must be a dict with the keys {sorted(expected)}, but is of "
            f"type {type(state).__name__}; resume from another checkpoint, or start a new run"
        )
    # Accept states without the keys IDENTITY and FILLED, which earlier versions did not write.
    if (state.keys() | ({IDENTITY} & expected)) - {FILLED} != expected:
        raise UserError(
            f"the state of {what} must have the keys {sorted(expected)}, but has "
            f"{sorted(state)}; resume with the {keys} of the checkpoint, or start a new run"
        )
    for name, value in identity.items():
        if name == IDENTITY and name in state and state[name] != value:
            raise UserError(
                f"the token store or its tokenizer is not the one of the checkpoint "
                f"({_difference(state[name], value)}); resume with the {keys} of the checkpoint, "
                f"or start a new run"
            )
        if name != IDENTITY and state[name] != value:
            raise UserError(
                f"the checkpoint was made with {name} = {state[name]}, but this run has {value}; "
                f"resume with the {keys} and seed of the checkpoint, or start a new run"
            )


def _difference(theirs: Any, ours: Any) -> str:
    """Describe the first value in which two identities of data differ, for error messages.

    Args:
        theirs: Identity of the token stores in the checkpoint (`State`).
        ours: Identity of this run's token stores.
    """
    before, now = _values_of(theirs), _values_of(ours)
    for name in [*now, *before]:
        if before.get(name) != now.get(name):
            return f"{name} was {before.get(name, 'none')[:16]}, is {now.get(name, 'none')[:16]}"
    return "other stores"


def _values_of(identity: Any) -> dict[str, str]:
    """Return, by name, the values (such as checksums) that identify the tokens of a source.

    Args:
        identity: Identity of one store (`TokenStore.identity`), or a list of them. With several
            stores, each name starts with the number of its store.
    """
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
    """Return a global batch of the given documents, and the state of the stream after it.

    Args:
        state: The state before the batch.
        documents: Documents of the batch.
        read: Entries of the new state that say how many documents were read.
        missing: Tokens that the batch lacked before these documents were read. The documents are
            whole, so they may have more tokens. The excess counts for the next batch; the new state
            stores it as "surplus".
        identity: Entries of the state that identify the stream (corpus, seed and order).
        is_last: Whether this is the last batch of the data.
    """
    surplus = max(0, documents.num_tokens - missing)
    after = {**read, "batch": state["batch"] + 1, "surplus": surplus}
    if FILLED in state:
        after[FILLED] = state[FILLED] + state["surplus"] + documents.num_tokens - surplus
    batch = GlobalBatch(index=state["batch"], documents=documents, is_last=is_last)
    return batch, {**state, **identity, **after}


def check_surplus(state: State, tokens: int) -> None:
    """Raise UserError if a stream's state has the wrong number of tokens that were read.

    A state stores this number in two parts. "surplus" has the tokens that the batches so far have
    beyond their planned size, because documents are not cut. `FILLED` has the others.

    Args:
        state: The state of a stream. States without FILLED are not checked.
        tokens: Tokens of all documents that were read before the state.
    """
    filled = state.get(FILLED)
    if filled is not None and filled + state["surplus"] != tokens:
        raise UserError(
            f"the state of the corpus has surplus = {state['surplus']} and {FILLED} = {filled}, "
            f"whose sum must be {tokens}, the number of tokens of the documents that were read; "
            f"resume from another checkpoint"
        )


def check_lengths(lengths: IntArray) -> None:
    """Raise UserError unless there is at least one document and each has at least one token."""
    if not lengths.size:
        raise UserError(
            "the corpus has no documents; set data.store or data.corpus to a corpus with "
            "documents, or, if this is the held-out part, raise data.heldout_fraction"
        )
    if (i := first_true(lengths < 1)) is not None:
        raise UserError(
            f"document {i} of the corpus has {lengths[i]} tokens, but every document must have "
            f"at least 1; leave out empty documents"
        )


def check_documents(
    pieces: Pieces, lengths: IntArray, *, source: IntArray, is_masked: BoolArray
) -> None:
    """Raise UserError if a piece does not fit its document.

    A piece does not fit if it ends after its document, names another source than its document, or
    states a wrong number of labels.

    Args:
        pieces: The pieces to check.
        lengths: Tokens of each piece's document, shape [num_pieces].
        source: Number of the source of each piece's document, shape [num_pieces].
        is_masked: Whether only some tokens of each piece's document are trained, shape
            [num_pieces].
    """
    counted = np.minimum(pieces.stop, lengths - 1) - pieces.start
    labels = np.where(is_masked, UNCOUNTED, counted)
    for wrong, what in (
        (pieces.document < 0, "has a negative document id"),
        (pieces.source != source, "belongs to another corpus"),
        (pieces.stop > lengths, "ends after the end of its document"),
        (pieces.num_targets != labels, "has a wrong number of labels (num_targets)"),
    ):
        if (i := first_true(wrong)) is not None:
            raise UserError(
                f"a piece {what}: {pieces[i]} of a document of {lengths[i]} tokens; resume from "
                "another checkpoint"
            )


def check_were_read(pieces: Pieces, position: IntArray, num_read: IntArray) -> None:
    """Raise UserError if a piece's document was not read yet.

    Args:
        pieces: The pieces to check.
        position: Position of each piece's document in its stream, shape [num_pieces].
        num_read: Number of documents that were read of each piece's stream, shape [num_pieces].
    """
    if (i := first_true(position >= num_read)) is not None:
        raise UserError(
            f"{pieces[i]} belongs to a document that was not read: it is at position "
            f"{position[i]} of the shuffled corpus, but only {num_read[i]} documents were read; "
            f"resume from another checkpoint"
        )


def checked_lengths(
    name: str, values: IntLike | list[Any], *, where: Callable[[int], str] = "length {}".format
) -> IntArray:
    """Return document lengths as a read-only int64 array, after checking each of them.

    A valid length is a whole number in [1, MOST_LENGTH]. A float must also be below `EXACT_FLOATS`.
    True, None and text are refused.

    Args:
        name: Name of the source, for messages.
        values: The lengths, shape [n].
        where: Returns the name of an entry in error messages, given its index.

    Raises:
        UserError: There are no lengths, or one is not a whole number of tokens.
    """
    array = values if isinstance(values, np.ndarray) else np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise UserError(
            f"{name}: lengths must be a one-dimensional array of integers, but are an array of "
            f"dtype {array.dtype} and shape {array.shape}"
        )
    if not isinstance(values, np.ndarray):
        whole = [_whole(name, where, i, value) for i, value in enumerate(values)]
        array = np.array(whole, np.int64)
    elif array.dtype.kind == "f":
        # 16-bit floats cannot represent EXACT_FLOATS, so compare as 64-bit floats.
        array = array.astype(np.promote_types(array.dtype, np.float64))
        is_whole = (array == np.round(array)) & (np.abs(array) < EXACT_FLOATS)
        if (i := first_true(~is_whole)) is not None:
            raise _no_length(name, where(i), array[i].item())
    if not array.size:
        raise UserError(f"{name} has no lengths; give the length of at least one document")
    if (i := first_true((array < 1) | (array > MOST_LENGTH))) is not None:
        raise UserError(
            f"{name}: {where(i)} is {array[i]}, but must be from 1 to {MOST_LENGTH} tokens; "
            f"leave out empty documents"
        )
    out = array.astype(np.int64)
    out.flags.writeable = False
    return out


def _whole(name: str, where: Callable[[int], str], at: int, value: Any) -> int:
    """Return a document length as an int of at most 64 bits.

    Args:
        name: Name of the source, for the error message.
        where: Returns the name of an entry in the error message, given its index.
        at: Index of the entry.
        value: The entry.

    Raises:
        UserError: The entry is not a whole number, or is too large for 64 bits or for a float.
    """
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
        f"{name}: {where} is {value!r}, but must be a whole number of tokens; correct this length"
    )


class ListedBatches:
    """A stream that returns the global batches of a list. Only the last one has `is_last`."""

    def __init__(self, batches: Sequence[GlobalBatch]) -> None:
        self.batches: Sequence[GlobalBatch] = batches

    def start(self) -> State:
        """Return the state before the first batch."""
        return {"batch": 0}

    def next(self, state: State) -> tuple[GlobalBatch, State] | None:
        """Return the batch after `state` and the new state, or None at the end of the list."""
        at = int(state["batch"])
        if at >= len(self.batches):
            return None
        batch = replace(self.batches[at], is_last=at + 1 == len(self.batches))
        return batch, {"batch": at + 1}
