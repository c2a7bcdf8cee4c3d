"""Checks in an hour what wlb claims about GPUs, on the GPUs of this machine.

`python -m experiments.gpu_hour` uses the GPUs of this node; with `--device cpu --quick` it tries
the program on a laptop. It checks the machine, runs the tests that need a GPU, measures kernels,
trains small runs, and compares each result with the claim or prediction. Started again with the
same --out, it resumes where it stopped.

It writes gpu_hour.html, a page to read, and gpu_hour.json, the file to send back to wlb's authors.
Exit status: 0, 2 for wrong arguments, 3 if a claim failed.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from experiments.gpu_hour.page import conditions, document, write_page
from experiments.gpu_hour.parts import PARTS, parts_for
from experiments.gpu_hour.running import read_whole, run_parts
from experiments.gpu_hour.setting import Setting
from experiments.harness.arguments import experiment_parser
from experiments.harness.files import write_json


def arguments() -> argparse.Namespace:
    parser = experiment_parser(__doc__)
    parser.prog = "python -m experiments.gpu_hour"
    parser.add_argument(
        "--gpus", type=int, choices=(1, 8), help="default: 8 if there are 8, else 1"
    )
    parser.add_argument("--minutes", type=float, default=60, help="for all parts together")
    parser.add_argument("--quick", action="store_true", help="short forms of all parts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_hour"), help="folder of results")
    names = ", ".join((*(part.name for part in PARTS), "steps"))
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=f"of {names}")
    options = parser.parse_args()
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cuda" and not visible:
        parser.error("torch sees no GPU; --device cpu --quick tries the hour on a CPU")
    if options.gpus is None:
        options.gpus = 8 if visible >= 8 else 1
    if options.device == "cpu":
        options.gpus = 0
    elif options.gpus > visible:
        parser.error(f"--gpus {options.gpus}: torch sees {visible}")
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes} must be above 0")
    return options


def another_setting(setting: Setting) -> str:
    """Returns why the results folder cannot be resumed with this setting, or "" if it can.

    It cannot if its results come from another device, another number of GPUs or another length. If
    it can, the setting is written into the folder for the next start.
    """
    path = setting.folder / "setting.json"
    wanted = {"device": setting.device, "gpus": setting.gpus, "quick": setting.quick}
    found = read_whole(path)
    if found and found != wanted:
        return f"{setting.folder} has results of {found}, not of {wanted}; give another --out"
    write_json(path, wanted)
    return ""


def main() -> int:
    options = arguments()
    setting = Setting(
        folder=options.out.resolve(), device=options.device, gpus=options.gpus, quick=options.quick
    )
    setting.folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    try:
        parts = parts_for(setting, options.only)
    except ValueError as error:
        console.print(f"gpu_hour: {error}")
        return 2
    if other := another_setting(setting):
        console.print(f"gpu_hour: {other}", markup=False)
        return 2
    about = conditions(setting)
    found = run_parts(setting, parts, console, seconds=options.minutes * 60)
    made = document(setting, found, about)
    path = setting.folder / "gpu_hour.json"
    write_json(path, made, indent=1)
    page = write_page(made, setting.folder / "gpu_hour.html")
    for row in made["claims"]:
        console.print(
            f"{row['verdict']:8} {row['claim']}: claimed {row['claimed']}, measured "
            f"{row['measured']}",
            markup=False,
        )
    for line in made["advice"]:
        console.print(f"to change: {line}", markup=False)
    console.print(f"wrote {page} and {path}; please send the JSON back", markup=False)
    return 3 if any(row["verdict"] == "failed" for row in made["claims"]) else 0


if __name__ == "__main__":
    sys.exit(main())
