"""Numbers as people write them: one rule of what counts as a number or a size in text.

Python's own `int` and `float` also take underscores, blanks around them and digits of other
scripts, and `str.isdigit` even raised ones, which `int` refuses.
"""

import math
import re
from decimal import Decimal

_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf(?:inity)?)")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE](?P<exponent>[+-]?[0-9]+))?")
_FEW = 18
"""A word of fewer digits is a number of 64 bits; a longer exponent is no number of anything."""
_MANY = 60
"""Longest word that `number_of` takes for a number."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)(?: ?([A-Za-z]+))?")
_MOST_DIGITS = 400
"""More are no number of anything, and Python refuses to convert thousands."""
_UNITS = (
    {"": 1, "B": 1}
    | {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
    | {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}
)
MOST_SIZE = 1 << 62


def whole_of(text: str) -> int:
    """The whole number that `text` is, in digits 0 to 9; ValueError for anything else."""
    if len(text) > _MOST_DIGITS or not _WHOLE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


def real_of(text: str) -> float:
    """The number that `text` is, in digits 0 to 9; also inf. ValueError for anything else."""
    if len(text) > _MOST_DIGITS or not _REAL.fullmatch(text.lower()):
        raise ValueError(f"{text[:40]!r} is not a number")
    value = float(text)
    if math.isinf(value) and "inf" not in text.lower():
        raise ValueError(f"{text[:40]!r} is not a number below 1e309")
    return value


def number_of(word: str) -> int | float | str:
    """The number that a word of a text file is, exactly, or the word if it is none.

    A number has ASCII digits alone, with a sign, a point or an exponent where it needs one (12,
    12.0, 2e1): no underscores, no digits of other scripts, no separators of thousands.
    """
    if len(word) < _FEW and word.isascii() and word.isdecimal():
        return int(word)
    found = _NUMBER.fullmatch(word)
    if found is None or len(word) > _MANY or len(found["exponent"] or "") > _FEW:
        return word
    exact = Decimal(word)
    if exact.adjusted() < _MANY and exact == exact.to_integral_value():
        return int(exact)
    # A fraction that no float has must not vanish.
    rounded = float(word)
    return word if rounded.is_integer() or math.isinf(rounded) else rounded


def size_of(text: str) -> int:
    """The bytes of a size such as 5GB, 1.5 MiB or 1000; ValueError for anything else, for less than
    a byte and for more than `MOST_SIZE`.
    """
    match = _SIZE.fullmatch(text) if len(text) <= _MOST_DIGITS else None
    unit = _UNITS.get((match[2] or "").upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text[:40]!r}: write it as 5GB, 500MB, 2GiB or a number of bytes")
    number = match[1]
    size = int(float(number) * unit) if "." in number else int(number) * unit
    if not 1 <= size <= MOST_SIZE:
        raise ValueError(f"{text[:40]!r} must be in [1 byte, {MOST_SIZE} bytes]")
    return size
