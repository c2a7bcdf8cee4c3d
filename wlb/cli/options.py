"""Helpers that declare command-line options: flags, texts, and numbers with defaults."""

import argparse
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from wlb.plan.errors import shortened
from wlb.plan.numerals import real_of, size_of, whole_of

MOST = 10**9
"""Largest number that an option accepts, unless the option has another limit."""
MOST_PROCESSES = 4096


def number(kind: type[int] | type[float], most: float = MOST) -> Callable[[str], Any]:
    """Return a parser of numbers, for the `type` of an option.

    Numbers of a magnitude above `most` are refused, because a command would not end with them.
    Infinity is accepted; commands that permit it take it as "no limit".
    """
    what = "a whole number" if kind is int else "a number"

    def parsed(text: str) -> Any:
        try:
            value = whole_of(text) if kind is int else real_of(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shortened(text, 40)!r} is not {what}") from None
        if abs(value) > most and abs(value) != float("inf"):
            raise argparse.ArgumentTypeError(f"{shortened(text, 40)} must be at most {most}")
        return value

    # argparse uses the function's name in its messages.
    parsed.__name__ = kind.__name__
    return parsed


def size(text: str) -> int:
    """Parse a number of bytes such as 5GB, for the `type` of an option."""
    try:
        return size_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_flag(parser: Any, name: str, text: str) -> None:
    """Add an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def add_text(parser: Any, name: str, metavar: str, text: str, **more: Any) -> None:
    """Add an option that takes a text or a file's name; `more` goes to `add_argument`."""
    parser.add_argument(name, metavar=metavar, help=text, **more)


def add_value(
    parser: Any, name: str, usual: Any, text: str, *, most: float = MOST, **more: Any
) -> None:
    """Add an option with a default, which decides the option's type and is shown in its help.

    Args:
        parser: A parser or a group of one.
        name: The option, with its dashes.
        usual: The default. For an enumeration member all members are choices; a tuple takes several
            values.
        text: The help text.
        most: Largest number.
        **more: Further arguments of `add_argument`; they override those that follow from the
            default.
    """
    kind: Any = type(usual)
    shown, settings = usual, {"default": usual}
    if isinstance(usual, StrEnum):
        settings |= {"choices": list(kind), "metavar": "|".join(kind)}
    elif isinstance(usual, tuple):
        kind, shown = type(usual[0]), " ".join(f"{value:g}" for value in usual)
        settings = {"default": list(usual), "nargs": "+"}
    kind = number(kind, most) if kind in (int, float) else kind
    settings |= {"type": kind, "help": f"{text} (default: {shown})", **more}
    parser.add_argument(name, **settings)


def add_overrides(parser: Any, **more: Any) -> None:
    """Add --set; `options.overrides` then lists its values in order."""
    more = {"nargs": "+", "action": "extend", "default": [], **more}
    parser.add_argument("--set", dest="overrides", **more)


def add_json(parser: Any, what: str) -> None:
    """Add --json [FILE]; `what` says in the help what is written."""
    text = f"{what} as JSON, to stdout or a file"
    add_text(parser, "--json", "FILE", text, nargs="?", const="-")
