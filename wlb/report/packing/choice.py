"""Output of `wlb tune packing`: the recommended packing, the reason, and a table of packings."""

from collections.abc import Sequence
from math import ceil, log10
from typing import NamedTuple

from rich.table import Table

from wlb.packing.study.measure import PackingSummary
from wlb.packing.study.tune import SAME, Tuning
from wlb.report.packing.tables import thousands
from wlb.report.tables import new_table
from wlb.spec import PackingSection, Policy

SIGNIFICANT = 2.0
"""A saving of GPU hours counts as real if it exceeds its standard error times this number."""
FINE = 0.0025
"""The output proposes more steps only if the standard error of the saving, as a fraction of the GPU
hours, is above this number."""


class PackingChoice(NamedTuple):
    """One of the packings among which the user can choose."""

    name: str  # label of the row in the table
    summary: PackingSummary  # balance and delay of the packing
    hours: float  # simulated GPU hours, divided by those of the usual loader


def switch_verdict(name: str, *, best: float, own: float, error: float | None, steps: int) -> str:
    """Return sentences that say whether to change a run to the recommended packing.

    Args:
        name: Preset or TOML file of the run.
        best: Fraction of the usual loader's GPU hours that the recommended packing saves.
        own: Fraction of the usual loader's GPU hours that the run's present packing saves.
        error: Standard error of `best` - `own`; None if there are too few steps to estimate it.
        steps: Number of global batches that were simulated.
    """
    if error is None:
        return (
            f"{steps} steps are too few to say whether another packing of {name} would save GPU "
            f"hours; repeat the command with more --steps."
        )
    saved = best - own
    if saved < -SIGNIFICANT * error:
        return (
            f"Keep the packing of {name}: it saves {own:.1%} of the usual loader's GPU hours, and "
            f"the best other packing that was tried saves {best:.1%}."
        )
    verdict = (
        f"The recommended packing would save {best:.1%} of the usual loader's GPU hours; the "
        f"packing of {name} saves {own:.1%}."
    )
    if saved > SIGNIFICANT * error:
        # Subtract rounded values, so that the difference is right for the numbers that are printed.
        shown = round(best, 3) - round(own, 3)
        return (
            f"{verdict} The difference is {shown:.1%}, with a standard error of {error:.1%} over "
            f"{steps:,} steps."
        )
    # Ask for so many steps that the standard error is a third of the saving. Then the next verdict
    # probably does not ask for more steps.
    enough = max(FINE, abs(saved) / 3)
    if error <= enough:
        return (
            f"{verdict} The two are equally good within the standard error of their difference, "
            f"{error:.1%}; use either."
        )
    more = _rounded_up(steps * (error / enough) ** 2)
    return (
        f"{verdict} But {steps:,} steps are too few to trust the difference, whose standard error "
        f"is {error:.1%}; repeat the command with --steps {more}."
    )


def _rounded_up(number: float) -> int:
    """Return `number` rounded up to two significant digits."""
    unit = 10 ** max(0, int(log10(number)) - 1)
    return ceil(number / unit) * unit


def choice_table(choices: Sequence[PackingChoice]) -> Table:
    """Return a table with a row for each packing. The last row, the recommended one, is bold."""
    columns = ("GPU hours", "imbalance", "mean\ndelay", "longest\ndelay", "most\ntokens")
    caption = (
        "usual loader = the loader of Megatron-LM and torchtitan, which cuts documents where a "
        "window ends. GPU hours = simulated GPU hours with pipeline bubbles and communication, "
        "relative to the usual loader's. imbalance = time of a step's slowest micro-batch over the "
        "mean of its micro-batches, steps weighted by their time; 1.000 is perfect. delay = steps "
        "between reading and training a token. most tokens = tokens of the longest micro-batch"
    )
    table = new_table("", labels=["packing"], numbers=columns, caption=caption)
    for choice in choices:
        s = choice.summary
        table.add_row(
            choice.name,
            f"{choice.hours:.1%}",
            f"{s.step_time_weighted:.3f}" if s.num_steps else "-",
            f"{s.mean_delay:.2f}",
            f"{s.max_delay}",
            thousands(s.longest_micro_batch),
            style="bold" if choice is choices[-1] else "",
        )
    return table


def in_words(section: PackingSection) -> str:
    """Return a text that describes packing settings, such as "policy bounded, which lets ..."."""
    if section.policy == Policy.BOUNDED:
        said = (
            f"policy bounded, which lets a long document wait until a step with it is balanced, at "
            f"most {section.max_delay} steps"
        )
    elif section.queue_thresholds:
        queues = " and ".join(f"{t:g}" for t in section.queue_thresholds)
        said = (
            f"policy var_len (the paper's Algorithm 1), in which documents of at least {queues} "
            f"context windows wait in queues until every micro-batch gets one of them"
        )
    else:
        said = "policy var_len (the paper's Algorithm 1), in which no document waits in a queue"
    said += f". A micro-batch has at most the tokens of {section.s_max:g} context windows"
    if section.step_tokens:
        return f"{said}, and a step at most those of {section.step_tokens:g} global batches"
    return said


def how_chosen(tuning: Tuning) -> str:
    """Return a text that says by which rule the recommended setting was chosen."""
    budget, tried = tuning.delay_budget, len(tuning.points)
    if not tuning.is_within_budget:
        return (
            f"How it was chosen: {tried} settings were tried. None has a mean delay of at most "
            f"{budget:g} steps (--delay-budget), so the setting with the least mean delay is "
            f"recommended."
        )
    return (
        f"How it was chosen: {tried} settings were tried. The candidates were those with a mean "
        f"delay of at most {budget:g} steps (--delay-budget; with 0.5 the paper found no loss of "
        f"quality). Among the candidates whose imbalance exceeds the lowest by at most {SAME}, the "
        f"one with the least delay is recommended. --all lists other settings."
    )
