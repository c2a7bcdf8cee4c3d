"""Concatenate documents to padding-free batches with document boundaries. Only NumPy is needed.

Labels are unshifted, as transformers expects: labels[t] is token t. A document's first token is
never predicted, so its label is IGNORE, and n tokens have n - 1 targets. `next_labels` are shifted:
next_labels[t] is token t + 1. For documents [5, 6, 7] and [8, 9], padded to 6 tokens:

    input_ids     5  6  7  8  9  0
    labels        -  6  7  -  9  -     (- is IGNORE)
    next_labels   6  7  -  9  -  -
    position_ids  0  1  2  0  1  0
    cu_seqlens    0, 3, 5, 6

Boundaries are taken from lengths if they are given, otherwise from position ids; without either,
each example is one document. Padding follows the documents as separate segments without targets.

This takes 3 to 8 ns per token for arrays, and 20 to 30 ns for lists.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from struct import error as struct_error
from struct import pack_into
from typing import Any

import numpy as np
import numpy.typing as npt

from wlb.adapters.collate.boundaries import (
    Int32Array,
    cu_seqlens_from_lengths,
    document_lengths,
    lengths_from_position_ids,
    position_ids_from_lengths,
)
from wlb.parallel.rows import IGNORE, LabelReader, TokenReader
from wlb.plan import IntArray, IntLike, Layout, MicroBatch, UserError, check_at_least

TokenArray = npt.NDArray[np.integer[Any]]
"""Array with the dtype `FlatOptions.dtype`, int64 by default."""

_PACKED_TOKENS = 256
"""If lists have at least this mean length, each is written by its own `pack_into` call.

Shorter lists are joined first (`_pack`), because one call for several of them is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOptions:
    """How documents are concatenated to a `FlatBatch`: padding, labels and dtype."""

    # The batch is padded to a multiple of this many tokens; None means no padding.
    pad_to_multiple_of: int | None = None
    # Most tokens of one segment of padding; None puts all padding into one segment. Positions of
    # padding count from the segment's beginning, so this keeps them below the model's number of
    # positions.
    longest_padding: int | None = None
    pad_token_id: int = 0  # token of the padding
    # Label of each document's first token, which the loss must ignore; IGNORE (-100) by default.
    separator_id: int = IGNORE
    position_ids_start: int = 0  # position of a document's first token (RoBERTa: padding_idx + 1)
    next_labels: bool = False  # whether to make `FlatBatch.next_labels`
    dtype: type[np.int64] | type[np.int32] = np.int64  # type of tokens, labels and positions

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of is not None:
            check_at_least("pad_to_multiple_of", self.pad_to_multiple_of, 1)
        if self.longest_padding is not None:
            check_at_least("longest_padding", self.longest_padding, 1)
        check_at_least("pad_token_id", self.pad_token_id, 0)
        check_at_least("position_ids_start", self.position_ids_start, 0)
        if np.dtype(self.dtype) not in (np.dtype(np.int64), np.dtype(np.int32)):
            raise UserError(f"dtype = {self.dtype}, but must be numpy.int64 or numpy.int32")

    def padding(self, num_tokens: int) -> int:
        """Return the number of padding tokens for a batch of `num_tokens` tokens.

        A batch without tokens gets `pad_to_multiple_of` padding tokens, at least one.
        """
        multiple = self.pad_to_multiple_of or 1
        return -num_tokens % multiple if num_tokens else multiple

    def padding_segments(self, num_padding: int) -> IntArray:
        """Divide `num_padding` tokens of padding into segments; return their lengths, shape [n]."""
        longest = self.longest_padding or max(1, num_padding)
        starts = np.arange(0, num_padding, longest)
        return np.minimum(longest, num_padding - starts)


DEFAULT_OPTIONS = FlatOptions()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatBatch:
    """A batch of concatenated documents followed by padding, T tokens in all.

    A segment is a document or a run of padding.
    """

    input_ids: TokenArray  # shape [T]
    labels: TokenArray  # unshifted, shape [T]; IGNORE where there is no target
    position_ids: TokenArray  # restart at every segment, shape [T]
    # Offsets of the segments, from 0 to T, shape [num_segments + 1].
    cu_seqlens: Int32Array
    max_seqlen: int  # tokens of the longest segment
    num_padding: int = 0  # tokens of padding
    # Shifted labels, shape [T]: at each token, the label of the next token of its document, and
    # `separator_id` at the document's last token. None if `FlatOptions.next_labels` is False.
    next_labels: TokenArray | None = None
    # Number of targets that are in next_labels but not in labels. If a piece ends before its
    # document does, its last token predicts the token after the piece; this counts as one, unless
    # that token has no label.
    num_cut_targets: int = 0

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens without padding."""
        return self.input_ids.size - self.num_padding

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return int(np.searchsorted(self.cu_seqlens, self.num_tokens))

    @property
    def lengths(self) -> IntArray:
        """Return the tokens of each document, shape [num_documents]."""
        return np.diff(self.cu_seqlens)[: self.num_documents].astype(np.int64)

    @property
    def num_targets(self) -> int:
        """Return the number of tokens that are trained, by which the loss is divided.

        The first token of a document never counts, whatever `separator_id` is.
        """
        is_target = self.labels != IGNORE
        is_target[self.cu_seqlens[: self.num_documents]] = False
        return int(np.count_nonzero(is_target)) + self.num_cut_targets

    @property
    def seq_idx(self) -> Int32Array:
        """Return the index of each token's segment, int32 [T]."""
        return np.repeat(
            np.arange(self.cu_seqlens.size - 1, dtype=np.int32), np.diff(self.cu_seqlens)
        )


def flatten(
    examples: Sequence[IntLike],
    *,
    labels: Sequence[IntLike] | None = None,
    lengths: Sequence[IntLike] | None = None,
    position_ids: Sequence[IntLike] | None = None,
    options: FlatOptions = DEFAULT_OPTIONS,
) -> FlatBatch:
    """Concatenate examples, each of which is a document or a packed row of documents.

    Args:
        examples: Token ids of each example, as lists or arrays.
        labels: Unshifted labels of each example; by default its tokens.
        lengths: Lengths of the documents in each example.
        position_ids: Position ids of each example, which restart at each document. Without lengths
            and position_ids, each example is one document.
        options: Layout of the batch.

    Raises:
        UserError: Lengths, position ids or labels of an example do not fit its tokens.
    """
    if not len(examples):
        raise UserError("a batch needs at least one example, got none")
    ids = _checked("tokens", examples, options)
    sizes = _sizes(ids)
    if not sizes.all():
        raise UserError(f"example {int(sizes.argmin())} has no tokens; remove empty examples")
    documents = _documents(sizes, lengths, position_ids, start=options.position_ids_start)
    return _assemble(ids, documents, _labels(labels, sizes, options), options)


def flatten_buffer(
    tokens: IntLike,
    lengths: IntLike,
    *,
    labels: IntLike | None = None,
    options: FlatOptions = DEFAULT_OPTIONS,
) -> FlatBatch:
    """Return a batch of documents whose tokens are concatenated already.

    This is faster than `flatten` and `flatten_micro_batch`.

    Args:
        tokens: Tokens of all documents, shape [num_tokens]. They are copied.
        lengths: Tokens of each document, at least one each.
        labels: Unshifted labels, shape [num_tokens]; by default the tokens.
        options: Layout of the batch.
    """
    documents = document_lengths(lengths)
    if not documents.size:
        raise UserError("a batch needs at least one document, got none")
    _check_row("the buffer", documents, len(tokens))
    ids = _checked("tokens", [tokens], options)
    given = _labels(None if labels is None else [labels], _sizes([tokens]), options)
    return _assemble(ids, documents, given, options)


def flatten_micro_batch(
    micro_batch: MicroBatch, reader: TokenReader, *, options: FlatOptions = DEFAULT_OPTIONS
) -> FlatBatch:
    """Return the batch for a plan's micro-batch, in which each piece counts as a document.

    If a piece ends before its document does, the piece's last token predicts the document's next
    token. Only `FlatBatch.next_labels` contain that target. Without `options.next_labels` it is not
    trained. An empty micro-batch becomes padding.

    Args:
        micro_batch: The micro-batch, with pieces in the plan's order.
        reader: Reads the tokens of pieces. A `LabelReader` also says which tokens are trained.
        options: Layout of the batch.
    """
    if micro_batch.layout != Layout.SEPARATE:
        raise UserError(
            f"the plan has packing.layout = {micro_batch.layout}, but a flat batch keeps "
            "documents separate; plan with packing.layout = separate"
        )
    pieces = micro_batch.pieces
    rows = list(
        zip(pieces.document.tolist(), pieces.start.tolist(), pieces.stop.tolist(), strict=True)
    )
    read = _checked("tokens", [reader.read(*row) for row in rows], options)
    documents = document_lengths(micro_batch.lengths)
    _check_sizes("tokens that were read", _sizes(read), documents)
    label, given = reader.read, None
    if isinstance(reader, LabelReader):
        label = reader.labels
        given = _checked("labels", [label(*row) for row in rows], options)
    out = _assemble(read, documents, given, options)
    if out.next_labels is None:
        return out
    # For pieces that end before their document, set the last target to the token that follows.
    num_cut = 0
    for end, (document, _, stop) in zip(out.cu_seqlens[1:].tolist(), rows, strict=False):
        if stop < reader.length(document):
            out.next_labels[end - 1] = following = label(document, stop, stop + 1)[0]
            num_cut += int(following) != IGNORE
    return replace(out, num_cut_targets=num_cut)


def _assemble(
    ids: Sequence[IntLike],
    lengths: IntArray,
    labels: Sequence[IntLike] | None,
    options: FlatOptions,
) -> FlatBatch:
    """Build the batch from values that were checked before.

    Args:
        ids: Tokens, in total as many as the sum of `lengths`.
        lengths: Tokens of each document.
        labels: Unshifted labels, as many as tokens; None means that labels are the tokens.
        options: Layout of the batch.
    """
    num_tokens = int(lengths.sum())
    padding = options.padding(num_tokens)
    segments = np.append(lengths, options.padding_segments(padding))
    cu_seqlens = cu_seqlens_from_lengths(segments)
    tokens = _join("tokens", ids, num_tokens + padding, options)
    out = tokens.copy() if labels is None else _join("labels", labels, tokens.size, options)
    out[cu_seqlens[: lengths.size]] = options.separator_id
    tokens[num_tokens:] = options.pad_token_id
    out[num_tokens:] = IGNORE
    return FlatBatch(
        input_ids=tokens,
        labels=out,
        position_ids=position_ids_from_lengths(
            segments, start=options.position_ids_start, dtype=options.dtype
        ),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(segments.max()),
        num_padding=padding,
        next_labels=np.append(out[1:], out.dtype.type(IGNORE)) if options.next_labels else None,
    )


def _documents(
    sizes: IntArray,
    lengths: Sequence[IntLike] | None,
    position_ids: Sequence[IntLike] | None,
    *,
    start: int,
) -> IntArray:
    """Return the lengths of all documents, in the order of the examples, shape [num_documents].

    Args:
        sizes: Tokens of each example.
        lengths: Lengths of the documents in each example, or None.
        position_ids: Position ids of each example, or None.
        start: Position id of a document's first token.
    """
    if lengths is None and position_ids is None:
        return sizes
    by_length = by_position = None
    if lengths is not None:
        _check_count("lengths", len(lengths), sizes)
        by_length = [
            document_lengths(row, f"lengths of example {i}: ") for i, row in enumerate(lengths)
        ]
        for i, row in enumerate(by_length):
            _check_row(f"example {i}", row, int(sizes[i]))
    if position_ids is not None:
        _check_sizes("position_ids", _sizes(position_ids), sizes)
        by_position = [
            lengths_from_position_ids(row, f"position_ids of example {i}", start=start)
            for i, row in enumerate(position_ids)
        ]
    if by_length is not None and by_position is not None:
        for i, (a, b) in enumerate(zip(by_length, by_position, strict=True)):
            if not np.array_equal(a, b):
                raise UserError(
                    f"example {i} has lengths {_short(a)}, but its position_ids begin documents "
                    f"of {_short(b)} tokens; correct one of the two, or give only the lengths"
                )
    return np.concatenate(by_length if by_length is not None else by_position or [])


def _labels(
    labels: Sequence[IntLike] | None, sizes: IntArray, options: FlatOptions
) -> Sequence[IntLike] | None:
    """Return the labels after checking that each example has as many labels as tokens.

    Args:
        labels: Labels of each example; None is returned unchanged.
        sizes: Tokens of each example.
        options: Gives the dtype that labels must fit.
    """
    if labels is None:
        return None
    values = _checked("labels", labels, options)
    _check_sizes("labels", _sizes(values), sizes)
    return values


def _sizes(values: Sequence[IntLike]) -> IntArray:
    return np.fromiter(map(len, values), np.int64, len(values))


def _checked(what: str, values: Sequence[IntLike], options: FlatOptions) -> Sequence[IntLike]:
    """Return the values of all examples, as lists or as 1-D integer arrays that fit the dtype.

    Arrays are checked here. Lists are returned unchanged if all values are lists; `_join` checks
    their entries later.

    Args:
        what: Name of the values in error messages.
        values: One list or array for each example.
        options: Gives the dtype.
    """
    if all(isinstance(value, list | tuple) for value in values):
        return values
    arrays = [np.asarray(value) for value in values]
    for i, array in enumerate(arrays):
        if array.ndim != 1:
            raise UserError(
                f"{what} of example {i} have shape {array.shape}, but must have one axis; give "
                "one number for each token"
            )
    wanted = np.dtype(options.dtype)
    kinds = {array.dtype for array in arrays}
    if not all(kind.kind in "iu" and np.can_cast(kind, wanted) for kind in kinds):
        for i, array in enumerate(arrays):
            _check_range(f"{what} of example {i}", array, wanted)
    return arrays


def _check_count(what: str, count: int, sizes: IntArray) -> None:
    if count != sizes.size:
        raise UserError(
            f"{what} are given for {count} examples, but tokens for {sizes.size} examples; give "
            "both for every example"
        )


def _check_sizes(what: str, found: IntArray, sizes: IntArray) -> None:
    _check_count(what, found.size, sizes)
    wrong = np.flatnonzero(found != sizes)
    if wrong.size:
        i = int(wrong[0])
        raise UserError(
            f"example {i} has {sizes[i]} tokens but {found[i]} {what}; give one value for each "
            "token"
        )


def _check_row(what: str, lengths: IntArray, num_tokens: int) -> None:
    total = int(lengths.sum())
    if total != num_tokens:
        raise UserError(
            f"{what} has {num_tokens} tokens, but its documents' lengths {_short(lengths)} add up "
            f"to {total}; if the row was cut or padded, cut or pad the lengths as well"
        )


def _short(lengths: IntArray) -> str:
    shown = ", ".join(map(str, lengths[:8].tolist()))
    return f"[{shown}{', ...' if lengths.size > 8 else ''}]"


def _join(what: str, values: Sequence[IntLike], num_rows: int, options: FlatOptions) -> TokenArray:
    """Concatenate values at the beginning of a new array; the caller fills the rest with padding.

    Args:
        what: Name of the values in error messages.
        values: One list or one checked 1-D array for each example. Entries of lists are checked.
        num_rows: Number of entries of the array, at least the number of values.
        options: Gives the dtype.
    """
    out = np.empty(num_rows, options.dtype)
    if not values or isinstance(values[0], list | tuple):
        try:
            _pack(values, out)
        except struct_error:
            raise UserError(_not_integers(what, values, out.dtype)) from None
    else:
        np.concatenate(values, out=out[: sum(map(len, values))], casting="same_kind")
    return out


def _pack(values: Sequence[IntLike], out: TokenArray) -> None:
    """Copy lists of integers into `out`, one after the other, with `struct.pack_into`.

    `pack_into` is faster than NumPy's conversion, and raises an error for values that are not
    integers. Each call costs as much time as writing 50 integers, so short lists are joined and
    written by one call. Long lists are not joined, because the arguments of such a call would not
    fit into the processor's caches.
    """
    rows: Iterable[Any] = values
    if sum(map(len, values)) < _PACKED_TOKENS * len(values):
        integers = chain.from_iterable(values)
        rows = iter(lambda: tuple(islice(integers, 16 * _PACKED_TOKENS)), ())
    at = 0
    for row in rows:
        pack_into(f"{len(row)}{out.dtype.char}", out.data, at * out.itemsize, *row)
        at += len(row)


def _check_range(what: str, array: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raise UserError unless all entries of the array are integers that `dtype` can represent.

    `what` names the entries in the message.
    """
    if array.dtype.kind not in "iu":
        raise UserError(
            f"{what} have dtype {array.dtype}, but must be integers; convert them, for example to "
            "int64"
        )
    info = np.iinfo(dtype)
    if array.size and not info.min <= int(array.min()) <= int(array.max()) <= info.max:
        raise UserError(
            f"{what} range from {array.min()} to {array.max()}, which {dtype} cannot represent; "
            "correct the values, or choose a wider dtype"
        )


def _not_integers(what: str, values: Sequence[IntLike], dtype: np.dtype[Any]) -> str:
    """Return an error message about the first value that is not an integer within `dtype`.

    Args:
        what: Name of the values in the message.
        values: One list or array for each example.
        dtype: The integer type that must be able to represent every value.
    """
    info = np.iinfo(dtype)
    for i, value in enumerate(values):
        for at, item in enumerate(value):
            is_integer = hasattr(item, "__index__")
            if not is_integer or not info.min <= int(item) <= info.max:
                return (
                    f"{what} of example {i}: entry {at} is {item!r}, but must be an integer that "
                    f"{dtype} can represent"
                )
    return f"{what} are not integers of {dtype}"
