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
"""Largest number of processes that an option accepts."""


def number(kind: type[int] | type[float], most: float = MOST) -> Callable[[str], Any]:
    """Return a function that converts text to a number, for the `type` of an argparse option.

    Args:
        kind: int or float.
        most: Largest magnitude that is accepted. With a larger number, a command might never end. A
            float may also be infinite, which some commands accept as "no limit".
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

    # Set the function's name, because argparse shows it in error messages.
    parsed.__name__ = kind.__name__
    return parsed


def size(text: str) -> int:
    """Convert text such as 5GB to a number of bytes, for the `type` of an argparse option."""
    try:
        return size_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_flag(parser: Any, name: str, text: str) -> None:
    """Add the option `name`, which takes no value, with the help `text`."""
    parser.add_argument(name, action="store_true", help=text)


def add_text(parser: Any, name: str, metavar: str, text: str, **more: Any) -> None:
    """Add an option that takes a text or the name of a file.

    Args:
        parser: The parser, or an argument group of it.
        name: The option with its dashes, such as "--out".
        metavar: Name of the value in the help.
        text: The help text.
        **more: Further arguments of `add_argument`.
    """
    parser.add_argument(name, metavar=metavar, help=text, **more)


def add_value(
    parser: Any, name: str, usual: Any, text: str, *, most: float = MOST, **more: Any
) -> None:
    """Add an option with a default, which decides the option's type and is shown in its help.

    Args:
        parser: The parser, or an argument group of it.
        name: The option with its dashes, such as "--steps".
        usual: The default. If it is a member of an enum, the option accepts all members of the
            enum. If it is a tuple, the option takes one or more values.
        text: The help text.
        most: Largest number that is accepted.
        **more: Further arguments of `add_argument`, which replace those that follow from the
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
    """Add the option --set KEY=VALUE ..., whose values are stored in `options.overrides` in order.

    Args:
        parser: The parser.
        **more: Further arguments of `add_argument`.
    """
    more = {"nargs": "+", "action": "extend", "default": [], **more}
    parser.add_argument("--set", dest="overrides", **more)


def add_json(parser: Any, what: str) -> None:
    """Add the option --json [FILE]. Its help says that `what` is written."""
    text = f"write {what} as JSON to FILE, or without FILE to stdout"
    add_text(parser, "--json", "FILE", text, nargs="?", const="-")
