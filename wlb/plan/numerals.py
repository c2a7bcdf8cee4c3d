"""Conversion of text to numbers and sizes, with stricter rules than Python's.

Python's `int` and `float` also accept underscores, surrounding spaces and digits of other scripts.
`str.isdigit` even accepts superscript digits, which `int` refuses.
"""

import math
import re
from decimal import Decimal

_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf(?:inity)?)")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE](?P<exponent>[+-]?[0-9]+))?")
_FEW_DIGITS = 18
"""`number_of` converts words with fewer digits than this without checks, because they fit in 64
bits. It refuses exponents with more digits than this."""
_MOST_CHARACTERS = 60
"""A word with more characters than this is not a number for `number_of`."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)(?: ?([A-Za-z]+))?")
_MOST_DIGITS = 400
"""`whole_of`, `real_of` and `size_of` refuse text with more characters than this. Python itself
refuses to convert thousands of digits, with another error."""
_UNITS = (
    {"": 1, "B": 1}
    | {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
    | {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}
)
MOST_SIZE = 1 << 62
"""Largest size in bytes that `size_of` accepts. It fits in a 64-bit integer."""


def whole_of(text: str) -> int:
    """Convert text such as "-12" to an int; ValueError if it is not digits 0 to 9 with a sign."""
    if len(text) > _MOST_DIGITS or not _WHOLE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


def real_of(text: str) -> float:
    """Convert text such as "1.5", "2e3" or "inf" to a float; ValueError for anything else."""
    if len(text) > _MOST_DIGITS or not _REAL.fullmatch(text.lower()):
        raise ValueError(f"{text[:40]!r} is not a number")
    value = float(text)
    if math.isinf(value) and "inf" not in text.lower():
        raise ValueError(f"{text[:40]!r} is not a number below 1e309")
    return value


def number_of(word: str) -> int | float | str:
    """Convert a word of a text file to a number, or return the word if it is not a number.

    A number consists of ASCII digits, optionally with a sign, a decimal point and an exponent (12,
    12.0, 2e1). Underscores, digits of other scripts and thousands separators are not accepted.
    Whole numbers are converted exactly.
    """
    if len(word) < _FEW_DIGITS and word.isascii() and word.isdecimal():
        return int(word)
    found = _NUMBER.fullmatch(word)
    if found is None or len(word) > _MOST_CHARACTERS or len(found["exponent"] or "") > _FEW_DIGITS:
        return word
    exact = Decimal(word)
    if exact.adjusted() < _MOST_CHARACTERS and exact == exact.to_integral_value():
        return int(exact)
    # The number is a fraction here. If the nearest float is whole or infinite, it is a different
    # number, so return the word.
    rounded = float(word)
    return word if rounded.is_integer() or math.isinf(rounded) else rounded


def size_of(text: str) -> int:
    """Convert a size such as 5GB, 1.5 MiB or 1000 to bytes.

    Raises:
        ValueError: The text is not a size, or the size is not between 1 byte and `MOST_SIZE`.
    """
    match = _SIZE.fullmatch(text) if len(text) <= _MOST_DIGITS else None
    unit = _UNITS.get((match[2] or "").upper()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{text[:40]!r} is not a size; write a size such as 5GB, 500MB or 2GiB, or a number of "
            f"bytes"
        )
    number = match[1]
    size = int(float(number) * unit) if "." in number else int(number) * unit
    if not 1 <= size <= MOST_SIZE:
        raise ValueError(f"{text[:40]!r} must be at least 1 byte and at most {MOST_SIZE} bytes")
    return size
