"""Makes the command lines of experiments, so that one option means one thing everywhere."""

import argparse
from collections.abc import Callable
from typing import Any


class ExperimentParser(argparse.ArgumentParser):
    """Refuses --take with other steps or another seed: what is taken would be named after them."""

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
    """The type of an option for whole numbers from `minimum` on."""

    def parsed(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} must be at least {minimum}")
        return value

    # argparse names the type in messages by it.
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
    """Returns a parser with those of the common options that the experiment has.

    Args:
        doc: the experiment's docstring, whose first line describes the command
        quick: what `--quick` does besides writing nothing; "" for experiments without it
        seed: default of `--seed`
        steps: default of `--steps`, a number of global batches
        lengths: whether `--lengths FILE ...` adds files of document lengths
        take: what `--take` does; "" for experiments without it
    """
    parser = ExperimentParser(description=(doc or "").splitlines()[0])
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps, help="number of global batches")
    if seed is not None:
        parser.add_argument("--seed", type=int, default=seed, help="seed of what is drawn")
    if lengths:
        text = "files of document lengths"
        parser.add_argument("--lengths", nargs="*", default=[], metavar="FILE", help=text)
    if take:
        parser.add_argument("--take", action="store_true", help=take)
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick} and write nothing")
    return parser
