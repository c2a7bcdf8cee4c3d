"""Simulates training runs that others measured on H100s and published.

`python -m experiments.published_runs [--runs FILE] [--profile NAME] [--quick]` maps every row of a
CSV file (this folder's README.md has its columns) to a `RunSpec`, simulates one step of it, and
prints predicted over measured throughput: as wlb would run it, and with what is known of the
trainer. Few constants are fitted, each source checked with those that the others give.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.drawing import COLOURS, MARKERS, new_figure
from experiments.published_runs.fitting import (
    FITTED_PRECISION,
    Sensitivity,
    fit,
    fit_without,
    rank_correlation,
    sensitivity,
)
from experiments.published_runs.mapping import SOURCES, as_wlb_runs, mapped
from experiments.published_runs.prediction import Constants, Prediction, predict
from experiments.published_runs.reasons import CHANGES, reasons
from experiments.published_runs.rows import read_runs
from experiments.results import How, Picture, Table, show, write_results
from wlb.cost import KernelProfile, load_profile

FOLDER = Path(__file__).parent
RUNS = FOLDER / "runs.csv"
CONSTANTS = Constants(fsdp_slowdown=0.24, triton_speed=0.57)
"""Fitted to the BF16 rows of all sources (`fitting`)."""
EXPLAINED = (2, 5, 10, 14, 19, 20, 21, 22, 28, 29)
"""Lines of the rows of which the page shows what each part of the model is worth."""


def runs_table(blind: Sequence[Prediction], found: Sequence[Prediction]) -> Table:
    """Every row: measured, predicted, and where the time goes."""
    rows = [
        [
            *(p.case.run.line, p.case.run.source, p.case.run.name),
            *(p.case.run.precision, p.case.measured, before.ratio),
            *(p.tokens_per_s_gpu, p.ratio, p.attention_share, p.communication_share),
            *(p.peak_gib, p.case.run.peak_gib),
        ]
        for before, p in zip(blind, found, strict=True)
    ]
    return Table(
        name="runs",
        title="Predicted over measured tokens per second",
        columns=[
            *("line", "source", "run", "products", "measured", "as wlb"),
            *("predicted", "predicted / measured", "attention", "communication"),
            *("peak, GiB", "printed peak, GiB"),
        ],
        rows=rows,
        formats={
            "line": "d",
            "measured": ",.0f",
            "as wlb": ".2f",
            "predicted": ",.0f",
            "predicted / measured": ".3f",
            "attention": ".0%",
            "communication": ".0%",
            "peak, GiB": ".0f",
            "printed peak, GiB": ".1f",
        },
        note="Tokens per second and GPU. **as wlb**: predicted over measured if wlb's own executor "
        "ran the row on an H100 of 700 W. Shares are of the critical path. FP8 rows are priced as "
        "BF16 and take part in no fit and no mean.",
    )


def mapping_table(found: Sequence[Prediction]) -> Table:
    """What each row was mapped to."""
    return Table(
        name="mapping",
        title="What each row was mapped to",
        columns=["line", "source", "run", "simulated as"],
        rows=[[p.case.run.line, p.case.run.source, p.case.run.name, p.case.words()] for p in found],
        formats={"line": "d"},
    )


def sources_table(found: Sequence[Prediction], sensitivities: Sequence[Sensitivity]) -> Table:
    """By source: errors, order of the rows, and the constants that the other sources give."""
    rows: list[list[Any]] = []
    for source in dict.fromkeys(p.case.run.source for p in found):
        own = [p for p in found if p.case.run.source == source and _is_fitted(p)]
        if not own:
            continue
        given = fit_without(sensitivities, source)
        held = [
            s.ratio(given.fsdp_slowdown, given.triton_speed)
            for s in sensitivities
            if s.case.run.source == source
        ]
        order = None
        if len(own) > 2:
            order = rank_correlation(
                [p.tokens_per_s_gpu for p in own], [p.case.measured for p in own]
            )
        ratios = np.array([p.ratio for p in own])
        rows.append(
            [
                *(source, len(own), float(ratios.mean()), float(np.abs(ratios - 1).max()), order),
                *(given.fsdp_slowdown, given.triton_speed),
                *(float(np.mean(held)), float(np.abs(np.array(held) - 1).max())),
            ]
        )
    return Table(
        name="sources",
        title="By source, and with constants of the other sources",
        columns=[
            *("source", "rows", "mean", "largest error", "rank correlation"),
            *("slowdown by others", "kernel speed", "mean by others", "largest error by others"),
        ],
        rows=rows,
        formats={
            "rows": "d",
            "mean": ".3f",
            "largest error": ".1%",
            "rank correlation": ".3f",
            "slowdown by others": ".2f",
            "kernel speed": ".2f",
            "mean by others": ".3f",
            "largest error by others": ".1%",
        },
        note="BF16 rows. **by others**: with constants fitted to all sources but this one; the "
        "speed of Triton's kernel, which one source alone has, is that source's own.",
    )


def reasons_table(
    found: Sequence[Prediction], profile: KernelProfile, constants: Constants
) -> Table:
    """What each part of the model is worth, for one row of each kind."""
    rows = [
        [
            *(p.case.run.line, p.case.run.source, p.case.run.name, p.ratio),
            *reasons(p.case, profile, constants, p.ratio),
        ]
        for p in found
        if p.case.run.line in EXPLAINED
    ]
    return Table(
        name="reasons",
        title="Predicted over measured with one part of the model left out",
        columns=["line", "source", "run", "all parts", *CHANGES],
        rows=rows,
        formats={"line": "d", "all parts": ".3f", **dict.fromkeys(CHANGES, ".3f")},
        note="Each column has one thing as wlb does it, and all others as the trainer does. Cells "
        "are empty where the row has not that part.",
    )


def _is_fitted(prediction: Prediction) -> bool:
    return prediction.case.run.precision == FITTED_PRECISION


def plot(blind: Sequence[Prediction], found: Sequence[Prediction]) -> Any:
    """Predicted over measured, before and now, by share of attention."""
    figure, axes = new_figure(ncols=2, height=3.6, sharey=True)
    panels = ((blind, "as wlb would run it"), (found, "as the trainer does"))
    for axis, (predictions, title) in zip(axes, panels, strict=True):
        axis.axhspan(0.9, 1.1, color="0.92")
        axis.axhline(1.0, color="0.5", linewidth=0.8)
        for i, source in enumerate(SOURCES):
            own = [p for p in predictions if p.case.run.source == source]
            if not own:
                continue
            x = [q.attention_share for q in found if q.case.run.source == source]
            is_filled = [_is_fitted(p) for p in own]
            colours = [COLOURS[i] if full else "none" for full in is_filled]
            axis.scatter(
                *(x, [p.ratio for p in own]),
                marker=MARKERS[i],
                facecolors=colours,
                edgecolors=COLOURS[i],
                label=source,
                s=34,
            )
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("attention's share of the step")
    axes[0].set_ylabel("predicted / measured")
    axes[1].legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=RUNS, help="CSV file of published runs")
    parser.add_argument("--profile", default="h100", help="kernel profile of an H100 of 700 W")
    parser.add_argument("--quick", action="store_true", help="predict and print, without fits")
    options = parser.parse_args()
    profile = load_profile(options.profile)
    cases = [mapped(run) for run in read_runs(options.runs)]
    blind = [predict(as_wlb_runs(case), profile, Constants()) for case in cases]
    found = [predict(case, profile, CONSTANTS) for case in cases]
    tables = [runs_table(blind, found), mapping_table(found)]
    if options.quick:
        show(*tables, width=200)
        return
    fitted = [case for case in cases if case.run.precision == FITTED_PRECISION]
    sensitivities = [sensitivity(case, profile) for case in fitted]
    tables[1:1] = [sources_table(found, sensitivities), reasons_table(found, profile, CONSTANTS)]
    show(*tables, width=200)
    print(f"fitted to all sources: {fit(sensitivities)}; used: {CONSTANTS}")
    if options.runs != RUNS or options.profile != "h100":
        return
    write_results(
        FOLDER,
        title="Training runs that others published",
        how=How.SIMULATED,
        profile=profile,
        text=text_of(found),
        tables=tables,
        figures=[
            Picture(
                name="ratios",
                caption="Predicted over measured tokens per second of published H100 runs. Left: "
                "as wlb's executor would run them; right: with what is known of their trainers. "
                "The grey band is 10% on either side; hollow marks are FP8 runs.",
                figure=plot(blind, found),
            )
        ],
    )


def text_of(found: Sequence[Prediction]) -> str:
    """The page's text."""
    ratios = np.array([p.ratio for p in found if _is_fitted(p)])
    within = int((np.abs(ratios - 1) <= 0.1).sum())
    assumed = [
        f"- {name} ({traits.kernel_words}): {'; '.join(traits.assumed)}."
        for name, traits in SOURCES.items()
    ]
    lines = (
        f"{within} of {ratios.size} BF16 rows are predicted within 10%, all within "
        f"{np.abs(ratios - 1).max():.0%}. The rows and their sources: "
        "[README.md](../README.md), [runs.csv](../runs.csv).",
        "",
        "Nothing here ran on our side. Two constants are fitted: a second of FSDP's collectives "
        f"beside computation costs the computation {CONSTANTS.fsdp_slowdown:g} s, and Triton's "
        f"FlashAttention-1 with ALiBi has {CONSTANTS.triton_speed:g} of FlashAttention-2's "
        "throughput. Everything else is a profile, a source's configuration, or an assumption "
        "that the following list names.",
        "",
        *assumed,
        "",
        "What is not reached: FP8 rows (one speed of FP8 products does not explain both the "
        "pipelines and the rows whose attention is most of the time), and the peaks of pipelines.",
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
