"""Results of a search of parallel layouts (`wlb tune layout`) as tables and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from wlb.cost import KernelProfile
from wlb.memory.estimate import GIB
from wlb.report.tables import new_table
from wlb.simulate.layout_search.layouts import degrees_of, pipeline_of
from wlb.simulate.layout_search.search import Search
from wlb.simulate.layout_search.trial import Trial
from wlb.simulate.layout_search.why import Loser, References
from wlb.simulate.published import published_error
from wlb.spec import Recompute

COLUMNS: tuple[str, ...] = ("s/step", "ktok/s", "gain", "MFU", "GiB", "delay", "bubble", "bound")
"""Headings of the numeric columns of the table of layouts; `CAPTION` explains them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutReport:
    """The result of a search of parallel layouts."""

    search: Search  # all layouts that were tried
    best: tuple[Trial, ...]  # the best layouts, the fastest first
    # for each value of TP, CP, PP, EP, schedule or recomputation that the winner does not have: the
    # fastest layout with this value, and why this layout is slower than the winner
    losers: tuple[Loser, ...]
    # the winner's layout with other packing policies, and with other sharding strategies
    references: References
    # why the run's present layout is not compared with the best ones; "" if it is compared
    own_note: str = ""

    @property
    def winner(self) -> Trial:
        """The simulation of the fastest layout."""
        return self.best[0]

    @property
    def own(self) -> Trial | None:
        """The simulation of the run's present layout; None if it was not simulated."""
        return self.search.own

    def to_json(self) -> dict[str, Any]:
        """Return the result as a dictionary for `json.dumps`."""
        known = self.search
        return {
            "best": [trial.to_json() for trial in self.best],
            "own": None if self.own is None else self.own.to_json(),
            "own_note": self.own_note,
            "losers": [loser.to_json() for loser in self.losers],
            "policies": [trial.to_json() for trial in self.references.policies],
            "strategies": [trial.to_json() for trial in self.references.strategies],
            "refused": [
                {"reason": r.reason, "count": r.count, "first": r.name, "message": r.message}
                for r in known.layouts.refusals.values()
            ],
            "candidates": len(known.layouts.candidates),
            "walked": len(known.even),
            "packed": len(known.packed),
            "tuned": len(known.tuned),
            "is_cut": known.is_cut,
        }


def fits_own_devices(trial: Trial) -> bool:
    """Return whether a simulated run fits in the memory of its devices, less a reserve."""
    return trial.fits


def lines_of(trial: Trial) -> tuple[str, str, str]:
    """Return a description of a layout in three lines.

    The lines are the parallel degrees, the pipeline with recomputation, and packing with sharding.
    """
    spec = trial.spec
    second = f"{pipeline_of(spec)}, n {spec.micro_batches_per_pipeline}"
    if spec.splits_backward and spec.pp.weight_delay > 1:
        second += f", weight delay {spec.pp.weight_delay}"
    if spec.training.recompute != Recompute.NONE:
        second += f", recompute {spec.training.recompute}"
    third = trial.packing
    if spec.parallel.cp > 1:
        third += f", {spec.sharding.strategy}"
    return degrees_of(spec), second, third


def cells_of(trial: Trial, own: Trial | None) -> tuple[str, ...]:
    """Return the texts of a layout's row in the table of layouts, in the order of COLUMNS.

    Args:
        trial: The layout of this row.
        own: The run's present layout, from which the gain is computed; None if it is unknown.
    """
    # Do not compute a gain over a run that does not fit in memory.
    has_gain = own is not None and fits_own_devices(own)
    return (
        f"{trial.time_s:.3f}",
        f"{trial.tokens_per_s / 1e3:.1f}",
        f"{own.time_s / trial.time_s:.3f}" if own is not None and has_gain else "-",
        f"{trial.mfu:.1%}",
        f"{trial.peak_memory_bytes / GIB:.1f}",
        f"{trial.mean_delay:.2f}/{trial.max_delay}",
        f"{trial.bubble:.1%}",
        f"{trial.of_bound:.3f}",
    )


def layout_verdict(report: LayoutReport, *, profile: KernelProfile, gpus: int) -> str:
    """Return sentences that name the best layout and compare it with the run's present layout.

    Args:
        report: Result of the search.
        profile: Kernel profile of the simulation.
        gpus: Number of devices.
    """
    best, own = report.winner, report.own
    beside = ""
    if own is not None and fits_own_devices(own):
        beside = f", {1 - best.time_s / own.time_s:.1%} less than with the run's present settings"
        if own.layout == best.layout:
            beside = f"{beside}, which have the same layout"
    error = published_error(best.spec, profile)
    trust = "" if error is None else f"; {error}"
    return (
        f"Best of {len(report.search.layouts.candidates):,} layouts of {gpus:,} GPUs: "
        f"{best.layout}. A step takes {best.time_s:.3g} s{beside} (simulated{trust})."
    )


def layout_table(report: LayoutReport, *, title: str) -> Table:
    """Return a table of the best layouts, with the run's present layout in the last row."""
    texts = ["layout, pipeline, packing"]
    table = new_table(
        title, labels=[""], texts=texts, numbers=COLUMNS, is_plain=True, caption=CAPTION
    )
    rows = [(str(i + 1), trial) for i, trial in enumerate(report.best)]
    rows += [("own", report.own)] if report.own is not None else []
    for label, trial in rows:
        style = "bold" if trial is report.winner else ""
        text = "\n".join(lines_of(trial))
        table.add_row(label, text, *cells_of(trial, report.own), style=style)
    return table


CAPTION = (
    "All numbers are simulated, on the same documents in all rows, and include the steps that "
    "train what still waits when the documents end. s/step = seconds of all steps divided by the "
    "number of global batches. ktok/s = thousands of tokens per second. gain = speed-up over the "
    "run's present settings (row own). MFU = model FLOPs utilization, with attention within "
    "documents only. GiB = memory of the rank that needs most. delay = steps that a token waits, "
    "mean/maximum. bubble = fraction of the time in which pipeline ranks wait. bound = time of "
    "perfectly balanced steps over the simulated time. In the first column: v = virtual stages of "
    "a rank; n = micro-batches of a pipeline; S = S_max in context windows; T = most tokens of a "
    "step, in global batches; M = micro-batches of a step"
)


def loser_lines(report: LayoutReport) -> list[str]:
    """Return lines that say why other layouts, packing policies and sharding strategies are slower.

    A line names a value that the winner does not have, such as "TP 8", and describes the fastest
    layout with this value. Values with the same fastest layout share a line.
    """
    labels: dict[str, list[str]] = {}
    for loser in report.losers:
        labels.setdefault(_of_loser(loser), []).append(loser.label)
    out = [f"{'; '.join(families)}: {text}" for text, families in labels.items()]
    out += _beside("packing", report.references.policies, report.winner)
    return out + _beside("sharding", report.references.strategies, report.winner)


def _of_loser(loser: Loser) -> str:
    """Return a text that says how much slower a layout is than the winner, and why."""
    if loser.trial is None:
        return loser.why
    degrees, pipeline, packing = lines_of(loser.trial)
    depth = "" if loser.trial.is_sharded else " if all CP ranks had equal work"
    best = f"{loser.behind:+.1%}{depth} ({degrees}, {pipeline}; {packing})"
    return f"{best}: {loser.why or 'as fast'}"


def _beside(what: str, trials: Sequence[Trial], winner: Trial) -> list[str]:
    """Return a line with the times of packing policies or sharding strategies on the best layout.

    Args:
        what: "packing" or "sharding".
        trials: Simulations of the winner's layout with each policy or strategy.
        winner: Simulation of the winner.

    Returns:
        A list with the line; empty if there are fewer than two trials.
    """
    parts: list[str] = []
    for trial in trials:
        name = trial.packing if what == "packing" else str(trial.spec.sharding.strategy)
        text = f"{name} {trial.time_s / winner.time_s - 1:+.1%}"
        if what == "packing":
            text += f" (delay {trial.mean_delay:.2f})"
        parts.append(text)
    note = "; original cuts documents and thus computes less attention" if what == "packing" else ""
    line = f"{what} on the best layout, time relative to the best: {', '.join(parts)}{note}"
    return [line] if len(parts) > 1 else []


def refusal_lines(report: LayoutReport) -> list[str]:
    """Return a line for each reason why layouts were left out, with their number and an example."""
    out: list[str] = []
    for r in sorted(report.search.layouts.refusals.values(), key=lambda r: -r.count):
        first = r.message if r.name in r.message else f"{r.name}: {r.message}" * bool(r.message)
        example = f"; for example {first}" if first else ""
        out.append(f"{r.count} layouts were left out ({r.reason}){example}")
    return out


def effort_line(report: LayoutReport) -> str:
    """Return a text that says how many layouts fit in memory and how many each phase simulated."""
    known = report.search
    text = (
        f"{len(known.layouts.candidates):,} layouts fit in memory; {len(known.even):,} were "
        f"simulated with equal micro-batches, {len(known.packed)} with packed documents, and "
        f"{len(known.tuned)} with all packing settings"
    )
    return text + ("; layouts that were not simulated may be faster" if known.is_cut else "")
