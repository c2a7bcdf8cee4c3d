"""`wlb tune packing`: find good packing settings for given documents (Section 4.2), without torch.

`wlb tune layout`, which searches parallel layouts, is in `wlb.cli.tune_layout`.
"""

import argparse
import math
import shlex
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import track

from wlb.cli import output, settings, sources, tune_layout
from wlb.cli.options import add_flag, add_json, add_text, add_value, number
from wlb.cost import workload_for
from wlb.memory import gpu_budget, memory_estimate
from wlb.memory.estimate import GIB
from wlb.packing.study.saving import gain_over, usual_and_own
from wlb.packing.study.tune import (
    PRICES,
    S_MAX,
    STEP_TOKENS,
    THRESHOLDS,
    TuningGrid,
    finish,
    tune_points,
)
from wlb.plan import check_at_least, check_between
from wlb.report.packing.choice import (
    PackingChoice,
    choice_table,
    how_chosen,
    in_words,
    switch_verdict,
)
from wlb.report.packing.plots import tuning_figure
from wlb.report.packing.tables import tuning_table, uneven, weight_remark
from wlb.report.tables import console
from wlb.simulate import simulate_run
from wlb.simulate.forecast import batches_to_compare, packed_by, share_saved
from wlb.spec import Policy, RunSpec, load


def add_parser(commands: Any) -> None:
    """Add the parsers of `wlb tune packing` and `wlb tune layout` to the subparsers `commands`."""
    parser = commands.add_parser(
        "tune",
        help="find good packing settings for given documents, or a parallel layout for a cluster",
        description="Try settings on a sample of documents, and recommend the best setting.",
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    packing = what.add_parser(
        "packing",
        help="find good packing settings: queue thresholds, S_max, T and the price of delay",
        description="Try combinations of queue thresholds, S_max (most tokens of a micro-batch) "
        "and T (most tokens of a step) for the policy var_len (the paper's Algorithm 1), and of "
        "S_max, T and packing.delay_price for the policy bounded. Recommends the setting with the "
        "lowest imbalance among those whose mean delay is within --delay-budget. --all prints the "
        "Pareto front of imbalance, delay and variation of tokens per step.",
    )
    sources.add_arguments(packing, steps=160)
    packing.add_argument(
        "--policies", nargs="+", default=["var_len", "bounded"], choices=("var_len", "bounded")
    )
    for name, default, text in (
        ("--thresholds", THRESHOLDS, "queue thresholds to try, in context windows"),
        ("--s-max", S_MAX, "values of S_max to try, in context windows"),
        ("--step-tokens", STEP_TOKENS, "values of T to try, in global batches; 0 = no limit"),
        (
            "--prices",
            PRICES,
            "factors for packing.delay_price to try with the policy bounded (1 = its default)",
        ),
    ):
        add_value(packing, name, default, text, type=number(float))
    text = "largest number of queues for outliers to try"
    add_value(packing, "--max-queues", 2, text, most=16)
    text = "largest mean delay that the recommended setting may have, in steps"
    add_value(packing, "--delay-budget", 0.5, text)
    add_value(packing, "--rows", 8, "number of settings that --all prints")
    add_flag(
        packing,
        "--all",
        "also print the Pareto front: the settings that no other one beats in imbalance, delay and "
        "variation of tokens together",
    )
    add_json(packing, "the results of all settings")
    text = "draw the Pareto front of imbalance and delay (.png, .svg or .pdf)"
    add_text(packing, "--plot", "FILE", text)
    text = "write a TOML file with the recommended settings, for wlb train"
    add_text(packing, "--out", "FILE", text)
    packing.set_defaults(run=run)
    tune_layout.add_parser(what)


def run(options: argparse.Namespace) -> int:
    """Run `wlb tune packing` and return its exit status."""
    # 1. Load the run, and keep only the values of S_max that fit in memory.
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
    # 2. Try all settings on the same documents.
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
    # 3. Write the recommended setting as a command and as TOML.
    best, masks_labels = tuning.recommended, sources.masks_labels(source)
    is_constant = not masks_labels and uneven(best.summary, spec.training.loss_normalizer)
    keys = settings.all_keys(options, best.overrides, is_constant=is_constant)
    store = [] if options.corpus else ["data.store=PREFIX"]
    command = shlex.join(["wlb", "train", options.name, "--set", *store, *keys])
    model = settings.priced_model(options, spec, cost.profile.name)
    chosen = load(options.name, keys)
    why = f"recommended: {best.summary.label}; predicted for {model}"
    if options.out:
        output.write_text(options.out, settings.as_toml(chosen, options, why=why))
    # 4. Simulate whole steps with the recommended setting, the usual loader and the run's present
    # setting.
    usual_row, own_row = usual_and_own(spec, batches, cost)
    filled = sources.filled_in(chosen, options)
    sample = batches[: batches_to_compare(spec)]
    with console(stderr=True).status("simulating"):
        usual, own, ours = (
            simulate_run(run, cost, sample)
            for run in (sources.usual_of(options, spec), spec, filled)
        )
    switch = share_saved(ours, own)
    hours = {"recommended": share_saved(ours, usual).saved, "own": share_saved(own, usual).saved}
    gain = gain_over(usual_row, own_row)
    # 5. Write the JSON, or print the answer.
    data = {
        "balance": gain.to_json(),
        "hours": {**hours, "switch": switch.saved, "switch_error": switch.error},
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
    choices = (
        PackingChoice("usual loader", usual_row, 1.0),
        PackingChoice(f"{options.name}, present", own_row, 1 - hours["own"]),
        PackingChoice("recommended", best.summary, 1 - hours["recommended"]),
    )
    screen = console(markup=False)
    screen.print(
        switch_verdict(
            options.name,
            best=hours["recommended"],
            own=hours["own"],
            error=switch.error,
            steps=len(sample),
        )
    )
    screen.print(f"Simulated for {model}.")
    for line in _fits(options, filled):
        screen.print(line)
    screen.print(choice_table(choices))
    screen.print(f"Recommended: {in_words(filled.packing)}.")
    _say_how_to_use_it(screen, options, command)
    if is_constant:
        screen.print(
            f"training.loss_normalizer=constant divides the loss by a constant instead of the "
            f"step's number of labels, which differs from step to step. Every label then has the "
            f"same weight; otherwise labels of the longest documents would have "
            f"{best.summary.long_weight:.2f} times the mean weight."
        )
    for line in (how_chosen(tuning), *left_out, *facts.lines):
        screen.print(line)
    if options.all:
        screen.print(f"With the present packing of {options.name}: {gain}.")
        screen.print(tuning_table(tuning, rows=options.rows))
        normalizer = spec.training.loss_normalizer
        for line in weight_remark(best.summary, normalizer, masks_labels=masks_labels):
            screen.print(line)
    output.print_written(screen, options.plot, options.out, options.json)
    return 0


def _say_how_to_use_it(screen: Console, options: argparse.Namespace, command: str) -> None:
    """Print how the recommended setting is used in each kind of training loop."""
    screen.print("To use it:")
    # Do not break the command into lines, so that a user can copy it.
    screen.print(f"- in wlb's trainer: {command}", soft_wrap=True)
    if not options.corpus:
        screen.print(
            "  Replace PREFIX by the path of your token store without its suffix (Megatron's .bin "
            "and .idx files, which `wlb prepare` also makes)."
        )
    screen.print(
        "- in Megatron-Core, torchtitan, transformers or TRL: give the same settings to an adapter "
        "(wlb/adapters/README.md)."
    )
    screen.print(
        f"- for another model or number of GPUs: run `wlb init {options.name} > my.toml`, change "
        f"my.toml, and run `wlb tune packing my.toml`."
    )


def _fitting(options: argparse.Namespace, spec: RunSpec) -> tuple[tuple[float, ...], list[str]]:
    """Return the values of --s-max that fit in GPU memory, and a remark about the other values.

    On a CPU, or if no value fits, all values are returned. The list of remarks is empty if all
    values are returned.
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
        f"--s-max {others} (context windows) was not tried, because micro-batches of this size "
        f"need more than the {planned / GIB:.1f} GiB of GPU memory that training may use."
    ]


def _fits(options: argparse.Namespace, chosen: RunSpec) -> list[str]:
    """Return [a sentence that says whether the setting fits in GPU memory]; [] on a CPU."""
    if options.device == "cpu":
        return []
    need, budget = memory_estimate(chosen).total_bytes, gpu_budget(chosen)
    planned = budget.planned_bytes
    needs = (
        f"of {chosen.parallel.world_size:,} GPUs, the one that needs most memory needs "
        f"{need / GIB:.1f} GiB, and training may use {planned / GIB:.1f} of its {budget.gib:g} GiB"
    )
    if need <= planned:
        return [f"The recommended packing fits in GPU memory: {needs}."]
    return [f"The recommended packing does not fit in GPU memory: {needs}; lower --s-max."]


def _check(options: argparse.Namespace) -> None:
    """Raise a UserError for invalid options, before any work is done."""
    check_between("--delay-budget", options.delay_budget, 0, math.inf)
    check_at_least("--rows", options.rows, 1)
    sources.check_outputs(
        options.json, options.plot, needs_plots=bool(options.plot), settings=options.out
    )
    output.check_figure(options.plot)
