"""Mix several token stores into one corpus. A store's weight is its share of the tokens.

The order follows start-time fair queueing (Goyal, SIGCOMM'96). Each store s with weight w_s is
shuffled separately. A document that comes after t tokens of store s gets the tag t / w_s, and the
blend has the documents of all stores in the order of their tags. For example, if all documents have
4 tokens and the weights are 2 and 1, documents of store A get the tags 0, 2, 4, ... and those of
store B get 0, 4, 8, ..., so the blend is A B A A B A A B ...
Indices of documents in the blend start with the documents of the first store, continue with those
of the second store, and so on. `Documents.source` is the number of the store, from 0.
Guarantees: those of `batches.py`. Also, let t_s be the tokens of store s that were read so far, and
l_s the length of its longest document. Then t_a / w_a and t_b / w_b of two stores a and b never
differ by more than l_a / w_a + l_b / w_b.
Cost: 16 bytes of memory per document, in addition to those of the stores.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb.data.batches import (
    BLOCK,
    FILLED,
    IDENTITY,
    MOST_COUNT,
    BatchStream,
    GlobalBatches,
    Source,
    State,
    TargetSource,
    batch_after,
    check_documents,
    check_lengths,
    check_state,
    check_surplus,
    check_were_read,
    checked_settings,
    identity_of,
    stream_rows,
)
from wlb.data.shuffle import unpermute
from wlb.data.store import TokenArray, TokenStore, summary_of
from wlb.plan import (
    UNCOUNTED,
    DocumentIds,
    Documents,
    GlobalBatch,
    IntArray,
    Pieces,
    UserError,
    digest,
    int_array,
    offsets_of,
    whole_number,
)
from wlb.spec.blend import parse_blend

StoreName = str | tuple[str, ...]
"""Prefix of a token store, or the entries of `data.blend`."""

# Store i is shuffled with the run's seed plus i times this number (2**64 over the golden ratio, as
# in splitmix64), so that stores of equal size get different orders.
_SEED_STEP = 0x9E3779B97F4A7C15
# Keys of a state whose value is one number, and keys whose value is a list of one number per store.
_COUNTS = ("batch", "surplus")
_COLUMNS = ("documents_read", "tokens_read")


class BlendedStore:
    """Several token stores that can be read like one store.

    Documents are numbered store after store: first those of the first store, and so on.

    Args:
        stores: At least one store. All must have the same tokenizer.
        weights: For each store its share of the tokens, in any unit, above 0.
    """

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float]) -> None:
        _check_weights(len(stores), weights)
        check_tokenizers(stores, "data.blend")
        self.stores = tuple(stores)
        self.weights = tuple(weights)
        self._first = offsets_of([store.num_documents for store in stores])

    @property
    def prefix(self) -> str:
        """Prefixes of all stores as one text, separated by commas, for messages."""
        return ", ".join(store.prefix for store in self.stores)

    @property
    def num_documents(self) -> int:
        """Number of documents of all stores."""
        return int(self._first[-1])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all stores."""
        return sum(store.num_tokens for store in self.stores)

    @property
    def summary(self) -> str:
        """The size of the blend in words, such as "3 documents, 40 tokens"."""
        num_empty = sum(store.num_empty_documents for store in self.stores)
        return summary_of(self.num_documents, self.num_tokens, num_empty)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each document, shape [num_documents]. Each access creates a new array."""
        return np.concatenate([store.lengths for store in self.stores])

    @property
    def identity(self) -> list[dict[str, Any]]:
        """The identity of each store (see `TokenStore.identity`)."""
        return [store.identity for store in self.stores]

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size, or None if no store has a `.json` file."""
        sizes = [store.vocab_size for store in self.stores]
        return max((size for size in sizes if size), default=None)

    @property
    def has_targets(self) -> bool:
        """Whether some store of the blend has a `.targets` file that says what is trained."""
        return any(store.has_targets for store in self.stores)

    @property
    def num_targets(self) -> IntArray:
        """Number of trained tokens of each document, shape [num_documents]."""
        return np.concatenate([store.num_targets for store in self.stores])

    def read(self, document: int, start: int = 0, stop: int | None = None) -> TokenArray:
        """Return tokens [start, stop) of the document with this index in the blend.

        None as `stop` means the document's end.
        """
        store, row = self._find(document)
        return store.read(row, start, stop)

    def trained(
        self, document: int, start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.bool_]:
        """Return whether each of the tokens [start, stop) of a document is trained.

        The arguments are those of `TokenStore.trained` (stop = None means the document's end), but
        `document` is an index into the blend.
        """
        store, row = self._find(document)
        return store.trained(row, start, stop)

    def _find(self, document: int) -> tuple[TokenStore, int]:
        """Return the store that has a document of the blend, and the document's index there."""
        if not 0 <= document < self.num_documents:
            raise UserError(
                f"document {document} is not in the blend of {self.prefix}, which has "
                f"{self.num_documents} documents, numbered from 0"
            )
        at = int(np.searchsorted(self._first, document, side="right")) - 1
        return self.stores[at], document - int(self._first[at])


class BlendedBatches(BatchStream):
    """A stream of global batches that mixes several sources in proportion to weights.

    Args:
        sources: The corpora to mix.
        weights: For each source its share of the tokens, in any unit, above 0.
        tokens_per_batch: Tokens of a global batch, on average.
        seed: Seed from which the shuffled order of every source is derived.
        epochs: The stream ends when every source was read at least this many times. Sources with
            a large weight are read more often. 0 means without end.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        *,
        tokens_per_batch: int,
        seed: int,
        epochs: int = 0,
    ) -> None:
        _check_weights(len(sources), weights)
        self.tokens_per_batch, self.epochs = checked_settings(tokens_per_batch, epochs)
        self.sources = tuple(sources)
        self._weights = np.array(weights, np.float64)
        self._lengths = [int_array("lengths", source.lengths) for source in sources]
        for lengths in self._lengths:
            check_lengths(lengths)
        self._tokens = [int(lengths.sum()) for lengths in self._lengths]
        self._first = offsets_of([lengths.size for lengths in self._lengths])
        self.ids = DocumentIds(num_documents=int(self._first[-1]))
        self._seed = whole_number("seed", seed)
        self._targets = [
            source if isinstance(source, TargetSource) and source.has_targets else None
            for source in sources
        ]
        self._is_masked = np.array([targets is not None for targets in self._targets])
        self._identity: State = {
            "num_documents": [lengths.size for lengths in self._lengths],
            "num_tokens": self._tokens,
            "lengths": [digest(lengths) for lengths in self._lengths],
            "weights": [float(weight) for weight in weights],
            "seed": self._seed,
        }
        if self.has_targets:
            self._identity["targets"] = [
                None if t is None else digest(t.num_targets) for t in self._targets
            ]

        identities = [identity_of(source) for source in self.sources]
        if any(identities):
            self._identity[IDENTITY] = identities

    @property
    def has_targets(self) -> bool:
        """Whether at least one source trains only some of its tokens."""
        return bool(self._is_masked.any())

    def count_targets(self, pieces: Pieces) -> IntArray:
        """Return the number of trained labels of each piece, shape [num_pieces]."""
        out = pieces.num_targets.copy()
        for number, source in enumerate(self._targets):
            here = np.flatnonzero(pieces.source == number)
            rows = self.ids.row(pieces.document[here]) - self._first[number]
            if source is not None:
                out[here] = source.count_targets(rows, pieces.start[here], pieces.stop[here])
        return out

    def start(self) -> State:
        """Return the state before the first document."""
        columns = {name: [0] * len(self.sources) for name in _COLUMNS}
        return {**dict.fromkeys((*_COUNTS, FILLED), 0), **columns, **self._identity}

    def next(self, state: State) -> tuple[GlobalBatch, State] | None:
        """Return the batch after `state` and the new state, or None after the last epoch."""
        read = self._read(state)
        missing = self.tokens_per_batch - state["surplus"]
        has_ended = not self._has_next(read[1])
        source, ids, lengths = self._take(read[0], read[1], missing)
        if not ids.size and (missing > 0 or has_ended):
            return None
        documents = Documents(
            id=ids,
            length=lengths,
            num_targets=np.where(self._is_masked[source], UNCOUNTED, lengths - 1),
            source=source,
        )
        columns = {name: column.tolist() for name, column in zip(_COLUMNS, read, strict=True)}
        is_last = not self._has_next(read[1])
        identity = self._identity
        return batch_after(state, documents, columns, missing, identity=identity, is_last=is_last)

    def _read(self, state: State) -> list[IntArray]:
        """Return how many documents and tokens of each source were read before `state`.

        Returns:
            The numbers of documents and the numbers of tokens, shape [num_sources] each.

        Raises:
            UserError: The state is of another blend, or it is damaged.
        """
        names = {*_COUNTS, *_COLUMNS}
        check_state(state, names, self._identity, what="a blend", keys="data.blend")
        if bad := [name for name in _COLUMNS if not isinstance(state[name], list)]:
            raise UserError(
                f"{bad[0]} in the state of a blend is of type {type(state[bad[0]]).__name__}, but "
                f"must be a list with one number for each store; resume from another checkpoint"
            )
        counts = [state.get(name, 0) for name in (*_COUNTS, FILLED)]
        counts += [n for c in _COLUMNS for n in state[c]]
        sizes = {len(state[name]) for name in _COLUMNS}
        valid = all(type(n) is int and 0 <= n <= MOST_COUNT for n in counts)
        if sizes != {len(self.sources)} or not valid:
            raise UserError(
                f"the state of the blend is damaged: its numbers must be whole numbers from 0 to "
                f"{MOST_COUNT}, with one for each of the {len(self.sources)} stores in each of the "
                f"lists {' and '.join(_COLUMNS)}, but are {counts}; resume from another checkpoint"
            )
        return [np.array(state[name], np.int64) for name in _COLUMNS]

    def num_batches(self, state: State) -> int:
        """Return the number of global batches before `state`."""
        self._read(state)
        return state["batch"]

    def num_tokens(self, state: State) -> int:
        """Return the number of tokens that were read before `state`.

        Raises:
            UserError: The state's counts of documents and of tokens contradict each other.
        """
        documents, tokens = self._read(state)
        for number, read in enumerate(documents.tolist()):
            size = self._lengths[number].size
            whole = read - read % size
            blocks = range(whole, read, BLOCK)
            found = read // size * self._tokens[number] + sum(
                int(self._block(number, b, min(BLOCK, read - b))[1].sum()) for b in blocks
            )
            if found != tokens[number]:
                raise UserError(
                    f"store {number} of data.blend has {found} tokens in its first {read} "
                    f"documents, but the checkpoint counted {tokens[number]} tokens; resume with "
                    f"the stores that the checkpoint was made with, or start a new run"
                )
        check_surplus(state, int(tokens.sum()))
        return int(tokens.sum())

    def may_have_ended(self, state: State) -> bool:
        """Return whether `state` is at the end of an epoch, where the data may end."""
        documents, tokens = self._read(state)
        if not documents.all():
            return False
        last = [int(self._block(n, d - 1, 1)[1][0]) for n, d in enumerate(documents.tolist())]
        # Documents are read in the order of their tags (`_end` says what a tag is), and an epoch
        # ends before the first tag that reaches `_end_of`. So an epoch ends at `state` if, in each
        # source, the tag of the last document that was read is below that limit and the next
        # document's is not.
        least = float((tokens / self._weights).min())
        latest = float(((tokens - np.array(last)) / self._weights).max())
        epochs = int(least / self._end_of(1))
        return any(latest < self._end_of(n) <= least for n in (epochs, epochs + 1) if n)

    def check_pieces(self, state: State, pieces: Pieces) -> None:
        """Raise UserError unless the pieces' documents were read before `state`.

        See `AccountedStream.check_pieces`.
        """
        documents, _ = self._read(state)
        epoch, row = np.divmod(pieces.document, self.ids.num_documents)
        number = np.searchsorted(self._first, row, side="right") - 1
        check_documents(
            pieces,
            np.concatenate(self._lengths)[row],
            source=number,
            is_masked=self._is_masked[number],
        )
        # Position of each piece's document in the shuffled stream of its source.
        at = row - self._first[number]
        for one, lengths in enumerate(self._lengths):
            here = np.flatnonzero(number == one)
            seed = self._seed + one * _SEED_STEP
            at[here] = unpermute(at[here], lengths.size, seed, epoch[here])
            at[here] += epoch[here] * lengths.size
        check_were_read(pieces, at, documents[number])

    @property
    def _end(self) -> float:
        """The tag from which on documents are not read, so that the stream ends.

        A document's tag is the number of tokens before it in its source, divided by the weight of
        the source. At this tag every source was read at least `epochs` times.
        """
        return self._end_of(self.epochs) if self.epochs else np.inf

    def _end_of(self, epochs: int) -> float:
        return float((np.array(self._tokens, np.int64) * epochs / self._weights).max())

    def _has_next(self, tokens_read: IntArray) -> bool:
        return bool((tokens_read / self._weights).min() < self._end)

    def _take(
        self, documents_read: IntArray, tokens_read: IntArray, missing: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return the next documents, as many as have `missing` tokens together.

        There are fewer tokens only if the data ends.

        Args:
            documents_read: Number of documents read of each source, shape [num_sources]. Updated in
                place.
            tokens_read: Number of tokens read of each source, shape [num_sources]. Updated in
                place.
            missing: Tokens that the batch still needs. The last document may bring more.

        Returns:
            Source, id and length of each document, shape [num] each.
        """
        out: list[tuple[IntArray, IntArray, IntArray]] = []
        while missing > 0 and self._has_next(tokens_read):
            source, ids, lengths = self._ordered(documents_read, tokens_read, missing)
            used = min(lengths.size, int(np.searchsorted(np.cumsum(lengths), missing)) + 1)
            source, ids, lengths = source[:used], ids[:used], lengths[:used]
            documents_read += np.bincount(source, minlength=len(self.sources))
            np.add.at(tokens_read, source, lengths)
            missing -= int(lengths.sum())
            out.append((source, ids, lengths))
        none = np.zeros(0, np.int64)
        columns = zip((none, none, none), *out, strict=True)
        source, ids, lengths = (np.concatenate(column) for column in columns)
        return source, ids, lengths

    def _ordered(
        self, documents_read: IntArray, tokens_read: IntArray, missing: int
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return source, id and length of the next documents, in the order of the blend.

        At least one document is returned. All of them together may have more or fewer than
        `missing` tokens.

        Args:
            documents_read: Number of documents read of each source, shape [num_sources].
            tokens_read: Number of tokens read of each source, shape [num_sources].
            missing: About how many tokens are needed.
        """
        shares = self._weights / self._weights.sum()
        ids: list[IntArray] = []
        lengths: list[IntArray] = []
        tags: list[npt.NDArray[np.float64]] = []
        first_unseen: list[tuple[float, int]] = []
        for number, weight in enumerate(self._weights):
            mean = self._tokens[number] / self._lengths[number].size
            # Look up as many documents as this source contributes to `missing` tokens on average,
            # and a few more.
            size = min(BLOCK, int(1.125 * missing * shares[number] / mean) + 64)
            block_ids, block = self._block(number, int(documents_read[number]), size)
            # Tokens of this source before each document. Divided by the source's weight, they are
            # the document's tag, by which the documents of all sources are sorted.
            before = tokens_read[number] + np.cumsum(block) - block
            ids.append(block_ids)
            lengths.append(block)
            tags.append(before / weight)
            first_unseen.append((float((before[-1] + block[-1]) / weight), number))
        source = np.repeat(np.arange(len(ids)), [block.size for block in ids])
        tag = np.concatenate(tags)
        # `limit` is the smallest tag of a document that was not looked up. Return only documents
        # before that tag, because the order after it is unknown. If tags are equal, the source with
        # the lower number comes first.
        limit, of = min(first_unseen)
        known = (tag < limit) | ((tag == limit) & (source < of))
        rows = np.flatnonzero(known & (tag < self._end))
        rows = rows[np.lexsort((source[rows], tag[rows]))]
        return source[rows], np.concatenate(ids)[rows], np.concatenate(lengths)[rows]

    def _block(self, number: int, first: int, size: int) -> tuple[IntArray, IntArray]:
        """Return ids and lengths of `size` documents of a source.

        Args:
            number: Number of the source.
            first: Position of the first of the documents in the shuffled stream of the source.
            size: Number of documents.
        """
        lengths = self._lengths[number]
        seed = self._seed + number * _SEED_STEP
        epoch, rows = stream_rows(first, size, lengths.size, seed=seed)
        return self.ids.of(epoch, int(self._first[number]) + rows), lengths[rows]


def open_store(name: StoreName, *, source_id: int = 0) -> TokenStore | BlendedStore:
    """Open the store at a prefix, or all stores of a blend as one.

    Args:
        name: Prefix of a store, or the entries of `data.blend`.
        source_id: Value of `Documents.source` if `name` is a single store. Stores of a blend have
            the values 0, 1, ... instead.
    """
    if isinstance(name, str):
        return TokenStore(name, source_id=source_id)
    entries = parse_blend(name)
    stores = [TokenStore(prefix, source_id=i) for i, (prefix, _) in enumerate(entries)]
    return BlendedStore(stores, [weight for _, weight in entries])


def open_batches(
    name: StoreName, *, tokens_per_batch: int, seed: int, epochs: int = 0, shuffle: bool = True
) -> GlobalBatches | BlendedBatches:
    """Open a store or a blend, and return its global batches.

    Args:
        name: Prefix of a store, or the entries of `data.blend`.
        tokens_per_batch: Tokens of a global batch, on average.
        seed: Seed of the order.
        epochs: How many times the data is read. 0 means without end.
        shuffle: Whether each epoch is shuffled. It must be True for a blend.
    """
    store = open_store(name)
    if isinstance(store, TokenStore):
        return GlobalBatches(
            store, tokens_per_batch=tokens_per_batch, seed=seed, epochs=epochs, shuffle=shuffle
        )
    if not shuffle:
        raise UserError(
            f"the blend {store.prefix} cannot be read with shuffle = false, because a blend "
            "does not say in which order to read its stores; set shuffle = true, or read a single "
            "store"
        )
    return BlendedBatches(
        store.stores, store.weights, tokens_per_batch=tokens_per_batch, seed=seed, epochs=epochs
    )


def _check_weights(num_sources: int, weights: Sequence[float]) -> None:
    if not num_sources or len(weights) != num_sources:
        raise UserError(
            f"a blend needs at least one source and one weight for each source, but has "
            f"{num_sources} sources and {len(weights)} weights"
        )
    if not all(0 < weight < np.inf for weight in weights):
        raise UserError(
            f"the weights {list(weights)} must be finite and above 0; leave out sources with "
            f"weight 0"
        )


def check_tokenizers(stores: Sequence[TokenStore], keys: str) -> None:
    """Raise UserError if stores have different tokenizers.

    The vocabulary size, the EOS id and the checksum of the tokenizer are compared, as the stores'
    descriptions state them. A value that a description lacks is not compared.

    Args:
        stores: The stores to compare.
        keys: The configuration keys that name the stores, for messages.
    """
    # For each property: the first store whose description has it, and its value there.
    first: dict[str, tuple[TokenStore, object]] = {}
    for store in stores:
        if store.info is None:
            continue
        known = {
            "vocab_size": store.info.vocab_size,
            "eos_id": store.info.eos_id,
            "tokenizer": store.info.preparation.get("tokenizer_checksum"),
        }
        for what, theirs in known.items():
            if theirs is None:
                continue
            other, ours = first.setdefault(what, (store, theirs))
            if ours != theirs:
                name = (other.info and other.info.tokenizer) or "tokenizer.json"
                path = Path(other.prefix).parent / name
                raise UserError(
                    f"the stores {other.prefix} and {store.prefix} of {keys} have different "
                    f"tokenizers ({what} {_short(ours)} and {_short(theirs)}); prepare both with "
                    f"wlb prepare --tokenizer {path}"
                )


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:16]}..." if len(text) > 16 else text
