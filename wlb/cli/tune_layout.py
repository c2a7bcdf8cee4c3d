"""`wlb tune layout`: search the best parallel layout for a number of devices; needs no torch."""

import argparse
import math
import os
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from wlb.cli import output, sources
from wlb.cli.options import MOST_PROCESSES, add_json, add_text, add_value, number
from wlb.cost import KernelProfile, workload_for
from wlb.cost.machine import program_version
from wlb.memory import gpu_budget, planned_gib
from wlb.memory.estimate import GIB
from wlb.packing import with_s_max
from wlb.plan import UserError, check_at_least, check_between
from wlb.report.layout import (
    LayoutReport,
    effort_line,
    fits_own_devices,
    layout_table,
    layout_verdict,
    loser_lines,
    refusal_lines,
)
from wlb.report.simulation import worth_line, worth_of
from wlb.report.tables import console
from wlb.simulate.layout_search.layouts import AXES, EP, LayoutChoices, layouts_of
from wlb.simulate.layout_search.packings import CHOSEN, POLICIES, STRATEGIES, PackingChoices
from wlb.simulate.layout_search.search import Search, Tuner
from wlb.simulate.layout_search.trial import BatchSample, effective_caps
from wlb.simulate.layout_search.why import losers_of, references_of
from wlb.simulate.layout_search.workers import Workers
from wlb.simulate.published import trust_line
from wlb.spec import Recompute, RunSpec, Schedule, load, resolve_dp, to_toml

STEPS = (32, 12)
"""Largest and smallest default of --steps."""
MICRO_BATCHES = 256
"""Number of micro-batches that should be simulated by default. Divided by the micro-batches of a
step, it gives the default of --steps, within the limits STEPS."""


def add_parser(what: Any) -> None:
    """Add the parser of `wlb tune layout` to the subparsers `what` of `wlb tune`."""
    parser = what.add_parser(
        "layout",
        help="search parallel layout, recomputation, packing and sharding for a number of devices",
        description="Simulate layouts of --gpus devices that fit in memory, for the model, context "
        "window, cluster and global batch of the configuration NAME. Prints the fastest layouts, "
        "and why others are slower. Every layout trains the same number of tokens per step.",
    )
    most, fewest = STEPS
    text = f"{most}, or fewer if steps have many micro-batches, but at least {fewest}"
    sources.add_arguments(parser, steps=None, steps_default=text)
    parser.add_argument(
        "--gpus", type=number(int, 2**20), required=True, help="number of devices of the whole run"
    )
    text = "tokens of a step, a multiple of the context window (default: as many as NAME has)"
    add_text(parser, "--global-batch-tokens", "TOKENS", text, type=number(int, 2**40))
    text = "largest mean delay of a token that a packing may have, in steps"
    add_value(parser, "--max-delay-mean", 0.5, text, metavar="STEPS")
    _add_restrictions(parser)
    add_value(parser, "--top", 10, "number of layouts that are printed")
    add_text(parser, "--out", "FILE", "write a TOML file with the best layout, for wlb train")
    add_json(parser, "the results")
    text = "number of worker processes (default: one for each CPU core)"
    parser.add_argument("--jobs", type=number(int, MOST_PROCESSES), default=0, help=text)
    parser.set_defaults(run=run)


def _add_restrictions(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which values the search tries."""
    for axis in (*AXES, EP):
        parser.add_argument(
            f"--{axis}",
            nargs="+",
            type=number(int),
            default=[],
            help=f"try only these values of parallel.{axis} (default: all that are possible)",
        )
    text = "try only these values of pp.virtual_stages (default: all that are possible)"
    parser.add_argument(
        "--virtual-stages", nargs="+", type=number(int), default=[], metavar="V", help=text
    )
    for name, key, values, default in (
        ("--schedules", "pp.schedule", Schedule, Schedule),
        ("--recompute", "training.recompute", Recompute, Recompute),
        ("--policies", "packing.policy", POLICIES, CHOSEN),
        ("--sharding", "sharding.strategy", STRATEGIES, STRATEGIES),
    ):
        words, usual = [str(value) for value in values], [str(value) for value in default]
        said = "all" if usual == words else ", ".join(usual)
        parser.add_argument(
            name,
            nargs="+",
            choices=words,
            default=usual,
            metavar="VALUE",
            help=f"values of {key} to try: {', '.join(words)} (default: {said})",
        )
    text = "numbers of micro-batches to try besides data.num_windows, as multiples of it above 1"
    usual = PackingChoices().micro_batches
    add_value(parser, "--micro-batches", usual, text, nargs="*", metavar="FACTOR")


def run(options: argparse.Namespace) -> int:
    """Run `wlb tune layout` and return its exit status."""
    started = time.monotonic()
    _check(options)
    given = load(options.name, options.overrides)
    spec = _searched(given, options)
    if options.steps is None:
        most, fewest = STEPS
        options.steps = min(most, max(fewest, MICRO_BATCHES // spec.num_micro_batches))
    # 1. Load the documents, and the run with its present settings for comparison.
    as_given = replace(spec, packing=given.packing, pp=given.pp)
    own, own_note = _own(as_given, options.gpus)
    source = sources.open_source(options, spec)
    batches = sources.batches_of(options, spec, source)
    # 2. Search the layouts.
    narrowed, packings = _choices(options)
    layouts = layouts_of(spec, gpus=options.gpus, choices=narrowed)
    first = layouts.candidates[0].spec
    profile = workload_for(first, options.device).profile
    # rich shows this status line only if stderr is a terminal.
    status = console(stderr=True).status("layouts")
    with Workers(jobs=options.jobs or os.cpu_count() or 1) as workers, status:
        counts: Counter[str] = Counter()

        def more(what: str, count: int) -> None:
            counts[what] += count
            status.update(", ".join(f"{n} {name}" for name, n in counts.items()))

        tuner = Tuner(
            sample=BatchSample(batches=tuple(batches), device=options.device),
            choices=packings,
            workers=workers,
            top=options.top,
            max_delay_mean=options.max_delay_mean,
            progress=more,
        )
        known = tuner.search(layouts, own)
        losers = losers_of(tuner, known, own=own, node=profile.ranks_per_node)
        report = LayoutReport(
            search=known,
            best=tuple(known.ranking[: options.top]),
            losers=tuple(losers),
            references=references_of(tuner, known.ranking[0]),
            own_note=own_note or _own_note(known),
        )
    # 3. Write the winner, and print the results.
    facts = sources.facts_shown(source, batches, spec)
    title = (
        f"{options.name} on {options.gpus} devices, {spec.tokens_per_step:,} tokens a step, "
        f"{len(batches)} global batches of {source.name}"
    )
    if options.out:
        output.write_text(options.out, _toml(options, given, report))
    _show(options, report, title, facts.lines, profile, time.monotonic() - started)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise a UserError for invalid options, before any work is done."""
    check_at_least("--gpus", options.gpus, 1)
    check_at_least("--top", options.top, 1)
    check_at_least("--jobs", options.jobs, 0, " (0 = one for each CPU core)")
    check_between("--max-delay-mean", options.max_delay_mean, 0, math.inf)
    sources.check_outputs(options.json, needs_plots=False, settings=options.out)


def _searched(given: RunSpec, options: argparse.Namespace) -> RunSpec:
    """Return the run from which the search derives all layouts.

    The run has the tokens per step of --global-batch-tokens, a vocabulary size, and no settings
    that depend on a layout.

    Args:
        given: The configuration as the user wrote it.
        options: The parsed command line.
    """
    window = given.data.context_window
    # Without --global-batch-tokens, a step has as many tokens as in the user's configuration.
    dp_of_own = given.parallel.dp or max(1, options.gpus // given.parallel.model_ranks)
    own_tokens = replace(given, parallel=replace(given.parallel, dp=dp_of_own)).tokens_per_step
    tokens = own_tokens if options.global_batch_tokens is None else options.global_batch_tokens
    if tokens < window or tokens % window:
        raise UserError(
            f"--global-batch-tokens = {tokens} must be a multiple of data.context_window = "
            f"{window}, such as {max(1, round(tokens / window)) * window}"
        )
    return replace(
        sources.with_vocabulary(given, options),
        pp=replace(given.pp, stage_layers=(), weight_delay=1),
        packing=replace(given.packing, num_micro_batches=0),
        data=replace(given.data, num_windows=tokens // window),
        planner=replace(given.planner, baseline=False),
    )


def _own(spec: RunSpec, gpus: int) -> tuple[RunSpec | None, str]:
    """Return the run with its present layout, for comparison with the layouts that are found.

    Args:
        spec: The run with its present settings.
        gpus: Number of devices.

    Returns:
        The run and "". If the present layout cannot run on `gpus` devices, None and the reason.
    """
    try:
        own = resolve_dp(spec, gpus)
        own = with_s_max(own, planned_gib=planned_gib(own))
        # effective_caps raises UserError if memory allows the present packing too few tokens in a
        # step to train documents that waited.
        effective_caps(own)
        return own, ""
    except UserError as error:
        return None, f"the run's present layout is not compared: {error}"


def _own_note(known: Search) -> str:
    """Return a sentence that says that the run's present settings do not fit in memory, or ""."""
    own = known.own
    if own is None or fits_own_devices(own):
        return ""
    return (
        f"the run's present settings do not fit in memory: pipeline rank {own.fullest_rank} needs "
        f"{own.peak_memory_bytes / GIB:.1f} GiB of the {gpu_budget(own.spec).explanation}; "
        f"therefore the column gain is empty"
    )


def _choices(options: argparse.Namespace) -> tuple[LayoutChoices, PackingChoices]:
    """Return which layouts and which packings the options tell the search to try."""
    numbers = (*AXES, EP, "virtual_stages")
    layouts = LayoutChoices(
        **{name: tuple(sorted(set(getattr(options, name)))) for name in numbers},
        schedules=tuple(s for s in Schedule if str(s) in options.schedules),
        recompute=tuple(r for r in Recompute if str(r) in options.recompute),
    )
    packings = PackingChoices(
        policies=tuple(p for p in POLICIES if str(p) in options.policies),
        strategies=tuple(s for s in STRATEGIES if str(s) in options.sharding),
        micro_batches=tuple(options.micro_batches),
    )
    return layouts, packings


def _toml(options: argparse.Namespace, given: RunSpec, report: LayoutReport) -> str:
    """Return the best layout as a TOML file, without values that training fills in itself.

    Args:
        options: The parsed command line, which a comment repeats.
        given: The configuration as the user wrote it.
        report: Result of the search.
    """
    spec, winner = winning_spec(given, report.winner.spec), report.winner
    comments = (
        f"{winner.layout}",
        f"found by: {output.command_of(options)}",
        f"simulated: {winner.time_s:.3f} s a step of {spec.tokens_per_step:,} tokens, "
        f"{winner.peak_memory_bytes / GIB:.1f} GiB on the fullest rank",
    )
    return to_toml(spec, comments=comments)


def winning_spec(given: RunSpec, found: RunSpec) -> RunSpec:
    """Return the user's configuration with the settings that the search found.

    Args:
        given: The configuration as the user wrote it.
        found: The best run that the search found.
    """
    return replace(
        given,
        parallel=found.parallel,
        ep=found.ep,
        cost=replace(given.cost, expert_load=found.cost.expert_load),
        pp=found.pp,
        packing=found.packing,
        sharding=found.sharding,
        data=replace(given.data, num_windows=found.data.num_windows),
        training=replace(given.training, recompute=found.training.recompute),
    )


def _show(
    options: argparse.Namespace,
    report: LayoutReport,
    title: str,
    facts: tuple[str, ...],
    profile: KernelProfile,
    seconds: float,
) -> None:
    """Write the results as JSON if requested, and print tables unless the JSON went to stdout.

    Args:
        options: The parsed command line.
        report: Result of the search.
        title: Title of the table.
        facts: Lines about the documents.
        profile: Kernel profile of the simulation.
        seconds: Duration of the search.
    """
    data = {
        "command": output.command_of(options),
        "version": program_version(),
        "profile": profile.name,
        "worth": dict(worth_of(profile)),
        "trust": trust_line(report.winner.spec, profile),
        "gpus": options.gpus,
        **report.to_json(),
    }
    if output.write_json(options, data):
        return
    screen = console(markup=False)
    screen.print(layout_verdict(report, profile=profile, gpus=options.gpus))
    if not options.out:
        screen.print("--out my.toml writes this layout for `wlb train my.toml`.")
    for line in facts:
        screen.print(line)
    screen.print(layout_table(report, title=title))
    if report.own_note:
        screen.print(report.own_note)
    screen.print("Why other layouts are slower (time relative to the best layout):")
    for line in loser_lines(report):
        screen.print(f"  {line}")
    screen.print(trust_line(report.winner.spec, profile))
    screen.print(worth_line(profile))
    screen.print(f"{effort_line(report)}; the search took {seconds:.0f} s")
    for line in refusal_lines(report):
        screen.print(f"  {line}")
    output.print_written(screen, options.out, options.json)
