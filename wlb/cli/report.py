"""`wlb report`: a page of a run, finished or still going. No torch."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from wlb.cli import sources
from wlb.report import read_run, run_page


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="one page of a run: loss, speed, balance, ranks, a step's timeline",
        description="Read metrics.jsonl and write one HTML file that needs no network: loss, "
        "tokens/s, predicted and measured times, imbalance beside Plain-4D, a heat map of ranks, "
        "the timeline of a step, delays, stragglers, configuration. Needs matplotlib, not torch.",
    )
    parser.add_argument("folder", metavar="RUN", help="folder of a run: run.output_dir/run.name")
    parser.add_argument(
        "--out", metavar="FILE", help="where the page goes (default: RUN/report.html)"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="the step whose passes are drawn, as the run's table counts: measured if "
        "it was recorded (telemetry.timeline_interval), else simulated from its plan, which needs "
        "the run's store (default: the last one that was recorded)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    records = read_run(folder)
    out = Path(options.out or folder / "report.html")
    sources.check_outputs(str(out), needs_plots=True)
    command = shlex.join(["wlb", *options.words])
    text = run_page(records, step=options.step, command=command)
    out.write_text(text, "utf-8")
    print(f"written: {out} ({len(text.encode()) / 1024:,.0f} KiB)")
    return 0
