"""`wlb doctor`: check GPUs, kernels, network and files of the machines before a run starts."""

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from wlb.cli.options import add_flag, add_json, add_overrides, add_text, add_value
from wlb.cli.output import command_of, needs_train_extra, write_text
from wlb.cli.sources import check_outputs
from wlb.cli.system import with_system
from wlb.plan import UserError
from wlb.report.tables import console, new_table
from wlb.spec import KNOWN_SYSTEMS, Device, load, presets

PRESETS = {"cpu": "demo_single", "cuda": "7b_128k"}
"""For each type of device, the preset whose requirements are checked if no NAME is given."""

_DESCRIPTION = """\
Check the machines of a run: driver and GPUs, NVLink between TP ranks, NUMA binding, file
descriptors, memory, /dev/shm, disk, the shared folder, token stores, clocks of GPUs and of nodes,
and ECC errors. Also compare the results of every attention kernel with plain attention, measure the
bandwidth of every communicator and compare it with the kernel profile, and measure the speed of
matrix products on each rank.

  wlb doctor                                        this machine
  wlb doctor 7b_128k                                this machine, for a run of 64 ranks
  srun ... wlb doctor 7b_128k --json found.json     all ranks of a job (slurm/doctor.sh)

Without torchrun or Slurm, the command starts as many local ranks as the layout has, if this machine
has enough GPUs (or, on the CPU, if the ranks are few). Otherwise it starts one process and skips
the checks between ranks.

"fail" means that the run would not start, would hang, or would compute wrong numbers. "warn" means
that it would be slower than it should be, or that it is close to a limit. Exit status: 0 if no
check failed, 3 if a check failed, 2 for a wrong command, 1 if the checks could not be completed."""


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb doctor` to the subparsers `commands`."""
    parser = commands.add_parser(
        "doctor",
        help="check GPUs, kernels, network and files of the machines before a run",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = (
        f"a TOML file, or a preset: {', '.join(presets())} (default: demo_single on a CPU, 7b_128k "
        f"on a GPU)"
    )
    parser.add_argument("name", nargs="?", help=text)
    text = f"use the settings of a training system, as in wlb train: {', '.join(KNOWN_SYSTEMS)}"
    add_text(parser, "--system", "SYSTEM", text)
    add_overrides(parser, metavar="KEY=VALUE", help="set keys of the configuration to other values")
    text = "check only the attention kernel that the run uses, and measure for a short time"
    add_flag(parser, "--quick", text)
    text = "seconds after which a group of checks is aborted, and the ranks that hang are named"
    add_value(parser, "--timeout", 300.0, text, metavar="S")
    add_json(parser, "the findings")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `wlb doctor` and return its exit status."""
    if not options.timeout > 0:
        raise UserError(f"--timeout = {options.timeout:g} must be above 0 seconds")
    check_outputs(options.json, needs_plots=False)
    with needs_train_extra("wlb doctor needs"):
        from wlb.doctor import UNFIT, Options, examine
        from wlb.launch.local import RankFailure
        from wlb.parallel.world import choose_device
    if options.name is None:
        options.name = PRESETS[choose_device(Device.AUTO, local_ranks=1).kind]
    spec = load(options.name, with_system(options.name, options.overrides, options.system))
    show = functools.partial(_report, options.name, command_of(options), options.json)
    try:
        is_well = examine(spec, Options(is_quick=options.quick, limit_s=options.timeout, show=show))
    except RankFailure as failure:
        print(f"wlb doctor: {failure}", file=sys.stderr)
        return 1
    return 0 if is_well else UNFIT


def _report(name: str, command: str, json_to: str | None, findings: Sequence[Any]) -> None:
    """Print the findings, and write them as JSON if requested. Only rank 0 calls this function.

    Args:
        name: Preset or TOML file of the run.
        command: The command line, for the JSON.
        json_to: File for the JSON; "-" for stdout; None for no JSON.
        findings: Results of the checks (`wlb.doctor.Finding`).
    """
    from wlb.doctor import Verdict, counts, is_failed

    summary = {str(verdict): count for verdict, count in counts(findings).items()}
    if json_to is not None:
        data = {
            "command": command,
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "verdict": str(Verdict.FAIL if is_failed(findings) else Verdict.PASS),
            "counts": summary,
            "findings": [finding.to_json() for finding in findings],
        }
        text = json.dumps(data, indent=1, allow_nan=False) + "\n"
        if json_to == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        write_text(json_to, text)
    screen = console()
    screen.print(_answer(name, findings), markup=False)
    colours = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    table = new_table(f"wlb doctor {name}", texts=("check", "", "found"))
    for finding in findings:
        colour = colours.get(finding.verdict, "dim")
        found = finding.found + (f"\n-> {finding.remedy}" if finding.remedy else "")
        table.add_row(finding.check, f"[{colour}]{finding.verdict}[/]", escape(found))
    screen.print(table)
    screen.print(", ".join(f"{count} {verdict}" for verdict, count in summary.items() if count))


def _answer(name: str, findings: Sequence[Any]) -> str:
    """Return a sentence that says whether the run can start here, and which checks failed.

    Args:
        name: Name of the run, with which the sentence begins.
        findings: Findings of all checks.
    """
    from wlb.doctor import Verdict

    of = {v: [f for f in findings if f.verdict == v] for v in (Verdict.FAIL, Verdict.WARN)}
    skipped = sum(finding.verdict == Verdict.SKIP for finding in findings)
    rest = f"; checks that do not apply to this machine or layout: {skipped}" if skipped else ""
    failed, warned = (", ".join(f.check for f in of[v]) for v in (Verdict.FAIL, Verdict.WARN))
    if failed:
        remedy = next((f.remedy for f in of[Verdict.FAIL] if f.remedy), "")
        first = f". First {remedy}" if remedy else "."
        return f"{name} cannot run here, because these checks failed: {failed}{first}"
    if warned:
        return f"{name} can run here, but may be slow or close to a limit: {warned}{rest}."
    return f"{name} can run here: no check failed or gave a warning{rest}."
