"""`wlb report`: write the page of a run, compare runs, or say why one failed; needs no torch."""

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

from wlb.cli import output, sources
from wlb.cli.options import add_flag, add_text, number
from wlb.launch.failure import began_s, newest_records
from wlb.launch.report import compose_report
from wlb.plan import UserError
from wlb.report.run.compare import runs_tables
from wlb.report.run.page import run_page
from wlb.report.run.records import RunRecords, read_run
from wlb.report.tables import console


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb report`."""
    parser = commands.add_parser(
        "report",
        help="a run's page: loss, speed, balance, ranks, a step's timeline; a table of several",
        description="Read metrics.jsonl and write one HTML file that needs no network: loss, "
        "tokens/s, predicted and measured times, imbalance compared with the usual loader's, a "
        "heat map of ranks, the timeline of a step, delays, stragglers, configuration. Works "
        "during the run. "
        "Of several runs it prints tables instead: loss, speed, balance, keys that differ. "
        "The page needs matplotlib (extra [plot]); nothing needs torch.",
        epilog="A straggler is a rank whose measured / predicted time exceeds the median rank's by "
        "15% in three consecutive tables of ranks.",
    )
    text = "folder of a run: run.output_dir/run.name"
    parser.add_argument("folders", metavar="RUN", nargs="+", help=text)
    text = "file of the page of one run (default: RUN/report.html)"
    add_text(parser, "--out", "FILE", text)
    text = (
        "step whose passes are drawn, counted as in training's table: measured if recorded (every "
        "100th step and the last), otherwise simulated from its plan, which needs the run's store "
        "(default: the last recorded step)"
    )
    add_text(parser, "--step", "N", text, type=number(int))
    text = (
        "only say what ended the last start of a run that is not training any more: the rank that "
        "failed first, and where each rank was"
    )
    add_flag(parser, "--failure", text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.failure:
        return _failure([Path(folder) for folder in options.folders])
    is_one = len(options.folders) == 1
    for name, given in (("--step", options.step), ("--out", options.out)):
        if given is not None and not is_one:
            raise UserError(f"{name} is for the page of one run; leave it out, or give one RUN")
    sources.check_outputs(options.out, needs_plots=is_one)
    runs = [read_run(Path(folder)) for folder in options.folders]
    # If a run has failed, print why before anything else.
    for each in runs:
        if (report := compose_report(each.folder, is_over=False)) is not None:
            print(f"{each.folder}: {report.text}")
    if is_one:
        _write_page(options, runs[0])
    else:
        screen = console(markup=False)
        for table in runs_tables(runs):
            screen.print(table)
    return 0


def _write_page(options: argparse.Namespace, records: RunRecords) -> None:
    """Write the HTML page of one run."""
    out = Path(options.out or records.folder / "report.html")
    sources.check_outputs(str(out), needs_plots=False)
    command = output.command_of(options)
    output.write_text(out, run_page(records, step=options.step, command=command))
    print(f"written: {out} ({out.stat().st_size / 1024:,.0f} KiB)")


def _started(folder: Path) -> str:
    """Return when the last start of a run began, in words; "" if it left no records."""
    records = newest_records(folder)
    if not records.exists():
        return ""
    began = datetime.fromtimestamp(began_s(records)).isoformat(sep=" ", timespec="seconds")
    return f", started {began}"


def _failure(folders: list[Path]) -> int:
    """Print what ended the last start of each run."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is no folder; give the folder of a run: run.output_dir/run.name"
            )
        report = compose_report(folder)
        text = report.text if report else "no rank of it left a record of a failure; see the log"
        print(f"{folder}{_started(folder)}: {text}")
    return 0
