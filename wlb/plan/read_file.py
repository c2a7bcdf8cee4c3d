"""Reading of text, JSON, TOML and NumPy files that somebody else may have written.

A file that cannot be read raises a UserError with the file, the key, its value and a remedy. This
covers bytes that are not text, text that is not JSON, values nested too deeply, numbers beyond 64
bits, keys that occur twice, arrays that claim more entries than their file has, and, inside
`malformed`, values of an unexpected shape.
"""

import io
import json
import lzma
import re
import struct
import tokenize
import tomllib
import zipfile
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from wlb.plan.errors import UserError, shortened

MOST_DEPTH = 64
"""Deepest nesting of lists and objects that is accepted. Files of common tools nest less than 20
deep."""
MOST_BYTES = 1 << 30
"""Largest file that is read as a whole, as text or JSON."""
MOST_TOML_BYTES = 1 << 20
MOST_ARRAY_BYTES = 1 << 35
"""Most bytes of an array in a .npy or .npz file."""
# Longest integer in TOML, in bits. Python refuses to print much longer ones in a message.
_MOST_BITS = 4096
_DIGITS = re.compile(r"\d{19}")
_PART = r"""(?:(?<![\w-])[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(
    rf"{_PART}(?:[ \t]*\.[ \t]*(?:[\w-]+|\"[^\"\n]*\"|'[^'\n]*')){{{MOST_DEPTH}}}"
)
WRONG_SHAPE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
)
"""Exceptions that code raises when it reads a value of an unexpected type or shape."""


@contextmanager
def malformed(where: object, remedy: str) -> Generator[None]:
    """Turn exceptions of a block that only reads values of a file into a UserError.

    An error in such a block is the file's fault. A UserError passes, preceded by `where` unless its
    message has it already.

    Args:
        where: The file, or what is read.
        remedy: What the reader of the message can do.
    """
    try:
        yield
    except UserError as error:
        if str(where) in str(error):
            raise
        raise UserError(f"{where}: {error}") from error
    except WRONG_SHAPE as error:
        raise UserError(f"{where}: {describe_error(error)}; {remedy}") from error


def describe_error(error: BaseException) -> str:
    """Describe an exception that a value of an unexpected shape has caused."""
    text = shortened(" ".join(str(error).split()), 300)
    match error:
        case KeyError():
            return f"lacks the key {text}"
        case RecursionError():
            return "is nested too deeply"
        case MemoryError() | OverflowError():
            return f"asks for more than this machine has ({text or 'memory'})"
        case _:
            return f"cannot be read ({text or type(error).__name__})"


def read_text(path: Path, *, remedy: str) -> str:
    """Return the text of a UTF-8 file; UserError if it is binary or very large.

    An OSError passes.
    """
    _check_size(path, remedy)
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not text (byte {error.object[error.start]:#04x} at {error.start} is not "
            f"UTF-8); {remedy}"
        ) from None


def _check_size(path: Path, remedy: str) -> None:
    if (size := path.stat().st_size) > MOST_BYTES:
        raise UserError(f"{path} has {size} bytes, must have at most {MOST_BYTES}; {remedy}")


def parse_json(
    text: str | bytes,
    where: object,
    *,
    remedy: str = "repair or replace it",
    unique: bool = False,
    wide: bool = False,
) -> Any:
    """Return the value of JSON text.

    Args:
        text: JSON, as text or UTF-8 bytes.
        where: The file or source, for messages.
        remedy: What the reader of a message can do.
        unique: Refuse an object that has a key twice. Otherwise its last value counts.
        wide: Accept integers of more than 64 bits.

    Raises:
        UserError: The text is not JSON, or exceeds the limits.
    """
    if len(text) > MOST_BYTES:
        raise UserError(f"{where} has {len(text)} bytes, must have at most {MOST_BYTES}; {remedy}")
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        # A text without 19 digits in a row has no integer beyond 64 bits, and `parse_int` slows
        # parsing.
        is_limited = not wide and _DIGITS.search(decoded) is not None
        options: dict[str, Any] = {"parse_int": _int64} if is_limited else {}
        options |= {"object_pairs_hook": _unique} if unique else {}
        value = json.loads(decoded, **options)
    except UserError as error:
        raise UserError(f"{where} {error}; {remedy}") from None
    except RecursionError:
        raise UserError(f"{where} is nested too deeply to be JSON; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); {remedy}") from None
    # Nesting this deep needs at least as many brackets, so most files need no second pass.
    if decoded.count("[") + decoded.count("{") > MOST_DEPTH:
        check_depth(value, where, remedy=remedy)
    return value


def read_json(path: Path, *, remedy: str = "repair or replace it", wide: bool = False) -> Any:
    """Return the value of a JSON file; UserError if it is not JSON.

    An OSError passes.

    Args:
        path: The file.
        remedy: What the reader of a message can do.
        wide: Accept integers of more than 64 bits. Files of Hugging Face have some: for a tokenizer
            without a length limit, transformers writes "model_max_length":
            1000000000000000019884624838656.
    """
    _check_size(path, remedy)
    return parse_json(path.read_bytes(), path, remedy=remedy, unique=True, wide=wide)


def read_object(
    path: Path, *, remedy: str = "repair or replace it", wide: bool = False
) -> dict[str, Any]:
    """Return the object of a JSON file; UserError if it is anything else.

    The arguments are those of `read_json`.
    """
    return object_of(read_json(path, remedy=remedy, wide=wide), path, remedy=remedy)


def object_of(value: Any, where: object, *, remedy: str = "repair or replace it") -> dict[str, Any]:
    """Return `value` if it is a JSON object; otherwise raise a UserError."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: must be a JSON object, got {type(value).__name__}; {remedy}")
    return cast("dict[str, Any]", value)


def parse_toml(text: str | bytes, where: object) -> dict[str, Any]:
    """Return the keys of TOML text; UserError if it is not TOML or exceeds the limits.

    `where` is the file or source, for messages.
    """
    if len(text) > MOST_TOML_BYTES:
        raise UserError(
            f"{where} has {len(text)} bytes, must have at most {MOST_TOML_BYTES}; leave out what "
            f"is no configuration"
        )
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        # tomllib takes quadratic time for a key with many parts.
        if (found := _LONG_KEY.search(decoded)) is not None:
            raise UserError(
                f"{where}: the key {shortened(found[0], 60)!r} has more than {MOST_DEPTH} parts; "
                f"write section.key"
            )
        values = tomllib.loads(decoded)
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{where}: not valid TOML: it is nested too deeply") from None
    # For an integer of thousands of digits, tomllib raises a plain ValueError.
    except ValueError as error:
        raise UserError(f"{where}: not valid TOML: {error}") from None
    check_depth(values, where, remedy="write section.key", bits=_MOST_BITS)
    return values


def _int64(digits: str) -> int:
    """Convert digits to an integer that fits 64 bits."""
    value = int(digits) if len(digits) < 32 else 1 << 64
    if not -(1 << 63) <= value < 1 << 64:
        raise UserError(f"holds {shortened(digits, 60)}, an integer of more than 64 bits")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON pairs; UserError if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"has the key {shortened(twice, 60)!r} twice in an object")
    return found


def check_depth(value: Any, where: object, *, remedy: str, bits: int = 0) -> None:
    """Raise a UserError for values nested deeper than `MOST_DEPTH`.

    Args:
        value: Lists and objects.
        where: The file, for the message.
        remedy: What the reader of the message can do.
        bits: Also refuse integers of more bits than this; 0 means no limit.
    """
    # Descend level by level. A recursive function could itself overflow the stack.
    level: list[Any] = [[value]]
    for _ in range(MOST_DEPTH + 2):
        inner = [part for one in level for part in _parts(one)]
        if bits and (wide := [v for v in inner if type(v) is int and v.bit_length() > bits]):
            raise UserError(
                f"{where} holds an integer of {wide[0].bit_length()} bits, must be at most {bits}; "
                f"{remedy}"
            )
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return
    raise UserError(f"{where} is nested more than {MOST_DEPTH} deep; {remedy}")


def _parts(value: Any) -> Any:
    return cast("dict[str, Any]", value).values() if isinstance(value, dict) else value


def load_arrays(
    source: str | Path | bytes, where: object, *, remedy: str, most_bytes: int = MOST_ARRAY_BYTES
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an .npz file by name, or the array of an .npy file as `""`.

    Nothing is unpickled.

    Args:
        source: Path or contents of the file.
        where: The file, for messages.
        remedy: What the reader of a message can do.
        most_bytes: Most bytes of one unpacked array.

    Raises:
        UserError: The file is neither, or an array claims more than the file has, or is too large.
    """
    with malformed(where, remedy):
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if not data.startswith(b"PK"):
            return {"": _array(data, "", where, remedy)}
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            names = [item.filename.removesuffix(".npy") for item in file.infolist()]
            if twice := next((n for i, n in enumerate(names) if n in names[:i]), None):
                raise UserError(f"{where} has two arrays {twice!r}; {remedy}")
            # Check the sizes first: a small zip file may unpack to more than memory has.
            for item in file.infolist():
                if item.file_size > most_bytes:
                    raise UserError(
                        f"{where}: array {item.filename!r} has {item.file_size} bytes, must have "
                        f"at most {most_bytes}; {remedy}"
                    )
            items = zip(names, file.infolist(), strict=True)
            return {n: _array(_unpacked(file, i), n, where, remedy) for n, i in items}


def _unpacked(file: zipfile.ZipFile, item: zipfile.ZipInfo) -> bytes:
    """Return the bytes of an array in a zip file.

    A decompressor may raise OSError for corrupt bytes. It is converted, because callers would take
    it for a failing disk.
    """
    try:
        return file.read(item)
    except OSError as error:
        raise ValueError(f"array {item.filename!r} cannot be unpacked: {error}") from error


def _array(data: bytes, name: str, where: object, remedy: str) -> npt.NDArray[Any]:
    """Return the array of .npy bytes, after checking that they are as many as the header says."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise UserError(f"{where} is a .npy file of version {version}; {remedy}")
    shape, _, dtype = read(stream)
    # Read the header alone first: numpy would allocate what it claims.
    need, have = dtype.itemsize, len(data) - stream.tell()
    for length in shape:
        need *= length
    if dtype.hasobject or need > have or min(shape, default=0) < 0:
        said = f" {name!r}" if name else ""
        raise UserError(
            f"{where}: array{said} of shape {shape} and dtype {dtype} needs {need} bytes, the file "
            f"has {have}; {remedy}"
        )
    return np.load(io.BytesIO(data), allow_pickle=False)


class Fields:
    """Typed look-ups in a JSON object, for files whose values are checked one by one.

    An absent or null key gives `default`; without a default it is an error. Errors are UserErrors
    with the file, the key, its value and a remedy.
    """

    def __init__(self, values: Mapping[str, Any], where: str, *, remedy: str = "") -> None:
        self.values, self.where, self.remedy = values, where, remedy

    def whole(
        self, name: str, default: int | None = None, *, at_least: int = 1, at_most: int = 2**62
    ) -> int:
        """Return an integer in [at_least, at_most]."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < at_least:
            raise self.error(name, f"must be an integer of at least {at_least}")
        if value > at_most:
            raise self.error(name, f"must be at most {at_most}")
        return value

    def real(self, name: str, default: float | None = None, *, at_most: float = 1e30) -> float:
        """Return a number whose magnitude is at most `at_most`."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "must be a number")
        if not -at_most <= value <= at_most:
            raise self.error(name, f"must be a finite number of at most {at_most:g}")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Return text that contains no zero characters."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or "\0" in value:
            raise self.error(name, "must be text")
        return value

    def error(self, name: str, why: str) -> UserError:
        """Return a UserError that says `why` the value of a key cannot be used."""
        said = shortened(repr(self.values[name]), 300) if name in self.values else "(missing)"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return UserError(f"{self.where}: {name} = {said} {why}{remedy}")
