"""Defines the options that experiments share, so that an option means the same in all of them."""

import argparse
from collections.abc import Callable
from typing import Any


class ExperimentParser(argparse.ArgumentParser):
    """Argument parser that refuses --take together with a changed --steps or --seed.

    --take reuses earlier results. The page would name the new steps or seed for results that were
    made with the old ones.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = super().parse_args(args, namespace)
        if getattr(options, "take", False):
            for name in ("steps", "seed"):
                if getattr(options, name, None) != self.get_default(name):
                    self.error(
                        f"--take keeps the steps and seed of its results; leave out --{name}"
                    )
        return options


def at_least(minimum: int) -> Callable[[str], int]:
    """Returns an argparse type that accepts whole numbers of at least `minimum`."""

    def parsed(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} must be at least {minimum}")
        return value

    # argparse shows this name in "invalid int value".
    parsed.__name__ = "int"
    return parsed


def experiment_parser(
    doc: str | None,
    *,
    quick: str = "",
    seed: int | None = None,
    steps: int | None = None,
    lengths: bool = False,
    take: str = "",
) -> ExperimentParser:
    """Returns a parser with the common options that an experiment asks for.

    Args:
        doc: The experiment's docstring. Its first line describes the command.
        quick: Help of `--quick`, besides that it writes nothing. Empty: no such option.
        seed: Default of `--seed`. None: no such option.
        steps: Default of `--steps`, a number of global batches. None: no such option.
        lengths: Whether to add `--lengths FILE ...`, which takes files of document lengths.
        take: Help of `--take`. Empty: no such option.
    """
    parser = ExperimentParser(description=(doc or "").splitlines()[0])
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps, help="number of global batches")
    if seed is not None:
        parser.add_argument("--seed", type=int, default=seed, help="seed of random draws")
    if lengths:
        text = "files of document lengths"
        parser.add_argument("--lengths", nargs="*", default=[], metavar="FILE", help=text)
    if take:
        parser.add_argument("--take", action="store_true", help=take)
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick} and write nothing")
    return parser
