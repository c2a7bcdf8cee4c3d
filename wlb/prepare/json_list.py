"""A JSON file of one list, item by item, and what a .json file holds.

The list may be larger than memory: held is a block of the file or the longest item, with its text.
What follows a damaged item cannot be found, so the file is refused there. The library ijson 3.6 is
not used: it turns a lone surrogate into a question mark without a word, and its memory grows with
the square of the nesting (over 16 GB for 100,000 brackets).
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

_BLOCK = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_CUT = 16
"""Characters before the end of the text read so far within which a number, literal or escape that
is cut there looks like an error, or a number like another one."""


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

    ValueError where the file is no such list, or where an item or the blanks between two have more
    than `most` characters.
    """
    text = _Text(file, most)
    if not text.take("["):
        raise ValueError("it is no JSON list")
    number = 0
    while not (number == 0 and text.take("]")):
        try:
            item = text.item()
        # The item is nested too deeply, or has a number of too many digits.
        except (RecursionError, ValueError) as error:
            raise ValueError(f"record {number} cannot be read: {error}") from None
        yield item
        number += 1
        if not text.take(","):
            if text.take("]"):
                break
            raise ValueError(
                f"record {number - 1} is followed by neither a comma nor the list's end"
            )
    if text.peek():
        raise ValueError(f"text follows the list of {number} records")


class _Text:
    """The characters of a file from where it was read to, as many as are needed."""

    def __init__(self, file: IO[bytes], most: int) -> None:
        self._file, self._most = file, most
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._passed = 0
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False

    def peek(self) -> str:
        """The next character that is no blank, "" at the end of the file."""
        num_blanks = 0
        while True:
            found = _SPACE.match(self._text, self._at)
            end = found.end() if found else self._at
            num_blanks += end - self._at
            self._at = end
            # A file of megabytes may unpack to any number of them.
            if num_blanks > self._most:
                raise ValueError(f"more than {self._most} blanks follow each other")
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def take(self, character: str) -> bool:
        """Whether that character is next, which is then passed."""
        is_next = self.peek() == character
        self._at += is_next
        return is_next

    def item(self) -> object:
        """The JSON value that is next; ValueError where there is none of the most characters."""
        self.peek()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut(error):
                    raise ValueError(
                        f"{error.msg} at character {error.pos - self._at} of it"
                    ) from None
            else:
                if self._ended or end + _CUT <= len(self._text):
                    self._at = end
                    return value
            if len(self._text) - self._at > self._most:
                raise ValueError(f"it has more than {self._most} characters")
            self._read()

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        is_open = error.msg.startswith("Unterminated string")
        return is_open or error.pos >= len(self._text) - _CUT

    def _read(self) -> None:
        """Reads as much again as is held, so that a long item is scanned few times."""
        rest = self._text[self._at :]
        data = self._file.read(max(_BLOCK, len(rest)))
        self._ended = not data
        # The decoder keeps the bytes of a character that the last block cut.
        first = self._passed - len(self._decoder.getstate()[0])
        self._passed += len(data)
        try:
            self._text, self._at = rest + self._decoder.decode(data, self._ended), 0
        except UnicodeDecodeError as error:
            raise ValueError(f"it is not UTF-8 at byte {first + error.start}") from None
