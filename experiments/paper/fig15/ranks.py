"""Runs Figure 15's whole CP operation with real collectives, all ranks as one CP group.

`torchrun --nproc-per-node 4 -m experiments.paper.fig15.ranks [--check]` uses NCCL with bf16
and whole windows if every rank has a GPU, else Gloo with float32 and lengths scaled by 1/16.
--check compares output and gradients of q, k, v of every strategy with one process and exits with 1
if one differs by more than the tolerance. Without it forward and backward are timed after a
barrier, by CUDA events or wall clock: medians over rounds, maximum over ranks.
"""

import argparse
import sys
from fractions import Fraction

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from experiments.harness.streams import WINDOW
from experiments.paper.fig15.case import STRATEGIES, distinct, micro_batches, plans_of
from experiments.paper.fig15.layer import CPU_SCALE, Case, describe, scale_of
from experiments.paper.fig15.whole_op import TOLERANCE, benchmark, check
from wlb.parallel import world as worlds
from wlb.plan import ShardingPlan
from wlb.spec import Device

TIMEOUT_S = 600
Plans = list[dict[str, ShardingPlan]]


def check_all(case: Case, plans: Plans, console: Console) -> bool:
    """Returns whether every strategy agrees with one process on every micro-batch."""
    layout = case.layout()
    tolerance = TOLERANCE[layout.dtype]
    table = Table(title=f"{case.window}: largest relative error, tolerance {tolerance:g}")
    for column in ("strategy", "output", "dq", "dk", "dv", ""):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    agrees = True
    for name in STRATEGIES:
        errors = np.max([check(of[name], layout) for of in plans], axis=0)
        is_good = bool((errors <= tolerance).all())
        agrees &= is_good
        table.add_row(name, *(f"{e:.1e}" for e in errors), "ok" if is_good else "WRONG")
    console.print(table)
    return agrees


def time_all(case: Case, plans: Plans, console: Console, *, rounds: int) -> None:
    layout = case.layout()
    times: dict[str, list[np.ndarray]] = {name: [] for name in STRATEGIES}
    for of in plans:
        unique, index = distinct(of)
        found = benchmark(unique, layout, rounds=rounds)
        for name in STRATEGIES:
            times[name].append(found[index[name]] / 1e6)
    sums = {name: np.sum(rows, axis=0) for name, rows in times.items()}
    table = Table(title=f"{case.window}: whole operation with collectives, {len(plans)} batches")
    for column in ("strategy", "forward ms", "backward ms", "total ms", "over per_sequence"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name, (forward, backward) in sums.items():
        total = forward + backward
        gain = sums["per_sequence"].sum() / total
        table.add_row(name, f"{forward:.2f}", f"{backward:.2f}", f"{total:.2f}", f"{gain:.3f}")
    console.print(table)


def run(options: argparse.Namespace, world: worlds.World, device: torch.device) -> bool:
    console = Console(width=110, quiet=world.rank != 0)
    scale = options.scale or (Fraction(1) if device.type == "cuda" else CPU_SCALE)
    count = options.count or (4 if options.check else 16)
    agrees = True
    for window in options.windows:
        case = Case(window=window, cp=world.world_size, device=device, scale=scale)
        cost = case.cost()
        pieces = micro_batches("original", window=window, count=count, seed=options.seed)
        plans = [plans_of(case.lengths(p), cp=case.cp, cost=cost) for p in pieces]
        kind = "NCCL" if device.type == "cuda" else "Gloo"
        console.print(f"CP {case.cp}, {kind}, {describe(case.layout())}, lengths x {scale}")
        if options.check:
            agrees &= check_all(case, plans, console)
        else:
            time_all(case, plans, console, rounds=options.rounds)
    return agrees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="compare with one process instead of timing"
    )
    parser.add_argument("--device", choices=[str(d) for d in Device], default="auto")
    parser.add_argument("--windows", type=int, nargs="+", default=[65536, WINDOW])
    parser.add_argument("--count", type=int, help="micro-batches; default: 16, with --check 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--scale", type=scale_of, help="factor on all lengths; default: 1 on CUDA, 1/16 on CPU"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    world = worlds.discover()
    if world is None:
        parser.error("start it with torchrun --nproc-per-node N -m ...")
    choice = worlds.choose_device(
        Device(options.device), local_ranks=world.local_world_size, one_gpu_each=world.one_gpu_each
    )
    device = worlds.rank_device(world, choice.kind)
    if device.type == "cpu":
        torch.set_num_threads(worlds.threads_per_rank(world.local_world_size))
    worlds.init(world, device, timeout_s=TIMEOUT_S)
    try:
        agrees = run(options, world, device)
    finally:
        worlds.shutdown()
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
