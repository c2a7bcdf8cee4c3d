"""Comparisons of packing policies as tables for the terminal, and facts about the documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from wlb.packing.study.measure import DEAR, PackingRun, PackingSummary
from wlb.packing.study.saving import ANYWHERE, Saving, loader_of
from wlb.packing.study.tune import Tuning
from wlb.plan import IntArray, late_remark, starved_remark
from wlb.plan.plain import PlainRecord
from wlb.report.tables import new_table
from wlb.simulate.forecast import SavedShare
from wlb.simulate.published import PublishedError
from wlb.spec import LossNormalizer

Cell = Callable[[PackingSummary], str]

MOST_FLUSHED = 0.1
"""A row gets a remark if more than this share of its tokens was trained only when the data
ended."""
UNEVEN_WEIGHT = 0.05
"""A row gets a remark if the weight of labels of long documents differs from 1 by more than
this."""


def _of_steps(name: str, form: str) -> Cell:
    """Return a cell for a figure of the steps before the flush.

    Without such a step the cell is a dash, because the figure's default of 1.000 would mislead.
    """
    return lambda s: format(getattr(s, name), form) if s.num_steps else "-"


STEP = "F+B time-w."
"""The column by which policies are compared, and from which the saving is computed."""
COLUMNS: tuple[tuple[str, Cell], ...] = (
    (STEP, _of_steps("step_time_weighted", ".3f")),
    ("imbalance", _of_steps("imbalance", ".3f")),
    ("p95", _of_steps("imbalance_p95", ".3f")),
    ("time-w.", _of_steps("imbalance_time_weighted", ".3f")),
    ("F+B", _of_steps("imbalance_step", ".3f")),
    (f"W_a x {DEAR}", _of_steps("imbalance_dear", ".3f")),
    ("attention", _of_steps("imbalance_attention", ".3f")),
    ("bound", _of_steps("lower_bound", ".3f")),
    ("delay", lambda s: f"{s.mean_delay:.2f}"),
    ("p99", lambda s: f"{s.p99_delay}"),
    ("max", lambda s: f"{s.max_delay}"),
    ("late", lambda s: f"{s.num_overdue}"),
    ("tok. CV", _of_steps("tokens_cv", ".2f")),
    ("long wt", _of_steps("long_weight", ".2f")),
    ("longest step", lambda s: thousands(s.longest_step) if s.num_steps else "-"),
    ("longest mb", lambda s: thousands(s.longest_micro_batch)),
    ("held", lambda s: thousands(s.held_tokens) if s.num_steps else "-"),
    ("flushed", lambda s: thousands(s.flushed_tokens)),
    ("cut docs", lambda s: f"{s.cut_documents}"),
    ("ms", lambda s: f"{s.packing_ms:.2f}"),
)
"""Heading and cell of each column."""

CAPTION = (
    f"{STEP}: what a step takes: forward and backward of the slowest micro-batches over the mean "
    "ones, summed over steps; imbalance: slowest micro-batch x number / total predicted forward "
    "latency (Section 7.4), mean of steps; time-w.: sum of slowest / sum of means of it; F+B: mean "
    "of steps of forward and backward, which packing balances; "
    f"W_a x {DEAR}: F+B of the same plans if attention takes {DEAR} times its price; delay, p99, "
    "max: iterations a token waits (the paper: 0.5 on average); tok. CV: variation of tokens per "
    "step; long wt: weight of a label of the longest documents, a tenth of all labels, in a step's "
    "mean loss (1: that of others); held: tokens that wait after a step; ms: packing time of a "
    "global batch; original cuts documents where windows end, as loaders of token streams do; long "
    "whole keeps those as long as a window in one piece, as the paper's loader does"
)


def remarks(runs: Sequence[PackingRun]) -> list[str]:
    """Return sentences about policies whose figures need an explanation.

    These are policies that let many documents wait until the data ended, that trained documents
    later than allowed, or that made steps with very few tokens.
    """
    out: list[str] = []
    for run in runs:
        s = run.summary
        share = s.flushed_tokens / s.num_tokens
        if not s.num_steps:
            out.append(
                f"{s.label}: no step before the data ended, everything was still held; more steps "
                f"would show whether it ever makes one"
            )
        elif share > MOST_FLUSHED:
            out.append(
                f"{s.label}: {share:.0%} of tokens were still held when the data ended; they count "
                f"for delay and not for imbalance"
            )
        if s.num_overdue:
            out.append(f"{s.label}: {late_remark(s.num_overdue, s.max_delay)}")
        if starved := starved_remark(run.tokens):
            out.append(f"{s.label}: {starved}")
    return out


FEW_CAPTION = (
    "computing: of the slowest micro-batches of all steps, over the usual loader's (GPU hours also "
    "have collectives and idle pipelines); imbalance: slowest micro-batches of all steps over the "
    "mean ones, forward and backward; delay: steps that a token waits; most tokens: "
    "of a micro-batch"
)


def verdict(
    saving: Saving,
    *,
    setting: str,
    simulated: Sequence[SavedShare] | None,
    error: PublishedError | None,
) -> str:
    """Say in a sentence what balanced packing would save on the documents.

    Args:
        saving: The best policy and the usual loader.
        setting: Model, GPUs and prices in words.
        simulated: Shares of GPU hours that whole simulated steps save, the best policy's first.
            None if nothing was simulated.
        error: How far predictions of this kind were off from published runs; None if that is
            unknown.
    """
    if saving.best is saving.usual and not simulated:
        return f"No policy here is faster than the usual loader on these documents ({setting})."
    if simulated is None:
        return (
            f"Balanced packing would shorten the computing of steps by {saving.gain.saved:.1%} on "
            f"these documents ({setting}; collectives and a pipeline's bubbles left out)."
        )
    trust, saved = "" if error is None else f"; {error}", simulated[0].saved
    # Less than 0.05% would be printed as 0.0%.
    if saved < 0.0005:
        longer = f": whole steps take {-saved:.1%} longer" if saved < -0.0005 else ""
        return (
            f"Balanced packing and sharding would save no GPU hours on these documents{longer} "
            f"({setting}, simulated{trust})."
        )
    if simulated[0].remark:
        trust += f"; {simulated[0].remark}"
    return (
        f"Balanced packing and sharding would save {saved:.1%} of GPU hours on these documents "
        f"({setting}, simulated{trust})."
    )


FEW_COLUMNS = ("computing", "imbalance", "mean\ndelay", "longest\ndelay", "most\ntokens")


def few_rows(summaries: Sequence[PackingSummary], saving: Saving | None) -> list[list[str]]:
    """Return the cells of each policy: its name, and one for each of `FEW_COLUMNS`."""
    usual = None if saving is None else saving.usual

    def over_usual(s: PackingSummary) -> str:
        if usual is None or not s.num_steps:
            return "-"
        return f"{s.step_time_weighted / usual.step_time_weighted:.3f}"

    return [
        [
            f"{s.label} (usual)" if s is usual else s.label,
            over_usual(s),
            _of_steps("step_time_weighted", ".3f")(s),
            f"{s.mean_delay:.2f}",
            f"{s.max_delay}",
            thousands(s.longest_micro_batch),
        ]
        for s in summaries
    ]


def few_table(summaries: Sequence[PackingSummary], saving: Saving | None, *, title: str) -> Table:
    """Return a table of policies with the most important columns.

    The best policy is in bold, and the usual loader is marked as such.
    """
    best = None if saving is None else saving.best
    table = new_table(title, labels=["policy"], numbers=FEW_COLUMNS, caption=FEW_CAPTION)
    for s, cells in zip(summaries, few_rows(summaries, saving), strict=True):
        table.add_row(*cells, style="bold" if s is best else "")
    return table


def saving_line(saving: Saving, *, model: str, simulated: Sequence[SavedShare] | None) -> str:
    """Say in a sentence how many GPU hours the best policy saves.

    The sentence has the figures of column `STEP`.

    Args:
        saving: The best policy and the usual loader.
        model: Which model was priced, in words.
        simulated: Shares of the usual loader's GPU hours that whole simulated steps save, the best
            policy's first. None if nothing was simulated.
    """
    best, usual = saving.best, saving.usual
    figures = f"{STEP} {best.step_time_weighted:.3f} against {usual.step_time_weighted:.3f}"
    cutting = _describe_cutting(usual)
    if saving.best is saving.usual:
        said = f"no policy here is faster than the usual loader{cutting[:-1]}: {figures}"
        return f"{said}; predicted for {model}"
    if not simulated:
        return (
            f"with {best.label} instead of the usual loader{cutting} the slowest micro-batches "
            f"of all steps would take {saving.gain.saved:.1%} less: {figures}; predicted by "
            f"{model}, which leaves out collectives and a pipeline's bubbles"
        )
    return (
        f"with {best.label} instead of the usual loader{cutting} and sharding per sequence you "
        f"would save {_hours(simulated[0].saved)}; by its slowest micro-batches alone "
        f"{saving.gain.saved:.1%}: {figures}; predicted for {model}"
    )


def _describe_cutting(row: PackingSummary) -> str:
    """Say which documents a loader cuts, as in ", which cuts documents anywhere (original),"."""
    cut = "documents anywhere" if loader_of(row) == ANYWHERE else "short documents only"
    return f", which cuts {cut} ({row.label}),"


def _hours(share: float) -> str:
    """Return the saved GPU hours in words."""
    if share > 0:
        return f"{share:.1%} of GPU hours, whole steps simulated"
    return f"no GPU hours: whole simulated steps take {-share:.1%} longer, with the flush"


def uneven(summary: PackingSummary, normalizer: LossNormalizer) -> bool:
    """Return whether labels of the longest documents count noticeably more or less than others."""
    is_even = abs(summary.long_weight - 1) < UNEVEN_WEIGHT
    return normalizer != LossNormalizer.CONSTANT and not is_even


def weight_remark(
    summary: PackingSummary, normalizer: LossNormalizer, *, masks_labels: bool = False
) -> list[str]:
    """Return a sentence if labels of the longest documents weigh noticeably more or less.

    Args:
        summary: The policy.
        normalizer: The run's loss normalizer.
        masks_labels: Whether the store marks which tokens are trained. Lengths do not tell which,
            so the weight is unknown then.
    """
    if masks_labels:
        return [
            "long wt counts all tokens as trained; this store masks some, so it does not hold for "
            "its labels"
        ]
    if not uneven(summary, normalizer):
        return []
    return [
        f"{summary.label}: a label of the longest documents (a tenth of all labels) counts "
        f"{summary.long_weight:.2f} of an equal share, since a step's loss is the mean of its "
        f"labels and steps vary in tokens; training.loss_normalizer=constant gives every label the "
        f"same"
    ]


def packing_table(summaries: Sequence[PackingSummary], *, title: str, own: str = "") -> Table:
    """Return a table with a row for each policy; the row labelled `own` is in bold."""
    names = [name for name, _ in COLUMNS]
    table = new_table(title, texts=["policy"], numbers=names, caption=CAPTION)
    for summary in summaries:
        style = "bold" if summary.label == own else ""
        table.add_row(summary.label, *(cell(summary) for _, cell in COLUMNS), style=style)
    return table


def tuning_table(tuning: Tuning, *, rows: int) -> Table:
    """Return a table of the settings that no other setting beats in every respect.

    The respects are imbalance, delay and evenness of steps.

    Args:
        tuning: The settings that were tried.
        rows: Most rows. The recommended setting is marked, and is always among them.
    """
    points = list(tuning.front[:rows])
    if tuning.recommended not in points:
        points.append(tuning.recommended)
    names = ("imbalance", "delay", "p99", "max", "tok. CV", "long wt", "longest mb")
    shown: list[tuple[str, Cell]] = [(STEP, lambda s: f"{s.step_time_weighted:.4f}")]
    shown += [(name, cell) for name, cell in COLUMNS if name in names]
    title = (
        f"{len(points)} of the {len(tuning.front)} settings that no other setting beats in "
        f"{STEP}, delay and tok. CV at once; {len(tuning.points)} were tried"
    )
    caption = (
        f"{CAPTION}; S: S_max in context windows; T: most tokens of a step, in global batches; L: "
        f"thresholds of Algorithm 1's queues, in context windows; price: of a delay of one step"
    )
    headings = [name for name, _ in shown]
    table = new_table(title, labels=[""], texts=["setting"], numbers=headings, caption=caption)
    for point in points:
        mark, style = ("->", "bold") if point == tuning.recommended else ("", "")
        cells = [cell(point.summary) for _, cell in shown]
        table.add_row(mark, point.summary.label, *cells, style=style)
    return table


def thousands(tokens: float) -> str:
    """Format a number of tokens, from 1,000 on in thousands."""
    return f"{tokens / 1000:.0f}K" if tokens >= 1000 else f"{tokens:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts(PlainRecord):
    """Facts about the documents of a source before they are packed; lengths in tokens."""

    name: str
    window: int  # context window
    num_documents: int
    num_tokens: int
    median: int  # median length
    p99: int  # 99th percentile of the lengths
    longest: int  # longest length
    short_share: float  # share of tokens in documents shorter than half the window
    num_long: int  # documents longer than the window
    long_share: float  # share of tokens in these

    @property
    def lines(self) -> tuple[str, str]:
        """The facts in two sentences."""
        first = (
            f"{self.name}: {self.num_documents:,} documents, {self.num_tokens:,} tokens; median "
            f"{self.median:,}, p99 {self.p99:,}, longest {self.longest:,}."
        )
        second = (
            f"{self.short_share:.0%} of tokens are in documents shorter than half the window of "
            f"{self.window:,}; "
        )
        if self.num_long:
            second += (
                f"{self.num_long:,} documents ({self.long_share:.1%} of tokens) are longer than it "
                f"and are cut into pieces of at most a window."
            )
        else:
            second += "no document is longer than the window."
        return first, second


def facts_of(name: str, lengths: IntArray, *, window: int) -> SourceFacts:
    """Return the facts about documents of these lengths (shape [n], n >= 1)."""
    total = int(lengths.sum())
    is_long = lengths > window
    return SourceFacts(
        name=name,
        window=window,
        num_documents=len(lengths),
        num_tokens=total,
        median=int(np.median(lengths)),
        p99=int(np.percentile(lengths, 99)),
        longest=int(lengths.max()),
        short_share=int(lengths[lengths < window / 2].sum()) / total,
        num_long=int(is_long.sum()),
        long_share=int(lengths[is_long].sum()) / total,
    )
