"""`wlb report`: write a page about a run, compare runs, or say why a run failed; needs no torch."""

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
    """Add the parser of `wlb report` to the subparsers `commands`."""
    parser = commands.add_parser(
        "report",
        help="write a page about a run (loss, speed, balance, ranks), or compare several runs",
        description="Read the metrics.jsonl of a run, which may still be training, and write one "
        "HTML file that needs no network: loss, tokens/s, predicted and measured times, imbalance "
        "with and without balanced packing, a heat map of ranks, the timeline of a step, delays, "
        "stragglers and the configuration. For several runs, print tables instead: loss, speed, "
        "balance, and configuration keys that differ. The page needs matplotlib (pip install "
        "'wlb-llm[plot]'). Torch is not needed.",
        epilog="A straggler is a rank whose ratio of measured to predicted time exceeds the median "
        "over ranks by more than 15% in three consecutive tables of all ranks' times.",
    )
    text = "folder of a run: run.output_dir/run.name"
    parser.add_argument("folders", metavar="RUN", nargs="+", help=text)
    text = "file for the page of one run (default: RUN/report.html)"
    add_text(parser, "--out", "FILE", text)
    text = (
        "step whose timeline is drawn, counted as in the table that training prints. Measured "
        "times are drawn if they were recorded (every 100th step and the last one). Otherwise the "
        "step is simulated, which needs the run's token store (default: the last recorded step)"
    )
    add_text(parser, "--step", "N", text, type=number(int))
    text = (
        "only print why the run ended: which rank failed first, and what each rank was doing. Use "
        "this for a run that is no longer training"
    )
    add_flag(parser, "--failure", text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `wlb report` and return its exit status."""
    if options.failure:
        return _failure([Path(folder) for folder in options.folders])
    is_one = len(options.folders) == 1
    for name, given in (("--step", options.step), ("--out", options.out)):
        if given is not None and not is_one:
            raise UserError(
                f"{name} applies only to the page of one run, but several runs are given; remove "
                f"{name}, or give one RUN"
            )
    sources.check_outputs(options.out, needs_plots=is_one)
    runs = [read_run(Path(folder)) for folder in options.folders]
    # If a run has failed, print the reason before anything else.
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
    """Write the HTML page of one run to the file of --out, or to report.html in its folder."""
    out = Path(options.out or records.folder / "report.html")
    sources.check_outputs(str(out), needs_plots=False)
    command = output.command_of(options)
    output.write_text(out, run_page(records, step=options.step, command=command))
    print(f"written: {out} ({out.stat().st_size / 1024:,.0f} KiB)")


def _started(folder: Path) -> str:
    """Return ", started TIME" for the last time that a run was started; "" if there is no record.

    Args:
        folder: Folder of the run.
    """
    records = newest_records(folder)
    if not records.exists():
        return ""
    began = datetime.fromtimestamp(began_s(records)).isoformat(sep=" ", timespec="seconds")
    return f", started {began}"


def _failure(folders: list[Path]) -> int:
    """Print why each run ended when it was last started; return the exit status.

    Args:
        folders: Folders of the runs.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder; give the folder of a run, run.output_dir/run.name"
            )
        report = compose_report(folder)
        text = report.text if report else "no rank recorded a failure; see logs/ in this folder"
        print(f"{folder}{_started(folder)}: {text}")
    return 0
