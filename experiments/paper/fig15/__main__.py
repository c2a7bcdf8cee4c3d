"""Compares the attention of one layer under each CP sharding strategy (Figure 15).

`python -m experiments.paper.fig15 [--device none|cuda|cpu]` times or predicts attention in a layer
of the 7B model at CP 4, for windows of 64K and 128K. Micro-batches are made by Plain-4D's loader
from documents of the fitted distribution. `device_of` describes the devices, and `run_window` how
times are summed.
"""

import argparse
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.harness.arguments import at_least, experiment_parser
from experiments.harness.files import write_json
from experiments.harness.pages import commit, show
from experiments.harness.streams import WINDOW
from experiments.paper.fig15.case import (
    PROFILE,
    STATIC,
    STRATEGIES,
    WINDOW_STEP,
    distinct,
    layer_cost,
    micro_batches,
    plans_of,
)
from experiments.paper.fig15.layer import CPU_SCALE, Case, describe, scale_of
from experiments.paper.fig15.rank_times import slowest_ns, times_ns
from experiments.paper.fig15.report import ALL, OPTIMAL, mean_line, note_of, table_of, write
from wlb.cost import ProfiledWorkload, attention_latency, load_profile
from wlb.plan import IntArray, ShardingPlan, UserError

Measure = Callable[[Sequence[ShardingPlan]], np.ndarray]
"""Maps plans of a micro-batch to the slowest rank's time in ns, shape [plans, 2] (both passes)."""


def predicted(cost: ProfiledWorkload) -> Measure:
    """Returns the measure that predicts times from a kernel profile."""

    def measure(plans: Sequence[ShardingPlan]) -> np.ndarray:
        found = [attention_latency(plan, cost) for plan in plans]
        return np.array([(x.forward_ns.max(), x.backward_ns.max()) for x in found], float)

    return measure


def measured(case: Case, rounds: int) -> Measure:
    """Returns the measure that times kernels on a device."""
    layout = case.layout()
    return lambda plans: slowest_ns(times_ns(plans, layout, rounds=rounds))


def rest_ns(pieces: Sequence[IntArray], cost: ProfiledWorkload) -> dict[str, float]:
    """Predicts the rest of the layer in ms, summed over micro-batches.

    The rest is the collectives of keys and values in forward ("gather_ms") and in backward
    ("exchange_ms"), and all linear layers ("linear_ms").
    """
    cp = cost.parallel.cp
    exchange = np.sum([cost.kv_exchange_ns(int(p.sum()), cp=cp) for p in pieces], axis=0)
    terms = [cost.terms(p) for p in pieces]
    linear = sum(
        int(ns.sum())
        for of in terms
        for name, ns in of.items()
        if not name.startswith(("attention_", "cp_comm_"))
    )
    return {
        "gather_ms": float(exchange[0]) / 1e6,
        "exchange_ms": float(exchange[1]) / 1e6,
        "linear_ms": linear / 1e6,
    }


def run_window(case: Case | None, window: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures or predicts all strategies for one window and returns the results as JSON values.

    The times are of attention kernels alone: sums over micro-batches of the slowest rank's forward
    and of the slowest rank's backward. `adaptive`, `hybrid` and `balanced` choose by predicted
    times.

    "optimal" takes the better of the two static strategies for each micro-batch in hindsight, as in
    the paper, and "optimal of all" the best of all five. With measured times, hindsight also
    benefits from noise.

    Args:
        case: The device and the window to measure. None: times are predicted.
        window: Context window in tokens.
        options: Command-line options.
    """
    pieces = micro_batches("original", window=window, count=options.count, seed=options.seed)
    cost = case.cost() if case else layer_cost(window=window, cp=options.cp)
    measure = predicted(cost) if case is None else measured(case, options.rounds)
    times: dict[str, list[np.ndarray]] = {name: [] for name in STRATEGIES}
    expected: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    chosen: list[str] = []
    for lengths in pieces:
        scaled = lengths if case is None else case.lengths(lengths)
        plans = plans_of(scaled, cp=options.cp, cost=cost)
        chosen.append(plans["adaptive"].strategy)
        unique, index = distinct(plans)
        found = measure(unique) / 1e6
        guess = predicted(cost)(unique).sum(axis=1) / 1e6
        for name in STRATEGIES:
            expected[name].append(guess[index[name]])
            times[name].append(found[index[name]])
    arrays = {name: np.array(rows) for name, rows in times.items()}
    for name, among in ((OPTIMAL, STATIC), (ALL, STRATEGIES)):
        stacked = np.stack([arrays[other] for other in among])
        best = stacked.sum(axis=2).argmin(axis=0)
        arrays[name] = stacked[best, np.arange(len(pieces))]
    foreseen = None
    if case is not None:
        foreseen = {name: float(np.sum(ms)) for name, ms in expected.items()}
    return {
        "ms": {name: rows.sum(axis=0).tolist() for name, rows in arrays.items()},
        "micro_batches": len(pieces),
        "chose_per_document": chosen.count("per_document"),
        "predicted_ms": foreseen,
        "rest": rest_ns(pieces, cost) if case is None else None,
    }


def device_of(requested: str) -> torch.device | None:
    """Returns the device that an option names, or None to predict.

    - none: nothing is measured. `attention_latency` predicts with profile `h100_runs`, whose
      attention kernels were measured on an H100.
    - cuda: bf16 kernels of all ranks run one after the other on one GPU. Times are medians over
      rounds.
    - cpu: float32 kernels with 4 heads of 16 run in the same way. Lengths are scaled down, and
      strategies choose by the profile cpu.
    - auto: cuda if there is a GPU, else none.
    """
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "none"
    return None if requested == "none" else torch.device(requested)


def heading(case: Case | None, rounds: int) -> tuple[str, str]:
    """Returns the title of a table, and a sentence on how its times were obtained."""
    if case is None:
        return (
            f"predicted, profile {PROFILE}, collectives apart",
            f"No step was run: `wlb.cost.attention_latency` with `kernels_profile/{PROFILE}.json`, "
            "FlashAttention-3.",
        )
    layout = describe(case.layout())
    if case.device.type == "cuda":
        machine = torch.cuda.get_device_name(case.device)
        clock = "CUDA events"
    else:
        machine = f"one thread of {os.cpu_count()} CPU cores, {platform.machine()}"
        clock = "the thread's own time"
    return (
        f"measured kernels, {case.device.type}, no collectives",
        f"Each rank's kernels in turn on {machine}, torch {torch.__version__}: {layout}, lengths x "
        f"{case.scale}, {clock}, medians of {rounds} rounds.",
    )


def arguments() -> argparse.Namespace:
    parser = experiment_parser(__doc__, quick="time 8 micro-batches", seed=0)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu", "none"), default="auto")
    parser.add_argument("--windows", type=at_least(1), nargs="+", default=[65536, WINDOW])
    parser.add_argument("--cp", type=at_least(1), default=4)
    parser.add_argument("--count", type=at_least(1), default=64, help="micro-batches per window")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="timings of each rank")
    parser.add_argument(
        "--scale", type=scale_of, help="factor on all lengths; default: 1 on CUDA, 1/16 on CPU"
    )
    parser.add_argument(
        "--profile", help=f"kernel profile that predicts and chooses on CUDA; default: {PROFILE}"
    )
    parser.add_argument(
        "--out", type=Path, help="write the times as JSON to this file, and no page"
    )
    options = parser.parse_args()
    if options.quick:
        options.count = min(options.count, 8)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if odd := [window for window in options.windows if window % WINDOW_STEP]:
        parser.error(f"--windows {odd[0]} must be a multiple of {WINDOW_STEP}")
    device = device_of(options.device)
    if options.profile is not None:
        if device is None or device.type != "cuda":
            parser.error(
                f"--profile {options.profile} is for --device cuda; predictions take {PROFILE}, "
                f"and a CPU the profile cpu"
            )
        try:
            load_profile(options.profile)
        except UserError as error:
            parser.error(f"--profile {options.profile}: {error}")
    return options


def main() -> None:
    options = arguments()
    device = device_of(options.device)
    windows: dict[str, Any] = {}
    title = ""
    for window in options.windows:
        case = None
        if device is not None:
            if device.type == "cpu":
                torch.set_num_threads(1)
            scale = options.scale or (CPU_SCALE if device.type == "cpu" else Fraction(1))
            case = Case(
                window=window,
                cp=options.cp,
                device=device,
                scale=scale,
                profile=options.profile or PROFILE,
            )
        title, note = heading(case, options.rounds)
        found = windows[str(window)] = {"note": note, **run_window(case, window, options)}
        show(table_of("fig15", window, found, title))
        print(note_of(found))
    print(mean_line(windows))
    if options.out:
        write_json(options.out, {"title": title, "windows": windows})
    if options.quick or options.out:
        return
    write(
        "predicted" if device is None else device.type,
        {
            "title": title,
            "command": shlex.join(["python", "-m", "experiments.paper.fig15", *sys.argv[1:]]),
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
            "cp": options.cp,
            "seed": options.seed,
            "windows": windows,
        },
    )


if __name__ == "__main__":
    main()
