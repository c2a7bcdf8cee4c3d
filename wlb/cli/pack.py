"""`wlb pack`: pack an epoch of a token store before training (`packing.packs`); needs no torch."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from wlb.cli import sources
from wlb.cli.options import add_overrides
from wlb.cost import workload_for
from wlb.data import TokenStore
from wlb.packing import Packs
from wlb.plan import UserError, offsets_of, segment_lengths
from wlb.planner import packs_of
from wlb.report.tables import console, facts_table
from wlb.spec import METHODS, load


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb pack` to the subparsers `commands`."""
    parser = commands.add_parser(
        "pack",
        help="decide before training how an epoch of a token store is packed, and save it",
        description="Pack one epoch of the token store data.store with the packing settings of "
        "NAME, and write the result to a file. `wlb train --set packing.packs=FILE` trains from "
        "this file. Values of packing.method: " + ", ".join(METHODS) + ".",
        epilog="example: wlb pack my_run.toml --set data.store=stores/chat "
        "packing.method=multipack_bfd_posid --out packs.npz",
    )
    parser.add_argument("name", help="a preset or TOML file, in which data.store must be set")
    add_overrides(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="the .npz file to write")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `wlb pack` and return its exit status."""
    spec = load(options.name, options.overrides)
    if not spec.data.store:
        raise UserError("data.store is empty; give the store to pack with --set data.store=PREFIX")
    if spec.packing.packs:
        raise UserError(
            f"packing.packs = {spec.packing.packs} must be empty for `wlb pack`, which packs "
            f'documents itself; add --set packing.packs=""'
        )
    path = Path(options.out)
    if path.suffix != ".npz":
        raise UserError(f"--out {options.out} must end in .npz; give a name such as packs.npz")
    sources.check_outputs(options.out, needs_plots=False)
    store = TokenStore(spec.data.store)
    packs = packs_of(spec, store, workload_for(spec, "cpu"))
    packs.save(path)
    console().print(_table(packs, store))
    print(f"packs: {path}")
    return 0


def _table(packs: Packs, store: TokenStore) -> Table:
    """Return a table with the numbers of documents, tokens, steps and padding of a packed epoch."""
    lengths = store.lengths[packs.rows]
    ends = offsets_of(lengths)[packs.offsets]
    tokens = np.diff(ends)
    # Count the rows of each micro-batch: its tokens and the padding that the layout adds.
    rows = tokens.copy()
    for i, (start, stop) in enumerate(zip(packs.offsets[:-1], packs.offsets[1:], strict=True)):
        rows[i] = segment_lengths(lengths[start:stop], packs.layout).sum()
    used = tokens[tokens > 0]
    table = facts_table(f"{packs.made_by}, {packs.layout}")
    for name, value in (
        ("documents", f"{packs.rows.size:,}"),
        ("tokens", f"{int(tokens.sum()):,}"),
        ("steps", f"{packs.num_steps:,}, with {packs.num_micro_batches} micro-batches each"),
        ("documents per micro-batch", f"{packs.rows.size / max(1, used.size):.1f} on average"),
        ("tokens per micro-batch", f"{used.mean():,.0f} on average, {int(used.max()):,} at most"),
        ("padding", f"{1 - tokens.sum() / max(1, int(rows.sum())):.2%} of all rows"),
    ):
        table.add_row(name, value)
    return table
