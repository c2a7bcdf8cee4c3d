"""`wlb simulate`: simulate a run on a cluster and compare it with other systems.

Only the options --replay and --run need torch.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wlb.cli import finished_run, output, sources
from wlb.cli.options import add_flag, add_json, add_text, number
from wlb.cost import mismatches, workload_for
from wlb.cost.machine import program_version
from wlb.memory import planned_gib
from wlb.packing.study.saving import gain_of
from wlb.plan import GlobalBatch, UserError, check_at_least
from wlb.plan.tally import BalanceGain
from wlb.report.simulation import layout_text, simulation_table, worth_line, worth_of
from wlb.report.tables import console, new_table
from wlb.report.timeline import timeline_figure
from wlb.simulate import (
    RunSimulation,
    Simulation,
    check_memory,
    critical_path,
    planner_of,
    sharded_steps,
    simulate_run,
    write_trace,
)
from wlb.simulate.forecast import share_saved
from wlb.simulate.published import published_error, trust_line
from wlb.spec import KNOWN_SYSTEMS, USUAL, RunSpec, load, system_overrides

REPLAYED_SHORTEST_S = 0.04
"""Duration in seconds to which --replay scales the shortest pass. The overhead of the executor, 1
to 2 ms for each pass, is small in comparison."""


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb simulate` to the subparsers `commands`."""
    parser = commands.add_parser(
        "simulate",
        help="simulate steps of a run on a cluster and compare systems",
        description="Pack, shard and simulate the same global batches with the configuration NAME "
        "and with the settings of other systems. Prints step time, tokens/s, bubbles, memory and "
        "the parts of the critical path. All times follow from the kernel profile; "
        "wlb/simulate/README.md lists what is modelled. A layout that does not fit in "
        "cluster.memory_gib, less a reserve, is refused.",
        epilog="example: wlb simulate 7b_128k --synthetic wlb_paper --systems usual plain_4d "
        "paper wlb --trace step.json --timeline step.png",
    )
    source = sources.add_arguments(parser)
    text = (
        "simulate the steps of a finished run (folder run.output_dir/run.name), and compare the "
        "simulated times with the measured times. This option may be combined only with --set "
        "cost.profile=... and --json. It needs torch and the run's token store"
    )
    add_text(source, "--run", "FOLDER", text, dest="recorded")
    text = (
        f"systems with which the run is compared: {', '.join(KNOWN_SYSTEMS)}. usual (the default) "
        f"is the loader of Megatron-LM and torchtitan, plain_4d is the paper's baseline. Speed-ups "
        f"are relative to the first system"
    )
    known = list(KNOWN_SYSTEMS)
    add_text(parser, "--systems", "SYSTEM", text, nargs="*", default=[USUAL], choices=known)
    text = "number of the step that is drawn and explained (default: the step of median time)"
    parser.add_argument("--step", type=number(int), help=text)
    text = "write a trace of the step of --step, which Perfetto or chrome://tracing can display"
    add_text(parser, "--trace", "FILE", text)
    text = "draw a timeline of the step of --step (.png, .svg or .pdf)"
    add_text(parser, "--timeline", "FILE", text)
    add_json(parser, "the results")
    text = (
        "print all columns, how the numbers of the kernel profile were obtained, and the parts of "
        "the step of --step"
    )
    add_flag(parser, "--all", text)
    add_flag(parser, "--over-memory", "also simulate layouts that do not fit in memory")
    text = "stop with an error if the kernel profile has no measurements for a part of the run"
    add_flag(parser, "--strict", text)
    text = (
        "also execute the first N steps (default: 4) of each system with the real pipeline "
        "executor, in processes that wait for the simulated times instead of computing, and "
        "compare the durations; needs torch"
    )
    add_text(parser, "--replay", "N", text, nargs="?", type=number(int), const=4)
    parser.set_defaults(run=run, defaults=parser.parse_args([]))


def run(options: argparse.Namespace) -> int:
    """Run `wlb simulate` and return its exit status."""
    if options.recorded:
        finished_run.refuse_others(options, options.defaults)
    if options.json == "-" and options.replay is not None:
        raise UserError(
            "--replay and --json without FILE both print to stdout; give --json FILE, or remove "
            "--replay or --json"
        )
    written = (options.json, options.trace, options.timeline)
    sources.check_outputs(*written, needs_plots=bool(options.timeline))
    output.check_figure(options.timeline)
    if options.recorded:
        return finished_run.show(options)
    # 1. Load the run and the documents.
    spec = priced_spec(load(options.name, options.overrides), options)
    source = sources.open_source(options, spec)
    batches = sources.batches_of(options, spec, source)
    systems = {name: _alternatives(options, spec, name) for name in options.systems}
    # 2. Simulate all systems, and the run itself last.
    runs: list[RunSimulation] = []
    quiet = console(stderr=True)
    for label, alternatives in {**systems, "run": [spec]}.items():
        if quiet.is_terminal:
            quiet.print(f"simulating {label}")
        runs.append(_fastest(options, alternatives, batches, label))
    own = runs[-1]
    # 3. Choose the step of the run that is drawn and explained.
    step = _chosen(options, own)
    simulation = own.simulation_of(step)
    _write(options, simulation, step)
    # 4. Print the results.
    spec = own.simulator.spec
    gain = gain_of(spec, batches, own.simulator.cost)
    _show(options, runs, simulation, step, source.name, gain)
    if options.replay is not None:
        return _replay(options, batches, runs)
    return 0


def priced_spec(spec: RunSpec, options: argparse.Namespace) -> RunSpec:
    """Return the run with dp, vocabulary size and S_max filled in, and planner.baseline = false.

    With false the planner does not also pack as the usual loader does. `gain_of` does so later.
    """
    spec = replace(spec, planner=replace(spec.planner, baseline=False))
    return sources.filled_in(spec, options)


def _alternatives(options: argparse.Namespace, spec: RunSpec, system: str) -> list[RunSpec]:
    """Return configurations with which wlb trains as another system would, such as Megatron-LM.

    They have the run's parallel layout. A system may have several alternative configurations, of
    which the fastest is used.

    Args:
        options: The parsed command line.
        spec: The run.
        system: Name of the system (`wlb.spec.systems`).
    """
    return [
        replace(
            priced_spec(load(options.name, [*options.overrides, *overrides]), options),
            parallel=spec.parallel,
        )
        for overrides in system_overrides(system, planned_gib=planned_gib(spec))
    ]


def _fastest(
    options: argparse.Namespace,
    alternatives: Sequence[RunSpec],
    batches: Sequence[GlobalBatch],
    label: str,
) -> RunSimulation:
    """Simulate configurations, and return the simulation of the fastest that fits in memory.

    Args:
        options: The parsed command line.
        alternatives: Configurations of one system, such as Megatron-LM, or that of the run.
        batches: Global batches to simulate.
        label: Name of the system in the output; "run" for the run.

    Raises:
        UserError: None of them can be simulated. The message says why the first one cannot.
    """
    fits: list[RunSimulation] = []
    refused: list[UserError] = []
    for spec in alternatives:
        try:
            cost = workload_for(spec, options.device)
            if options.strict and mismatches(cost):
                raise UserError(
                    f"cost.profile = {spec.cost.profile} does not cover this run: "
                    f"{'; '.join(mismatches(cost))}; measure a profile for this run with `wlb "
                    f"profile`, or remove --strict"
                )
            made = simulate_run(spec, cost, batches, label=label)
            if not options.over_memory:
                check_memory(made)
            fits.append(made)
        except UserError as error:
            refused.append(error)
    if not fits:
        raise refused[0]
    return min(fits, key=lambda made: made.time_s)


def _chosen(options: argparse.Namespace, made: RunSimulation) -> int:
    """Return the number of the step to show in detail: --step, or else a step of median time."""
    count = made.step_time_s.size
    if options.step is None:
        return int(np.argsort(made.step_time_s, kind="stable")[count // 2])
    if not 0 <= options.step < count:
        raise UserError(
            f"--step = {options.step} must be the number of a simulated step, from 0 to {count - 1}"
        )
    return options.step


def _write(options: argparse.Namespace, simulation: Simulation, step: int) -> None:
    """Write the files of --trace and --timeline, if these options are given.

    Args:
        options: The parsed command line.
        simulation: Simulation of one step.
        step: Number of this step.
    """
    if options.trace:
        write_trace(options.trace, simulation, first_step=step)
    if options.timeline:
        pipeline = critical_path(simulation).main_pipeline
        title = f"step {step} of {options.name}, pipeline {pipeline}"
        figure = timeline_figure(simulation, 0, pipeline, title=title)
        figure.savefig(options.timeline, dpi=150)


def _show(
    options: argparse.Namespace,
    runs: list[RunSimulation],
    simulation: Simulation,
    step: int,
    source: str,
    gain: BalanceGain,
) -> None:
    """Write the results as JSON if requested, and print tables unless the JSON went to stdout.

    Args:
        options: The parsed command line.
        runs: Simulations of the systems to compare with (such as Megatron-LM), then of the run.
        simulation: Simulation of the one step whose critical path and bubble are printed.
        step: Number of this step.
        source: Name of the documents.
        gain: Predicted imbalance with the run's packing and with the usual loader.
    """
    own, cost = runs[-1], runs[-1].simulator.cost
    data = {
        "command": output.command_of(options),
        "version": program_version(),
        "profile": cost.profile.name,
        "worth": dict(worth_of(cost.profile)),
        "notes": list(mismatches(cost)),
        "trust": trust_line(own.simulator.spec, cost.profile),
        "spec": own.simulator.spec.to_dict(),
        "balance": gain.to_json(),
        "runs": [r.to_json() for r in runs],
    }
    if output.write_json(options, data):
        return
    screen = console(markup=False)
    if len(runs) > 1:
        screen.print(_answer(runs))
    screen.print(f"Predicted from packing alone: {gain}.")
    screen.print(layout_text(own.simulator.spec))
    title = f"{own.step_time_s.size} steps of {source}"
    screen.print(simulation_table(runs, title=title, own="run", has_all=options.all))
    screen.print(trust_line(own.simulator.spec, cost.profile))
    if not options.all:
        screen.print(
            "--all prints every column, how the numbers of the kernel profile were obtained, and "
            "the parts of a step"
        )
    else:
        screen.print(worth_line(cost.profile))
        for note in mismatches(cost):
            screen.print(f"  {note}")
    if options.all or options.step is not None:
        path = critical_path(simulation)
        screen.print(f"Step {step} of the run takes {path.step_time_s:.3f} s:")
        for line in path.describe():
            screen.print(f"  {line}")
        shares = ", ".join(f"{b:.1%}" for b in simulation.bubble[0].mean(axis=0))
        screen.print(f"  fraction of the step in which each pipeline rank waits (bubble): {shares}")
    output.print_written(screen, options.trace, options.timeline, options.json)


def _answer(runs: list[RunSimulation]) -> str:
    """Return a sentence that says how much less GPU time the run takes than the first system.

    Args:
        runs: Simulations of the systems to compare with (such as Megatron-LM), then of the run.
    """
    first, own = runs[0], runs[-1]
    spec, gpus = own.simulator.spec, own.simulator.spec.parallel.world_size
    share = 1 - first.tokens_per_s / own.tokens_per_s
    said = f"take {share:.1%} less" if share >= 0 else f"take {-share:.1%} more"
    error = published_error(spec, own.simulator.cost.profile)
    remarks = [str(error) if error else "", share_saved(own, first).remark]
    trust = "".join(f"; {remark}" for remark in remarks if remark)
    names = {USUAL: "the usual loader", "plain_4d": "the paper's Plain-4D"}
    return (
        f"The run would {said} GPU time than {names.get(first.label, first.label)} on these "
        f"documents ({gpus:,} GPU{'s' * (gpus > 1)}, simulated{trust})."
    )


def _replay(
    options: argparse.Namespace, batches: Sequence[GlobalBatch], runs: list[RunSimulation]
) -> int:
    """Execute simulated steps with the real pipeline executor, and print how long they took.

    Each pass waits for its simulated time instead of computing.

    Args:
        options: The parsed command line, whose --replay is the number of steps.
        batches: Global batches.
        runs: Simulations of the systems to compare with (such as Megatron-LM), then of the run.

    Returns:
        The exit status.
    """
    with output.needs_train_extra("--replay needs"):
        from wlb.validation.replay_step import compare, waits_of
    check_at_least("--replay", options.replay, 1)
    numbers = ("simulated s", "replayed s", "difference")
    table = new_table("Simulated and replayed step times", labels=["step"], numbers=numbers)
    worst = 0.0
    for made in runs:
        simulator, spec = made.simulator, made.simulator.spec
        planner = planner_of(spec, simulator.cost, batches)
        steps = tuple(sharded_steps(planner, dp=spec.parallel.dp, most=options.replay))
        simulation = simulator.run(simulator.price(steps))
        waits = [
            waits_of(simulation, step=s, shortest_s=REPLAYED_SHORTEST_S) for s in range(len(steps))
        ]
        labels = [f"{made.label}, step {s}" for s in range(len(steps))]
        for found in compare(waits, labels, spec.pp, pp=spec.parallel.pp):
            replayed = " ".join(f"{t:.3f}" for t in found.replayed_s)
            difference = f"{found.difference:+.1%}"
            table.add_row(found.label, f"{found.simulated_s:.3f}", replayed, difference)
            worst = max(worst, abs(found.difference))
    screen = console(markup=False)
    screen.print(table)
    screen.print(f"largest difference of the median replayed time from the simulated: {worst:.1%}")
    return 0
