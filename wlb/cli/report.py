"""`wlb report`: write a page about runs, or say what ended one; needs no torch."""

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from wlb.cli import output, sources
from wlb.cli.options import add_flag, add_text, number
from wlb.launch.failure import began_s, newest_records
from wlb.launch.report import compose_report
from wlb.plan import UserError
from wlb.report import read_run, run_page, runs_page

SEVERAL = "runs.html"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="one page of a run, or of several: loss, speed, balance, ranks, a step's timeline",
        description="Read metrics.jsonl and write one HTML file that needs no network: loss, "
        "tokens/s, predicted and measured times, imbalance compared with Plain-4D, a heat map of "
        "ranks, the timeline of a step, delays, stragglers, configuration. Works during the run. "
        "Several runs are compared on one page: loss by tokens, speed, balance, keys that differ. "
        "Needs matplotlib (extra [plot]), not torch.",
        epilog="A straggler is a rank whose measured / predicted time exceeds the median rank's by "
        "15% in three consecutive tables of ranks.",
    )
    text = "folder of a run: run.output_dir/run.name"
    parser.add_argument("folders", metavar="RUN", nargs="+", help=text)
    text = f"file of the page (default: RUN/report.html; of several runs {SEVERAL} here)"
    add_text(parser, "--out", "FILE", text)
    text = (
        "step whose passes are drawn, as the table of the run counts: measured if recorded (every "
        "100th step and the last), otherwise simulated from its plan, which needs the run's store "
        "(default: the last recorded step)"
    )
    add_text(parser, "--step", "N", text, type=number(int))
    text = (
        "only say what ended the last start of a run, which nothing trains any more: the rank that "
        "failed first, and where each rank was"
    )
    add_flag(parser, "--failure", text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.failure:
        return _failure([Path(folder) for folder in options.folders])
    sources.check_outputs(options.out, needs_plots=True)
    runs = [read_run(Path(folder)) for folder in options.folders]
    is_one = len(runs) == 1
    for each in runs:
        if (report := compose_report(each.folder, is_over=False)) is not None:
            print(f"{each.folder}: {report.text}")
    if options.step is not None and not is_one:
        raise UserError("--step draws a step of one run; leave it out, or give one RUN")
    out = Path(options.out or (runs[0].folder / "report.html" if is_one else SEVERAL))
    sources.check_outputs(str(out), needs_plots=False)
    command = output.command_of(options)
    if is_one:
        text = run_page(runs[0], step=options.step, command=command)
    else:
        text = runs_page(runs, command=command)
    output.write_text(out, text)
    print(f"written: {out} ({out.stat().st_size / 1024:,.0f} KiB)")
    return 0


def _started(folder: Path) -> str:
    """When the start began that a report is of, "" without records of one."""
    records = newest_records(folder)
    if not records.exists():
        return ""
    began = datetime.fromtimestamp(began_s(records)).isoformat(sep=" ", timespec="seconds")
    return f", started {began}"


def _failure(folders: list[Path]) -> int:
    """Print what ended the last start of each run."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; give that of a run: run.output_dir/run.name")
        report = compose_report(folder)
        text = report.text if report else "no rank of it left a record of a failure; see the log"
        print(f"{folder}{_started(folder)}: {text}")
    return 0
