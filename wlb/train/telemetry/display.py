"""Shows a run on rank 0's screen: the table of steps during training, and the summary at the end.

On a terminal, the table is updated in place. Otherwise a line is printed for each step.
"""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wlb.plan import (
    TERMS,
    ExpertLoads,
    MeasuredStep,
    Moments,
    StepMetrics,
    Work,
    late_remark,
    starved_remark,
)
from wlb.plan.tally import MeasuredShare, Saves, Stragglers, Tally
from wlb.report.tables import facts_table

_ROWS = 14  # number of steps that the live table shows, the latest ones
_MOST_STRAGGLERS = 5  # largest number of stragglers that the summary names
# Short names of sharding strategies, for the column "sharding chosen".
_SHORT = {"per_sequence": "seq", "per_document": "doc", "hybrid": "hyb", "balanced": "bal"}


class Heading(NamedTuple):
    """Heading of a column of the table of steps."""

    above: str  # first line of the heading
    name: str  # second line of the heading
    width: int  # width of the column in characters
    # If the terminal is too narrow for all columns, those with the highest rank are left out.
    rank: int

    @property
    def whole(self) -> str:
        """Both lines of the heading as one text."""
        return f"{self.above} {self.name}".strip()


HEADINGS = (
    Heading("", "step", 9, 0),
    Heading("", "loss", 7, 0),
    Heading("", "tokens", 8, 5),
    Heading("", "tokens/s", 9, 0),
    Heading("gradient", "norm", 9, 1),
    Heading("learning", "rate", 9, 4),
    Heading("imbalance", "usual", 10, 2),
    Heading("imbalance", "ours", 10, 1),
    Heading("delay, steps", "mean (max)", 13, 6),
    Heading("sharding", "chosen", 14, 7),
    Heading("peak", "GiB", 7, 3),
    Heading("time", "left", 9, 0),
)
FEW = ("step", "loss", "tokens/s", "imbalance usual", "imbalance ours", "time left")
"""Columns that are shown without `--verbose`."""
ANOTHER_MACHINE = 0.3
"""The summary warns if the mean relative error of predicted times is larger than this.

The profile was then probably measured on another machine, or this machine has other work too."""
_LOADS = Heading("slowest rank", "CP, experts", 12, 3)
"""A column with two ratios, which is only shown for a model with experts.

The first ratio is the predicted attention time of the slowest CP rank, divided by the mean over CP
ranks. The second is the number of tokens of the most loaded EP rank, divided by the mean over EP
ranks."""


class StepFigures(NamedTuple):
    """Figures of a step that are not part of its predictions and measurements."""

    learning_rate: float  # learning rate of the step's update
    memory_bytes: int  # peak memory of rank 0's GPU, or of its process on a CPU


class Display:
    """Shows the table of steps, to which each step adds a row. A context manager.

    Args:
        console: Where the table is printed.
        title: Title of the table.
        total_steps: Number of steps of the run.
        experts: Whether the model has experts.
        verbose: Whether all columns are shown. If false, only the columns `FEW` are.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        *,
        total_steps: int,
        experts: bool = False,
        verbose: bool = False,
    ) -> None:
        self.console, self.title, self.total_steps = console, title, total_steps
        headings = (*HEADINGS[:-1], _LOADS, HEADINGS[-1]) if experts else HEADINGS
        self._shown = [i for i, h in enumerate(headings) if verbose or h.whole in FEW]
        self._has_loads = experts
        self.headings = tuple(headings[i] for i in self._shown)
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_ROWS)
        self._note = self._first_note = ""
        self._has_warned = False
        self._left = TimeLeft(total_steps)
        self._live: Live | None = None
        # On a terminal that cannot move its cursor, a live table would only appear at the end.
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
            self._live.update(self._table())
        else:
            self.console.print(self.title, soft_wrap=True)
            for line in ([h.above for h in self.headings], [h.name for h in self.headings]):
                self.console.print(self._line(line), soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def step(
        self,
        steps_done: int,
        m: MeasuredStep,
        predicted: StepMetrics,
        plain: StepMetrics | None,
        figures: StepFigures,
    ) -> None:
        """Add a step to the table of steps.

        At the first step that trains documents later than `packing.max_delay` allows, a warning is
        printed.

        Args:
            steps_done: Number of updates so far.
            m: Measurements of the step.
            predicted: Predictions for the run's packing.
            plain: Predictions for the usual loader; None if not computed.
            figures: Learning rate and memory of the step.
        """
        seconds = m.step_time_s or 0.0
        counts = dict(m.sharding_counts)
        chosen = " ".join(f"{_SHORT.get(n, n)} {c}" for n, c in counts.items() if c)
        row = (
            f"{steps_done}/{self.total_steps}",
            "-" if m.loss is None else f"{m.loss:.3f}",
            f"{m.num_tokens}",
            f"{m.num_tokens / seconds:,.0f}" if seconds else "-",
            "-" if m.grad_norm is None else f"{m.grad_norm:.3g}",
            f"{figures.learning_rate:.2e}",
            "-" if plain is None else f"{plain.imbalance:.2f}",
            f"{predicted.imbalance:.2f}",
            f"{m.mean_delay:.2f} ({m.max_delay})",
            chosen or "-",
            f"{figures.memory_bytes / 2**30:.2f}",
            *([_loads(m)] if self._has_loads else []),
            self._left.after(steps_done),
        )
        row = tuple(row[i] for i in self._shown)
        self._rows.append(row)
        if self._live is not None:
            self._live.update(self._table())
        else:
            self.console.print(self._line(row), soft_wrap=True)
        if predicted.num_overdue and not self._has_warned:
            self._has_warned = True
            late = late_remark(predicted.num_overdue, predicted.max_delay)
            self.say(f"warning: in step {steps_done}, {late}; the summary counts all steps")

    def evaluation(self, step: int, loss: float) -> None:
        """Show the held-out loss after `step` updates, beside the first one since the launch."""
        note = f"held-out loss {loss:.3f} after {step} steps"
        self._first_note = self._first_note or note
        self._note = note if note == self._first_note else f"{self._first_note}   {note}"
        if self._live is not None:
            self._live.update(self._table())
        else:
            self.console.print(note)

    def say(self, line: str) -> None:
        """Print a line above the live table, where it stays."""
        self.console.print(line, soft_wrap=True, markup=False)

    def _table(self) -> Group:
        # Without vertical lines, more columns fit a narrow terminal.
        table = Table(
            title=self.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        shown = fitting(self.console.width, self.headings)
        for i in shown:
            heading = self.headings[i]
            text = f"{heading.above}\n{heading.name}".strip()
            table.add_column(text, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[i] for i in shown))
        left_out = [h.whole for i, h in enumerate(self.headings) if i not in shown]
        note = f"a wider terminal also shows {', '.join(left_out)}" if left_out else ""
        return Group(table, Text(self._note), Text(note, style="dim"))

    def _line(self, row: Sequence[str]) -> str:
        widths = (heading.width for heading in self.headings)
        return " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _loads(m: MeasuredStep) -> str:
    """Return two ratios as text: imbalance of CP ranks in attention, and of EP ranks in tokens."""
    return "-" if m.experts is None else f"{m.cp_imbalance:.2f}, {m.experts.mean_rank:.2f}"


def fitting(width: int, headings: Sequence[Heading] = HEADINGS) -> list[int]:
    """Choose the columns of the table of steps that fit a terminal.

    Args:
        width: Width of the terminal in characters.
        headings: All columns.

    Returns:
        Indices of the columns that fit, in ascending order. Columns with a high `Heading.rank` are
            left out first.
    """
    left, shown = width - 2, list[int]()
    for i in sorted(range(len(headings)), key=lambda i: headings[i].rank):
        left -= headings[i].width + 1
        if left < 0 and shown:
            break
        shown.append(i)
    return sorted(shown)


class TimeLeft:
    """Estimates the time until the run's last step.

    The estimate uses the mean time of a step since training began, resumed or was rolled back. This
    time includes the evaluations and saves between steps.
    """

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._first: tuple[int, float] | None = None

    def after(self, steps_done: int) -> str:
        """Return the time left as text, such as "1:02:03" or "3 d 04 h"; "-" if not known yet.

        `steps_done` is the number of updates so far.
        """
        now_s = time.perf_counter()
        if self._first is None or steps_done <= self._first[0]:
            # Measure from the end of the first step. A rollback lowers `steps_done`, and the
            # measurement begins anew.
            self._first = (steps_done, now_s)
            return "-"
        done, begun_s = self._first
        left_s = (self._total - steps_done) * (now_s - begun_s) / (steps_done - done)
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        if hours >= 48:
            return f"{hours // 24} d {hours % 24:02d} h"
        return f"{hours}:{minutes:02d}:{seconds:02d}"


def _experts(table: Table, loads: list[float], sums: ExpertLoads) -> None:
    """Add rows to the summary that say how unevenly experts and ranks were loaded.

    Args:
        table: The summary.
        loads: For each step, the tokens of a layer's most loaded expert over the mean of its
            experts, averaged over layers.
        sums: Loads by layer and by EP rank, summed over steps.
    """
    if not loads:
        return
    text = (
        f"{sum(loads) / len(loads):.2f} mean of steps, {loads[-1]:.2f} in the last step: tokens of "
        f"the most loaded expert over those of the mean expert, mean of layers"
    )
    if not sums.steps:
        table.add_row("expert load", text)
        return
    table.add_row("expert load", f"{text}; most in layer {_most(sums, 'expert')}")
    table.add_row(
        "load of ranks",
        f"attention {sums.mean_attention:.2f} (slowest CP rank / mean over CP ranks, predicted), "
        f"experts {sums.mean_rank:.2f} (tokens of the EP rank that a layer waits for / mean over "
        f"EP ranks), most in layer {_most(sums, 'rank')}; in all layers and steps "
        f"together, EP rank {_most(sums, 'ranks')} has the most tokens",
    )


def _most(sums: ExpertLoads, name: str) -> str:
    """Return the layer or EP rank with the highest load as text, such as "3 (1.25)" for number 3.

    The load is divided by the mean load of experts or EP ranks, and averaged over steps. `name` is
    the field of `ExpertLoads` that has the loads.
    """
    worst, ratio = sums.worst(name)
    return f"{worst} ({ratio:.2f})"


def summary(
    console: Console, tally: Tally, *, files: dict[str, Path], wall: str, verbose: bool = True
) -> None:
    """Print the summary: balance, losses, speed, time, and what went wrong.

    Args:
        console: Where the summary is printed.
        tally: Sums over the run's steps.
        files: Paths of files that the run wrote, by the name under which they are printed.
        wall: The run's wall time by phase, as text (`wall_line`).
        verbose: Whether rows on delays, sharding, ranks and measured times are printed too.
    """
    table = facts_table("Summary")
    if tally.stopped:
        table.add_row("stopped", tally.stopped)
    gain = f"{tally.balance} (predicted, same documents)" if tally.plain.steps else ""
    if gain:
        table.add_row("balance", gain)
    losses = tally.losses
    if losses:
        last = losses[-5:]
        table.add_row(
            "training loss",
            f"first step {losses[0]:.3f}, mean of the last {len(last)} steps "
            f"{sum(last) / len(last):.3f} nats a token",
        )
    if tally.heldout:
        first, last = tally.heldout[0], tally.heldout[-1]
        best = min(tally.heldout, key=lambda item: item[1])
        shown = {f"{loss:.3f} after {step} steps": None for step, loss in (first, best, last)}
        table.add_row("held-out loss", ", ".join(shown))
    tokens = tally.ours.tokens - tally.skipped_tokens
    rate = tokens / tally.train_time_s if tally.train_time_s else 0.0
    table.add_row(
        "speed",
        f"{tokens:,} tokens at {rate:,.0f} per second, plus {tally.padding_share:.2%} padding; "
        f"{tally.held:,} wait for a later step (the checkpoint keeps them)",
    )
    table.add_row("time", wall)
    _warnings(table, tally)
    if verbose:
        _details(table, tally)
    console.print(table)
    for name, path in files.items():
        # Paths are printed below the table, because the table would cut long paths.
        console.print(f"{name}: {path}", soft_wrap=True)
    if not verbose:
        console.print(
            "--verbose and `wlb report` have more: delays, sharding, ranks and measured times"
        )


def _warnings(table: Table, tally: Tally) -> None:
    """Add rows to the summary about problems, such as late documents and failed saves."""
    if tally.overdue:
        table.add_row("late", late_remark(tally.overdue, tally.max_delay))
    if starved := starved_remark(tally.step_tokens):
        table.add_row("starved steps", f"warning: {starved}")
    if tally.stragglers.by_rank:
        table.add_row("stragglers", _stragglers(tally.stragglers))
    if tally.refused:
        text = ", ".join(f"{count} {_REFUSED[what]}" for what, count in tally.refused.items())
        table.add_row("refused", f"steps: {text}")
    if tally.saves.failed:
        table.add_row("checkpoints", _saves(tally.saves))


def _details(table: Table, tally: Tally) -> None:
    """Add the rows of the summary that only --verbose shows."""
    _balance(table, tally)
    chosen = ", ".join(f"{n} {c}" for n, c in sorted(tally.shardings.items()) if c)
    table.add_row("sharding chosen", f"{chosen or '-'} (micro-batches)")
    if tally.key_rows.gathered:
        num_micro_batches = sum(tally.shardings.values())
        table.add_row(
            "keys exchanged",
            f"only the needed rows in {tally.key_rows.num_by_need} of {num_micro_batches} "
            f"micro-batches; the CP rank that received most got {tally.key_rows.share:.1%} of an "
            f"all-gather's rows",
        )
    _experts(table, tally.expert_loads, tally.experts)
    if tally.telemetry.steps:
        _measured(table, tally.telemetry)
    if tally.stragglers.num_tables and not tally.stragglers.by_rank:
        table.add_row("stragglers", _stragglers(tally.stragglers))
    for name, text in tally.rows.items():
        table.add_row(name, text)
    if tally.saves.stall_s and not tally.saves.failed:
        table.add_row("checkpoints", _saves(tally.saves))


_REFUSED = {"skip": "skipped as not finite", "rollback": "trained again from a checkpoint"}


def _saves(saves: Saves) -> str:
    stalls = saves.stall_s.values()
    line = (
        f"{len(stalls) - len(saves.failed)} written, for which training waited "
        f"{sum(stalls) / len(stalls):.3f} s each, {max(stalls):.3f} s at most"
    )
    return line + (f"; {len(saves.failed)} could not be written" if saves.failed else "")


def _stragglers(seen: Stragglers) -> str:
    if not seen.by_rank:
        return f"none in {seen.num_tables} tables of ranks"
    return "\n".join(
        f"{s.worst.text}, at most; a straggler in {s.num_tables} of {seen.num_tables} tables"
        for s in seen.worst_first[:_MOST_STRAGGLERS]
    )


def _balance(table: Table, tally: Tally) -> None:
    shown = [("imbalance", tally.ours)]
    if tally.plain.steps:
        shown.insert(0, ("imbalance, usual loader", tally.plain))
    for name, share in shown:
        table.add_row(
            name,
            f"{share.mean_imbalance:.3f} mean of steps, {share.weighted_imbalance:.3f} "
            f"time-weighted (predicted)",
        )
    table.add_row(
        "token delay", f"{tally.mean_delay:.2f} steps on average, {tally.max_delay} at most"
    )


def _measured(table: Table, measured: MeasuredShare) -> None:
    weighted = measured.slowest_ns / measured.mean_ns
    predicted = measured.predicted_slowest_ns / measured.predicted_mean_ns
    table.add_row(
        "imbalance, measured",
        f"{measured.degrees / measured.steps:.3f} mean of steps, "
        f"{weighted:.3f} time-weighted (predicted for the same spans: {predicted:.3f})",
    )
    terms = [_term(n, measured.terms[n]) for n in TERMS]
    if any((measured.terms[n].mape or 0) > ANOTHER_MACHINE for n in TERMS):
        terms.append(
            "the profile seems to be measured on another machine, or on this one without other "
            "work; --calibrate fits a profile to this run"
        )
    table.add_row("measured / predicted", "\n".join(terms))
    table.add_row("model FLOP/s", _work(measured.work))
    table.add_row("computing a step", _spread(*measured.spread("compute")))
    table.add_row(
        "waiting a step",
        _spread(*measured.spread("bubble"))
        + f" ({measured.steps} steps), including waits for a core that ranks share",
    )
    if measured.step_s:
        table.add_row("overhead a step", _overhead(measured))


def _overhead(measured: MeasuredShare) -> str:
    """Describe the time per step in which a rank waits for inputs or plans, or writes records."""
    parts = (measured.loading_s, measured.planning_s, measured.records_s)
    loading, planning, records = (part / measured.steps * 1e3 for part in parts)
    return (
        f"{sum(parts) / measured.step_s:.2%} of the step's time: {loading:.2f} ms for inputs, "
        f"{planning:.2f} ms for plans, {records:.2f} ms for telemetry"
    )


def _term(name: str, total: Moments) -> str:
    ratio, mape, correlation = total.ratio, total.mape, total.correlation
    if ratio is None or mape is None:
        return f"{name.replace('_', ' ')}: nothing to compare"
    r = "-" if correlation is None else f"{correlation:.3f}"
    return f"{ratio:.3f} {name.replace('_', ' ')} (MAPE {mape:.0%}, correlation {r})"


def _work(work: Work) -> str:
    def shown(tflops: float, mfu: float | None) -> str:
        return f"{tflops:.3g} TFLOP/s" + ("" if mfu is None else f", MFU {mfu:.1%}")

    return (
        f"{shown(work.tflops, work.mfu)} per rank, with the FLOPs of the documents as they are; "
        f"counted as full windows: {shown(work.window_tflops, work.window_mfu)}"
    )


def _spread(mean_s: float, largest_s: float, rank: int) -> str:
    return f"mean over ranks {mean_s:.3f} s, slowest rank {largest_s:.3f} s (most often {rank})"
