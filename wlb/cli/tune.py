"""`wlb tune packing`: tune packing on sample documents (Section 4.2); needs no torch.

`wlb tune layout` is in `wlb.cli.tune_layout`.
"""

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.progress import track

from wlb.cli import output, settings, sources, tune_layout
from wlb.cli.options import add_flag, add_json, add_text, add_value, number
from wlb.cost import workload_for
from wlb.memory import gpu_budget, memory_estimate
from wlb.memory.estimate import GIB
from wlb.packing.study.saving import gain_of
from wlb.packing.study.tune import (
    PRICES,
    S_MAX,
    STEP_TOKENS,
    THRESHOLDS,
    Tuning,
    TuningGrid,
    finish,
    tune_points,
)
from wlb.plan import check_at_least, check_between
from wlb.report.packing.plots import tuning_figure
from wlb.report.packing.tables import recommendation, tuning_table, uneven, weight_remark
from wlb.report.tables import console
from wlb.simulate.forecast import SavedShare, batches_to_compare, packed_by, simulated_shares
from wlb.spec import Policy, RunSpec, load


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="find packing settings for document lengths, or a layout for a cluster",
        description="Try settings on a sample of documents and recommend one.",
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    packing = what.add_parser(
        "packing",
        help="queue thresholds, S_max, T and delay price",
        description="Sweep queue thresholds (number and values), S_max and T of Algorithm 1 and "
        "the delay price of bounded; print the Pareto front of imbalance, delay and token "
        "variation, and the setting that balances best within a delay budget.",
    )
    sources.add_arguments(packing, steps=160)
    packing.add_argument(
        "--policies", nargs="+", default=["var_len", "bounded"], choices=("var_len", "bounded")
    )
    for name, default, text in (
        ("--thresholds", THRESHOLDS, "candidates for L_i, in context windows"),
        ("--s-max", S_MAX, "candidates for S_max, in context windows"),
        ("--step-tokens", STEP_TOKENS, "candidates for T, in global batches; 0 = no cap"),
        ("--prices", PRICES, "candidates for bounded's delay price, times its default"),
    ):
        add_value(packing, name, default, text, type=number(float))
    add_value(packing, "--max-queues", 2, "most outlier queues", most=16)
    add_value(packing, "--delay-budget", 0.5, "mean delay allowed, in steps")
    add_value(packing, "--rows", 8, "rows of the front that are printed")
    add_flag(packing, "--all", "every column of the front")
    add_json(packing, "points")
    add_text(packing, "--plot", "FILE", "the front as .png, .svg or .pdf")
    add_text(packing, "--out", "FILE", "write the recommended settings as TOML for wlb train")
    packing.set_defaults(run=run)
    tune_layout.add_parser(what)


def run(options: argparse.Namespace) -> int:
    _check(options)
    spec = sources.filled_in(load(options.name, options.overrides), options)
    s_max, left_out = _fitting(options, spec)
    grid = TuningGrid(
        policies=tuple(Policy(name) for name in options.policies),
        thresholds=tuple(options.thresholds),
        max_queues=options.max_queues,
        s_max=s_max,
        step_tokens=tuple(options.step_tokens),
        prices=tuple(options.prices),
    )
    source = sources.open_source(options, spec)
    batches = sources.batches_of(options, spec, source)
    cost = workload_for(spec, options.device)
    progress = console(stderr=True)
    points = list(
        track(
            tune_points(spec, batches, cost, grid=grid),
            total=grid.size(spec),
            description="settings",
            console=progress,
            disable=not progress.is_terminal,
        )
    )
    tuning = finish(points, delay_budget=options.delay_budget)
    if options.plot:
        tuning_figure(tuning).savefig(options.plot, dpi=150)
    facts = sources.facts_shown(source, batches, spec)
    best, masks_labels = tuning.recommended, sources.masks_labels(source)
    is_constant = not masks_labels and uneven(best.summary, spec.training.loss_normalizer)
    keys = settings.all_keys(options, best.overrides, is_constant=is_constant)
    command = shlex.join(["wlb", "train", options.name, "--set", *keys])
    model = settings.priced_model(options, spec, cost.profile.name)
    notes = [
        f"predicted for {model}",
        *weight_remark(best.summary, spec.training.loss_normalizer, masks_labels=masks_labels),
    ]
    if is_constant:
        notes.append("The command above has training.loss_normalizer=constant for that reason.")
    chosen = load(options.name, keys)
    toml = settings.as_toml(chosen, options, why=f"recommended: {best.summary.label}; {notes[0]}")
    if options.out:
        output.write_text(options.out, toml)
    gain, filled = gain_of(spec, batches, cost), sources.filled_in(chosen, options)
    with console(stderr=True).status("simulating"):
        hours = simulated_shares(
            cost,
            batches[: batches_to_compare(spec)],
            usual=sources.usual_of(options, spec),
            ours=[filled, spec],
        )
    data = {
        "balance": gain.to_json(),
        "hours": {"recommended": hours[0].saved, "own": hours[1].saved},
        "source": facts.to_json(),
        "delay_budget": options.delay_budget,
        "is_within_budget": tuning.is_within_budget,
        "recommended": tuning.recommended.to_json(),
        "command": command,
        "front": [p.to_json() for p in tuning.front],
        "points": [p.to_json() for p in tuning.points],
    }
    if output.write_json(options, data):
        return 0
    worth = _worth(options, filled, hours)
    worth += [f"As {options.name} is set: {gain}.", *left_out]
    _show(options, facts.lines, tuning, notes, command, worth)
    return 0


def _fitting(options: argparse.Namespace, spec: RunSpec) -> tuple[tuple[float, ...], list[str]]:
    """The candidates for S_max whose micro-batches fit a GPU's memory, and a line on the others;
    all of them on a CPU, and where none fits.
    """
    given = tuple(options.s_max)
    if options.device == "cpu":
        return given, []
    planned = gpu_budget(spec).planned_bytes
    longest = replace(spec.packing, policy=Policy.BOUNDED, step_tokens=0.0)
    fit = tuple(
        s
        for s in given
        if memory_estimate(packed_by(spec, replace(longest, s_max=s))).total_bytes <= planned
    )
    if not fit or fit == given:
        return given, []
    others = ", ".join(f"{s:g}" for s in given if s not in fit)
    return fit, [
        f"S_max of {others} windows was not tried, because such micro-batches need more than the "
        f"{planned / GIB:.1f} GiB that plans may use."
    ]


def _worth(options: argparse.Namespace, chosen: RunSpec, hours: Sequence[SavedShare]) -> list[str]:
    """What the recommended setting saves beside the run as it is set, and whether it fits."""
    best, own = (share.saved for share in hours)
    said = (
        f"Whole steps simulated, it saves {best:.1%} of the usual loader's GPU hours, and "
        f"{options.name} as it is set {own:.1%}."
    )
    if hours[0].remark:
        said += f" But {hours[0].remark}."
    if options.device == "cpu":
        return [said]
    need, budget = memory_estimate(chosen).total_bytes, gpu_budget(chosen)
    room = f"{need / GIB:.1f} GiB of the {budget.planned_bytes / GIB:.1f} GiB that plans may use"
    if need <= budget.planned_bytes:
        return [said, f"It fits: the fullest rank needs {room}."]
    return [said, f"It does not fit: the fullest rank needs {room}; try lower --s-max."]


def _show(
    options: argparse.Namespace,
    facts: tuple[str, str],
    tuning: Tuning,
    notes: list[str],
    command: str,
    worth: Sequence[str],
) -> None:
    """Prints the recommendation, how to use it, and what it was chosen from."""
    screen = console(markup=False)
    screen.print(recommendation(tuning, delay_budget=options.delay_budget))
    screen.print(f"Use it: {command}", soft_wrap=True)
    for line in worth:
        screen.print(line)
    for line in facts:
        screen.print(line)
    screen.print(tuning_table(tuning, rows=options.rows, has_all=options.all))
    if not options.all:
        screen.print(
            "imbalance: slowest micro-batches over the mean ones, forward and backward; delay: "
            "steps that a token waits; most tokens: of a micro-batch; S: S_max in windows, T: "
            "tokens of a step in global batches, L: thresholds of queues in windows, price: of a "
            "delay; --all has every column"
        )
    for line in notes:
        # A command that is copied must be one line.
        screen.print(line, soft_wrap=True)
    output.print_written(screen, options.plot, options.out, options.json)


def _check(options: argparse.Namespace) -> None:
    """Refuse wrong options before any work."""
    check_between("--delay-budget", options.delay_budget, 0, math.inf)
    check_at_least("--rows", options.rows, 1)
    sources.check_outputs(
        options.json, options.plot, needs_plots=bool(options.plot), settings=options.out
    )
    output.check_figure(options.plot)
