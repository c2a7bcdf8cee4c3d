"""Redraws the loss curves of the convergence study from its committed runs.

`python -m experiments.paper.fig16.redraw` trains nothing. Unlike the rest of the page, the curves
need neither the corpus nor the counts of its packing.
"""

import json
from pathlib import Path

from experiments.paper.fig16.__main__ import SEEDS
from experiments.paper.fig16.arms import ARMS, SMALL
from experiments.paper.fig16.outcome import result_from_json
from experiments.paper.fig16.page import draw_curves
from experiments.paper.fig16.summary import groups_of


def redraw(results: Path) -> Path:
    """Writes `curves.png` from the runs in `results`/runs and returns its path."""
    kept = {
        (arm.name, seed): result_from_json(json.loads(path.read_text("utf-8")))
        for seed in range(SEEDS)
        for arm in ARMS
        if (path := results / "runs" / f"{arm.name}-seed{seed}.json").exists()
    }
    groups = groups_of(kept, None)
    if not groups:
        raise ValueError(f"{results} has no run together with the baseline of the same seed")
    every = SMALL.eval_tokens
    grid = range(0, groups[0].results[0].num_tokens + 1, every)
    made = results / "curves.png"
    draw_curves(groups, grid).savefig(made, dpi=150)
    return made


if __name__ == "__main__":
    redraw(Path(__file__).parent / "results")
