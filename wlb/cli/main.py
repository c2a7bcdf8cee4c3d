"""The command line: `wlb COMMAND ...`, which is the same as `python -m wlb COMMAND ...`."""

import argparse
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn

from wlb import __version__
from wlb.cli import (
    completion,
    doctor,
    init,
    pack,
    plan,
    prepare,
    profile,
    rehearse,
    report,
    simulate,
    train,
    tune,
    weights,
)
from wlb.cli.output import never_fail_to_encode
from wlb.plan import UserError
from wlb.plan.errors import shortened
from wlb.spec import RemovedKeyWarning, RenamedKeyWarning, did_you_mean

_EPILOG = """\
wlb COMMAND --help describes a command. wlb train --help lists the common keys of the
configuration, and wlb train --help-all lists all keys.
These commands need no torch: completion, init, pack, plan, prepare, report, simulate, tune, and
wlb train --dry-run.

First steps: wlb train demo; wlb init demo > my.toml; wlb train my.toml --dry-run."""
_COMMANDS = (init, prepare, train, doctor, pack, plan, simulate, tune, rehearse, profile, report)


def main(arguments: list[str] | None = None) -> int:
    """Run a command of `wlb` and return its exit status.

    A UserError or OSError is printed as one line on stderr. Any other exception is a bug of wlb and
    is printed with its traceback.

    Args:
        arguments: Words of the command line after `wlb`. None means those of `sys.argv`.

    Returns:
        The exit status:
        - 0: success
        - 1: a run failed
        - 2: the input was wrong
        - 3: `wlb doctor` found a fault, or `wlb train --dry-run` a run that does not fit in memory
        - 4: a signal or a stop file ended a run early, and the run has saved a checkpoint
        - 130: the user pressed Ctrl-C
    """
    never_fail_to_encode(sys.stdout)
    parser, commands = parser_of()
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser.print_help()
        return 0
    # If the command is misspelled, suggest a similar one, because argparse only lists all commands.
    meant = did_you_mean(words[0], commands.choices)
    if meant and words[0] not in commands.choices and not words[0].startswith("-"):
        print(f"wlb: there is no command {words[0]!r}{meant}", file=sys.stderr)
        return 2
    # Refuse NUL characters here. As part of a file name they would raise a ValueError, which would
    # be printed as a bug of wlb.
    if nul := next((word for word in words if "\0" in word), None):
        print(
            f"wlb: the argument {shortened(repr(nul), 300)} contains a NUL character (\\x00); "
            f"remove the character",
            file=sys.stderr,
        )
        return 2
    options, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse_unknown(_command_of(parser, words), unknown)
    options.words = words
    try:
        with _one_line_warnings(options.command):
            return options.run(options)
    except (UserError, OSError) as error:
        print(f"wlb {options.command}: {shortened(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"wlb {options.command}: interrupted by Ctrl-C", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """An argument parser that shortens error messages, because they may quote a very long value."""

    def error(self, message: str) -> NoReturn:
        super().error(shortened(message))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Refuse "--" as the value of an option: Python 3.11 drops the word and would use an empty
        # list as the value.
        if action.nargs is None and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)


def _command_of(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser:
    """Return the parser of the command or subcommand that the words of a command line name."""
    for word in words:
        for action in parser._actions:  # argparse has no public list of a parser's arguments
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
                break
    return parser


def _refuse_unknown(command: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """Exit with an error about the unknown words, and suggest the option that may be meant.

    Args:
        command: Parser of the command.
        unknown: Words of the command line that the parser does not know.
    """
    name = unknown[0].split("=")[0]
    if not name.startswith("-"):
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    options = [option for action in command._actions for option in action.option_strings]
    command.error(f"there is no option {name}{did_you_mean(name, options)}")


def parser_of() -> tuple[argparse.ArgumentParser, Any]:
    """Return the parser of `wlb`, and the object of its subparsers, which has all commands."""
    parser = _Parser(
        prog="wlb",
        description="Workload-balanced 4-D parallelism for LLM training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"wlb {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    weights.add_parsers(commands)
    completion.add_parser(commands)
    return parser, commands


@contextmanager
def _one_line_warnings(command: str) -> Generator[None]:
    """Print warnings about old configuration keys in one line, without a line of source code."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, RemovedKeyWarning | RenamedKeyWarning):
            print(f"wlb {command}: warning: {message}", file=sys.stderr)
        else:
            before(message, category, *where)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
