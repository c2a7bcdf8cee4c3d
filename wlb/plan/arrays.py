"""Integer arrays in the form that all records of `wlb.plan` use: int64, one axis, read-only.

Plans are compared by integers only. Hosts that make the same plan therefore have the same bytes,
and the same `digest`.
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
"""Most rows that the int32 offsets of attention kernels can address."""

DIGEST_BITS = 60
"""A digest has 60 bits, so that an all-reduce carries it exactly as four float64 values of 15
bits."""


def int_array(name: str, values: IntLike) -> IntArray:
    """Return a read-only int64 copy of `values` (shape [n]); UserError for anything but integers.

    Floats without a fraction count as integers.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UserError(
            f"{name} holds lists of unequal lengths; give one whole number each, in one flat list"
        ) from error
    # NumPy turns a set or a generator into a single object without axes.
    if array.ndim == 0 and hasattr(values, "__iter__") and not isinstance(values, np.ndarray):
        raise UserError(
            f"{name} is a {type(values).__name__}, which has no length or order of its own; give a "
            f"list, such as list({name})"
        )
    # NumPy converts True to 1 in a list that also has integers.
    if isinstance(values, list | tuple) and bool in set(map(type, cast("list[Any]", values))):
        raise UserError(f"{name} holds True or False; give whole numbers")
    if array.ndim != 1:
        raise UserError(f"{name} must have one axis, got shape {array.shape}")
    if array.size == 0:
        array = np.zeros(0, np.int64)
    elif array.dtype.kind == "f":
        is_whole = np.isfinite(array) & (array == np.round(array))
        if (i := first_true(~is_whole)) is not None:
            raise UserError(f"{name}[{i}] = {array[i]} is not a whole number")
    elif array.dtype.kind not in "iu":
        raise UserError(f"{name} must hold integers, got dtype {array.dtype}")
    may_overflow = array.dtype != np.int64 and array.size > 0
    if may_overflow and not -(2.0**63) <= float(array.min()) <= float(array.max()) < 2.0**63:
        raise UserError(f"{name} holds {array.min()} to {array.max()}, beyond 64-bit integers")
    out = array.astype(np.int64)
    out.flags.writeable = False
    return out


def whole_number(name: str, value: object, minimum: int | None = None, remedy: str = "") -> int:
    """Return `value` as a plain int; UserError for floats, text, or values below `minimum`.

    NumPy scalars become ints. Their arithmetic rounds and overflows, which would change a plan, and
    JSON has none of them.

    Args:
        name: What messages call the value.
        value: Anything that a caller passed.
        minimum: Least valid number. None means that every whole number is valid.
        remedy: Text that ends the message of a number that is too small.
    """
    try:
        number = int(operator.index(cast(SupportsIndex, value)))
    except TypeError as error:
        raise UserError(
            f"{name} = {value!r} is no whole number; give an int, such as int({name})"
        ) from error
    if minimum is not None:
        check_at_least(name, number, minimum, remedy)
    return number


def convert_to_ints(record: object, **minimum: int | None) -> None:
    """Convert these fields of a frozen dataclass to plain ints of at least `minimum`.

    A field that is None stays None.
    """
    for name, least in minimum.items():
        if (value := getattr(record, name)) is not None:
            object.__setattr__(record, name, whole_number(name, value, least))


def check_at_least(name: str, value: float, minimum: float, remedy: str = "") -> None:
    """Raise a UserError that names a number below `minimum`, or NaN. `remedy` ends the message."""
    if not value >= minimum:
        raise UserError(f"{name} = {value} must be at least {minimum}{remedy}")


def check_between(
    name: str, value: float, low: float, high: float, *, closed: bool = False
) -> None:
    """Raise a UserError that names a number outside [low, high), or [low, high] if `closed`."""
    if not (low <= value < high or (closed and value == high)):
        raise UserError(f"{name} = {value} must be in [{low}, {high}{']' if closed else ')'}")


def check_minimum(name: str, array: IntArray, minimum: int) -> None:
    """Raise a UserError that names the first entry of `array` (shape [n]) below `minimum`."""
    if (i := first_true(array < minimum)) is not None:
        raise UserError(f"{name}[{i}] = {array[i]} must be at least {minimum}")


def first_true(mask: BoolArray) -> int | None:
    """Return the first index at which `mask` (shape [n]) is true, or None."""
    found = np.flatnonzero(mask)
    return int(found[0]) if found.size else None


def offsets_of(counts: IntLike) -> IntArray:
    """Return running offsets `[0, c0, c0 + c1, ...]` (shape [n + 1]) of `counts` (shape [n])."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.asarray(counts, np.int64), out=out[1:])
    return out


def distinct(values: IntArray) -> IntArray:
    """Return the distinct values in ascending order.

    `np.unique` gives the same, but hashes integers. Where `values` (shape [n]) is nearly sorted, it
    takes hundreds of times as long.
    """
    ordered = np.sort(values, kind="stable")
    return ordered[np.append(np.ones(min(1, ordered.size), bool), ordered[1:] != ordered[:-1])]


def digest(*parts: str | int | IntArray) -> int:
    """Return a 60-bit hash of integer arrays, integers and names; equal bytes give equal hashes."""
    h = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            # Hash sizes too, so that [1], [2, 3] differs from [1, 2], [3].
            h.update(f"a{part.size}:".encode())
            h.update(np.ascontiguousarray(part, np.dtype("<i8")).tobytes())
        else:
            h.update(f"{type(part).__name__}{part};".encode())
    return int.from_bytes(h.digest(), "little") >> (64 - DIGEST_BITS)
