"""Says which profiles, constants and defaults of wlb to change after an hour on GPUs.

`python -m experiments.gpu_hour.advice gpu_hour.json ...` reads files that `experiments.gpu_hour`
wrote. It prints one sentence per change, with the figures that support it.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernels_profile.derive import PRODUCT_SPEED
from wlb.cost.machine import short_name
from wlb.memory.budget import ALLOCATOR_GAPS
from wlb.plan import UserError
from wlb.plan.read_file import read_json

TOLERANCE = 0.10
"""Relative error of a prediction above which a change is advised."""
GAIN = 0.02
"""Relative difference below which two systems count as equally fast."""


def advice(made: Mapping[str, Any]) -> list[str]:
    """Returns what to change, as sentences; the list is empty if all predictions were right.

    Args:
        made: Contents of gpu_hour.json. If it comes from a CPU, only failures are reported,
            because its speeds say nothing about prices and defaults for GPUs.
    """
    parts = {part["name"]: part for part in made["parts"]}
    figures = {name: part["answer"].get("figures", {}) for name, part in parts.items()}
    gpu = made["conditions"].get("gpu", "a CPU")
    said = [
        f"{row['claim']}: failed ({row['measured']}). Fix this first."
        for row in made["claims"]
        if row["verdict"] == "failed"
    ]
    if made["conditions"].get("device") == "cpu":
        return said
    if "profile" in figures.get("profile", {}):
        name = short_name(gpu)
        said.append(
            f"Commit the measured profile as kernels_profile/{name}.json, with a row in that "
            f"folder's README: it prices operations on this device."
        )
    return [*said, *_of_steps(figures), *_of_memory(figures), *_of_defaults(figures)]


def _of_steps(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields advice where whole steps take longer or shorter than a profile predicts."""
    for profile in ("the shipped profile", "the measured profile"):
        ratios = [
            found["profiles"][profile]["ratio"]
            for name, found in figures.items()
            if name.startswith("steps_") and profile in found.get("profiles", {})
        ]
        if not ratios:
            continue
        mean = math.prod(ratios) ** (1 / len(ratios))
        if abs(mean - 1) > TOLERANCE:
            yield (
                f"Steps take {1 / mean:.2f} times what {profile} predicts (mean of "
                f"{len(ratios)} runs). If it is h100_runs, PRODUCT_SPEED in "
                f"kernels_profile/derive.py, now {PRODUCT_SPEED:g}, is what long runs lose."
            )


def _of_memory(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields advice where the estimate of a run's peak memory is wrong."""
    for name, found in figures.items():
        if name.startswith("steps_") and "peak_gib" in found:
            off = found["estimated_gib"] / found["peak_gib"] - 1
            if abs(off) > TOLERANCE:
                yield (
                    f"{name.removeprefix('steps_')}: the estimate of memory is {off:+.0%} off "
                    f"({found['estimated_gib']:.1f} for {found['peak_gib']:.1f} GiB). Its terms "
                    f"are in wlb/memory/estimate.py; gaps of the allocator are {ALLOCATOR_GAPS:g}."
                )


def _of_defaults(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields advice where another system or exchange is faster than wlb's default."""
    best, gain = _fastest(figures, "balance", "wlb")
    if gain > 1 + GAIN:
        yield (
            f"System {best} is {gain:.2f} times as fast as `wlb`, our default, on the same "
            f"documents: look at wlb/spec/systems.py."
        )
    best, gain = _fastest(figures, "exchange", "gather")
    if gain > 1 + GAIN:
        yield (
            f"Keys {best.replace('_', ' ')} are {gain:.2f} times as fast as gathered ones: "
            f"sharding.exchange and cp.overlap_stages could have other defaults."
        )


def _fastest(figures: Mapping[str, Any], part: str, default: str) -> tuple[str, float]:
    """Returns the fastest setting that a part measured, and its speed over the default's.

    Returns ("", 0) if the part did not run.
    """
    speeds: dict[str, float] = figures.get(part, {}).get("tokens_per_s", {})
    if not speeds:
        return "", 0.0
    best = max(speeds, key=lambda way: speeds[way])
    return best, speeds[best] / speeds[default]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_hour.advice", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for path in parser.parse_args().files:
        try:
            made = read_json(path)
            said = advice(made)
        except (UserError, KeyError, TypeError, json.JSONDecodeError) as error:
            parser.error(f"{path} is no gpu_hour.json: {error}")
        conditions = made["conditions"]
        print(f"{path}: {conditions.get('gpus', 0)} x {conditions.get('gpu', 'a CPU')}")
        for line in said or ["everything agrees; nothing to change"]:
            print(f"- {line}")


if __name__ == "__main__":
    main()
