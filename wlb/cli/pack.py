"""`wlb pack`: pack an epoch of a token store in advance, for `packing.packs`; needs no torch."""

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
    """Add the parser of `wlb pack`."""
    parser = commands.add_parser(
        "pack",
        help="pack an epoch of a token store offline, for packing.packs",
        description="Pack one epoch of data.store with the packing settings of NAME and write a "
        "file that `--set packing.packs=FILE` trains. Values of packing.method: "
        + ", ".join(METHODS)
        + ".",
        epilog="example: wlb pack my_run.toml --set data.store=stores/chat "
        "packing.method=multipack_bfd_posid --out packs.npz",
    )
    parser.add_argument("name", help="a preset or TOML file; data.store must be set")
    add_overrides(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="an .npz file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    spec = load(options.name, options.overrides)
    if not spec.data.store:
        raise UserError("data.store is empty; name the store to pack by --set data.store=PREFIX")
    if spec.packing.packs:
        raise UserError("packing.packs is set, but `wlb pack` writes such a file; leave it empty")
    path = Path(options.out)
    if path.suffix != ".npz":
        raise UserError(f"--out {options.out} must be an .npz file, such as packs.npz")
    sources.check_outputs(options.out, needs_plots=False)
    store = TokenStore(spec.data.store)
    packs = packs_of(spec, store, workload_for(spec, "cpu"))
    packs.save(path)
    console().print(_table(packs, store))
    print(f"packs: {path}")
    return 0


def _table(packs: Packs, store: TokenStore) -> Table:
    """Return a table that describes the packed epoch."""
    lengths = store.lengths[packs.rows]
    ends = offsets_of(lengths)[packs.offsets]
    tokens = np.diff(ends)
    # Rows include the padding of the layout.
    rows = tokens.copy()
    for i, (start, stop) in enumerate(zip(packs.offsets[:-1], packs.offsets[1:], strict=True)):
        rows[i] = segment_lengths(lengths[start:stop], packs.layout).sum()
    used = tokens[tokens > 0]
    table = facts_table(f"{packs.made_by}, {packs.layout}")
    for name, value in (
        ("documents", f"{packs.rows.size:,}"),
        ("tokens", f"{int(tokens.sum()):,}"),
        ("steps", f"{packs.num_steps:,} of {packs.num_micro_batches} micro-batches"),
        ("documents of a micro-batch", f"{packs.rows.size / max(1, used.size):.1f}"),
        ("tokens of a micro-batch", f"{used.mean():,.0f} on average, {int(used.max()):,} at most"),
        ("padding", f"{1 - tokens.sum() / max(1, int(rows.sum())):.2%} of all rows"),
    ):
        table.add_row(name, value)
    return table
