"""`wlb tune layout`: search layouts for a number of devices; needs no torch."""

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
MICRO_BATCHES = 256
"""Micro-batches to simulate by default, approximately. The number of steps follows from it, within
STEPS (most, fewest)."""


def add_parser(what: Any) -> None:
    """Add the parser of `wlb tune layout`."""
    parser = what.add_parser(
        "layout",
        help="layout, recompute, packing and sharding for a number of devices",
        description="Search the layouts of --gpus devices for the model, window, cluster and "
        "global batch of NAME by simulation, within memory; print the best ones and why the others "
        "lost. Every layout trains the same number of tokens per step.",
    )
    most, fewest = STEPS
    text = f"{most}, fewer where steps have many micro-batches, at least {fewest}"
    sources.add_arguments(parser, steps=None, steps_default=text)
    parser.add_argument(
        "--gpus", type=number(int, 2**20), required=True, help="devices of the whole run"
    )
    text = "tokens of a step, a multiple of the window (default: NAME's)"
    add_text(parser, "--global-batch-tokens", "TOKENS", text, type=number(int, 2**40))
    text = "most steps that a token waits on average"
    add_value(parser, "--max-delay-mean", 0.5, text, metavar="STEPS")
    _add_restrictions(parser)
    add_value(parser, "--top", 10, "layouts that are printed")
    add_text(parser, "--out", "FILE", "write the best layout as TOML for wlb train")
    add_json(parser, "results")
    text = "processes (default: as many as there are cores)"
    parser.add_argument("--jobs", type=number(int, MOST_PROCESSES), default=0, help=text)
    parser.set_defaults(run=run)


def _add_restrictions(parser: argparse.ArgumentParser) -> None:
    """Add the options that narrow or widen the search."""
    for axis in (*AXES, EP):
        parser.add_argument(
            f"--{axis}",
            nargs="+",
            type=number(int),
            default=[],
            help=f"only these degrees of {axis}",
        )
    parser.add_argument("--virtual-stages", nargs="+", type=number(int), default=[], metavar="V")
    for name, values, default in (
        ("--schedules", Schedule, Schedule),
        ("--recompute", Recompute, Recompute),
        ("--policies", POLICIES, CHOSEN),
        ("--sharding", STRATEGIES, STRATEGIES),
    ):
        parser.add_argument(
            name, nargs="+", choices=[str(v) for v in values], default=[str(v) for v in default]
        )
    text = "micro-batches per window to try besides 1"
    usual = PackingChoices().micro_batches
    add_value(parser, "--micro-batches", usual, text, nargs="*", metavar="FACTOR")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    started = time.monotonic()
    _check(options)
    given = load(options.name, options.overrides)
    spec = _searched(given, options)
    if options.steps is None:
        most, fewest = STEPS
        options.steps = min(most, max(fewest, MICRO_BATCHES // spec.num_micro_batches))
    # 1. Load the run as it is set, for comparison, and the documents.
    as_given = replace(spec, packing=given.packing, pp=given.pp)
    own, own_note = _own(as_given, options.gpus)
    source = sources.open_source(options, spec)
    batches = sources.batches_of(options, spec, source)
    # 2. Search the layouts.
    narrowed, packings = _choices(options)
    layouts = layouts_of(spec, gpus=options.gpus, choices=narrowed)
    first = layouts.candidates[0].spec
    profile = workload_for(first, options.device).profile
    # The status is shown only if stderr is a terminal.
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
    """Refuse invalid options before any work."""
    check_at_least("--gpus", options.gpus, 1)
    check_at_least("--top", options.top, 1)
    check_at_least("--jobs", options.jobs, 0, " (0 = as many as cores)")
    check_between("--max-delay-mean", options.max_delay_mean, 0, math.inf)
    sources.check_outputs(options.json, needs_plots=False, settings=options.out)


def _searched(given: RunSpec, options: argparse.Namespace) -> RunSpec:
    """Return the run from which all layouts are derived.

    All layouts share its micro-batches and its vocabulary size, which is filled in as training
    would.
    """
    window = given.data.context_window
    # Without --global-batch-tokens, a step keeps as many tokens as the run has.
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
    """Return the run as it is set if that fits `gpus` devices; otherwise None and the reason."""
    try:
        own = resolve_dp(spec, gpus)
        own = with_s_max(own, planned_gib=planned_gib(own))
        # effective_caps raises UserError if memory leaves packing no room to catch up.
        effective_caps(own)
        return own, ""
    except UserError as error:
        return None, f"the run's own layout is not compared: {error}"


def _own_note(known: Search) -> str:
    """Return a remark if the run's present settings do not fit in memory; otherwise ""."""
    own = known.own
    if own is None or fits_own_devices(own):
        return ""
    return (
        f"the run's own settings do not fit: pipeline rank {own.fullest_rank} needs "
        f"{own.peak_memory_bytes / GIB:.1f} GiB of the {gpu_budget(own.spec).explanation}, so "
        f"no gain over them is given"
    )


def _choices(options: argparse.Namespace) -> tuple[LayoutChoices, PackingChoices]:
    """Return the choices of layouts and of packings that the options permit."""
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
    """Return the winner as a TOML file, without the values that training fills in."""
    spec, winner = winning_spec(given, report.winner.spec), report.winner
    comments = (
        f"{winner.layout}",
        f"found by: {output.command_of(options)}",
        f"simulated: {winner.time_s:.3f} s a step of {spec.tokens_per_step:,} tokens, "
        f"{winner.peak_memory_bytes / GIB:.1f} GiB on the fullest rank",
    )
    return to_toml(spec, comments=comments)


def winning_spec(given: RunSpec, found: RunSpec) -> RunSpec:
    """Return `given` with the settings that the search found."""
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
    """Write --json, and print the tables unless JSON went to stdout."""
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
        screen.print("--out my.toml writes it for `wlb train my.toml`.")
    for line in facts:
        screen.print(line)
    screen.print(layout_table(report, title=title))
    if report.own_note:
        screen.print(report.own_note)
    screen.print("why the others lost:")
    for line in loser_lines(report):
        screen.print(f"  {line}")
    screen.print(trust_line(report.winner.spec, profile))
    screen.print(worth_line(profile))
    screen.print(f"{effort_line(report)}; {seconds:.0f} s")
    for line in refusal_lines(report):
        screen.print(f"  {line}")
    output.print_written(screen, options.out, options.json)
