"""`wlb init`: print a preset as a TOML file that explains every key, for the user to edit."""

import argparse
from typing import Any

from wlb.cli.options import add_overrides, add_text
from wlb.cli.system import with_system
from wlb.spec import KNOWN_SYSTEMS, load, presets, to_commented_toml

_DESCRIPTION = """\
Print a preset or a TOML file as a complete TOML file to stdout; redirect the output to a file and
edit it. The output has the keys that the preset sets, and all other keys with their defaults,
commented out. A comment explains every key. The unchanged file trains the same run as the preset.

  wlb init demo > my.toml
  wlb init 7b_128k --system wlb --set parallel.dp=4 training.steps=20000 > my.toml
  wlb train my.toml --dry-run"""


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb init` to the subparsers `commands`."""
    parser = commands.add_parser(
        "init",
        help="print a preset as a TOML file with a comment on every key, for you to edit",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help=f"a preset: {', '.join(presets())}; or a TOML file")
    add_overrides(parser, metavar="KEY=VALUE", help="set keys to other values")
    text = f"use the settings of a training system, as in wlb train: {', '.join(KNOWN_SYSTEMS)}"
    add_text(parser, "--system", "SYSTEM", text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `wlb init` and return its exit status."""
    spec = load(options.name, with_system(options.name, options.overrides, options.system))
    made_by = f"wlb {' '.join(options.words)}"
    print(to_commented_toml(spec, comments=(f"Made by {made_by}.",)), end="")
    return 0
