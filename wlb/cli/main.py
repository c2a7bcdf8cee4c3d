"""`wlb COMMAND ...`, the same as `python -m wlb` (and `python -m wlb.train` for `wlb train`)."""

import argparse
import sys

from wlb import __version__
from wlb.cli import pack, plan, prepare, profile, report, simulate, train, tune, weights


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0 on success, 2 for bad input (with a message, without a traceback)."""
    parser = argparse.ArgumentParser(
        prog="wlb", description="Workload-balanced 4-D parallelism for LLM training."
    )
    parser.add_argument("--version", action="version", version=f"wlb {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prepare.add_parser(commands)
    train.add_parser(commands)
    pack.add_parser(commands)
    plan.add_parser(commands)
    simulate.add_parser(commands)
    tune.add_parser(commands)
    profile.add_parser(commands)
    report.add_parser(commands)
    weights.add_parsers(commands)
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    options.words = words
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"wlb {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"wlb {options.command}: interrupted", file=sys.stderr)
        return 130
