"""Output that commands share: JSON, text that any stream can encode, files, missing packages."""

import argparse
import codecs
import json
import shlex
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from wlb.plan import UserError


def command_of(options: argparse.Namespace) -> str:
    """Return the command line, for provenance."""
    return shlex.join(["wlb", *options.words])


def never_fail_to_encode(stream: Any) -> None:
    """Make a stream escape characters that it cannot encode (`escaped`) instead of raising.

    Otherwise printing a file name on an ASCII terminal could fail after all work is done.
    """
    if getattr(stream, "errors", None) == "strict":
        stream.reconfigure(errors=ESCAPED)


def escaped(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that cannot be encoded by escapes that TOML and JSON strings understand.

    This is a handler for `codecs.register_error`.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    codes = map(ord, error.object[error.start : error.end])
    return "".join(f"\\u{c:04x}" if c < 1 << 16 else f"\\U{c:08x}" for c in codes), error.end


ESCAPED = "wlb.escaped"
codecs.register_error(ESCAPED, escaped)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file; bytes of file names that are not valid UTF-8 are escaped."""
    Path(path).write_text(text, "utf-8", ESCAPED)


def write_json(options: argparse.Namespace, data: dict[str, Any]) -> bool:
    """Write `data` to where --json says, if anywhere.

    Returns:
        Whether it was printed to stdout; the caller then must not print anything else.
    """
    if options.json is None:
        return False
    text = json.dumps(data, indent=1, allow_nan=False)
    if options.json == "-":
        print(text)
        return True
    write_text(options.json, text + "\n")
    return False


def print_written(console: Console, *paths: str | None) -> None:
    """Print the names of the files that were written."""
    for path in paths:
        if path:
            console.print(f"written: {path}", markup=False)


def check_figure(path: str | None) -> None:
    """Raise a UserError, before any work, for a picture format that matplotlib cannot write."""
    suffix = Path(path or "").suffix.removeprefix(".")
    if not suffix:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    if suffix.lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(
            f"{path}: matplotlib cannot write {suffix} pictures; use .png, .svg or .pdf"
        )


@contextmanager
def needs_train_extra(what: str) -> Generator[None]:
    """Turn a missing package that this block imports into a UserError with the remedy.

    `what` begins the message, such as "training needs".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what} {error.name}, which is not installed; pip install 'wlb-llm[train]'"
        ) from None
