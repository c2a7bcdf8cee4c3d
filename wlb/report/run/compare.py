"""`wlb report RUN RUN ...`: tables that compare the results and configurations of several runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from wlb.plan.plain import flat
from wlb.report.run.page import tally_of
from wlb.report.run.records import RunRecords
from wlb.report.tables import new_table
from wlb.spec import to_dict

IGNORED_KEYS = ("run.name", "run.output_dir", "run.stop_file")
"""Configuration keys that are not compared, because they do not influence training."""


def runs_tables(runs: Sequence[RunRecords]) -> list[Table]:
    """Return a table of results and, if configuration keys differ, a second table of these keys."""
    names, figures = run_names(runs), [figures_of(run) for run in runs]
    rows = [(name, [cells[name] for cells in figures]) for name in figures[0]]
    differing = differences([to_dict(run.spec) for run in runs])
    found = [("Results", rows), ("Configuration keys that differ", differing)]
    tables: list[Table] = []
    for title, cells in found[: 2 if differing else 1]:
        table = new_table(title, labels=[""], numbers=names)
        for name, values in cells:
            table.add_row(name, *values)
        tables.append(table)
    return tables


def run_names(runs: Sequence[RunRecords]) -> list[str]:
    """Return a name for each run: its folder's name, or its path if two folders have this name."""
    short = [run.folder.resolve().name for run in runs]
    alike = {name for name, count in Counter(short).items() if count > 1}
    return [
        str(run.folder) if name in alike else name for run, name in zip(runs, short, strict=True)
    ]


def differences(specs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the configuration keys that differ between runs.

    Args:
        specs: The configurations of the runs, as nested dictionaries.

    Returns:
        Pairs of a dotted key and its value in each run.
    """
    of_runs = [dict(flat(spec)) for spec in specs]
    names = [name for name in of_runs[0] if name not in IGNORED_KEYS]
    values = {name: [repr(one.get(name)) for one in of_runs] for name in names}
    return [(name, found) for name, found in values.items() if len(set(found)) > 1]


def figures_of(run: RunRecords) -> dict[str, str]:
    """Return the results of a run as texts for the table of runs, by the name of the row."""
    totals = tally_of(run)
    last, work, measured = totals.losses[-5:], totals.telemetry.work, totals.telemetry
    experts = totals.experts
    return {
        "steps": f"{int(run.steps_done[-1]):,} of {run.spec.training.steps:,}",
        "tokens": f"{totals.ours.tokens:,}",
        "training loss, last 5 steps": f"{sum(last) / len(last):.3f}" if last else "-",
        "held-out loss": f"{run.evaluations[-1][1]:.3f}" if run.evaluations else "-",
        "tokens/s in steps": _ratio(totals.ours.tokens, totals.train_time_s, ",.0f"),
        "MFU": "-" if work.mfu is None else f"{work.mfu:.1%}",
        "imbalance, predicted": f"{totals.ours.weighted_imbalance:.3f}",
        "imbalance, measured": _ratio(measured.slowest_ns, measured.mean_ns, ".3f"),
        "imbalance of the usual loader, predicted": _ratio(
            totals.plain.slowest_ns, totals.plain.mean_ns, ".3f"
        ),
        "imbalance of EP ranks, measured": f"{experts.mean_rank:.3f}" if experts.steps else "-",
        "token delay, mean and maximum (steps)": f"{totals.mean_delay:.2f}, {totals.max_delay}",
        "wall time, last start (s)": f"{sum(run.wall.values()):,.1f}" if run.wall else "-",
    }


def _ratio(above: float, below: float, form: str) -> str:
    return format(above / below, form) if below else "-"
