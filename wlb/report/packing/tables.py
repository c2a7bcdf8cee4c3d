"""Tables for the terminal that compare packing policies, and statistics of the documents."""

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
"""A policy gets a remark if more than this fraction of its tokens still waited when the data
ended."""
UNEVEN_WEIGHT = 0.05
"""A policy gets a remark if the weight of a label of the longest documents in the loss differs from
an equal share, which is 1, by more than this."""


def _of_steps(name: str, form: str) -> Cell:
    """Return a function that formats one field of `PackingSummary` as a table cell.

    The field refers to the steps before the data ended. If a policy completed no such step, the
    cell is "-", because the field's default of 1.000 would look like perfect balance.

    Args:
        name: Name of the field.
        form: Format of the number, such as ".3f".
    """
    return lambda s: format(getattr(s, name), form) if s.num_steps else "-"


STEP = "F+B time-w."
"""Heading of the column by which policies are compared: the imbalance of forward and backward, in
which each step is weighted by its time."""
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
"""Heading of each column of the long table, and the function that makes its cells."""

CAPTION = (
    "Every imbalance is the predicted time of a step's slowest micro-batch divided by the mean "
    f"over its micro-batches; 1 is perfect. {STEP} = imbalance of forward plus backward, steps "
    "weighted by their time: policies are compared by this column. imbalance = imbalance of "
    "forward alone (Section 7.4 of the paper), mean over steps. p95 = the imbalance that 5% of the "
    "steps exceed. time-w. = imbalance of forward alone, steps weighted by their time. F+B = "
    f"imbalance of forward plus backward, mean over steps. W_a x {DEAR} = F+B of the same plans if "
    f"attention takes {DEAR} times its predicted time. attention = imbalance of attention alone. "
    "bound = lower bound of the imbalance for any packing. delay, p99, max = mean, 99th "
    "percentile and maximum of the steps that a token waits (the paper reports a mean of 0.5). "
    "late = pieces trained after the policy's maximum delay. tok. CV = standard deviation over "
    "mean of the tokens per step. long wt = weight in the loss of a label of the longest documents "
    "(those with a tenth of all labels) if a step's loss is the mean over its labels; 1 means an "
    "equal weight for all labels. longest step, longest mb = most tokens of a step and of a "
    "micro-batch. held = mean number of tokens that wait after a step. flushed = tokens that "
    "still waited when the data ended. cut docs = documents trained in more than one piece. ms = "
    "milliseconds to pack a global batch. The policy original cuts documents where windows end, as "
    'Megatron-LM and torchtitan do; with "long whole" it keeps a document as long as a window in '
    "one piece, as the paper's loader does"
)


def remarks(runs: Sequence[PackingRun]) -> list[str]:
    """Return a sentence for each policy whose numbers need an explanation.

    These are policies that let many documents wait until the data ended, that trained documents
    later than packing.max_delay, or that made steps with very few tokens.
    """
    out: list[str] = []
    for run in runs:
        s = run.summary
        share = s.flushed_tokens / s.num_tokens
        if not s.num_steps:
            out.append(
                f"{s.label}: the policy completed no step, because all documents still waited when "
                f"the data ended; repeat the command with more --steps"
            )
        elif share > MOST_FLUSHED:
            out.append(
                f"{s.label}: {share:.0%} of tokens still waited when the data ended; the delay "
                f"includes these tokens, the imbalance does not"
            )
        if s.num_overdue:
            out.append(f"{s.label}: {late_remark(s.num_overdue, s.max_delay)}")
        if starved := starved_remark(run.tokens):
            out.append(f"{s.label}: {starved}")
    return out


FEW_CAPTION = (
    "computing = predicted computing time for the same work, relative to the usual loader: the "
    "column imbalance divided by the usual loader's (GPU hours also include collectives and "
    "pipeline bubbles). imbalance = time of a step's slowest micro-batch over the mean of its "
    "micro-batches, forward plus backward, steps weighted by their time; 1 is perfect. delay = "
    "steps between reading and training a token. most tokens = tokens of the longest micro-batch"
)


def verdict(
    saving: Saving,
    *,
    setting: str,
    simulated: Sequence[SavedShare] | None,
    error: PublishedError | None,
) -> str:
    """Return a sentence that says what balanced packing would save on the given documents.

    Args:
        saving: Results of the best policy and of the usual loader.
        setting: Text that names the model, the GPUs and the prices.
        simulated: Fractions of GPU hours that packings save in simulated steps; the first is the
            best policy's. None without a simulation.
        error: By how much such simulations differed from published runs; None if unknown.
    """
    if saving.best is saving.usual and not simulated:
        return f"No policy here is faster than the usual loader on these documents ({setting})."
    if simulated is None:
        return (
            f"Balanced packing would shorten the computing time of steps by "
            f"{saving.gain.saved:.1%} on these documents ({setting}; collectives and pipeline "
            f"bubbles are not included)."
        )
    trust, saved = "" if error is None else f"; {error}", simulated[0].saved
    # Treat less than 0.05% as no saving, because it would be printed as 0.0%.
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
"""Headings of the short table."""


def few_rows(summaries: Sequence[PackingSummary], saving: Saving | None) -> list[list[str]]:
    """Return a row of texts for each policy: its name, and a cell for each of `FEW_COLUMNS`.

    Args:
        summaries: Results of all policies.
        saving: Results of the best policy and of the usual loader; None if the usual loader
            completes no step.
    """
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
    """Return the short table of policies, with the columns `FEW_COLUMNS`.

    The best policy is in bold, and the usual loader is marked.

    Args:
        summaries: Results of all policies.
        saving: Results of the best policy and of the usual loader; None if the usual loader
            completes no step.
        title: Title of the table.
    """
    best = None if saving is None else saving.best
    table = new_table(title, labels=["policy"], numbers=FEW_COLUMNS, caption=FEW_CAPTION)
    for s, cells in zip(summaries, few_rows(summaries, saving), strict=True):
        table.add_row(*cells, style="bold" if s is best else "")
    return table


def saving_line(saving: Saving, *, model: str, simulated: Sequence[SavedShare] | None) -> str:
    """Return a detailed sentence that says how many GPU hours the best policy saves.

    Args:
        saving: Results of the best policy and of the usual loader.
        model: Text that names the model and the prices.
        simulated: Fractions of the usual loader's GPU hours that packings save in simulated steps;
            the first is the best policy's. None without a simulation.
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
            f"of all steps would take {saving.gain.saved:.1%} less time ({figures}; predicted from "
            f"{model}, without collectives and pipeline bubbles)"
        )
    return (
        f"with {best.label} instead of the usual loader{cutting} and sharding per sequence you "
        f"would save {_hours(simulated[0].saved)}; the slowest micro-batches of all steps would "
        f"take {saving.gain.saved:.1%} less time ({figures}); predicted for {model}"
    )


def _describe_cutting(row: PackingSummary) -> str:
    """Return a clause that says which documents a loader cuts.

    For example: ", which cuts documents where a window ends (original),".
    """
    is_anywhere = loader_of(row) == ANYWHERE
    cut = "documents where a window ends" if is_anywhere else "only documents shorter than a window"
    return f", which cuts {cut} ({row.label}),"


def _hours(share: float) -> str:
    """Return a text that says what fraction of GPU hours is saved; `share` may be negative."""
    if share > 0:
        return f"{share:.1%} of GPU hours, whole steps simulated"
    return f"no GPU hours: all simulated steps take {-share:.1%} longer, the flush included"


def uneven(summary: PackingSummary, normalizer: LossNormalizer) -> bool:
    """Return whether the loss weights labels of the longest documents differently from others.

    Differences below `UNEVEN_WEIGHT` do not count.

    Args:
        summary: Result of packing with a policy.
        normalizer: The run's training.loss_normalizer. With a constant one all weights are equal.
    """
    is_even = abs(summary.long_weight - 1) < UNEVEN_WEIGHT
    return normalizer != LossNormalizer.CONSTANT and not is_even


def weight_remark(
    summary: PackingSummary, normalizer: LossNormalizer, *, masks_labels: bool = False
) -> list[str]:
    """Return a remark if the loss weights labels of the longest documents differently from others.

    Args:
        summary: Result of the policy.
        normalizer: The run's training.loss_normalizer.
        masks_labels: Whether the token store marks which tokens have labels. If so, the weight is
            unknown, because only lengths of documents were read.

    Returns:
        A list with one sentence; empty if the weights are about equal.
    """
    if masks_labels:
        return [
            "the column long wt assumes that all tokens are trained; this token store marks some "
            "as not trained, so the column does not apply to it"
        ]
    if not uneven(summary, normalizer):
        return []
    return [
        f"{summary.label}: a label of the longest documents (those with a tenth of all labels) has "
        f"{summary.long_weight:.2f} times the mean weight in the loss, because a step's loss is "
        f"the mean over its labels and steps differ in their number of labels; set "
        f"training.loss_normalizer=constant to give all labels the same weight"
    ]


def packing_table(summaries: Sequence[PackingSummary], *, title: str, own: str = "") -> Table:
    """Return the long table of policies, with all columns; the policy labelled `own` is in bold."""
    names = [name for name, _ in COLUMNS]
    table = new_table(title, texts=["policy"], numbers=names, caption=CAPTION)
    for summary in summaries:
        style = "bold" if summary.label == own else ""
        table.add_row(summary.label, *(cell(summary) for _, cell in COLUMNS), style=style)
    return table


def tuning_table(tuning: Tuning, *, rows: int) -> Table:
    """Return a table of the Pareto front of tuned settings.

    These are the settings for which no other setting has less imbalance, less delay and less
    variation of tokens per step at once.

    Args:
        tuning: Results of all settings that were tried.
        rows: Largest number of settings of the front to list. The recommended setting is always
            listed and is marked.
    """
    points = list(tuning.front[:rows])
    if tuning.recommended not in points:
        points.append(tuning.recommended)
    names = ("imbalance", "delay", "p99", "max", "tok. CV", "long wt", "longest mb")
    shown: list[tuple[str, Cell]] = [(STEP, lambda s: f"{s.step_time_weighted:.4f}")]
    shown += [(name, cell) for name, cell in COLUMNS if name in names]
    title = (
        f"Pareto front of {len(tuning.points)} settings: {len(points)} of the {len(tuning.front)} "
        f"settings for which no other is better in {STEP}, delay and tok. CV together"
    )
    caption = (
        f"{CAPTION}. In the column setting: S = S_max in context windows; T = most tokens of a "
        f"step, in global batches; L = thresholds of Algorithm 1's queues, in context windows; "
        f"price = packing.delay_price of the policy bounded"
    )
    headings = [name for name, _ in shown]
    table = new_table(title, labels=[""], texts=["setting"], numbers=headings, caption=caption)
    for point in points:
        mark, style = ("->", "bold") if point == tuning.recommended else ("", "")
        cells = [cell(point.summary) for _, cell in shown]
        table.add_row(mark, point.summary.label, *cells, style=style)
    return table


def thousands(tokens: float) -> str:
    """Return a number of tokens as text, in thousands if it is at least 1,000: 32768 is 33K."""
    return f"{tokens / 1000:.0f}K" if tokens >= 1000 else f"{tokens:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts(PlainRecord):
    """Statistics of the documents of a source before they are packed."""

    name: str  # name of the source
    window: int  # context window in tokens
    num_documents: int  # number of documents
    num_tokens: int  # tokens of all documents
    median: int  # median length of the documents in tokens
    p99: int  # 99th percentile of the lengths
    longest: int  # length of the longest document
    short_share: float  # fraction of tokens that are in documents shorter than half the window
    num_long: int  # number of documents longer than the window
    long_share: float  # fraction of tokens that are in documents longer than the window

    @property
    def lines(self) -> tuple[str, str]:
        """Two sentences that state the statistics of the documents."""
        first = (
            f"{self.name}: {self.num_documents:,} documents, {self.num_tokens:,} tokens; lengths: "
            f"median {self.median:,}, p99 {self.p99:,}, longest {self.longest:,}."
        )
        second = (
            f"{self.short_share:.0%} of tokens are in documents shorter than half the context "
            f"window of {self.window:,} tokens; "
        )
        if self.num_long:
            second += (
                f"{self.num_long:,} documents ({self.long_share:.1%} of tokens) are longer than "
                f"the window and are cut into pieces of at most this length."
            )
        else:
            second += "no document is longer than the window."
        return first, second


def facts_of(name: str, lengths: IntArray, *, window: int) -> SourceFacts:
    """Return statistics of the documents of a source.

    Args:
        name: Name of the source.
        lengths: Length of each document in tokens, shape [n] with n >= 1.
        window: Context window in tokens.
    """
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
