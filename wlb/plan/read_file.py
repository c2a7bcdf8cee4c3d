"""Reading of text, JSON, TOML and NumPy files that another program may have written or damaged.

A file that cannot be read raises a UserError with the name of the file, the key, its value and a
remedy. The functions detect bytes that are not text, text that is not JSON, values that are nested
too deeply, integers of more than 64 bits, keys that occur twice, and arrays whose header claims
more entries than the file has. Code that uses values of a file without checking their types runs in
a `with malformed(...)` block, which turns its exceptions into UserErrors.
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
"""Most levels of nested lists and objects that a file may have. Files of common tools have fewer
than 20 levels."""
MOST_BYTES = 1 << 30
"""Most bytes of a text or JSON file."""
MOST_TOML_BYTES = 1 << 20
"""Most bytes of a TOML file."""
MOST_ARRAY_BYTES = 1 << 35
"""Most bytes of one array in a .npy or .npz file."""
# Most bits of an integer in a TOML file. Error messages print integers, and Python refuses to print
# much longer ones.
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
"""Exceptions that code may raise when a value of a file has an unexpected type or form."""


@contextmanager
def malformed(where: object, remedy: str) -> Generator[None]:
    """Turn exceptions of a `with` block that interprets the content of a file into a UserError.

    Use this only for blocks in which every exception means that the file is wrong. If the block
    raises a UserError itself, `where` is put before its message, unless the message contains
    `where`.

    Args:
        where: Name of the file, for the message.
        remedy: What the user can do, for the message.
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
    """Return a text that says what is wrong with the file that caused this exception."""
    text = shortened(" ".join(str(error).split()), 300)
    match error:
        case KeyError():
            return f"lacks the key {text}"
        case RecursionError():
            return "is nested too deeply"
        case MemoryError() | OverflowError():
            return f"needs more than this machine has ({text or 'memory'})"
        case _:
            return f"cannot be read ({text or type(error).__name__})"


def read_text(path: Path, *, remedy: str) -> str:
    """Return the text of a UTF-8 file.

    Args:
        path: The file.
        remedy: What the user can do, for error messages.

    Raises:
        UserError: The file is not UTF-8, or has more than `MOST_BYTES` bytes.
        OSError: The file does not exist or cannot be read.
    """
    _check_size(path, remedy)
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (it has the byte {error.object[error.start]:#04x} at "
            f"position {error.start}); {remedy}"
        ) from None


def _check_size(path: Path, remedy: str) -> None:
    if (size := path.stat().st_size) > MOST_BYTES:
        raise UserError(f"{path} has {size} bytes but must have at most {MOST_BYTES}; {remedy}")


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
        where: Name of the file or other source, for error messages.
        remedy: What the user can do, for error messages.
        unique: Whether to refuse an object that has a key twice. If not, the key's last value is
            used.
        wide: Whether to accept integers of more than 64 bits.

    Raises:
        UserError: The text is not JSON, has more than `MOST_BYTES` bytes, is nested too deeply, or
            has something that `unique` or `wide` refuses.
    """
    if len(text) > MOST_BYTES:
        raise UserError(
            f"{where} has {len(text)} bytes but must have at most {MOST_BYTES}; {remedy}"
        )
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        # Check integers only if the text has 19 digits in a row, because shorter integers fit in 64
        # bits and `parse_int` slows parsing.
        is_limited = not wide and _DIGITS.search(decoded) is not None
        options: dict[str, Any] = {"parse_int": _int64} if is_limited else {}
        options |= {"object_pairs_hook": _unique} if unique else {}
        value = json.loads(decoded, **options)
    except UserError as error:
        raise UserError(f"{where} {error}; {remedy}") from None
    except RecursionError:
        raise UserError(f"{where} is nested too deeply to be read as JSON; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); {remedy}") from None
    # Check the depth only if the text has enough brackets to exceed the limit, which is rare.
    if decoded.count("[") + decoded.count("{") > MOST_DEPTH:
        check_depth(value, where, remedy=remedy)
    return value


def read_json(path: Path, *, remedy: str = "repair or replace it", wide: bool = False) -> Any:
    """Return the value of a JSON file.

    Args:
        path: The file.
        remedy: What the user can do, for error messages.
        wide: Whether to accept integers of more than 64 bits. Files of Hugging Face have them: for
            a tokenizer without a length limit, transformers writes "model_max_length":
            1000000000000000019884624838656.

    Raises:
        UserError: The file is not JSON, has a key twice in an object, is too large, is nested too
            deeply, or has an integer that `wide` refuses.
        OSError: The file does not exist or cannot be read.
    """
    _check_size(path, remedy)
    return parse_json(path.read_bytes(), path, remedy=remedy, unique=True, wide=wide)


def read_object(
    path: Path, *, remedy: str = "repair or replace it", wide: bool = False
) -> dict[str, Any]:
    """Return the object of a JSON file; UserError if the file is not JSON or not an object.

    Args:
        path: The file.
        remedy: What the user can do, for error messages.
        wide: Whether to accept integers of more than 64 bits.
    """
    return object_of(read_json(path, remedy=remedy, wide=wide), path, remedy=remedy)


def object_of(value: Any, where: object, *, remedy: str = "repair or replace it") -> dict[str, Any]:
    """Return `value` if it is a JSON object (a dictionary); otherwise raise a UserError.

    Args:
        value: A parsed JSON value.
        where: Name of the file, for the message.
        remedy: What the user can do, for the message.
    """
    if not isinstance(value, dict):
        raise UserError(
            f"{where} must contain a JSON object, but contains a {type(value).__name__}; {remedy}"
        )
    return cast("dict[str, Any]", value)


def parse_toml(text: str | bytes, where: object) -> dict[str, Any]:
    """Return the content of TOML text as a dictionary; UserError if it is not TOML or too large.

    Args:
        text: TOML, as text or UTF-8 bytes.
        where: Name of the file or other source, for error messages.
    """
    if len(text) > MOST_TOML_BYTES:
        raise UserError(
            f"{where} has {len(text)} bytes, but a TOML file may have at most {MOST_TOML_BYTES}; "
            f"remove everything that is not configuration"
        )
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        # Refuse keys with many parts (a.b.c...), because tomllib takes quadratic time for them.
        if (found := _LONG_KEY.search(decoded)) is not None:
            raise UserError(
                f"{where}: the key {shortened(found[0], 60)!r} has more than {MOST_DEPTH} parts; "
                f"write keys in the form section.key"
            )
        values = tomllib.loads(decoded)
    except UserError:
        raise
    except RecursionError:
        raise UserError(
            f"{where}: not valid TOML: it is nested too deeply; write keys in the form section.key"
        ) from None
    # Catch every ValueError, not only TOMLDecodeError, because tomllib raises a plain ValueError
    # for integers of thousands of digits.
    except ValueError as error:
        raise UserError(f"{where}: not valid TOML: {error}") from None
    check_depth(values, where, remedy="write keys in the form section.key", bits=_MOST_BITS)
    return values


def _int64(digits: str) -> int:
    """Convert the digits of a JSON integer; UserError if it does not fit in 64 bits."""
    value = int(digits) if len(digits) < 32 else 1 << 64
    if not -(1 << 63) <= value < 1 << 64:
        raise UserError(f"contains {shortened(digits, 60)}, an integer of more than 64 bits")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary of a JSON object's (key, value) pairs; UserError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"has the key {shortened(twice, 60)!r} twice in the same object")
    return found


def check_depth(value: Any, where: object, *, remedy: str, bits: int = 0) -> None:
    """Raise a UserError if a parsed JSON or TOML value has more than `MOST_DEPTH` nested levels.

    Args:
        value: The value.
        where: Name of the file, for the message.
        remedy: What the user can do, for the message.
        bits: Most bits that an integer in the value may have; 0 means no limit.
    """
    # Use a loop over levels, because a recursive function could overflow the stack.
    level: list[Any] = [[value]]
    for _ in range(MOST_DEPTH + 2):
        inner = [part for one in level for part in _parts(one)]
        if bits and (wide := [v for v in inner if type(v) is int and v.bit_length() > bits]):
            raise UserError(
                f"{where} contains an integer of {wide[0].bit_length()} bits, but integers must "
                f"have at most {bits} bits; {remedy}"
            )
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return
    raise UserError(f"{where} is nested more than {MOST_DEPTH} levels deep; {remedy}")


def _parts(value: Any) -> Any:
    return cast("dict[str, Any]", value).values() if isinstance(value, dict) else value


def load_arrays(
    source: str | Path | bytes, where: object, *, remedy: str, most_bytes: int = MOST_ARRAY_BYTES
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an .npz or .npy file as a dictionary, without unpickling anything.

    Args:
        source: Path of the file, or its bytes.
        where: Name of the file, for error messages.
        remedy: What the user can do, for error messages.
        most_bytes: Most bytes that one array of an .npz file may have when decompressed.

    Returns:
        The arrays by name. The array of an .npy file has the name "".

    Raises:
        UserError: The file is neither .npz nor .npy, an array is larger than `most_bytes`, or the
            file has fewer bytes than an array's header claims.
    """
    with malformed(where, remedy):
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if not data.startswith(b"PK"):
            return {"": _array(data, "", where, remedy)}
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            names = [item.filename.removesuffix(".npy") for item in file.infolist()]
            if twice := next((n for i, n in enumerate(names) if n in names[:i]), None):
                raise UserError(f"{where} has two arrays with the name {twice!r}; {remedy}")
            # Check all sizes before decompressing, because a small zip file may decompress to more
            # than memory can take.
            for item in file.infolist():
                if item.file_size > most_bytes:
                    raise UserError(
                        f"{where}: the array {item.filename!r} has {item.file_size} bytes, but may "
                        f"have at most {most_bytes}; {remedy}"
                    )
            items = zip(names, file.infolist(), strict=True)
            return {n: _array(_unpacked(file, i), n, where, remedy) for n, i in items}


def _unpacked(file: zipfile.ZipFile, item: zipfile.ZipInfo) -> bytes:
    """Return the decompressed bytes of an array in a zip file.

    If the bytes are corrupt, the decompressor may raise an OSError. This function raises a
    ValueError instead, because callers take an OSError for a failing disk.
    """
    try:
        return file.read(item)
    except OSError as error:
        raise ValueError(f"array {item.filename!r} cannot be unpacked: {error}") from error


def _array(data: bytes, name: str, where: object, remedy: str) -> npt.NDArray[Any]:
    """Return the array of a .npy file, after checking that the file has all bytes of the array.

    Args:
        data: Content of the .npy file.
        name: Name of the array in an .npz file, "" for a single array. Used in messages.
        where: The file that was read, for messages.
        remedy: What the user can do if the file is damaged, for messages.
    """
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise UserError(
            f"{where} is a .npy file of format version {version}, but only versions (1, 0) and "
            f"(2, 0) are supported; {remedy}"
        )
    shape, _, dtype = read(stream)
    # Check the size that the header claims before `np.load` allocates it.
    need, have = dtype.itemsize, len(data) - stream.tell()
    for length in shape:
        need *= length
    if dtype.hasobject or need > have or min(shape, default=0) < 0:
        said = f" {name!r}" if name else ""
        raise UserError(
            f"{where}: the header of the array{said} says shape {shape} and dtype {dtype}, which "
            f"needs {need} bytes, but {have} bytes follow; {remedy}"
        )
    return np.load(io.BytesIO(data), allow_pickle=False)


class Fields:
    """A JSON object whose values are read and type-checked one by one.

    If a key is absent or null, a method returns its argument `default`, or raises an error if
    `default` is None. Errors are UserErrors with the name of the file, the key, its value and a
    remedy.
    """

    def __init__(self, values: Mapping[str, Any], where: str, *, remedy: str = "") -> None:
        self.values, self.where, self.remedy = values, where, remedy

    def whole(
        self, name: str, default: int | None = None, *, at_least: int = 1, at_most: int = 2**62
    ) -> int:
        """Return the value of the key `name`, which must be an integer in [at_least, at_most].

        If the key is missing or null, return `default`; with default = None that is an error.
        """
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < at_least:
            raise self.error(name, f"must be an integer of at least {at_least}")
        if value > at_most:
            raise self.error(name, f"must be at most {at_most}")
        return value

    def real(self, name: str, default: float | None = None, *, at_most: float = 1e30) -> float:
        """Return the value of the key `name`, a number of at most `at_most` in magnitude.

        If the key is missing or null, return `default`; with default = None that is an error.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "must be a number")
        if not -at_most <= value <= at_most:
            raise self.error(name, f"must be a finite number of at most {at_most:g}")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value of the key `name`, which must be text without NUL characters.

        If the key is missing or null, return `default`; with default = None that is an error.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or "\0" in value:
            raise self.error(name, "must be text")
        return value

    def error(self, name: str, why: str) -> UserError:
        """Return (not raise) a UserError about the value of a key.

        Args:
            name: The key.
            why: What is wrong with its value, such as "must be text".
        """
        said = shortened(repr(self.values[name]), 300) if name in self.values else "(missing)"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return UserError(f"{self.where}: {name} = {said} {why}{remedy}")
