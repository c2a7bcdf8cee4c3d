"""`wlb rehearse`: run ranks of a job on fake CUDA tensors, on one machine without a GPU."""

import argparse
from pathlib import Path
from typing import Any

from wlb.cli import output
from wlb.cli.options import MOST_PROCESSES, add_json, add_overrides, add_text, add_value
from wlb.cli.sources import check_outputs
from wlb.cli.system import with_system
from wlb.plan import check_at_least
from wlb.rehearse.run import ALL, ONE_PER_STAGE, rehearse
from wlb.rehearse.show import as_json, show
from wlb.rehearse.trace import write_trace
from wlb.report.tables import console
from wlb.spec import KNOWN_SYSTEMS, load, presets

_DESCRIPTION = """\
Run ranks of a job on fake GPUs, on a machine without a GPU. The planner, mesh, trainer, backward
pass, optimizer, evaluation and checkpoint copies are the real ones; tensors have shapes but no
values.

  wlb rehearse 7b_128k                        one rank of each pipeline stage, three steps
  wlb rehearse run.toml --ranks 0,63          some ranks
  wlb rehearse 7b_128k --ranks all --jobs 8   all ranks; proves that they cannot deadlock

Prints the memory of each kind with its estimate, the memory that torch's allocator would reserve,
the predicted times of kernels and communication (exposed = the compute stream waits for it), and
the places where the host waits for the device. These faults are reported with rank, step,
operator, file and line: a tensor on the wrong device, a race between streams, memory freed while in
use, collectives that differ between ranks, sends without a matching receive, a deadlock, and too
little memory. A rehearsal computes no values and measures no times. It needs a C++ compiler for a
small library, which is compiled once."""


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb rehearse` to the subparsers `commands`."""
    parser = commands.add_parser(
        "rehearse",
        help="run ranks of a job on fake GPUs, to find errors without a cluster",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help=f"a TOML file, or a preset: {', '.join(presets())}")
    text = "set configuration keys to other values, as in --set data.store=... parallel.tp=4"
    add_overrides(parser, metavar="KEY=VALUE", help=text)
    text = f"use the settings of a training system, as in wlb train: {', '.join(KNOWN_SYSTEMS)}"
    add_text(parser, "--system", "SYSTEM", text)
    text = (
        f"ranks to rehearse: {ALL}, {ONE_PER_STAGE} (one rank of each pipeline stage), or rank "
        f"numbers such as 0,63"
    )
    add_value(parser, "--ranks", ONE_PER_STAGE, text)
    add_value(parser, "--steps", 3, "number of steps to rehearse", most=10_000)
    text = "number of ranks that are rehearsed at the same time, each in its own process"
    add_value(parser, "--jobs", 1, text, most=MOST_PROCESSES)
    text = "write a trace of kernels and transfers to this file, which Perfetto can display"
    add_text(parser, "--trace", "FILE", text)
    add_json(parser, "the results")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `wlb rehearse` and return its exit status."""
    check_at_least("--steps", options.steps, 1)
    check_at_least("--jobs", options.jobs, 1)
    overrides = with_system(options.name, options.overrides, options.system)
    check_outputs(options.trace, options.json, needs_plots=False)
    quiet = console(stderr=True)
    with output.needs_train_extra("a rehearsal needs"):
        found = rehearse(
            load(options.name, overrides),
            ranks=options.ranks,
            steps=options.steps,
            jobs=options.jobs,
            traces=bool(options.trace),
            tell=lambda line: quiet.print(line) if quiet.is_terminal else None,
        )
    if options.trace:
        write_trace(Path(options.trace), found.ranks)
    if not output.write_json(options, as_json(found)):
        show(found, console())
    return 0 if found.passed else 1
