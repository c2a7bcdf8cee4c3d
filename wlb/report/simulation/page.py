"""`wlb simulate --html`: which run is faster, and where the time of a step goes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from wlb.cost.machine import program_version
from wlb.plan import UserError
from wlb.report.plots import svg
from wlb.report.render import render
from wlb.report.simulation.plots import heat_map_figure, imbalance_figure
from wlb.report.simulation.tables import COMMON, Cell, layout_text, worth_of
from wlb.report.timeline import timeline_figure
from wlb.simulate import RunSimulation, Simulation, critical_path

COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("time (s)", lambda run, _: f"{run.time_s:.2f}"),
    ("steps", lambda run, _: str(run.step_time_s.size)),
    ("tokens/s", lambda run, _: f"{run.tokens_per_s:,.0f}"),
    ("gain", COMMON["gain"]),
    ("bound", COMMON["bound"]),
    ("imbalance", COMMON["imbalance"]),
    ("bubble", lambda run, _: f"{run.mean_bubble:.1%}"),
    ("delay", COMMON["delay"]),
    ("memory (GiB)", COMMON["memory"]),
    ("MFU", COMMON["MFU"]),
)
"""Heading, and the cell of a run and the baseline; the template explains each heading."""


def simulation_page(
    *,
    title: str,
    runs: Sequence[RunSimulation],
    own: str = "",
    step: int | None = None,
    provenance: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page as HTML. own: label of the run whose steps are drawn (default: the last). step: the
    one that is drawn beside the slowest (default: the median).

    The first run is the baseline, as in `simulation_table`. provenance: names and values such as
    the command; profile, commit and seed are added.
    """
    if not runs:
        raise UserError("no run was given")
    labels = [run.label for run in runs]
    if own and own not in labels:
        raise UserError(f"no run is called {own!r}; there are {', '.join(labels)}")
    own_index = labels.index(own) if own else len(runs) - 1
    shown = runs[own_index]
    slowest = int(shown.step_time_s.argmax())
    spec = shown.simulator.spec
    heat_map = heat_map_figure(
        simulated(shown, slowest).compute_s[0], title=f"step {slowest}", tp=spec.parallel.tp
    )
    return render(
        "simulation",
        title=title,
        layout=layout_text(spec),
        profile=shown.simulator.cost.profile.name,
        num_runs=len(runs),
        baseline=runs[0],
        best=max(runs, key=lambda run: run.tokens_per_s),
        notes=notes,
        head=["run", *(name for name, _ in COLUMNS)],
        rows=[[run.label, *(cell(run, runs[0]) for _, cell in COLUMNS)] for run in runs],
        own=own_index,
        figures={"steps": svg(imbalance_figure(runs), "steps"), "gpus": svg(heat_map, "gpus")},
        shown=shown,
        steps=[_step(shown, name, i) for name, i in _drawn_steps(shown, step).items()],
        provenance=[*provenance, *_provenance(shown)],
    )


def simulated(run: RunSimulation, step: int) -> Simulation:
    """One of the run's steps, simulated again with its events."""
    return run.simulator.run(run.prices.select(slice(step, step + 1)))


def _drawn_steps(run: RunSimulation, chosen: int | None) -> dict[str, int]:
    """The slowest step, and the chosen or the median one if it is another."""
    order: list[int] = np.argsort(run.step_time_s, kind="stable").tolist()
    if chosen is not None and chosen not in order:
        raise UserError(f"step {chosen} is none of the {len(order)} of {run.label}")
    slowest, median = order[-1], order[len(order) // 2]
    other = median if chosen is None else chosen
    if other == slowest:
        return {"slowest": slowest}
    return {"slowest": slowest, "median" if other == median else "chosen": other}


def _step(run: RunSimulation, name: str, index: int) -> dict[str, Any]:
    simulation = simulated(run, index)
    path = critical_path(simulation)
    pipeline = path.main_pipeline
    title = f"{run.label}, step {index}, pipeline {pipeline}"
    figure = svg(timeline_figure(simulation, 0, pipeline, title=title), name)
    return {"name": name, "index": index, "path": path, "figure": figure}


def _provenance(run: RunSimulation) -> list[tuple[str, str]]:
    spec, cost = run.simulator.spec, run.simulator.cost
    profile, origin = cost.profile, cost.profile.provenance
    return [
        ("kernel profile", f"{profile.name}: {profile.device}, {profile.dtype}"),
        ("its source", f"{origin.kind}: {origin.source}"),
        *((f"blocks that are {kind}", blocks) for kind, blocks in worth_of(profile)),
        *(("where the profile does not match", note) for note in cost.notes),
        ("layout", layout_text(spec)),
        ("seed", str(spec.run.seed)),
        ("commit", program_version()),
    ]
