"""`wlb train`: a preset or TOML file, trained; `--dry-run` shows what would happen."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from wlb.planner.service import PlanningError
from wlb.spec import SYSTEMS, RunSpec, list_keys, load, presets, system_choice
from wlb.train.faults.stop import Signals


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a preset or a TOML file",
        description="Train a preset or a TOML file on the ranks there are: those of torchrun or "
        "Slurm, else as many local processes as the layout asks for.",
        epilog=_keys_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help=f"a TOML file, or a preset: {', '.join(presets())}")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override keys, as in --set training.steps=100 parallel.tp=4",
    )
    parser.add_argument(
        "--system",
        metavar="SYSTEM",
        help=f"settings of one of the systems that are compared: {', '.join(SYSTEMS)}; fixed_4d:2 "
        f"is the second alternative of one that has two; --set comes after it",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print layout, memory and the first plan; train nothing",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="STEP|FOLDER|auto",
        help="go on from the run's last checkpoint, or from that of a step, or a checkpoint's "
        "folder; auto: from the last one if there is one, as jobs that are requeued do",
    )
    parser.add_argument(
        "--calibrate",
        nargs="?",
        const="",
        metavar="NAME_OR_PATH",
        help="at the end fit the kernel profile to what was measured and write it as a new one: "
        "run.output_dir/NAME.json, a path ending in .json, or (no argument) a name made from the "
        "old one; says which terms drifted. Use it by cost.profile=PATH",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    spec = load(options.name, _overrides(options))
    for name, given in (("--calibrate", options.calibrate), ("--resume", options.resume)):
        if options.dry_run and given is not None:
            raise ValueError(f"{name} needs a run that trains; leave --dry-run out")
    if options.dry_run:
        return _dry_run(spec)
    with Signals() as signals:  # caught while torch is imported, which takes seconds
        return _train(spec, options, signals)


def _dry_run(spec: RunSpec) -> int:
    with _needs_torch():
        from wlb.train import dry_run
        from wlb.train.telemetry.display import console
    dry_run.show(spec, console())
    return 0


def _train(spec: RunSpec, options: argparse.Namespace, signals: Signals) -> int:
    with _needs_torch():
        from wlb.launch.local import RankFailure
        from wlb.train import start
        from wlb.train.checkpoint.saver import CheckpointError
        from wlb.train.telemetry.display import console
    screen = console()
    try:
        start.train(
            spec,
            resume=options.resume,
            console=screen,
            calibrate=options.calibrate,
            signals=signals,
        )
    except (RankFailure, FloatingPointError, CheckpointError, PlanningError) as failure:
        print(f"wlb train: {failure}", file=sys.stderr)
        return 1
    finally:
        screen.show_cursor()  # hidden by a live table whose rank was killed
    return 0


@contextmanager
def _needs_torch() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"training needs {error.name}, which is not installed; pip install 'wlb-llm[train]'"
        ) from None


def _overrides(options: argparse.Namespace) -> list[str]:
    """Of --system, then those of --set, which win. A device's memory may be set by either."""
    if not options.system:
        return options.overrides
    memory_gib = load(options.name, options.overrides).cluster.memory_gib
    return [*system_choice(options.system, memory_gib=memory_gib), *options.overrides]


def _keys_help() -> str:
    lines = ["keys of a TOML file and of --set (section.key, default, unit):"]
    section = ""
    for item in list_keys(RunSpec):
        head = item.name.rsplit(".", 1)[0]
        if head != section:
            section = head
            lines.append(f"\n[{section}]")
        unit = f" {item.unit}" if item.unit else ""
        lines.append(f"  {item.name} = {item.default}{unit}  ({item.type})")
        lines.append(f"      {item.doc}")
    return "\n".join(lines)
