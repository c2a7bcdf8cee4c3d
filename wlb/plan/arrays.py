"""The integer arrays of all records in `wlb.plan`: int64, one-dimensional and read-only.

Plans contain only integers, which have no rounding differences. Hosts that make the same plan
therefore have arrays with the same bytes and the same `digest`.
"""

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from wlb.plan.errors import UserError

IntArray = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntLike = Sequence[int] | npt.NDArray[Any]

MOST_INT32 = 2**31 - 1
"""Largest int32. Attention kernels take cu_seqlens as int32, so no tensor may have more rows."""

DIGEST_BITS = 60
"""Number of bits of a digest. Ranks compare digests in an all-reduce of float64 values. A float64
value holds a part of 15 bits exactly, even when it is summed over all ranks, so a digest is sent as
four values."""


def int_array(name: str, values: IntLike) -> IntArray:
    """Return a read-only int64 copy of a list or array of integers.

    Args:
        name: Name of the values in error messages.
        values: Integers, shape [n]. Floats without a fraction count as integers.

    Raises:
        UserError: A value is not an integer or needs more than 64 bits, or `values` is not
            one-dimensional.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UserError(
            f"{name} is a list of lists of unequal lengths; give a list of whole numbers"
        ) from error
    # Refuse sets and generators, which NumPy turns into an array of shape () with one object.
    if array.ndim == 0 and hasattr(values, "__iter__") and not isinstance(values, np.ndarray):
        raise UserError(
            f"{name} is a {type(values).__name__}, but must be a list or an array; give a list, "
            f"such as list({name})"
        )
    # Check for bool here: in a list that also has integers, NumPy would convert True to 1.
    if isinstance(values, list | tuple) and bool in set(map(type, cast("list[Any]", values))):
        raise UserError(f"{name} contains True or False; give whole numbers")
    if array.ndim != 1:
        raise UserError(
            f"{name} has shape {array.shape} but must have one axis; give a list of whole numbers"
        )
    if array.size == 0:
        array = np.zeros(0, np.int64)
    elif array.dtype.kind == "f":
        is_whole = np.isfinite(array) & (array == np.round(array))
        if (i := first_true(~is_whole)) is not None:
            raise UserError(f"{name}[{i}] = {array[i]} is not a whole number")
    elif array.dtype.kind not in "iu":
        raise UserError(f"{name} has dtype {array.dtype}; give whole numbers")
    may_overflow = array.dtype != np.int64 and array.size > 0
    if may_overflow and not -(2.0**63) <= float(array.min()) <= float(array.max()) < 2.0**63:
        raise UserError(
            f"{name} has values from {array.min()} to {array.max()}, but each value must fit in a "
            f"signed 64-bit integer"
        )
    out = array.astype(np.int64)
    out.flags.writeable = False
    return out


def whole_number(name: str, value: object, minimum: int | None = None, remedy: str = "") -> int:
    """Return `value` as a Python int; UserError for floats, text, or values below `minimum`.

    NumPy integers are converted, because their arithmetic can overflow and `json` cannot write
    them.

    Args:
        name: Name of the value in error messages.
        value: The value, of any type.
        minimum: Smallest valid value. None means that every whole number is valid.
        remedy: Text at the end of the message for a value below `minimum`.
    """
    try:
        number = int(operator.index(cast(SupportsIndex, value)))
    except TypeError as error:
        raise UserError(
            f"{name} = {value!r} must be a whole number; give an int, such as int({name})"
        ) from error
    if minimum is not None:
        check_at_least(name, number, minimum, remedy)
    return number


def convert_to_ints(record: object, **minimum: int | None) -> None:
    """Convert fields of a frozen dataclass to Python ints, and check their minimum.

    Args:
        record: The dataclass. A field that is None stays None.
        **minimum: For each field to convert, its smallest valid value; None means no limit.
    """
    for name, least in minimum.items():
        if (value := getattr(record, name)) is not None:
            object.__setattr__(record, name, whole_number(name, value, least))


def check_at_least(name: str, value: float, minimum: float, remedy: str = "") -> None:
    """Raise a UserError if `value` is below `minimum` or NaN.

    Args:
        name: Name of the value in the message.
        value: The value.
        minimum: Smallest valid value.
        remedy: Text at the end of the message.
    """
    if not value >= minimum:
        raise UserError(f"{name} = {value} must be at least {minimum}{remedy}")


def check_between(
    name: str, value: float, low: float, high: float, *, closed: bool = False
) -> None:
    """Raise a UserError if `value` is outside [low, high), or outside [low, high] if `closed`.

    Args:
        name: Name of the value in the message.
        value: The value.
        low: Smallest valid value.
        high: Upper limit.
        closed: Whether `high` itself is valid.
    """
    if not (low <= value < high or (closed and value == high)):
        raise UserError(f"{name} = {value} must be in [{low}, {high}{']' if closed else ')'}")


def check_minimum(name: str, array: IntArray, minimum: int) -> None:
    """Raise a UserError that names the first entry of `array` below `minimum`, if there is one.

    Args:
        name: Name of the array in the message.
        array: The array, shape [n].
        minimum: Smallest valid value of an entry.
    """
    if (i := first_true(array < minimum)) is not None:
        raise UserError(f"{name}[{i}] = {array[i]} must be at least {minimum}")


def first_true(mask: BoolArray) -> int | None:
    """Return the first index at which `mask` (shape [n]) is true, or None."""
    found = np.flatnonzero(mask)
    return int(found[0]) if found.size else None


def offsets_of(counts: IntLike) -> IntArray:
    """Return the offsets `[0, c0, c0 + c1, ...]` (shape [n + 1]) of `counts` (shape [n])."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.asarray(counts, np.int64), out=out[1:])
    return out


def distinct(values: IntArray) -> IntArray:
    """Return the distinct values of an array (shape [n]) in ascending order.

    The result equals that of `np.unique`. If the array is nearly sorted, this function is hundreds
    of times faster than `np.unique`, because it sorts the array instead of hashing the values.
    """
    ordered = np.sort(values, kind="stable")
    return ordered[np.append(np.ones(min(1, ordered.size), bool), ordered[1:] != ordered[:-1])]


def digest(*parts: str | int | IntArray) -> int:
    """Return a 60-bit hash of integer arrays, integers and texts, equal on every machine."""
    h = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            # Hash the size of each array too, so that [1], [2, 3] differs from [1, 2], [3].
            h.update(f"a{part.size}:".encode())
            h.update(np.ascontiguousarray(part, np.dtype("<i8")).tobytes())
        else:
            h.update(f"{type(part).__name__}{part};".encode())
    return int.from_bytes(h.digest(), "little") >> (64 - DIGEST_BITS)
