"""Document boundaries of a packed row in four forms, and conversions between them.

    lengths       [3, 2]            tokens of each document, at least one each
    cu_seqlens    [0, 3, 5]         int32 offsets, as variable-length kernels take them
    position_ids  [0, 1, 2, 0, 1]   restart at each document
    block_mask    [5, 5]            True where a query attends to a key

Padding needs care with position_ids: its zeros look like documents of one token.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from wlb.plan import BoolArray, IntArray, IntLike, UserError, check_at_least, int_array, offsets_of
from wlb.plan.arrays import MOST_INT32
from wlb.plan.arrays import Int32Array as Int32Array

MAX_MASK_BYTES = 1 << 28
"""Default size limit of `block_mask`: 256 MiB, which is a mask of 16,384 tokens."""
_COPIED_TOKENS = 256
"""Mean document length from which copying positions per document is faster than computing them."""


def document_lengths(lengths: IntLike, where: str = "") -> IntArray:
    """Return `lengths` as int64, shape [n].

    Args:
        lengths: Tokens of each document.
        where: Beginning of error messages.

    Raises:
        UserError: A length is below 1.
    """
    out = int_array(f"{where}lengths", lengths)
    if out.size and int(out.min()) < 1:
        i = int(np.flatnonzero(out < 1)[0])
        raise UserError(
            f"{where}lengths[{i}] = {out[i]}; a document has at least 1 token, leave others out"
        )
    return out


def cu_seqlens_from_lengths(lengths: IntLike) -> Int32Array:
    """Return int32 offsets [0, l0, l0 + l1, ...], shape [n + 1], of documents of these lengths."""
    offsets = offsets_of(document_lengths(lengths))
    total = int(offsets[-1])
    if total > MOST_INT32:
        raise UserError(
            f"{total} tokens are more than int32 offsets reach ({MOST_INT32}); make smaller batches"
        )
    return offsets.astype(np.int32)


def lengths_from_cu_seqlens(cu_seqlens: IntLike) -> IntArray:
    """Return the tokens of each segment, shape [n], from increasing offsets, shape [n + 1]."""
    offsets = int_array("cu_seqlens", cu_seqlens)
    if not offsets.size or offsets[0] != 0:
        first = f"begin with {offsets[0]}" if offsets.size else "are empty"
        raise UserError(f"cu_seqlens {first}; they begin with 0")
    out = np.diff(offsets)
    if out.size and int(out.min()) < 1:
        i = int(np.flatnonzero(out < 1)[0])
        raise UserError(
            f"cu_seqlens[{i}] = {offsets[i]} and cu_seqlens[{i + 1}] = {offsets[i + 1]}: a segment "
            f"has at least 1 token; cut repeated offsets off the end"
        )
    return out


def position_ids_from_lengths(
    lengths: IntLike, *, start: int = 0, dtype: type[np.int64] | type[np.int32] = np.int64
) -> npt.NDArray[np.integer[Any]]:
    """Return positions that restart in each document, shape [sum of lengths].

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
    """Return the document lengths of one row whose positions restart at `start`.

    The first id must be `start`, and each other id `start` or one more than the id before it. So
    rows with left padding, and rows that begin inside a document, are refused.

    Args:
        position_ids: Positions, shape [T].
        where: Beginning of error messages.
        start: Position of a document's first token.

    Raises:
        UserError: The ids do not have this form.
    """
    ids = int_array(where, position_ids)
    if ids.size and ids[0] != start:
        raise UserError(
            f"{where} begin with {ids[0]}, a packed row begins with {start}; give lengths instead"
        )
    begins = ids == start
    wrong = np.flatnonzero(~begins[1:] & (ids[1:] != ids[:-1] + 1))
    if wrong.size:
        i = int(wrong[0]) + 1
        raise UserError(
            f"{where}[{i}] = {ids[i]} follows {ids[i - 1]}; in a packed row it is {start} or "
            f"{ids[i - 1] + 1}; give lengths instead"
        )
    return np.diff(np.append(np.flatnonzero(begins), ids.size))


def cu_seqlens_from_position_ids(position_ids: npt.ArrayLike, *, start: int = 0) -> Int32Array:
    """Return the document offsets of a row [T], or of the rows [R, S] one after the other.

    There must be no padding. UserError as in `lengths_from_position_ids`.

    Args:
        position_ids: Positions that restart in each document.
        start: Position of a document's first token.
    """
    ids = np.asarray(position_ids)
    if ids.ndim == 1:
        return cu_seqlens_from_lengths(lengths_from_position_ids(ids, start=start))
    if ids.ndim != 2:
        raise UserError(f"position_ids have shape {ids.shape}, not [T] or [rows, T]")
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

    That is where both are in the same segment and s <= t. The mask takes T * T bytes, and a few
    times that while it is made.

    transformers accepts `mask[None, None]` as attention_mask with SDPA. Its eager attention adds
    the mask to the scores: give it 0 and the lowest float instead of True and False.

    Args:
        cu_seqlens: Offsets of the segments.
        causal: False lets a query attend to later keys of its segment as well.
        window: Sliding window, s > t - window; None means no window.
        max_bytes: Size above which UserError is raised.
    """
    lengths = lengths_from_cu_seqlens(cu_seqlens)
    num_tokens = int(lengths.sum())
    if num_tokens**2 > max_bytes:
        raise UserError(
            f"a mask of {num_tokens} x {num_tokens} tokens takes {num_tokens**2} bytes, more than "
            f"max_bytes = {max_bytes}; give a kernel cu_seqlens instead, or raise max_bytes"
        )
    segment = np.repeat(np.arange(lengths.size), lengths)
    mask = segment[:, None] == segment
    if causal:
        mask = np.tril(mask)
    if window is not None:
        check_at_least("window", window, 1)
        mask = np.triu(mask, 1 - window)
    return mask
