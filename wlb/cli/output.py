"""Functions with which commands write JSON and text files and report missing packages."""

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
    """Return the command line as text, to be stored in the files that the command writes."""
    return shlex.join(["wlb", *options.words])


def never_fail_to_encode(stream: Any) -> None:
    """Make a stream escape characters that it cannot encode (`escaped`) instead of raising.

    Without this, printing a file name to an ASCII terminal could fail after all work is done.
    """
    if getattr(stream, "errors", None) == "strict":
        stream.reconfigure(errors=ESCAPED)


def escaped(error: UnicodeError) -> tuple[str, int]:
    r"""Return escapes (\uXXXX, as in TOML and JSON strings) for characters that cannot be encoded.

    This is an error handler for `codecs.register_error`. It returns the text that replaces the
    characters, and the position at which encoding continues.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    codes = map(ord, error.object[error.start : error.end])
    return "".join(f"\\u{c:04x}" if c < 1 << 16 else f"\\U{c:08x}" for c in codes), error.end


ESCAPED = "wlb.escaped"
codecs.register_error(ESCAPED, escaped)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file. Characters that UTF-8 cannot encode are escaped (`escaped`).

    The name of a file contains such characters if its bytes are not valid UTF-8.
    """
    Path(path).write_text(text, "utf-8", ESCAPED)


def write_json(options: argparse.Namespace, data: dict[str, Any]) -> bool:
    """Write `data` as JSON to stdout or a file if --json is given; otherwise do nothing.

    Returns:
        Whether the JSON went to stdout. If so, the caller must not print anything else.
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
    """Print a line "written: PATH" for each path that is not None or empty."""
    for path in paths:
        if path:
            console.print(f"written: {path}", markup=False)


def check_figure(path: str | None) -> None:
    """Raise a UserError if matplotlib cannot write the picture format of a file's suffix.

    A path without suffix, or None, is accepted.
    """
    suffix = Path(path or "").suffix.removeprefix(".")
    if not suffix:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    if suffix.lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserError(
            f"{path}: matplotlib cannot write .{suffix} pictures; give a file that ends in .png, "
            f".svg or .pdf"
        )


@contextmanager
def needs_train_extra(what: str) -> Generator[None]:
    """Raise a UserError that says how to install a package, if an import in the `with` block fails.

    Args:
        what: Beginning of the message, such as "training needs".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"{what} {error.name}, which is not installed; run: pip install 'wlb-llm[train]'"
        ) from None
