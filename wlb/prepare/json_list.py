"""A JSON file of one list, item by item, and what a .json file holds.

The text of a list is held in memory, its items one at a time. What follows a damaged item cannot be
found, so the file is refused there.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

_SPACE = re.compile(r"[ \t\n\r]*")


def first_bytes(file: IO[bytes], *, most: int) -> tuple[bytes, bytes]:
    """The first character that is no blank, and the line that it is on; reads at most `most` bytes.

    Both are empty where those are blanks. A mark of byte order is left out.
    """
    line = file.readline(most).removeprefix(codecs.BOM_UTF8)
    passed = len(line)
    while line and not line.strip():
        line = file.readline(most - passed) if passed < most else b""
        passed += len(line)
    return line.strip()[:1], line


def list_items(file: IO[bytes], *, most: int) -> Iterator[object]:
    """The items of the JSON list that is the whole of `file`.

    ValueError where the file is no such list, or has more than `most` bytes.
    """
    data = file.read(most + 1).removeprefix(codecs.BOM_UTF8)
    if len(data) > most:
        raise ValueError(f"a list of more than {most} bytes is not read")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start}") from None
    at = _passed(text, 0)
    if text[at : at + 1] != "[":
        raise ValueError("it is no JSON list")
    scan, number = json.JSONDecoder().raw_decode, 0
    at = _passed(text, at + 1)
    while number or text[at : at + 1] != "]":
        try:
            item, end = scan(text, at)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"record {number} cannot be read: {error.msg} at character {error.pos - at} of it"
            ) from None
        # The item is nested too deeply, or has a number of too many digits.
        except (RecursionError, ValueError) as error:
            raise ValueError(f"record {number} cannot be read: {error}") from None
        yield item
        number += 1
        at = _passed(text, end)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise ValueError(
                f"record {number - 1} is followed by neither a comma nor the list's end"
            )
        at = _passed(text, at + 1)
    if _passed(text, at + 1) < len(text):
        raise ValueError(f"text follows the list of {number} records")


def _passed(text: str, at: int) -> int:
    """Where the next character stands that is no blank."""
    found = _SPACE.match(text, at)
    return found.end() if found else at
