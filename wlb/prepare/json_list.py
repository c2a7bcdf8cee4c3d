"""Parse a JSON file that is one list, item by item.

The whole text is in memory, but only one parsed item at a time. If an item is damaged, the rest of
the file cannot be read, because it is unknown where the next item begins.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

_SPACE = re.compile(r"[ \t\n\r]*")


def first_bytes(file: IO[bytes], *, most: int) -> tuple[bytes, bytes]:
    """Return the first character of a file other than white space, and the line with it.

    Args:
        file: A binary file at its beginning.
        most: The most bytes to read.

    Returns:
        The character and its line, without a byte-order mark. Both are empty if the first `most`
        bytes are white space.
    """
    line = file.readline(most).removeprefix(codecs.BOM_UTF8)
    passed = len(line)
    while line and not line.strip():
        line = file.readline(most - passed) if passed < most else b""
        passed += len(line)
    return line.strip()[:1], line


def list_items(file: IO[bytes], *, most: int) -> Iterator[object]:
    """Yield the parsed items of a file that is one JSON list.

    Args:
        file: A binary file at its beginning.
        most: The most bytes that the file may have.

    Raises:
        ValueError: The file is not such a list, or has more than `most` bytes.
    """
    data = file.read(most + 1).removeprefix(codecs.BOM_UTF8)
    if len(data) > most:
        raise ValueError(f"a JSON list must have at most {most} bytes, but this one has more")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the file is not UTF-8, because of byte {error.start}") from None
    at = _skip_space(text, 0)
    if text[at : at + 1] != "[":
        raise ValueError("the file must begin with [, because it must be a JSON list")
    scan, number = json.JSONDecoder().raw_decode, 0
    at = _skip_space(text, at + 1)
    while number or text[at : at + 1] != "]":
        try:
            item, end = scan(text, at)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"record {number} cannot be read: {error.msg} at character {error.pos - at} of "
                f"the record"
            ) from None
        # Python refuses JSON that is nested too deeply, and numbers that have too many digits.
        except (RecursionError, ValueError) as error:
            raise ValueError(f"record {number} cannot be read: {error}") from None
        yield item
        number += 1
        at = _skip_space(text, end)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise ValueError(f"record {number - 1} must be followed by a comma or by ], but is not")
        at = _skip_space(text, at + 1)
    if _skip_space(text, at + 1) < len(text):
        raise ValueError(f"there is text after the end of the list of {number} records")


def _skip_space(text: str, at: int) -> int:
    """Return the position of the first character at or after `at` that is not white space."""
    found = _SPACE.match(text, at)
    return found.end() if found else at
