"""Compares windows, N, thresholds and S_max that the demo could show on the standard library.

`python -m experiments.demo_window [--steps 60]` plans the demo's corpus (its store must exist: run
`wlb train demo` once) under several settings. For each window and N it prints Plain-4D
and the best settings of Algorithm 1, as predicted by the CPU profile. It trains nothing.
"""

import argparse
from itertools import islice
from pathlib import Path

from wlb.plan import StepMetrics
from wlb.planner import open_planner
from wlb.spec import load

STORES = "stdlib-bpe4096-*-train.bin"
THRESHOLDS = ([0.2, 0.63], [0.3, 0.7], [0.4, 0.8], [0.5, 0.9])


def ratios(steps: list[StepMetrics]) -> tuple[float, float]:
    """Returns the mean of the steps' imbalance, and the sum of slowest over the sum of means."""
    mean = sum(m.imbalance for m in steps) / len(steps)
    slowest = sum(m.max_workload_ns for m in steps)
    return mean, slowest / sum(m.mean_workload_ns for m in steps)


def row(
    store: str, window: int, n: int, thresholds: list[float], s_max: float, steps: int
) -> dict[str, float]:
    spec = load(
        "demo",
        [
            f"data.context_window={window}",
            f"data.num_windows={n}",
            f"packing.queue_thresholds={thresholds}",
            f"packing.s_max={s_max}",
            "model.vocab_size=4096",
        ],
    )
    plans = list(islice(open_planner(spec, store, "cpu").steps(), steps))
    ours = [p.predicted for p in plans]
    plain = [p.baseline for p in plans if p.baseline is not None]
    tokens = sum(m.num_tokens for m in ours)
    return {
        "plain": ratios(plain)[0],
        "plain_weighted": ratios(plain)[1],
        "ours": ratios(ours)[0],
        "ours_weighted": ratios(ours)[1],
        "delay": sum(m.mean_delay * m.num_tokens for m in ours) / tokens,
        "ms_a_step": sum(m.mean_workload_ns for m in ours) * n / len(ours) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    made = next(Path("runs/stores").glob(STORES), None)
    if made is None:
        parser.error(f"no runs/stores/{STORES}; `wlb train demo` makes it")
    store = str(made.with_suffix(""))
    print("window  N  thresholds  S_max  Plain-4D (weighted)  ours (weighted)  delay  ms a step")
    for window, n in ((2048, 4), (4096, 4), (6144, 3), (6144, 4), (8192, 3), (8192, 4), (16384, 4)):
        found = [
            (row(store, window, n, thresholds, s_max, steps), thresholds, s_max)
            for thresholds in THRESHOLDS
            for s_max in (1.25, 1.5, 2.0)
        ]
        for r, thresholds, s_max in sorted(found, key=lambda f: f[0]["ours_weighted"])[:3]:
            print(
                f"{window:6} {n:2}  {thresholds}  {s_max:5}  {r['plain']:8.3f} "
                f"({r['plain_weighted']:.3f})  {r['ours']:10.3f} ({r['ours_weighted']:.3f})  "
                f"{r['delay']:8.2f}  {r['ms_a_step']:8.0f}"
            )


if __name__ == "__main__":
    main()
