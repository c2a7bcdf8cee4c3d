"""`wlb report`: write a page about a finished or current run; needs no torch."""

import argparse
from pathlib import Path
from typing import Any

from wlb.cli import output, sources
from wlb.cli.options import add_text
from wlb.report import read_run, run_page


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="one page of a run: loss, speed, balance, ranks, a step's timeline",
        description="Read metrics.jsonl and write one HTML file that needs no network: loss, "
        "tokens/s, predicted and measured times, imbalance compared with Plain-4D, a heat map of "
        "ranks, the timeline of a step, delays, stragglers, configuration. Works during the run. "
        "Needs matplotlib (extra [plot]), not torch.",
        epilog="A straggler is a rank whose measured / predicted time exceeds the median rank's by "
        "telemetry.straggler_threshold in telemetry.straggler_records consecutive tables of ranks.",
    )
    parser.add_argument("folder", metavar="RUN", help="folder of a run: run.output_dir/run.name")
    add_text(parser, "--out", "FILE", "file of the page (default: RUN/report.html)")
    text = (
        "step whose passes are drawn, as the table of the run counts: measured if recorded "
        "(telemetry.timeline_interval), otherwise simulated from its plan, which needs the run's "
        "store (default: the last recorded step)"
    )
    add_text(parser, "--step", "N", text, type=int)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    records = read_run(folder)
    out = Path(options.out or folder / "report.html")
    sources.check_outputs(str(out), needs_plots=True)
    command = output.command_of(options)
    text = run_page(records, step=options.step, command=command)
    out.write_text(text, "utf-8")
    print(f"written: {out} ({len(text.encode()) / 1024:,.0f} KiB)")
    return 0
