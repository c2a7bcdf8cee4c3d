"""Numbers in text: one rule for what counts as a number or a size.

Python's `int` and `float` are too lenient: they also accept underscores, surrounding blanks and
digits of other scripts. `str.isdigit` even accepts superscript digits, which `int` refuses.
"""

import math
import re
from decimal import Decimal

_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf(?:inity)?)")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE](?P<exponent>[+-]?[0-9]+))?")
_FEW_DIGITS = 18
"""Words with fewer digits fit into 64 bits and need no checks. Exponents may not be longer
either."""
_MOST_CHARACTERS = 60
"""Characters of the longest word that `number_of` reads as a number."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)(?: ?([A-Za-z]+))?")
_MOST_DIGITS = 400
"""Characters of the longest text that is converted. Python refuses to convert thousands of
digits."""
_UNITS = (
    {"": 1, "B": 1}
    | {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
    | {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}
)
MOST_SIZE = 1 << 62
"""Bytes of the largest size that is accepted."""


def whole_of(text: str) -> int:
    """Convert text in digits 0 to 9 to a whole number; ValueError for anything else."""
    if len(text) > _MOST_DIGITS or not _WHOLE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


def real_of(text: str) -> float:
    """Convert text in digits 0 to 9, or inf, to a float; ValueError for anything else."""
    if len(text) > _MOST_DIGITS or not _REAL.fullmatch(text.lower()):
        raise ValueError(f"{text[:40]!r} is not a number")
    value = float(text)
    if math.isinf(value) and "inf" not in text.lower():
        raise ValueError(f"{text[:40]!r} is not a number below 1e309")
    return value


def number_of(word: str) -> int | float | str:
    """Convert a word of a text file to the number it spells, or return the word if it spells none.

    The conversion is exact. A number has ASCII digits, with a sign, a point or an exponent where it
    needs one (12, 12.0, 2e1). Underscores, digits of other scripts and thousands separators are not
    accepted.
    """
    if len(word) < _FEW_DIGITS and word.isascii() and word.isdecimal():
        return int(word)
    found = _NUMBER.fullmatch(word)
    if found is None or len(word) > _MOST_CHARACTERS or len(found["exponent"] or "") > _FEW_DIGITS:
        return word
    exact = Decimal(word)
    if exact.adjusted() < _MOST_CHARACTERS and exact == exact.to_integral_value():
        return int(exact)
    # If the float nearest to a fraction is whole, the fraction would be lost: return the word.
    rounded = float(word)
    return word if rounded.is_integer() or math.isinf(rounded) else rounded


def size_of(text: str) -> int:
    """Convert a size such as 5GB, 1.5 MiB or 1000 to bytes.

    Raises:
        ValueError: The text is no size, is less than a byte or more than `MOST_SIZE`.
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
