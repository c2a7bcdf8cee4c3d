"""Padding-free batches: examples one after the other, and where each document begins.

Section 3.4 of "Enhancing Training Efficiency Using Packing with Flash Attention": tokens are
concatenated, position ids restart at each document, the first label of each document is IGNORE.
NumPy only; `wlb.adapters.collate.collators` hands the same to torch.

Labels are unshifted, as transformers' models take them: labels[t] is what token t itself counts as
a target, and the model compares it with what it predicted at t - 1. So a document of n tokens has
n - 1 targets, and its first label must be IGNORE, or the model would learn to predict a document's
first token from another document. `next_labels` are the same, shifted already.

Boundaries have one source: the lengths of documents where they are given, else position ids of a
row that says it is packed by them, else each example is one document. Tokens (EOS) are never read.
Given lengths and position ids have to agree.

Padding (`pad_to_multiple_of`) comes last and is one segment of its own in cu_seqlens, because
kernels for variable lengths leave rows behind cu_seqlens[-1] unwritten. It counts neither as
document nor target: `lengths` and `num_documents` leave it out, its labels are IGNORE.

Cost: 3 to 8 ns a token of a buffer or of arrays and 20 to 30 ns of Python lists, whose integers are
read one by one, plus some 50 us a batch (`python -m experiments.collation`).
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
    document_lengths,
    lengths_from_position_ids,
    offsets_of_documents,
    positions_in_documents,
)
from wlb.parallel.rows import IGNORE, LabelReader, TokenReader
from wlb.plan import IntArray, IntLike, Layout, MicroBatch, check_at_least

TokenArray = npt.NDArray[np.integer[Any]]
"""int64, or what `FlatOptions.dtype` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOptions:
    """How a flat batch is laid out.

    pad_to_multiple_of: pad with `pad_token_id` to a multiple of so many tokens; None: no padding.
    separator_id: label of the first token of each document, IGNORE unless the loss ignores another
    value. position_ids_start: position of a document's first token; models like RoBERTa begin at
    padding_idx + 1. next_labels: make `FlatBatch.next_labels` too. dtype: int64 or int32, of
    tokens, labels and positions.
    """

    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    separator_id: int = IGNORE
    position_ids_start: int = 0
    next_labels: bool = False
    dtype: type[np.int64] | type[np.int32] = np.int64

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of is not None:
            check_at_least("pad_to_multiple_of", self.pad_to_multiple_of, 1)
        check_at_least("pad_token_id", self.pad_token_id, 0)
        check_at_least("position_ids_start", self.position_ids_start, 0)
        if np.dtype(self.dtype) not in (np.dtype(np.int64), np.dtype(np.int32)):
            raise ValueError(f"dtype = {self.dtype} must be numpy.int64 or numpy.int32")

    def padding(self, num_tokens: int) -> int:
        """Padding tokens behind `num_tokens`; an empty batch gets a whole multiple."""
        multiple = self.pad_to_multiple_of or 1
        return -num_tokens % multiple if num_tokens else multiple


_PACKED_TOKENS = 256
"""Mean tokens of a list from which a call for each is faster than calls for several."""

DEFAULT_OPTIONS = FlatOptions()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatBatch:
    """Documents one after the other, then padding; T tokens with it.

    input_ids, labels, position_ids: shape [T]. cu_seqlens: int32 offsets of the segments, the
    documents and then the padding if there is any; shape [num_segments + 1], from 0 to T.
    max_seqlen: tokens of the longest segment. num_padding: tokens of the padding, fewer than the
    multiple it fills up to. next_labels: shape [T], the label of the token that follows in the
    document, behind its last one the separator; None unless asked for. num_cut_targets: labels that
    next_labels alone have, of documents that end before they do.
    """

    input_ids: TokenArray
    labels: TokenArray
    position_ids: TokenArray
    cu_seqlens: Int32Array
    max_seqlen: int
    num_padding: int = 0
    next_labels: TokenArray | None = None
    num_cut_targets: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of documents."""
        return self.input_ids.size - self.num_padding

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.size - 1 - (self.num_padding > 0)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each document, shape [num_documents]; no padding."""
        return np.diff(self.cu_seqlens)[: self.num_documents].astype(np.int64)

    @property
    def num_targets(self) -> int:
        """Labels that are trained: what a loss is divided by. No separator is, whatever its id."""
        is_target = self.labels != IGNORE
        is_target[self.cu_seqlens[: self.num_documents]] = False
        return int(np.count_nonzero(is_target)) + self.num_cut_targets

    @property
    def seq_idx(self) -> Int32Array:
        """Number of each token's segment, shape [T]; padding has a number of its own."""
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
    """One batch of `examples`: token ids (lists or arrays), each a document or a packed row.

    labels: of each example, as long as it; else its tokens. Both unshifted, see the module.
    lengths: of the documents in each example; position_ids: of each example. Without both, an
    example is one document. ValueError names an example that does not fit.
    """
    if not len(examples):
        raise ValueError("a batch needs at least one example, got none")
    ids = _checked("tokens", examples, options)
    sizes = _sizes(ids)
    if not sizes.all():
        raise ValueError(f"example {int(sizes.argmin())} holds no token; leave empty examples out")
    num_tokens = int(sizes.sum())
    documents = _documents(sizes, lengths, position_ids, start=options.position_ids_start)
    padding = options.padding(num_tokens)
    tokens = _join("tokens", ids, num_tokens + padding, options)
    given = _labels(labels, sizes, padding=padding, options=options)
    return _assemble(tokens, documents, given, padding=padding, options=options)


def flatten_buffer(
    tokens: IntLike,
    lengths: IntLike,
    *,
    labels: IntLike | None = None,
    options: FlatOptions = DEFAULT_OPTIONS,
) -> FlatBatch:
    """One batch of documents that lie one after the other already; the fastest way in.

    tokens, labels: shape [num_tokens], copied. lengths: tokens of each document, at least one.
    """
    documents = document_lengths(lengths)
    if not documents.size:
        raise ValueError("a batch needs at least one document, got none")
    _check_row("the buffer", documents, len(tokens))
    padding = options.padding(len(tokens))
    sizes = _sizes([tokens])
    ids = _checked("tokens", [tokens], options)
    out = _join("tokens", ids, len(tokens) + padding, options)
    rows = None if labels is None else [labels]
    given = _labels(rows, sizes, padding=padding, options=options)
    return _assemble(out, documents, given, padding=padding, options=options)


def flatten_micro_batch(
    micro_batch: MicroBatch, reader: TokenReader, *, options: FlatOptions = DEFAULT_OPTIONS
) -> FlatBatch:
    """One batch of a plan's micro-batch, its pieces as documents in the plan's order.

    A piece that ends before its document does has the document's next token as its last target.
    Only `next_labels` can say so: ask for them, or a document loses a target where it is cut. A
    micro-batch without pieces becomes padding. A `LabelReader` says which tokens are trained.
    """
    if micro_batch.layout != Layout.SEPARATE:
        raise ValueError(
            f"the plan's micro-batches have packing.layout = {micro_batch.layout}, and here "
            f"documents lie one after the other and apart; plan with separate"
        )
    pieces = micro_batch.pieces
    rows = list(
        zip(pieces.document.tolist(), pieces.start.tolist(), pieces.stop.tolist(), strict=True)
    )
    read = _checked("tokens", [reader.read(*row) for row in rows], options)
    documents = document_lengths(micro_batch.lengths)
    _check_sizes("tokens that were read", _sizes(read), documents)
    num_tokens = int(documents.sum())
    padding = options.padding(num_tokens)
    tokens = _join("tokens", read, num_tokens + padding, options)
    label = reader.labels if isinstance(reader, LabelReader) else reader.read
    given = None
    if isinstance(reader, LabelReader):
        labels = _checked("labels", [label(*row) for row in rows], options)
        given = _join("labels", labels, num_tokens + padding, options)
    out = _assemble(tokens, documents, given, padding=padding, options=options)
    if out.next_labels is None:
        return out
    num_cut = 0
    for end, (document, _, stop) in zip(out.cu_seqlens[1:].tolist(), rows, strict=False):
        if stop < reader.length(document):
            out.next_labels[end - 1] = following = label(document, stop, stop + 1)[0]
            num_cut += int(following) != IGNORE
    return replace(out, num_cut_targets=num_cut)


def _assemble(
    tokens: TokenArray,
    lengths: IntArray,
    labels: TokenArray | None,
    *,
    padding: int,
    options: FlatOptions,
) -> FlatBatch:
    """tokens, labels: shape [T], documents of `lengths` and then room for the padding."""
    segments = np.append(lengths, padding) if padding else lengths
    cu_seqlens = offsets_of_documents(segments)
    out = tokens.copy() if labels is None else labels
    out[cu_seqlens[: lengths.size]] = options.separator_id
    first_padding = tokens.size - padding
    tokens[first_padding:] = options.pad_token_id
    out[first_padding:] = IGNORE
    return FlatBatch(
        input_ids=tokens,
        labels=out,
        position_ids=positions_in_documents(
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
    """Lengths of all documents, one after the other."""
    if lengths is None and position_ids is None:
        return sizes
    by_length = by_position = None
    if lengths is not None:
        _check_count("lengths", lengths, sizes)
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
                raise ValueError(
                    f"example {i}: its lengths are {_short(a)}, its position_ids begin documents "
                    f"of {_short(b)} tokens; give the lengths alone if they are right"
                )
    return np.concatenate(by_length if by_length is not None else by_position or [])


def _labels(
    labels: Sequence[IntLike] | None, sizes: IntArray, *, padding: int, options: FlatOptions
) -> TokenArray | None:
    """All labels in a new array, checked against the tokens' sizes; None for None."""
    if labels is None:
        return None
    values = _checked("labels", labels, options)
    _check_sizes("labels", _sizes(values), sizes)
    return _join("labels", values, int(sizes.sum()) + padding, options)


def _sizes(values: Sequence[IntLike]) -> IntArray:
    return np.fromiter(map(len, values), np.int64, len(values))


def _checked(what: str, values: Sequence[IntLike], options: FlatOptions) -> Sequence[IntLike]:
    """All as lists, which `_join` checks, or all as arrays of one axis that fit the dtype."""
    if all(isinstance(value, list | tuple) for value in values):
        return values
    arrays = [np.asarray(value) for value in values]
    for i, array in enumerate(arrays):
        if array.ndim != 1:
            raise ValueError(f"{what} of example {i} have shape {array.shape}, not one axis")
    wanted = np.dtype(options.dtype)
    if not all(dtype.kind in "iu" and np.can_cast(dtype, wanted) for dtype in _dtypes(arrays)):
        for i, array in enumerate(arrays):
            _check_range(f"{what} of example {i}", array, wanted)
    return arrays


def _dtypes(arrays: Sequence[npt.NDArray[Any]]) -> set[np.dtype[Any]]:
    return {array.dtype for array in arrays}


def _check_count(what: str, values: Sequence[Any], sizes: IntArray) -> None:
    if len(values) != sizes.size:
        raise ValueError(f"{what} of {len(values)} examples for the tokens of {sizes.size}")


def _check_sizes(what: str, found: IntArray, sizes: IntArray) -> None:
    if found.size != sizes.size:
        raise ValueError(f"{what} of {found.size} examples for the tokens of {sizes.size}")
    wrong = np.flatnonzero(found != sizes)
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(f"example {i} has {sizes[i]} tokens but {found[i]} {what}")


def _check_row(what: str, lengths: IntArray, num_tokens: int) -> None:
    total = int(lengths.sum())
    if total != num_tokens:
        raise ValueError(
            f"{what} has {num_tokens} tokens, its documents' lengths {_short(lengths)} add up to "
            f"{total}; if the row was cut or padded, cut or pad its lengths as well"
        )


def _short(lengths: IntArray) -> str:
    shown = ", ".join(map(str, lengths[:8].tolist()))
    return f"[{shown}{', ...' if lengths.size > 8 else ''}]"


def _join(what: str, values: Sequence[IntLike], num_rows: int, options: FlatOptions) -> TokenArray:
    """A new array of `num_rows`: all checked values, and room for the padding behind them."""
    out = np.empty(num_rows, options.dtype)
    if not values or isinstance(values[0], list | tuple):
        try:
            _pack(values, out)
        except struct_error:
            raise ValueError(_not_integers(what, values, out.dtype)) from None
    else:
        np.concatenate(values, out=out[: sum(map(len, values))], casting="same_kind")
    return out


def _pack(values: Sequence[IntLike], out: TokenArray) -> None:
    """Writes lists one after the other; `struct` is fast and takes integers only.

    Long lists one by one, short ones together: a call costs about as much as 50 integers, and
    arguments that outgrow the processor's caches cost more than that.
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
    """ValueError for an array whose values are no integers of `dtype`."""
    if array.dtype.kind not in "iu":
        raise ValueError(f"{what} have dtype {array.dtype}, not integers")
    info = np.iinfo(dtype)
    if array.size and not info.min <= int(array.min()) <= int(array.max()) <= info.max:
        raise ValueError(f"{what} are {array.min()} to {array.max()}, beyond {dtype}")


def _not_integers(what: str, values: Sequence[IntLike], dtype: np.dtype[Any]) -> str:
    """Which value of the lists is no integer of `dtype`."""
    info = np.iinfo(dtype)
    for i, value in enumerate(values):
        for at, item in enumerate(value):
            is_integer = hasattr(item, "__index__")
            if not is_integer or not info.min <= int(item) <= info.max:
                return f"{what} of example {i}: entry {at} is {item!r}, not an integer of {dtype}"
    return f"{what} are not integers of {dtype}"
