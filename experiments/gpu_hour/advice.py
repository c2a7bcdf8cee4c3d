"""Says what an hour on GPUs should change in wlb: profiles, constants and defaults.

`python -m experiments.gpu_hour.advice gpu_hour.json ...` reads the files that hours wrote. It
prints sentences, each with the figures that it rests on.
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
"""Predictions that are further off than this are worth a change."""
GAIN = 0.02
"""Two systems whose speeds differ by less are taken as equally fast."""


def advice(made: Mapping[str, Any]) -> list[str]:
    """What to change, as sentences; [] where everything agrees.

    An hour on a CPU tries the parts; of prices and defaults it says nothing.
    """
    parts = {part["name"]: part for part in made["parts"]}
    figures = {name: part["answer"].get("figures", {}) for name, part in parts.items()}
    gpu = made["conditions"].get("gpu", "a CPU")
    said = [
        f"{row['claim']}: failed ({row['measured']}). Mend this first."
        for row in made["claims"]
        if row["verdict"] == "failed"
    ]
    if made["conditions"].get("device") == "cpu":
        return said
    if "profile" in figures.get("profile", {}):
        name = short_name(gpu)
        said.append(
            f"Commit the measured profile as kernels_profile/{name}.json, with a row in that "
            f"folder's README: it has this device's prices."
        )
    return [*said, *_of_steps(figures), *_of_memory(figures), *_of_defaults(figures)]


def _of_steps(figures: Mapping[str, Any]) -> Iterator[str]:
    """Whether whole steps take what kernels say."""
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
    """Which system and which exchange of keys is fastest here, against what is the default."""
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
    """The fastest way that a part tried, and its speed over the default's; ("", 0) if it did not
    run.
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
