"""A page of simulated runs that needs nothing else: who is faster, and what a step's time is."""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from wlb.cost.machine import program_version
from wlb.report.packing.page import STYLE
from wlb.report.plots import svg
from wlb.report.simulation.plots import heat_map_figure, imbalance_figure
from wlb.report.simulation.tables import layout_text, worth_of
from wlb.report.timeline import timeline_figure
from wlb.simulate import RunSimulation, Simulation, critical_path

Cell = Callable[[RunSimulation, RunSimulation], str]
COLUMNS: tuple[tuple[str, Cell, str], ...] = (
    ("time (s)", lambda run, _: f"{run.time_s:.2f}", "of all steps, flush included"),
    ("steps", lambda run, _: str(run.step_time_s.size), "that the global batches made"),
    ("tokens/s", lambda run, _: f"{run.tokens_per_s:,.0f}", "real tokens, without padding"),
    (
        "gain",
        lambda run, baseline: f"{run.tokens_per_s / baseline.tokens_per_s:.3f}",
        "speed-up: tokens a second over the first row's",
    ),
    (
        "bound",
        lambda run, _: f"{run.balanced_time_s() / run.time_s:.3f}",
        "time with every micro-batch and CP rank at its step's mean / this: 1 where balance alone "
        "has nothing left to gain",
    ),
    (
        "imbalance",
        lambda run, _: f"{run.imbalance:.3f}",
        "slowest over mean micro-batch, forward and backward, time-weighted",
    ),
    (
        "bubble",
        lambda run, _: f"{run.mean_bubble:.1%}",
        "share of the time that a pipeline rank is in no pass",
    ),
    ("delay", lambda run, _: f"{run.mean_delay:.2f}", "steps that a token waits, mean"),
    (
        "memory (GiB)",
        lambda run, _: f"{run.peak_memory_bytes.max() / 2**30:.1f}",
        "most that a GPU holds, estimated",
    ),
    (
        "MFU",
        lambda run, _: f"{run.mfu(peak_tflops=run.simulator.spec.cluster.peak_tflops):.1%}",
        "FLOPs of the documents, not of windows, over what the GPUs could do",
    ),
)


def simulation_page(
    *,
    title: str,
    runs: Sequence[RunSimulation],
    own: str = "",
    step: int | None = None,
    provenance: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page as text. own: label of the run whose steps are drawn (default: the last). step:
    which of them is drawn beside the slowest one (default: the median).

    The first run is the baseline, as in `simulation_table`.
    provenance: what the caller knows besides (the command); profile, commit and seed are added.
    """
    if not runs:
        raise ValueError("no run was given")
    labels = [run.label for run in runs]
    if own and own not in labels:
        raise ValueError(f"no run is called {own!r}; there are {', '.join(labels)}")
    shown = runs[labels.index(own)] if own else runs[-1]
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in (*_lead(runs, shown), *notes)),
        "<h2>Runs over the same documents</h2>",
        _table(runs, shown),
        "<h2>Steps</h2>",
        _drawn(
            svg(imbalance_figure(runs), "steps"),
            "A point a step, running means as lines. Above: slowest over mean micro-batch in "
            "predicted time. Below: simulated time over the mean of the first run, the baseline. "
            "Policies that hold documents back have steps of different sizes; time a token "
            "compares them.",
        ),
        *_steps(shown, step),
        *_gpus(shown),
        "<h2>What the columns mean</h2><dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, _, text in COLUMNS),
        "</dl>",
        "<h2>Made with</h2><dl>",
        *(
            f"<dt>{escape(name)}</dt><dd><code>{escape(text)}</code></dd>"
            for name, text in (*provenance, *_provenance(shown))
        ),
        "</dl>",
    ]
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(parts) + "</body></html>\n"


def _lead(runs: Sequence[RunSimulation], shown: RunSimulation) -> list[str]:
    baseline, best = runs[0], max(runs, key=lambda run: run.tokens_per_s)
    lines = [
        f"Simulated, not measured: {layout_text(shown.simulator.spec)}, priced with kernel profile "
        f"{shown.simulator.cost.profile.name}."
    ]
    if best is baseline and len(runs) > 1:
        lines.append(f"{baseline.label}, the baseline, is the fastest here.")
    elif len(runs) > 1:
        ratio = best.tokens_per_s / baseline.tokens_per_s
        lines.append(
            f"{best.label} trains {ratio:.3f} times as many tokens a second as {baseline.label}."
        )
    return lines


def _table(runs: Sequence[RunSimulation], own: RunSimulation) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name, _, _ in COLUMNS)
    rows: list[str] = []
    for run in runs:
        cells = "".join(f"<td>{escape(cell(run, runs[0]))}</td>" for _, cell, _ in COLUMNS)
        mark = ' class="own"' if run is own else ""
        rows.append(f"<tr{mark}><td>{escape(run.label)}</td>{cells}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><th>run</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _steps(run: RunSimulation, chosen: int | None) -> list[str]:
    """The slowest and the median or chosen step: timeline, and the critical path in words."""
    order = np.argsort(run.step_time_s, kind="stable").tolist()
    if chosen is not None and chosen not in order:
        raise ValueError(f"step {chosen} is none of the {len(order)} of {run.label}")
    steps = {"slowest": int(order[-1])}
    median = int(order[len(order) // 2])
    steps["median" if chosen in (None, median) else "chosen"] = median if chosen is None else chosen
    parts: list[str] = []
    for name, step in steps.items():
        if name != "slowest" and step == steps["slowest"]:
            continue
        simulation = simulated(run, step)
        path = critical_path(simulation)
        pipeline = path.main_pipeline
        seconds = f"{path.step_time_s:.3f} s"
        title = f"{run.label}, step {step}, pipeline {pipeline}"
        parts += [
            f"<h2>The {name} step: {step} of {escape(run.label)}, {seconds}</h2>",
            _drawn(
                svg(timeline_figure(simulation, 0, pipeline, title=title), name),
                "The pipeline that is longest on the critical path. A bar is a pass, forward "
                "light and backward dark, its number and colour the micro-batch; blank is idle. "
                "Outlined: what the step's time is made of, each waiting for the one before it; "
                "where nothing is, the path is in another pipeline.",
            ),
            "<p>What took the time:</p><ul>",
            *(f"<li>{escape(line)}</li>" for line in path.describe()),
            "</ul>",
        ]
    return parts


def _gpus(run: RunSimulation) -> list[str]:
    step = int(run.step_time_s.argmax())
    spec = run.simulator.spec
    figure = heat_map_figure(
        simulated(run, step).compute_s[0], title=f"step {step}", tp=spec.parallel.tp
    )
    return [
        "<h2>GPUs in the slowest step</h2>",
        _drawn(
            svg(figure, "gpus"),
            "Time in kernels, without collectives, of each GPU. Pipeline ranks differ by embedding "
            "and output head, CP ranks by sharding, pipelines by what was dealt to them.",
        ),
    ]


def simulated(run: RunSimulation, step: int) -> Simulation:
    """One of the run's steps again, with its events, as a simulation of one step."""
    return run.simulator.run(run.prices.select(slice(step, step + 1)))


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


def _drawn(figure: str, caption: str) -> str:
    return f"<figure>{figure}<figcaption>{escape(caption)}</figcaption></figure>"
