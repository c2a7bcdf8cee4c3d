"""Convert between four descriptions of the document boundaries in a packed row.

    lengths       [3, 2]            tokens of each document, at least one each
    cu_seqlens    [0, 3, 5]         int32 offsets, as variable-length kernels take them
    position_ids  [0, 1, 2, 0, 1]   restart at each document
    block_mask    [5, 5]            True where a query attends to a key

The example has two documents, of 3 and 2 tokens. Remove padding before you convert position_ids:
padding zeros look like documents of one token.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from wlb.plan import BoolArray, IntArray, IntLike, UserError, check_at_least, int_array, offsets_of
from wlb.plan.arrays import MOST_INT32
from wlb.plan.arrays import Int32Array as Int32Array

MAX_MASK_BYTES = 1 << 28
"""Default of the largest size of a mask that `block_mask` makes, in bytes (16,384^2)."""
_COPIED_TOKENS = 256
"""Mean document length, in tokens, from which position_ids are made by copying.

Copying [0, 1, 2, ...] once per document is then faster than one computation for all tokens."""


def document_lengths(lengths: IntLike, where: str = "") -> IntArray:
    """Check document lengths and return them as int64, shape [n].

    Args:
        lengths: Tokens of each document.
        where: Text before the word "lengths" in error messages.

    Raises:
        UserError: A length is below 1.
    """
    out = int_array(f"{where}lengths", lengths)
    if out.size and int(out.min()) < 1:
        i = int(np.flatnonzero(out < 1)[0])
        raise UserError(
            f"{where}lengths[{i}] = {out[i]}, but a document must have at least 1 token; remove "
            "empty documents"
        )
    return out


def cu_seqlens_from_lengths(lengths: IntLike) -> Int32Array:
    """Return the offsets of n documents: int32 [0, l0, l0 + l1, ...], shape [n + 1]."""
    offsets = offsets_of(document_lengths(lengths))
    total = int(offsets[-1])
    if total > MOST_INT32:
        raise UserError(
            f"a batch of {total} tokens is too large for int32 offsets, which reach {MOST_INT32}; "
            "make smaller batches"
        )
    return offsets.astype(np.int32)


def lengths_from_cu_seqlens(cu_seqlens: IntLike) -> IntArray:
    """Return the number of tokens of each segment, shape [n].

    Args:
        cu_seqlens: Offsets of the segments, shape [n + 1], which begin with 0 and increase.
    """
    offsets = int_array("cu_seqlens", cu_seqlens)
    if not offsets.size or offsets[0] != 0:
        first = f"begin with {offsets[0]}" if offsets.size else "are empty"
        raise UserError(f"cu_seqlens {first}, but must begin with 0; put a 0 in front")
    out = np.diff(offsets)
    if out.size and int(out.min()) < 1:
        i = int(np.flatnonzero(out < 1)[0])
        raise UserError(
            f"cu_seqlens[{i}] = {offsets[i]} and cu_seqlens[{i + 1}] = {offsets[i + 1]}, but "
            "offsets must increase, because a document has at least 1 token; remove repeated "
            "offsets"
        )
    return out


def position_ids_from_lengths(
    lengths: IntLike, *, start: int = 0, dtype: type[np.int64] | type[np.int32] = np.int64
) -> npt.NDArray[np.integer[Any]]:
    """Return position ids that restart at the beginning of each document, shape [sum of lengths].

    Args:
        lengths: Tokens of each document.
        start: Position of a document's first token.
        dtype: Type of the result.
    """
    counts = document_lengths(lengths)
    starts = offsets_of(counts)
    total = int(starts[-1])
    if total >= _COPIED_TOKENS * counts.size > 0:
        one = np.arange(start, start + int(counts.max()), dtype=dtype)
        return np.concatenate([one[:count] for count in counts.tolist()])
    out = np.arange(total, dtype=dtype)
    out -= (starts[:-1] - start).astype(dtype).repeat(counts)
    return out


def lengths_from_position_ids(
    position_ids: IntLike, where: str = "position_ids", *, start: int = 0
) -> IntArray:
    """Return the lengths of the documents in a row, shape [n], from its position ids.

    The first id must be `start`, and every other id must be `start` or one more than the id before
    it. So rows with left padding, and rows that begin in the middle of a document, raise UserError.

    Args:
        position_ids: Position ids of the row, shape [T].
        where: Name of the ids in error messages.
        start: Position of a document's first token.

    Raises:
        UserError: The ids do not have this form.
    """
    ids = int_array(where, position_ids)
    if ids.size and ids[0] != start:
        raise UserError(
            f"{where} begin with {ids[0]}, but in a packed row they must begin with {start}; give "
            "the documents' lengths instead of position ids"
        )
    begins = ids == start
    wrong = np.flatnonzero(~begins[1:] & (ids[1:] != ids[:-1] + 1))
    if wrong.size:
        i = int(wrong[0]) + 1
        raise UserError(
            f"{where}[{i}] = {ids[i]} follows {ids[i - 1]}, but in a packed row it must be "
            f"{start} or {ids[i - 1] + 1}; give the documents' lengths instead of position ids"
        )
    return np.diff(np.append(np.flatnonzero(begins), ids.size))


def cu_seqlens_from_position_ids(position_ids: npt.ArrayLike, *, start: int = 0) -> Int32Array:
    """Return the offsets of all documents, int32, from position ids.

    Padding is not allowed. Ids that do not increase by 1 within a document raise UserError (see
    `lengths_from_position_ids`).

    Args:
        position_ids: Ids that restart at each document, for one row [T] or several [rows, T].
            If there are several rows, the offsets are those of the concatenated rows.
        start: Position of a document's first token.
    """
    ids = np.asarray(position_ids)
    if ids.ndim == 1:
        return cu_seqlens_from_lengths(lengths_from_position_ids(ids, start=start))
    if ids.ndim != 2:
        raise UserError(
            f"position_ids have shape {ids.shape}, but must have shape [T] or [rows, T]; reshape "
            "them"
        )
    rows = [
        lengths_from_position_ids(row, f"position_ids[{i}]", start=start)
        for i, row in enumerate(ids)
    ]
    return cu_seqlens_from_lengths(np.concatenate(rows) if rows else [])


def block_mask(
    cu_seqlens: IntLike,
    *,
    causal: bool = True,
    window: int | None = None,
    max_bytes: int = MAX_MASK_BYTES,
) -> BoolArray:
    """Return a mask [T, T] that is True where query t (row) attends to key s (column).

    A query attends to the keys of its own segment with s <= t. The mask takes T * T bytes of
    memory, and building it temporarily takes a few times as much.

    If a transformers model uses SDPA, pass `mask[None, None]` as attention_mask. If it uses eager
    attention, which adds the mask to the scores, first convert True to 0 and False to the lowest
    value of the dtype.

    Args:
        cu_seqlens: Offsets of the segments.
        causal: If False, a query attends to later keys of its segment as well.
        window: Sliding window: a query attends only to keys with s > t - window. None means no
            window.
        max_bytes: Largest size of the mask in bytes. A larger mask raises UserError.
    """
    lengths = lengths_from_cu_seqlens(cu_seqlens)
    num_tokens = int(lengths.sum())
    if num_tokens**2 > max_bytes:
        raise UserError(
            f"a mask of {num_tokens} x {num_tokens} tokens takes {num_tokens**2} bytes, more than "
            f"max_bytes = {max_bytes}; raise max_bytes, or give the attention kernel cu_seqlens "
            "instead of a mask"
        )
    segment = np.repeat(np.arange(lengths.size), lengths)
    mask = segment[:, None] == segment
    if causal:
        mask = np.tril(mask)
    if window is not None:
        check_at_least("window", window, 1)
        mask = np.triu(mask, 1 - window)
    return mask
