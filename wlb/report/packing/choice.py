"""The output of `wlb tune packing`: verdict, table of three rows, and how the choice was made."""

from collections.abc import Sequence
from math import ceil, log10
from typing import NamedTuple

from rich.table import Table

from wlb.packing.study.measure import PackingSummary
from wlb.packing.study.tune import SAME, Tuning
from wlb.report.packing.tables import thousands
from wlb.report.tables import new_table
from wlb.simulate.forecast import SavedShare
from wlb.spec import PackingSection, Policy

SIGNIFICANT = 2.0
"""A saving must exceed this many standard errors to be called one."""
FINE = 0.0025
"""More steps are not proposed once the standard error of a saving is below this share of GPU
hours."""


class PackingChoice(NamedTuple):
    """A packing between which the user can choose."""

    name: str
    summary: PackingSummary
    hours: float  # simulated GPU hours, relative to the usual loader's


def switch_verdict(name: str, switch: SavedShare, *, steps: int) -> str:
    """Say whether changing the run to the recommended packing is worth it.

    Args:
        name: The preset or file that is tuned.
        switch: Share of the run's present GPU hours that the recommended packing saves.
        steps: Global batches that were simulated.
    """
    saved, error = switch.saved, switch.error
    if error is None:
        return (
            f"{steps} steps are too few to say whether another packing of {name} saves GPU hours: "
            f"repeat with more --steps."
        )
    known = f"simulated over {steps:,} steps, standard error {error:.1%}"
    if saved > SIGNIFICANT * error:
        return (
            f"The recommended packing would save {saved:.1%} of the GPU hours of {name} as it is "
            f"set ({known})."
        )
    if saved < -SIGNIFICANT * error:
        return (
            f"Keep {name} as it is set: the best packing that was tried takes {-saved:.1%} more "
            f"GPU hours ({known})."
        )
    verdict = (
        f"{steps:,} steps cannot tell the recommended packing from {name} as it is set: the "
        f"difference is {saved:.1%} of GPU hours, with a standard error of {error:.1%}."
    )
    # A third of the saving, so that the next verdict is unlikely to be another draw.
    enough = max(FINE, abs(saved) / 3)
    if error <= enough:
        return f"{verdict} Either will do."
    return f"{verdict} Repeat with --steps {_rounded_up(steps * (error / enough) ** 2)} to know."


def _rounded_up(number: float) -> int:
    """Return the number rounded up to two significant digits."""
    unit = 10 ** max(0, int(log10(number)) - 1)
    return ceil(number / unit) * unit


def choice_table(choices: Sequence[PackingChoice]) -> Table:
    """Return a table of the choices; the last one, which is recommended, is in bold."""
    columns = ("GPU hours", "imbalance", "mean\ndelay", "longest\ndelay", "most\ntokens")
    caption = (
        "usual loader: that of Megatron-LM and torchtitan, which cuts documents where a window "
        "ends; GPU hours: simulated, relative to it; imbalance: time of the slowest micro-batches "
        "over the mean of all, 1.000 is perfect; delay: steps that a token waits until it is "
        "trained; most tokens: of a micro-batch"
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
    """Describe the settings of a tuned policy, as in "policy bounded, micro-batches of ..."."""
    said = f"policy {section.policy}, micro-batches of at most {section.s_max:g} context windows"
    if section.step_tokens:
        said += f", steps of at most {section.step_tokens:g} global batches"
    if section.policy == Policy.BOUNDED:
        return (
            f"{said}, and a delay price of {section.delay_price:.2g} (documents wait at most "
            f"{section.max_delay} steps)"
        )
    if not section.queue_thresholds:
        return f"{said}, and no waiting queue"
    queues = " and ".join(f"{t:g}" for t in section.queue_thresholds)
    return f"{said}, and waiting queues for documents from {queues} windows on"


def how_chosen(tuning: Tuning) -> str:
    """Describe the rule by which the setting was recommended."""
    budget, tried = tuning.delay_budget, len(tuning.points)
    if not tuning.is_within_budget:
        return (
            f"How it was chosen: none of the {tried} settings tried keeps the mean delay within "
            f"{budget:g} steps (--delay-budget), so the one with the least delay is taken."
        )
    return (
        f"How it was chosen: of the {tried} settings tried, those with a mean delay of at most "
        f"{budget:g} steps (--delay-budget) were compared by imbalance. Of those within {SAME} of "
        f"the best, the one with the least delay is taken. --all lists others."
    )
