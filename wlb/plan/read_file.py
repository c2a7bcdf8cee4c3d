"""Reads text, JSON, TOML and NumPy files that somebody else may have written.

What cannot be read is a UserError with the file, the key, its value and a remedy: bytes that are no
text, text that is no JSON, values nested too deeply, numbers beyond 64 bits, keys that are given
twice, arrays that claim more entries than their file holds, and (`malformed`) values of the wrong
shape.
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
"""Deepest nesting of lists and objects; schemas of tools have less than 20."""
MOST_BYTES = 1 << 30
"""Largest file that is read whole as text or JSON."""
MOST_TOML_BYTES = 1 << 20
MOST_ARRAY_BYTES = 1 << 35
"""Most bytes of an array in a .npy or .npz file."""
_MOST_BITS = 4096  # of an integer in TOML: Python prints it, and bounds of keys refuse it
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


@contextmanager
def malformed(where: object, remedy: str) -> Generator[None]:
    """Turns what reading a value of the wrong shape raises into a UserError.

    where: the file, or what is read. For blocks that only read what came from a file: an error in
    them is the file's. A UserError passes, with `where` in front unless it is named already.
    """
    try:
        yield
    except UserError as error:
        if str(where) in str(error):
            raise
        raise UserError(f"{where}: {error}") from error
    except WRONG_SHAPE as error:
        raise UserError(f"{where}: {told(error)}; {remedy}") from error


def told(error: BaseException) -> str:
    """The exception of a value of the wrong shape in words."""
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
    """The text of a UTF-8 file; UserError for a binary or very large file. An OSError passes."""
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
    """The value of JSON text; UserError with `where` for text that is none or beyond the limits.

    unique: an object that has a key twice is refused; elsewhere the last one counts. wide: integers
    of more than 64 bits are permitted.
    """
    if len(text) > MOST_BYTES:
        raise UserError(f"{where} has {len(text)} bytes, must have at most {MOST_BYTES}; {remedy}")
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
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
    if decoded.count("[") + decoded.count("{") > MOST_DEPTH:
        check_depth(value, where, remedy=remedy)
    return value


def read_json(path: Path, *, remedy: str = "repair or replace it", wide: bool = False) -> Any:
    """The value of a JSON file; UserError for a file that holds none. An OSError passes.

    wide: integers of more than 64 bits are permitted, as Hugging Face's files hold them: without a
    limit of length, transformers writes "model_max_length": 1000000000000000019884624838656.
    """
    _check_size(path, remedy)
    return parse_json(path.read_bytes(), path, remedy=remedy, unique=True, wide=wide)


def read_object(
    path: Path, *, remedy: str = "repair or replace it", wide: bool = False
) -> dict[str, Any]:
    """The object of a JSON file; UserError for a file that holds anything else. wide: as in
    `read_json`.
    """
    return object_of(read_json(path, remedy=remedy, wide=wide), path, remedy=remedy)


def object_of(value: Any, where: object, *, remedy: str = "repair or replace it") -> dict[str, Any]:
    """`value` if it is a JSON object; UserError otherwise."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: must be a JSON object, got {type(value).__name__}; {remedy}")
    return cast("dict[str, Any]", value)


def parse_toml(text: str | bytes, where: object) -> dict[str, Any]:
    """The keys of TOML text; UserError with `where` for text that is none or beyond the limits."""
    if len(text) > MOST_TOML_BYTES:
        raise UserError(
            f"{where} has {len(text)} bytes, must have at most {MOST_TOML_BYTES}; leave out what "
            f"is no configuration"
        )
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        # tomllib takes quadratic time for a key of many parts.
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
    # An integer of thousands of digits is a plain ValueError.
    except ValueError as error:
        raise UserError(f"{where}: not valid TOML: {error}") from None
    check_depth(values, where, remedy="write section.key", bits=_MOST_BITS)
    return values


def _int64(digits: str) -> int:
    value = int(digits) if len(digits) < 32 else 1 << 64
    if not -(1 << 63) <= value < 1 << 64:
        raise UserError(f"holds {shortened(digits, 60)}, an integer of more than 64 bits")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"has the key {shortened(twice, 60)!r} twice in an object")
    return found


def check_depth(value: Any, where: object, *, remedy: str, bits: int = 0) -> None:
    """UserError for lists and objects nested more than `MOST_DEPTH` deep, and, with `bits`, for an
    integer that has more.
    """
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
    """The arrays of an .npz file by name, or that of an .npy file as `""`; nothing is unpickled.

    UserError for what is neither, for an array that claims more than its file holds, and for one
    that is unpacked to more than `most_bytes`.
    """
    with malformed(where, remedy):
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if not data.startswith(b"PK"):
            return {"": _array(data, "", where, remedy)}
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            names = [item.filename.removesuffix(".npy") for item in file.infolist()]
            if twice := next((n for i, n in enumerate(names) if n in names[:i]), None):
                raise UserError(f"{where} has two arrays {twice!r}; {remedy}")
            for item in file.infolist():
                if item.file_size > most_bytes:
                    raise UserError(
                        f"{where}: array {item.filename!r} has {item.file_size} bytes, must have "
                        f"at most {most_bytes}; {remedy}"
                    )
            items = zip(names, file.infolist(), strict=True)
            return {n: _array(_unpacked(file, i), n, where, remedy) for n, i in items}


def _unpacked(file: zipfile.ZipFile, item: zipfile.ZipInfo) -> bytes:
    """The bytes of an array. What another method of compression makes of them may be an OSError,
    of bytes in memory, which says nothing of a disk.
    """
    try:
        return file.read(item)
    except OSError as error:
        raise ValueError(f"array {item.filename!r} cannot be unpacked: {error}") from error


def _array(data: bytes, name: str, where: object, remedy: str) -> npt.NDArray[Any]:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise UserError(f"{where} is a .npy file of version {version}; {remedy}")
    shape, _, dtype = read(stream)
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
    """Typed look-ups in a JSON object; UserError with the file, the key, its value and a remedy.

    where: the file. A key that is absent or null gives `default`; without one it is an error.
    """

    def __init__(self, values: Mapping[str, Any], where: str, *, remedy: str = "") -> None:
        self.values, self.where, self.remedy = values, where, remedy

    def whole(
        self, name: str, default: int | None = None, *, at_least: int = 1, at_most: int = 2**62
    ) -> int:
        """An integer in [at_least, at_most]."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < at_least:
            raise self.error(name, f"must be an integer of at least {at_least}")
        if value > at_most:
            raise self.error(name, f"must be at most {at_most}")
        return value

    def real(self, name: str, default: float | None = None, *, at_most: float = 1e30) -> float:
        """A number whose magnitude is at most `at_most`."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "must be a number")
        if not -at_most <= value <= at_most:
            raise self.error(name, f"must be a finite number of at most {at_most:g}")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Text without zeros."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or "\0" in value:
            raise self.error(name, "must be text")
        return value

    def error(self, name: str, why: str) -> UserError:
        """The UserError that says `why` a key's value cannot be used."""
        said = shortened(repr(self.values[name]), 300) if name in self.values else "(missing)"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return UserError(f"{self.where}: {name} = {said} {why}{remedy}")
