"""Documents, and the pieces of documents that micro-batches are packed from.

A `GlobalBatch` contains `Documents`, and packers place `Pieces` in micro-batches. A piece is a
whole document or, if the document is longer than the context window, one contiguous part of it.
Attention does not cross from one piece to another, and positions restart at 0 in each piece. The
label of a piece's last token is the document's next token, so cutting a document loses no label.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from wlb.plan.arrays import IntArray, IntLike, check_minimum, distinct, int_array
from wlb.plan.errors import UserError

IGNORE = -100
"""Label of a token that the loss ignores."""
UNCOUNTED = -1
"""Value of `num_targets` while the number of labels is unknown, as in fine-tuning, where only some
tokens are trained. `wlb.planner` counts the labels in the token store when it plans the step."""
_NAMES_IN_FILES = {"arrival_step": "arrival"}
"""Name in files of each field that has another name there. The fields were renamed after the first
files had been written."""
_Ids = TypeVar("_Ids", int, IntArray)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentIds:
    """Conversion between document ids and places in a data source.

    The same document has a different id in every epoch: id = epoch * num_documents + row, where row
    is the document's place in the source.
    """

    num_documents: int  # number of documents in the source, or in all sources of a blend together

    def of(self, epoch: int | IntArray, row: IntArray) -> IntArray:
        """Return the ids that documents have in an epoch.

        Args:
            epoch: Epoch of all documents, or the epoch of each document (shape [n]).
            row: Place of each document in the source, from 0; shape [n].
        """
        return epoch * self.num_documents + row

    def row(self, document: _Ids) -> _Ids:
        """Return the index in the source, from 0, of each document with one of these ids."""
        return document % self.num_documents


class _Columns:
    """A table as a struct of arrays: named int64 columns of equal length.

    `take`, `slice` and `concat` do not validate their result, because rows selected from a valid
    table are valid, and a packer calls these methods a dozen times in every step.
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
            raise UserError(
                f"{type(self).__name__}: all columns must have the same length, but have {sizes}"
            )

    @classmethod
    def _of_valid(cls, columns: Iterable[IntArray]) -> Self:
        """Make a table from columns in the order of `_names`, without checking the columns."""
        record = object.__new__(cls)
        for name, column in zip(cls._names, columns, strict=True):
            column.flags.writeable = False
            object.__setattr__(record, name, column)
        return record

    def columns(self) -> dict[str, IntArray]:
        """Return a dictionary from column name to column."""
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
        """Return the table's rows with the numbers `index` (shape [m]), in the order of `index`."""
        rows = np.asarray(index, np.int64)
        return self._of_valid(getattr(self, name)[rows] for name in self._names)

    def slice(self, start: int, stop: int) -> Self:
        """Return the table's rows [start, stop), without copying them."""
        return self._of_valid(getattr(self, name)[start:stop] for name in self._names)

    @classmethod
    def concat(cls, *parts: Self) -> Self:
        """Return one table with the rows of all `parts`, in order."""
        if not parts:
            return cls._of_valid(np.zeros(0, np.int64) for _ in cls._names)
        return cls._of_valid(
            np.concatenate([getattr(part, name) for part in parts]) for name in cls._names
        )

    @classmethod
    def empty(cls) -> Self:
        """Return a table without rows."""
        return cls.concat()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Documents(_Columns):
    """A table with one row for each document, in the order in which they were read."""

    _names: ClassVar[tuple[str, ...]] = ("id", "length", "num_targets", "source")
    # All columns have shape [num_documents].
    id: IntArray  # id of the document, unique within its source over all epochs (`DocumentIds`)
    length: IntArray  # tokens of the document, at least 1
    num_targets: IntArray  # tokens that have a label; UNCOUNTED if unknown
    source: IntArray  # number of the corpus from which the document was read

    def __post_init__(self) -> None:
        self._freeze()
        check_minimum("Documents.length", self.length, 1)
        check_minimum("Documents.num_targets", self.num_targets, UNCOUNTED)
        over = np.flatnonzero(self.num_targets > self.length)
        if over.size:
            i = int(over[0])
            raise UserError(
                f"document {self.id[i]} has {self.num_targets[i]} targets but only "
                f"{self.length[i]} tokens; correct num_targets or length"
            )

    @classmethod
    def from_lengths(cls, lengths: IntLike, *, first_id: int = 0) -> "Documents":
        """Make pre-training documents, in which every token but the last one has a label.

        Args:
            lengths: Tokens of each document, shape [n].
            first_id: Id of the first document. The ids of the following documents are first_id + 1,
                first_id + 2 and so on.
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
    """One row of the table `Pieces`: tokens [start, stop) of a document."""

    document: int
    start: int
    stop: int
    num_targets: int
    source: int
    arrival_step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces(_Columns):
    """A table with one row for each piece: a whole document or a contiguous part of a document."""

    _names: ClassVar[tuple[str, ...]] = (
        "document",
        "start",
        "stop",
        "num_targets",
        "source",
        "arrival_step",
    )
    # All columns have shape [num_pieces].
    document: IntArray  # id of the document that the piece is a part of
    start: IntArray  # position of the piece's first token in the document, from 0
    stop: IntArray  # position of the piece's last token in the document, plus one
    num_targets: IntArray  # tokens that have a label; UNCOUNTED if unknown
    source: IntArray  # number of the corpus from which the document was read
    # number of the step for which the document's global batch was read. A piece that is trained
    # three steps later has a delay of 3.
    arrival_step: IntArray

    def __post_init__(self) -> None:
        self._freeze()
        check_minimum("Pieces.start", self.start, 0)
        # Check `stop` first, because with a very negative one stop - start would overflow 64 bits
        # and become positive.
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
        """Number of targets of all pieces; UserError if that of some piece is UNCOUNTED."""
        uncounted = np.flatnonzero(self.num_targets == UNCOUNTED)
        if uncounted.size:
            raise UserError(
                f"the number of labels of document {self.document[uncounted[0]]} is unknown, "
                f"because its token store has labels for only some tokens; make the plan with "
                f"wlb.planner.Planner, which reads the labels from the store"
            )
        return int(self.num_targets.sum())

    @classmethod
    def whole(cls, documents: Documents, *, arrival_step: int = 0) -> "Pieces":
        """Make one piece of each document, however long.

        Args:
            documents: The documents.
            arrival_step: Step for which the documents were read.
        """
        d, start = documents, np.zeros(len(documents), np.int64)
        arrived = np.full(len(documents), arrival_step, np.int64)
        return cls._of_valid([d.id, start, d.length, d.num_targets, d.source, arrived])

    def to_json(self) -> dict[str, list[int]]:
        """Return {name: list of values} of all columns, with the names that files use."""
        return {name: column.tolist() for name, column in self.file_columns().items()}

    @classmethod
    def from_json(cls, data: dict[str, list[int]]) -> "Pieces":
        """Make the table from what `to_json` returned."""
        return cls.from_file_columns({n: int_array(n, values) for n, values in data.items()})

    def file_columns(self) -> dict[str, IntArray]:
        """Return {name: array of values} of all columns, with the names that files use."""
        return {_NAMES_IN_FILES.get(name, name): column for name, column in self.columns().items()}

    @classmethod
    def from_file_columns(cls, columns: dict[str, Any]) -> "Pieces":
        """Make the table from what `file_columns` returned.

        Raises:
            TypeError: A column is missing or unknown.
        """
        names = {in_files: name for name, in_files in _NAMES_IN_FILES.items()}
        return cls(**{names.get(name, name): column for name, column in columns.items()})


PIECES = {_NAMES_IN_FILES.get(f.name, f.name): [int] for f in fields(Pieces)}
"""Schema (`wlb.plan.schema`) of what `Pieces.to_json` returns."""


def cut_at(pieces: Pieces, offsets: IntLike) -> Pieces:
    """Cut pieces at token offsets, and return the resulting pieces in order.

    No label is lost, because the label of a part's last token is the first token of the next part.
    If `num_targets` of a piece is UNCOUNTED, `num_targets` of its parts is UNCOUNTED too.

    Args:
        pieces: Pieces in order, taken as one long sequence of tokens.
        offsets: Where to cut, in tokens from the beginning of this sequence.

    Raises:
        UserError: A piece that must be cut has labels on only some of its tokens. The piece does
            not say which tokens these are, so the labels of each part cannot be counted.
    """
    ends = np.cumsum(pieces.length)
    total = int(ends[-1]) if ends.size else 0
    cuts = np.asarray(offsets, np.int64)
    # The edges of the parts are the ends of all pieces and the offsets at which to cut.
    edges = distinct(np.concatenate([[0], ends, cuts[(cuts > 0) & (cuts < total)]]))
    row = np.searchsorted(ends, edges[:-1], side="right")
    begin = pieces.start[row] + edges[:-1] - (ends - pieces.length)[row]
    length = np.diff(edges)
    is_last = edges[1:] == ends[row]
    unlabelled = (pieces.length - pieces.num_targets)[row]
    is_counted = pieces.num_targets[row] != UNCOUNTED
    # Only pieces of fine-tuning have two or more unlabelled tokens. In pre-training only a
    # document's last token has no label, so the labels of each part are known.
    partial = np.flatnonzero((unlabelled > 1) & ~is_last & is_counted)
    if partial.size:
        piece = pieces[int(row[partial[0]])]
        raise UserError(
            f"document {piece.document} must be cut, but only {piece.num_targets} of its "
            f"{piece.stop - piece.start} tokens have labels, and this function cannot tell which "
            f"ones; plan from the token store with wlb.planner.Planner, or set "
            f'long_documents = "refuse" and a context window that is as long as the document'
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
    """Divide documents into pieces of at most `window` tokens, in order.

    Args:
        documents: Documents of any length.
        window: The context window: the most tokens that a piece may have.
        long_documents: What to do with a document of more than `window` tokens: "split" cuts it
            every `window` tokens, "refuse" raises a UserError that names the document.
        arrival_step: Step for which the documents were read.
    """
    whole = Pieces.whole(documents, arrival_step=arrival_step)
    long_rows = np.flatnonzero(documents.length > window)
    if not long_rows.size:
        return whole
    row = int(long_rows[0])
    if long_documents == "refuse":
        raise UserError(
            f"document {documents.id[row]} has {documents.length[row]} tokens, more than the "
            f'context window of {window}; set long_documents = "split" or a longer context window'
        )
    if long_documents != "split":
        raise UserError(f'long_documents = {long_documents!r} must be "split" or "refuse"')
    # Each long document is cut at window, 2 * window, ... tokens from its beginning.
    begins = np.cumsum(documents.length) - documents.length
    num_cuts = (documents.length[long_rows] - 1) // window
    nth = np.arange(int(num_cuts.sum())) - np.repeat(np.cumsum(num_cuts) - num_cuts, num_cuts) + 1
    return cut_at(whole, np.repeat(begins[long_rows], num_cuts) + nth * window)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The documents of one global batch. It has N x C tokens (C is the context window)."""

    index: int  # number of the global batch, counted from 0 at the start of the run
    # the documents, in the shuffled order of the data source. There are none if the last document
    # of an earlier global batch was so long that its tokens count for this global batch too.
    documents: Documents
    # whether the data ends with this global batch, so that no document may wait any longer
    is_last: bool = False
