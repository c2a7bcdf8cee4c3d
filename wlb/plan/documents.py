"""Documents, and the pieces of them that are trained.

A `GlobalBatch` brings `Documents`, and packers place `Pieces`. A piece is a whole document or,
where a document is longer than the context window, one contiguous part of it. Each piece has an
attention mask and positions of its own. The label of a piece's last token is the document's next
token, so the number of labels does not depend on where documents are cut.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from wlb.plan.arrays import IntArray, IntLike, check_minimum, distinct, int_array
from wlb.plan.errors import UserError

IGNORE = -100
"""Label of a token that is not trained."""
UNCOUNTED = -1
"""Value of `num_targets` for documents of which only some tokens are trained. `wlb.planner` reads
the labels from the store and counts them once, when it returns the step's plan."""
_NAMES_IN_FILES = {"arrival_step": "arrival"}
"""Columns that files store under another name than the field, because the field was renamed
later."""
_Ids = TypeVar("_Ids", int, IntArray)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentIds:
    """Ids of a source's documents over all epochs: id = epoch * num_documents + row."""

    num_documents: int  # documents of the source, or of all sources of a blend together

    def of(self, epoch: int | IntArray, row: IntArray) -> IntArray:
        """Return the ids of documents in an epoch.

        Args:
            epoch: One epoch for all, or one for each row (shape [n]).
            row: Places of the documents in the source, shape [n].
        """
        return epoch * self.num_documents + row

    def row(self, document: _Ids) -> _Ids:
        """Return the place of each document in the source, which is the same in every epoch."""
        return document % self.num_documents


class _Columns:
    """A struct of arrays: int64 columns of equal length that are selected and joined together.

    `take`, `slice` and `concat` do not validate their result, because rows selected from valid rows
    are valid, and a packer calls them a dozen times a step.
    """

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]]

    def _freeze(self) -> None:
        """Convert the columns to read-only int64 arrays and check that they are equally long."""
        sizes: dict[str, int] = {}
        for name in self._names:
            column = int_array(f"{type(self).__name__}.{name}", getattr(self, name))
            object.__setattr__(self, name, column)
            sizes[name] = column.size
        if len(set(sizes.values())) > 1:
            raise UserError(f"{type(self).__name__}: columns differ in length: {sizes}")

    @classmethod
    def _of_valid(cls, columns: Iterable[IntArray]) -> Self:
        """Make a record of valid columns, given in the order of `_names`, without checking them."""
        record = object.__new__(cls)
        for name, column in zip(cls._names, columns, strict=True):
            column.flags.writeable = False
            object.__setattr__(record, name, column)
        return record

    def columns(self) -> dict[str, IntArray]:
        """Return the columns by name."""
        return {name: getattr(self, name) for name in self._names}

    def __len__(self) -> int:
        return getattr(self, self._names[0]).size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        mine, theirs = self.columns(), other.columns()
        return all(np.array_equal(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def take(self, index: IntLike) -> Self:
        """Return the rows at `index` (shape [m]), in that order."""
        rows = np.asarray(index, np.int64)
        return self._of_valid(getattr(self, name)[rows] for name in self._names)

    def slice(self, start: int, stop: int) -> Self:
        """Return the rows [start, stop)."""
        return self._of_valid(getattr(self, name)[start:stop] for name in self._names)

    @classmethod
    def concat(cls, *parts: Self) -> Self:
        """Join records one after the other."""
        if not parts:
            return cls._of_valid(np.zeros(0, np.int64) for _ in cls._names)
        return cls._of_valid(
            np.concatenate([getattr(part, name) for part in parts]) for name in cls._names
        )

    @classmethod
    def empty(cls) -> Self:
        """Return a record without rows."""
        return cls.concat()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Documents(_Columns):
    """Documents in stream order; every column has shape [num_documents]."""

    _names: ClassVar[tuple[str, ...]] = ("id", "length", "num_targets", "source")
    id: IntArray  # unique within `source` over the whole run (`DocumentIds`)
    length: IntArray  # tokens, at least 1
    num_targets: IntArray  # tokens that have a label, or UNCOUNTED
    source: IntArray  # number of the corpus

    def __post_init__(self) -> None:
        self._freeze()
        check_minimum("Documents.length", self.length, 1)
        check_minimum("Documents.num_targets", self.num_targets, UNCOUNTED)
        over = np.flatnonzero(self.num_targets > self.length)
        if over.size:
            i = int(over[0])
            raise UserError(
                f"document {self.id[i]} has {self.num_targets[i]} targets "
                f"in {self.length[i]} tokens"
            )

    @classmethod
    def from_lengths(cls, lengths: IntLike, *, first_id: int = 0) -> "Documents":
        """Make pre-training documents, in which every token but the last one has a label.

        Args:
            lengths: Tokens of each document, shape [n].
            first_id: Id of the first document; the others count up from it.
        """
        length = int_array("lengths", lengths)
        check_minimum("lengths", length, 1)
        return cls(
            id=first_id + np.arange(length.size),
            length=length,
            num_targets=length - 1,
            source=np.zeros(length.size, np.int64),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.length.sum())


class Piece(NamedTuple):
    """One row of `Pieces`: tokens [start, stop) of a document, with the same fields."""

    document: int
    start: int
    stop: int
    num_targets: int
    source: int
    arrival_step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces(_Columns):
    """Contiguous parts of documents, one row each. All columns have shape [num_pieces]."""

    _names: ClassVar[tuple[str, ...]] = (
        "document",
        "start",
        "stop",
        "num_targets",
        "source",
        "arrival_step",
    )
    document: IntArray  # id of the document that the piece is a part of
    start: IntArray  # first token, counted from the document's beginning
    stop: IntArray  # token behind the last one
    num_targets: IntArray  # tokens that have a label, or UNCOUNTED
    source: IntArray  # number of the document's corpus
    # step for which the piece's global batch was read; delay counts from here
    arrival_step: IntArray

    def __post_init__(self) -> None:
        self._freeze()
        check_minimum("Pieces.start", self.start, 0)
        # Without this check, stop - start could overflow 64 bits and come out positive.
        check_minimum("Pieces.stop", self.stop, 1)
        check_minimum("Pieces.stop - start", self.stop - self.start, 1)

    def __getitem__(self, i: int) -> Piece:
        return Piece(*(int(getattr(self, name)[i]) for name in self._names))

    @property
    def length(self) -> IntArray:
        """Tokens of each piece, shape [num_pieces]."""
        return self.stop - self.start

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces."""
        return int((self.stop - self.start).sum())

    @property
    def total_targets(self) -> int:
        """Labels of all pieces; a UserError if some are not counted."""
        uncounted = np.flatnonzero(self.num_targets == UNCOUNTED)
        if uncounted.size:
            raise UserError(
                f"the labels of document {self.document[uncounted[0]]} are not counted, because "
                f"its store trains only some tokens; plan with wlb.planner.Planner, which counts"
            )
        return int(self.num_targets.sum())

    @classmethod
    def whole(cls, documents: Documents, *, arrival_step: int = 0) -> "Pieces":
        """Make one piece of each whole document."""
        d, start = documents, np.zeros(len(documents), np.int64)
        arrived = np.full(len(documents), arrival_step, np.int64)
        return cls._of_valid([d.id, start, d.length, d.num_targets, d.source, arrived])

    def to_json(self) -> dict[str, list[int]]:
        """Return the columns as plain lists, by the names that files use."""
        return {name: column.tolist() for name, column in self.file_columns().items()}

    @classmethod
    def from_json(cls, data: dict[str, list[int]]) -> "Pieces":
        """Read what `to_json` wrote."""
        return cls.from_file_columns({n: int_array(n, values) for n, values in data.items()})

    def file_columns(self) -> dict[str, IntArray]:
        """Return the columns by the names that files use."""
        return {_NAMES_IN_FILES.get(name, name): column for name, column in self.columns().items()}

    @classmethod
    def from_file_columns(cls, columns: dict[str, Any]) -> "Pieces":
        """Read what `file_columns` returned; TypeError for a missing or unknown column."""
        names = {in_files: name for name, in_files in _NAMES_IN_FILES.items()}
        return cls(**{names.get(name, name): column for name, column in columns.items()})


PIECES = {_NAMES_IN_FILES.get(f.name, f.name): [int] for f in fields(Pieces)}
"""Schema (`wlb.plan.schema`) of pieces in files."""


def cut_at(pieces: Pieces, offsets: IntLike) -> Pieces:
    """Cut a sequence of pieces at token offsets.

    No label is lost: the last token of a part keeps the piece's next token as its label. Parts of
    an UNCOUNTED piece are UNCOUNTED.

    Args:
        pieces: Pieces in order, taken as one sequence of tokens.
        offsets: Where to cut, counted from the beginning of the sequence.

    Raises:
        UserError: A piece to be cut has labels on only some tokens. How many of them fall into each
            part is known to the store alone.
    """
    ends = np.cumsum(pieces.length)
    total = int(ends[-1]) if ends.size else 0
    cuts = np.asarray(offsets, np.int64)
    # Every part lies between two neighbouring edges: ends of pieces, and cuts inside of them.
    edges = distinct(np.concatenate([[0], ends, cuts[(cuts > 0) & (cuts < total)]]))
    row = np.searchsorted(ends, edges[:-1], side="right")
    begin = pieces.start[row] + edges[:-1] - (ends - pieces.length)[row]
    length = np.diff(edges)
    is_last = edges[1:] == ends[row]
    unlabelled = (pieces.length - pieces.num_targets)[row]
    is_counted = pieces.num_targets[row] != UNCOUNTED
    # A plain pre-training piece lacks a label on one token at most.
    partial = np.flatnonzero((unlabelled > 1) & ~is_last & is_counted)
    if partial.size:
        piece = pieces[int(row[partial[0]])]
        raise UserError(
            f"document {piece.document} has {piece.num_targets} labels on "
            f"{piece.stop - piece.start} tokens, so how many fall into each part of a cut is not "
            f"known; plan with wlb.planner.Planner on their store, which counts them, or use "
            f'long_documents = "refuse" and a window that holds it'
        )
    return Pieces(
        document=pieces.document[row],
        start=begin,
        stop=begin + length,
        num_targets=np.where(is_counted, length - np.where(is_last, unlabelled, 0), UNCOUNTED),
        source=pieces.source[row],
        arrival_step=pieces.arrival_step[row],
    )


def split_long(
    documents: Documents, *, window: int, long_documents: str, arrival_step: int = 0
) -> Pieces:
    """Make pieces of at most `window` tokens from documents, in order, without dropping any token.

    Args:
        documents: Documents of any length.
        window: Most tokens of a piece.
        long_documents: What to do with a longer document: "split" cuts it every `window` tokens,
            "refuse" raises a UserError that names it.
        arrival_step: Step from which the pieces' delay counts.
    """
    whole = Pieces.whole(documents, arrival_step=arrival_step)
    long_rows = np.flatnonzero(documents.length > window)
    if not long_rows.size:
        return whole
    row = int(long_rows[0])
    if long_documents == "refuse":
        raise UserError(
            f"document {documents.id[row]} has {documents.length[row]} tokens, more than the "
            f'context window of {window}; use long_documents = "split" or a larger window'
        )
    if long_documents != "split":
        raise UserError(f'long_documents must be "split" or "refuse", got {long_documents!r}')
    # Each long document is cut at window, 2 * window, ... tokens from its beginning.
    begins = np.cumsum(documents.length) - documents.length
    num_cuts = (documents.length[long_rows] - 1) // window
    nth = np.arange(int(num_cuts.sum())) - np.repeat(np.cumsum(num_cuts) - num_cuts, num_cuts) + 1
    return cut_at(whole, np.repeat(begins[long_rows], num_cuts) + nth * window)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """Documents in shuffled order that fill N x C tokens (N micro-batches, C context window)."""

    index: int  # number of the batch in the stream, from 0
    documents: Documents  # empty if the last document of an earlier batch already filled this one
    is_last: bool = False  # no batch follows, so a policy need not let documents wait
