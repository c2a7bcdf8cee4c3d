"""`wlb plan`: compare packing policies and sharding strategies on document lengths; no torch."""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import islice
from typing import Any

from wlb import __version__
from wlb.cli import output, settings, sources
from wlb.cli.options import add_flag, add_json, add_text, add_value, number
from wlb.cost import (
    CountedWorkload,
    ProfiledWorkload,
    WorkloadModel,
    counted,
    ideal_kernels_ns,
    rows_of_layer,
    workload_for,
    workload_of_model,
)
from wlb.data import LengthSource, ListedBatches
from wlb.packing import PackingRun, measure
from wlb.packing.study.compare import compare, solver_packers, variants_of
from wlb.packing.study.saving import MEAN_DELAY, Saving, gain_over, saving_of
from wlb.plan import (
    GlobalBatch,
    ShardingPlan,
    UserError,
    check_between,
    local_tokens,
    rows_gathered,
)
from wlb.plan.tally import BalanceGain
from wlb.planner import Planner
from wlb.report.packing.page import packing_page
from wlb.report.packing.tables import (
    few_table,
    packing_table,
    remarks,
    saving_line,
    uneven,
    verdict,
    weight_remark,
)
from wlb.report.tables import console
from wlb.sharding import NAMES, WITH_REMAINDER, shard
from wlb.simulate.forecast import SavedShare, batches_to_compare, packed_by, simulated_shares
from wlb.simulate.published import published_error
from wlb.spec import PackingSection, Policy, Remainder, RunSpec, load

SHARDED_STEPS = 8
"""Number of steps on which the sharding strategies are compared."""
MOST_SOLVED = 32
"""Most global batches that are packed with the ILP solver, which takes seconds for each."""


def add_parser(commands: Any) -> None:
    """Add the parser of `wlb plan` to the subparsers `commands`."""
    parser = commands.add_parser(
        "plan",
        help="compare packing policies on document lengths",
        description="Pack the same global batches with every packing policy, and print the "
        "balance, delay, tokens and time of each policy. The configuration NAME gives the context "
        "window, the number of micro-batches, S_max (the most tokens of a micro-batch) and the "
        "model whose times are predicted.",
        epilog="Column 'long wt' of --all: the weight in the loss of a label of the longest "
        "documents (those with a tenth of all labels) if a step's loss is the mean over its "
        "labels; 1 is the mean weight of all labels. If the column differs from 1 by 0.05 or more, "
        "set training.loss_normalizer=constant.",
    )
    sources.add_arguments(parser)
    text = "print all columns, the comparison of sharding strategies, and remarks on the policies"
    add_flag(parser, "--all", text)
    text = (
        f"also pack the first {MOST_SOLVED} global batches by solving the integer program of the "
        f"paper's Eq. 1: once one global batch at a time, and once two at a time"
    )
    add_flag(parser, "--ilp", text)
    parser.add_argument(
        "--ilp-seconds",
        type=number(float),
        default=5.0,
        help="time limit of each call of the ILP solver, in seconds (default: 5)",
    )
    add_json(parser, "the results of all policies")
    add_text(parser, "--html", "FILE", "write an HTML page with tables and plots")
    text = "write a TOML file with the settings of the best policy, for wlb train"
    add_text(parser, "--out", "FILE", text)
    text = "largest mean delay that the best policy may have, in steps"
    add_value(parser, "--delay-budget", MEAN_DELAY, text)
    text = (
        "predict times from the FLOPs of the model in this Hugging Face config.json, instead of "
        "from the kernel times of NAME's model"
    )
    add_text(parser, "--model", "FILE", text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `wlb plan` and return its exit status."""
    # 1. Load the run and the documents.
    _check(options)
    given = load(options.name, options.overrides)
    spec = sources.filled_in(given, options)
    source = sources.open_source(options, spec)
    cost, priced = _prices(options, spec)
    batches = sources.batches_of(options, spec, source)
    # 2. Pack the documents with every policy, and shard them with every strategy.
    sections = {variant.label: variant.section for variant in variants_of(spec)}
    own = next(iter(sections))
    # rich shows this status line only if stderr is a terminal.
    with console(stderr=True).status("packing"):
        runs = list(compare(spec, batches, cost))
        if options.ilp:
            runs += _solved(options, spec, batches, cost)
    sharding = _sharding(spec, batches, cost)
    # 3. Describe the documents, the layout and the prices.
    facts = sources.facts_shown(source, batches, spec)
    setting = _setting(spec, cost, len(batches), priced=priced)
    masks_labels = sources.masks_labels(source)
    stream = _stream(options, source, batches)
    more = weight_remark(runs[0].summary, spec.training.loss_normalizer, masks_labels=masks_labels)
    # 4. Compare two packings with the usual loader: the best policy's, and the run's present one.
    first: list[str] = []
    saving = saving_of(
        [r.summary for r in runs if r.summary.label in sections], mean_delay=options.delay_budget
    )
    shares: list[SavedShare] | None = None
    gain: BalanceGain | None = None
    if saving is not None:
        model = priced
        if isinstance(cost, ProfiledWorkload):
            usual = sources.usual_of(options, spec)
            shares = _simulated(spec, usual, cost, batches, sections[saving.best.label])
            model = settings.priced_model(options, spec, cost.profile.name)
        first.append(_verdict(options, spec, cost, saving, shares))
        why = saving_line(saving, model=model, simulated=shares)
        more.append(why)
        section = sections[saving.best.label]
        if spec.parallel.world_size == 1 and isinstance(cost, ProfiledWorkload):
            first.append(
                "A run on one GPU waits for no other GPU; balanced packing saves time only where "
                "ranks or pipeline stages wait for each other."
            )
        first += _take_away(options, given, saving, section, why, shares, masks_labels=masks_labels)
        gain = gain_over(saving.usual, runs[0].summary)
        if shares:
            saved = shares[1].saved
            said = f"saves {saved:.1%} of" if saved >= 0 else f"takes {-saved:.1%} more than"
            first.append(
                f"With its present packing, {options.name} {said} the usual loader's GPU hours."
            )
        first.append(f"With the present packing of {options.name}: {gain}.")
    elif options.out:
        raise UserError(
            "--out has no best policy to write, because the usual loader, with which policies are "
            "compared, has too few documents for a step; raise --steps"
        )
    # 5. Write the page and the JSON, or print the tables.
    if options.html:
        page = packing_page(
            title=f"Packing {source.name} in windows of {spec.data.context_window:,} tokens",
            facts=facts,
            lengths=sources.lengths_shown(source, batches),
            runs=runs,
            own=own,
            answer=first,
            saving=saving,
            hours=shares[0].saved if shares else None,
            assumes=_assumes(options, spec, cost),
            provenance=_provenance(options, setting),
            notes=[stream, sharding["text"], *more],
        )
        output.write_text(options.html, page)
    data = {
        "command": output.command_of(options),
        "version": __version__,
        "source": facts.to_json(),
        "setting": setting,
        "spec": spec.to_dict(),
        "own": own,
        "sharding": sharding,
        "balance": gain and gain.to_json(),
        "saving": None if saving is None else {**saving.to_json(), **_shares_of(shares or [])},
        "rows": [r.summary.to_json() for r in runs],
    }
    if output.write_json(options, data):
        return 0
    more = [sharding["text"], *more, *remarks(runs)]
    about = [priced] if options.model else []
    _show(options, first, [*about, *facts.lines, stream], setting, runs, saving, own, more)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise a UserError for invalid options, before any work is done."""
    check_between("--delay-budget", options.delay_budget, 0, math.inf)
    sources.check_outputs(
        options.json, options.html, needs_plots=bool(options.html), settings=options.out
    )
    if options.model and options.out:
        raise UserError(
            "--out writes settings for NAME's model, but with --model times are predicted for "
            "another model; remove --out or --model"
        )


def _prices(
    options: argparse.Namespace, spec: RunSpec
) -> tuple[ProfiledWorkload | CountedWorkload, str]:
    """Return the cost model, and a text that says where its predicted times come from.

    The cost model predicts times from a kernel profile, or with --model from the FLOPs of a
    config.json.
    """
    if options.model:
        model = counted(options.model)
        return workload_of_model(model), f"FLOPs of {model}"
    cost = workload_for(spec, options.device)
    return cost, f"profile {cost.profile.name}"


def _simulated(
    spec: RunSpec,
    usual: RunSpec,
    cost: ProfiledWorkload,
    batches: list[GlobalBatch],
    best: PackingSection,
) -> list[SavedShare]:
    """Simulate whole steps, and return what share of the usual loader's GPU hours packing saves.

    Args:
        spec: The run with its present packing.
        usual: The run with the usual loader.
        cost: The cost model.
        batches: Global batches, of which the first ones are simulated.
        best: The [packing] section of the best policy.

    Returns:
        The share that the best policy saves, and the share that the run's present packing saves.
    """
    some = batches[: batches_to_compare(spec)]
    with console(stderr=True).status("simulating"):
        # If the run's packing is already the best, simulate the run unchanged, so that the result
        # equals the result of `wlb simulate`.
        ours = [spec if best == spec.packing else packed_by(spec, best), spec]
        return simulated_shares(cost, some, usual=usual, ours=ours)


def _shares_of(simulated: Sequence[SavedShare]) -> dict[str, float | None]:
    """Return simulated savings of GPU hours as entries of the JSON output.

    Args:
        simulated: What `_simulated` returned: the saving of the best policy, and that of the run's
            present packing. If it is empty, all entries are None.
    """
    first, second = (*simulated, None, None)[:2]
    return {
        "simulated": first and first.saved,
        "simulated_error": first and first.error,
        "simulated_own": second and second.saved,
    }


def _take_away(
    options: argparse.Namespace,
    given: RunSpec,
    saving: Saving,
    section: PackingSection,
    why: str,
    shares: list[SavedShare] | None,
    *,
    masks_labels: bool,
) -> list[str]:
    """Write the best policy's settings to the file of --out; without --out, say what is best.

    Args:
        options: The parsed command line.
        given: The configuration as the user wrote it.
        saving: Results of the best policy and of the usual loader.
        section: The [packing] section of the best policy.
        why: Sentence about the result, for a comment in the file.
        shares: Shares of GPU hours that the best policy and the run's present packing save in
            simulated steps (`_simulated`). None without a simulation.
        masks_labels: Whether the token store marks which tokens are trained.

    Returns:
        A list with one sentence that names the policy. The list is empty if the file was written or
        the policy saves nothing.
    """
    if not options.out and (saving.best is saving.usual or (shares and shares[0].saved <= 0)):
        return []
    if options.model:
        return [f"The best policy is {saving.best.label}."]
    if not options.out:
        return [
            f"The best policy is {saving.best.label}; --out my.toml writes its settings for "
            f"`wlb train my.toml`."
        ]
    is_constant = not masks_labels and uneven(saving.best, given.training.loss_normalizer)
    best = settings.packed_as(given, section, options, is_constant=is_constant)
    output.write_text(options.out, settings.as_toml(best, options, why=why))
    return []


def _verdict(
    options: argparse.Namespace,
    spec: RunSpec,
    cost: ProfiledWorkload | CountedWorkload,
    saving: Saving,
    shares: list[SavedShare] | None,
) -> str:
    """Return the first line of the output, which says what the best policy saves.

    Args:
        options: The parsed command line.
        spec: The run, with all values filled in.
        cost: The cost model.
        saving: Results of the best policy and of the usual loader.
        shares: Shares of GPU hours that the best policy and the run's present packing save in
            simulated steps (`_simulated`). None without a simulation.
    """
    if isinstance(cost, CountedWorkload):
        setting = f"FLOPs of {options.model}"
        return verdict(saving, setting=setting, simulated=None, error=None)
    error = published_error(spec, cost.profile)
    gpus = spec.parallel.world_size
    is_default = options.name not in options.words
    model = f"{options.name}, used because no NAME was given," if is_default else options.name
    return verdict(
        saving,
        setting=(
            f"{model} on {gpus:,} GPU{'s' * (gpus > 1)} with kernel times of {cost.profile.name}"
        ),
        simulated=shares or [],
        error=error,
    )


def _assumes(
    options: argparse.Namespace, spec: RunSpec, cost: ProfiledWorkload | CountedWorkload
) -> tuple[str, str]:
    """Return a sentence in two parts that says what the numbers of an HTML page are based on.

    With a kernel profile, the first part is its name, and the second part says "kernel times", the
    model and its number of GPUs. With FLOPs of --model, the first part is "FLOPs".
    """
    if isinstance(cost, CountedWorkload):
        return "FLOPs", f"of {options.model}, without collectives and pipeline bubbles"
    gpus = spec.parallel.world_size
    trust = published_error(spec, cost.profile)
    off = "" if trust is None else f"; {trust}"
    return cost.profile.name, f"kernel times, {options.name} on {gpus:,} GPU{'s' * (gpus > 1)}{off}"


def _provenance(options: argparse.Namespace, setting: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and values for the end of an HTML page: command, settings, version and date.

    Args:
        options: The parsed command line.
        setting: Further names and values (`_setting`).
    """
    return [
        ("command", output.command_of(options)),
        ("settings", f"{options.name} {' '.join(options.overrides)}".strip()),
        *((name, str(value)) for name, value in setting.items()),
        ("wlb", __version__),
        ("date", date.today().isoformat()),
    ]


def _show(
    options: argparse.Namespace,
    first: list[str],
    facts: list[str],
    setting: dict[str, Any],
    runs: list[PackingRun],
    saving: Saving | None,
    own: str,
    more: list[str],
) -> None:
    """Print the results.

    Args:
        options: The parsed command line.
        first: Sentences on what the best policy saves and what to do, which are printed first.
        facts: Lines about the documents.
        setting: Layout and prices (`_setting`).
        runs: Results of all policies.
        saving: Results of the best policy and of the usual loader; None if there are none.
        own: Label of the run's present packing, which is marked in the table.
        more: Remarks that are printed only with --all.
    """
    # Turn off rich's markup, because names of files may contain brackets.
    screen = console(markup=False)
    for line in (*first, *facts):
        screen.print(line)
    batches = (
        f"{setting['steps']} global batches of {setting['micro_batches']} x "
        f"{setting['window']:,} tokens"
    )
    summaries = [r.summary for r in runs]
    if options.all:
        title = f"{batches}, times from: {setting['cost']}"
        screen.print(packing_table(summaries, title=title, own=own))
        for line in more:
            screen.print(line)
    else:
        screen.print(few_table(summaries, saving, title=batches))
        screen.print("--all prints every column, a comparison of sharding strategies, and remarks")
    output.print_written(screen, options.out, options.html, options.json)


def _solved(
    options: argparse.Namespace, spec: RunSpec, batches: list[GlobalBatch], cost: WorkloadModel
) -> list[PackingRun]:
    """Pack the first global batches with the ILP solver, and with the greedy policy `fixed`.

    Each packs first 1 and then 2 global batches together. The solver's results are compared with
    those of `fixed`.
    """
    some = batches[:MOST_SOLVED]
    out: list[PackingRun] = []
    fixed = [v for v in variants_of(spec) if v.section.policy == Policy.FIXED]
    greedy = {v.section.window_batches: v for v in fixed}
    solvers = solver_packers(spec, cost, time_limit_s=options.ilp_seconds)
    for (label, packer), w in zip(solvers, (1, 2), strict=True):
        if w in greedy:
            beside = replace(greedy[w], label=f"{greedy[w].label}, {len(some)} batches")
            out += compare(spec, some, cost, [beside])
        out.append(measure(packer, some, cost=cost, label=f"{label}, {len(some)} batches"))
    return out


def _stream(options: argparse.Namespace, source: LengthSource, batches: list[GlobalBatch]) -> str:
    """Return a sentence that says how many tokens were packed and if documents were repeated."""
    packed = sum(batch.documents.num_tokens for batch in batches)
    passes = sources.passes_of(source, batches)
    line = f"{packed:,} tokens were packed"
    if len(batches) < options.steps:
        line += f"; the data ended after {len(batches)} of {options.steps} global batches"
    if len(passes) > 1:
        read = ", ".join(f"{name} {n:.2f} times" for name, n in passes.items())
        return f"{line}; stores were read: {read}"
    (once,) = passes.values()
    if once > 1.005:
        line += f"; the source was read {once:.1f} times, each time in another order"
        line = line.replace("another", "the same") if options.in_order else line
    return line


def _sharding(spec: RunSpec, batches: list[GlobalBatch], cost: WorkloadModel) -> dict[str, Any]:
    """Compare all sharding strategies on the first steps of the run's packing.

    Returns:
        A dictionary for the JSON output. The key "text" has sentences for the user. The key
        "over_ideal" has a ratio for each strategy: the predicted attention time of the slowest CP
        rank, divided by the ideal time. The ideal time is the attention time of the documents on
        one rank, divided by cp.
    """
    cp, own = spec.parallel.cp, str(spec.sharding.strategy)
    if cp == 1:
        return {"text": "sharding strategies are not compared, because parallel.cp = 1"}
    planner = Planner.from_spec(spec, ListedBatches(batches), cost)
    plans = list(islice(planner.steps(), SHARDED_STEPS))
    lengths = [b.lengths for plan in plans for b in plan.packing.micro_batches]
    ideal = sum(ideal_kernels_ns(pieces, cost, cp=cp) for pieces in lengths)
    counts: Counter[str] = Counter()
    exchanges: Counter[str] = Counter()
    needed = 0.0
    over: dict[str, float] = {}
    for name in NAMES:
        remainder = planner.remainder if name in WITH_REMAINDER else Remainder.MERGED
        made = [
            shard(
                pieces,
                cp=cp,
                strategy=name,
                cost=cost,
                remainder=remainder,
                exchange=planner.exchange,
            )
            for pieces in lengths
        ]
        slowest = sum(plan.slowest_kernels_ns for plan in made)
        over[name] = slowest / ideal if ideal else 1.0
        if name == own:
            counts.update(plan.strategy for plan in made)
            exchanges.update(str(plan.exchange) for plan in made)
            needed = _needed_share(made, cost, row_multiple=spec.row_multiple)
    listed = ", ".join(f"{name} {ratio:.3f}" for name, ratio in over.items())
    text = (
        f"Sharding over {cp} CP ranks in the first {len(plans)} steps. Predicted attention time of "
        f"the slowest rank, over the attention time on one rank divided by {cp}: {listed}. With "
        f"the run's strategy {own}, micro-batches are divided as follows: {_counted(counts)}; "
        f"exchanges of keys: {_counted(exchanges)}; the rank that needs most keys needs "
        f"{needed:.0%} of the rows that an all-gather would bring"
    )
    return {
        "text": text,
        "strategy": own,
        "counts": dict(counts),
        "over_ideal": over,
        "exchanges": dict(exchanges),
        "needed_share": needed,
    }


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _needed_share(
    plans: Sequence[ShardingPlan], cost: WorkloadModel, *, row_multiple: int
) -> float:
    """Return the rows of keys that a CP rank needs, as a fraction of the rows of an all-gather.

    For each micro-batch, the rows of the rank that needs most are counted.

    Args:
        plans: Sharding plans of the micro-batches, over which rows are summed.
        cost: The cost model, which says which layers have sliding windows.
        row_multiple: Every rank pads its number of rows to a multiple of this number.
    """
    gathered = sum(
        rows_gathered(
            plan, local_tokens=local_tokens(plan.num_tokens, cp=plan.cp, row_multiple=row_multiple)
        )
        for plan in plans
    )
    received = sum(float(rows_of_layer(plan, cost).sum(axis=1).max()) for plan in plans)
    return received / gathered if gathered else 0.0


def _setting(spec: RunSpec, cost: WorkloadModel, steps: int, *, priced: str) -> dict[str, Any]:
    """Return the conditions of the comparison by name: steps, window, prices, seed and layout.

    Args:
        spec: The run, with all values filled in.
        cost: The cost model.
        steps: Number of global batches that were packed.
        priced: Text that describes the cost model.
    """
    window = spec.data.context_window
    attention, linear = (int(f([window])[0]) for f in (cost.attention_ns, cost.linear_ns))
    return {
        "steps": steps,
        "micro_batches": spec.num_micro_batches,
        "window": window,
        "cost": f"{priced}, W_a / W_l = {attention / linear:.2f} for a document as long as the "
        f"context window",
        "seed": spec.run.seed,
        "layout": f"tp {spec.parallel.tp} cp {spec.parallel.cp} pp {spec.parallel.pp} "
        f"dp {spec.parallel.dp}",
    }
