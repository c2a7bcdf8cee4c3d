"""`wlb profile` (or `python -m wlb.profile`): measure kernels and fit a kernel profile."""

import argparse
import datetime
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from wlb.cli.options import add_flag, add_text, number
from wlb.cli.output import command_of, needs_train_extra, write_text
from wlb.cost.machine import program_version, short_name
from wlb.data.folder import make_folder, refuse_file
from wlb.plan import UserError, check_at_least
from wlb.report.tables import console, new_table
from wlb.spec import Device, load, presets

SWEEP = ".sweep.jsonl"
"""Suffix of the file of raw measurements, from which an interrupted `wlb profile` resumes."""


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb profile` to the subparsers `commands`."""
    parser = commands.add_parser(
        "profile",
        help="measure kernels on this machine and write a kernel profile",
        description="Measure attention, matrix products, element-wise operators and collectives, "
        "fit a cost model to the measurements (W_a and W_l of the paper's Eq. 2), and print its "
        "error on measurements that were not used for the fit. "
        "Writes a kernel profile (JSON), plots (PNG, with matplotlib) and a log. To resume an "
        "interrupted measurement, repeat the command. To measure collectives, start the command "
        "under torchrun on several GPUs. kernels_profile/README.md describes the format.",
        epilog="example: wlb profile --out kernels_profile/h200.json; then train with --set "
        "cost.profile=kernels_profile/h200.json",
    )
    parser.add_argument("--device", choices=[str(d) for d in Device], default="auto")
    text = (
        f"preset or TOML file that gives the model, the TP size and the longest document: "
        f"{', '.join(presets())} (default: demo on a CPU, 7b_128k on a GPU)"
    )
    add_text(parser, "--preset", "NAME", text)
    text = "change a key of the preset"
    add_text(parser, "--set", "KEY=VALUE", text, dest="overrides", action="append")
    text = "measure only this attention kernel (default: all that are installed)"
    add_text(parser, "--backend", "NAME", text)
    text = (
        "also measure attention with these numbers of heads per rank and this head size: "
        "HEADSxSIZE or HEADS:KV_HEADSxSIZE, such as 8x64 or 8:2x128"
    )
    add_text(parser, "--heads", "LAYOUT", text, nargs="+", default=[])
    add_text(
        parser,
        "--out",
        "FILE",
        "file of the profile, or an existing folder for it (default: NAME.json)",
        type=Path,
    )
    parser.add_argument("--name", help="name of the profile (default: from --out or the device)")
    text = (
        "GPUs per node of the cluster, on which the predicted times of collectives depend "
        "(default: the number of GPUs visible here if there are several, otherwise 8)"
    )
    add_text(parser, "--ranks-per-node", "N", text, type=number(int))
    add_flag(parser, "--quick", "measure fewer points, in less than a minute")
    add_flag(parser, "--no-plots", "do not draw plots")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `wlb profile` and return its exit status."""
    # Import torch only here, because the import takes seconds and most commands do not need torch.
    with needs_train_extra("profiling needs"):
        from wlb.parallel import world as worlds
        from wlb.profile import PRESETS, run_sweep, settings_of

    begin = time.perf_counter()
    if options.ranks_per_node is not None:
        check_at_least("--ranks-per-node", options.ranks_per_node, 1)
    # 1. Find the ranks and the device.
    world = worlds.discover()
    kind = worlds.choose_device(
        Device(options.device),
        local_ranks=1 if world is None else world.local_world_size,
        one_gpu_each=world is not None and world.one_gpu_each,
    ).kind
    device = worlds.rank_device(world or worlds.World(), kind)
    # 2. Decide what to measure.
    spec = load(options.preset or PRESETS[kind], options.overrides)
    settings = settings_of(
        spec, device=device, backend=options.backend, heads=options.heads, quick=options.quick
    )
    # 3. Check that the results can be written, before measurements that may take hours.
    out, name = _names(options, settings.header()["name"])
    if not options.no_plots:
        from wlb.report.plots import require_matplotlib

        require_matplotlib()
    make_folder(out.parent)
    refuse_file(out)
    screen = console(record=True)
    written = _written(options, out)
    if world is None or not world.rank:
        screen.print(f"profile {name!r}; files that will be written: {written}", markup=False)
    command = command_of(options)
    if world is not None:
        here = world.local_world_size
        command += f" ({world.world_size} ranks started by {world.origin}, {here} on this node)"
        worlds.init(world, device, timeout_s=1800.0)
    try:
        # 4. Measure. All ranks take part, because collectives are measured too.
        start = {
            "date": datetime.date.today().isoformat(),
            "commit": program_version(),
            "command": command,
        }
        path = out.with_suffix(SWEEP)
        records, environment = run_sweep(settings, path, world, screen, start)
    finally:
        worlds.shutdown()
    # 5. Fit and write the profile on rank 0 only.
    if world is not None and world.rank:
        return 0
    _finish(options, settings, records, environment, out, name, screen, begin)
    return 0


def _names(options: argparse.Namespace, device_name: str) -> tuple[Path, str]:
    """Return the path and the name of the profile, from --out and --name or the device's name."""
    file = options.out if options.out is not None and not options.out.is_dir() else None
    name = options.name or (file.stem if file is not None else short_name(device_name))
    out = options.out or Path(f"{name}.json")
    if out.is_dir():
        out /= f"{name}.json"
    if out.suffix != ".json":
        raise UserError(f"--out {out} must end in .json; give a name such as profile.json")
    return out, name


def _finish(
    options: argparse.Namespace,
    settings: Any,
    records: Any,
    environment: dict[str, Any],
    out: Path,
    name: str,
    screen: Console,
    begin: float,
) -> None:
    """Fit the profile to the measurements, print the errors, and write profile, plots and log.

    Args:
        options: The parsed command line.
        settings: What was measured (`wlb.profile.settings_of`).
        records: The measurements.
        environment: Names and versions of the device and the software.
        out: File of the profile.
        name: Name of the profile.
        screen: Console whose output is also written to the log.
        begin: Value of `time.perf_counter` when the command began.
    """
    from wlb.cost.profile_file import save_profile
    from wlb.profile import SweepOrigin, build

    per_node = options.ranks_per_node or visible_gpus(environment["device"])
    origin = SweepOrigin(name=name, environment=environment, ranks_per_node=per_node)
    model, layouts, grid = settings.model, settings.layouts, settings.grid
    built = build(records, model=model, layouts=layouts, grid=grid, origin=origin)
    save_profile(out, built.profile)
    for table in (_attention_table(built), _linear_table(built)):
        screen.print(table)
    if environment["device"] == "cuda" and not per_node:
        screen.print(
            f"note: only one GPU is visible here, so the profile assumes "
            f"{built.profile.ranks_per_node} GPUs per node; change this with --ranks-per-node N"
        )
    for note in built.notes:
        screen.print(f"note: {note}", markup=False)
    for record in built.failed:
        screen.print(f"not measured: {record.kind} {dict(record.point)}: {record.failed}")
    if not options.no_plots:
        _draw(built, settings, plots_folder(out))
    screen.print(f"written after {time.perf_counter() - begin:.0f} s: {_written(options, out)}")
    screen.print(
        f"To use the profile, add --set cost.profile={out} to wlb train, plan, tune or simulate, "
        f"or call wlb.load_profile({str(out)!r}) in Python.",
        markup=False,
    )
    write_text(out.with_suffix(".log"), screen.export_text())


def visible_gpus(device: str) -> int | None:
    """Return the number of GPUs of this node; None if the number is unknown.

    If only one GPU is visible, the number is unknown, because a job with one GPU does not see the
    other GPUs of its node.

    Args:
        device: "cuda" or "cpu".
    """
    import torch

    count = torch.cuda.device_count() if device == "cuda" else 0
    return count if count > 1 else None


def plots_folder(out: Path) -> Path:
    """Return the folder for the plots of the profile `out`. It is next to the profile."""
    return out.with_name(f"{out.stem}_plots")


def _written(options: argparse.Namespace, out: Path) -> str:
    """Return the names of all files that the command writes, joined by commas.

    Args:
        options: The parsed command line.
        out: File of the profile.
    """
    plots = [] if options.no_plots else [f"{plots_folder(out)}/"]
    return ", ".join([str(out), *plots, *(str(out.with_suffix(s)) for s in (".log", SWEEP))])


def _draw(built: Any, settings: Any, folder: Path) -> None:
    """Write the plots of a profile as PNG files.

    Args:
        built: The profile with its measurements (`wlb.profile.build`).
        settings: What was measured (`wlb.profile.settings_of`).
        folder: Folder for the files.
    """
    from wlb.report.profile.plots import profile_figures
    from wlb.report.profile.points import HeldPoint

    figures = profile_figures(
        built.profile,
        model=settings.model,
        records=[asdict(record) for record in built.records],
        held=[
            HeldPoint(table=i, **asdict(point))
            for i, fitted in enumerate(built.attention)
            for point in fitted.points
        ],
    )
    make_folder(folder)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=150)


def _attention_table(built: Any) -> Table:
    """Return a table of the errors of predicted attention times, for calls left out of the fit."""
    numbers = (
        *("heads", "head size", "launch (us)"),
        *("equal segments", "unequal segments", "test-retest"),
    )
    title = (
        "Attention: relative error of predicted times of calls that were not fitted, forward plus "
        "backward: mean (95th percentile, maximum)"
    )
    table = new_table(title, labels=["kernel"], texts=["blocks"], numbers=numbers)
    for fitted in built.attention:
        t, r = fitted.table, fitted.residuals
        launches = f"{t.launch_forward_ns / 1e3:.0f} + {t.launch_backward_ns / 1e3:.0f}"
        if t.group_forward_ns:
            group = f"{t.group_forward_ns / 1e3:.0f} + {t.group_backward_ns / 1e3:.0f}"
            launches += f", per group {group}"
        heads = str(t.num_heads)
        if t.num_kv_heads != t.num_heads:
            heads += f":{t.num_kv_heads}"
        table.add_row(
            t.backends[0],
            blocks_words(t),
            heads,
            str(t.head_dim),
            launches,
            _error(r, "held_pair_total"),
            _error(r, "held_batch_total"),
            f"{r['retest_total']:.1%}" if "retest_total" in r else "",
        )
    return table


def blocks_words(table: Any) -> str:
    """Return "priced" if an attention table prices a call's thread blocks, else "no price"."""
    return "priced" if table.blocks else "no price"


def _error(residuals: dict[str, float], name: str) -> str:
    """Return the mean, 95th percentile and maximum of a relative error as text.

    Args:
        residuals: Statistics of errors by name.
        name: Name of the error, to which "_mape", "_p95" and "_max" are appended.
    """
    values = [residuals.get(f"{name}_{part}") for part in ("mape", "p95", "max")]
    if None in values:
        return "not measured"
    mape, p95, worst = (f"{v:.1%}" for v in values)
    return f"{mape} ({p95}, {worst})"


def _linear_table(built: Any) -> Table:
    """Return a table of the fitted speeds of everything except attention (W_l of Eq. 2)."""
    title = "Everything except attention: fitted speeds, forward / backward"
    table = new_table(title, texts=["part"], numbers=["fitted"])
    profile = built.profile
    for name, surface in (("forward", profile.gemm.forward), ("backward", profile.gemm.backward)):
        low, high = float(surface.values.min()), float(surface.values.max())
        table.add_row(f"GEMM {name}", f"{low:.3g} to {high:.3g} TFLOP/s")
    for cost in profile.elementwise:
        rates = f"{cost.forward_bytes_per_s / 1e9:.3g} / {cost.backward_bytes_per_s / 1e9:.3g} GB/s"
        calls = f"{cost.forward_call_ns / 1e3:.1f} / {cost.backward_call_ns / 1e3:.1f} us a call"
        table.add_row(cost.op, f"{rates}, {calls}")
    table.add_row("head and loss", f"{profile.head.tflops:.3g} TFLOP/s")
    for cost in profile.collectives:
        figures = f"{cost.alpha_ns / 1e3:.0f} us + bytes / {cost.bytes_per_s / 1e9:.3g} GB/s"
        table.add_row(f"{cost.op} {cost.scope}", f"{figures} ({cost.provenance.kind})")
    for key, value in built.residuals.items():
        if key.startswith(("layer_", "operators_")):
            table.add_row(f"held-out layers, {key.replace('_', ' ')}", f"{value:.1%} error")
    return table
