"""Writes the results of gpu_hour: a JSON file with all numbers, and an HTML page, claims first."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.gpu_hour.advice import advice
from experiments.gpu_hour.running import Ended, State
from experiments.gpu_hour.setting import Setting
from experiments.harness.pages import commit
from wlb.cost.machine import start_nvml
from wlb.report.render import render

TEMPLATES = Path(__file__).parent


def conditions(setting: Setting) -> dict[str, Any]:
    """Returns the conditions of the measurement: versions, the GPU, its power limit and clocks."""
    import torch

    found: dict[str, Any] = {
        "wlb": commit(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": setting.device,
        "quick": setting.quick,
    }
    if setting.device == "cpu":
        return found
    from torch.cuda import nccl

    found |= {
        "gpus": setting.gpus,
        "gpu": torch.cuda.get_device_name(0),
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / (1 << 30),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())),
    }
    return found | _nvml_values()


def _nvml_values() -> dict[str, Any]:
    nvml, why = start_nvml()
    if nvml is None:
        return {"nvml": why}
    queries = {
        "driver": lambda handle: nvml.nvmlSystemGetDriverVersion(),
        "power_limit_w": lambda handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "most_sm_clock_mhz": lambda handle: nvml.nvmlDeviceGetMaxClockInfo(
            handle, nvml.NVML_CLOCK_SM
        ),
    }
    found: dict[str, Any] = {}
    try:
        for name, query in queries.items():
            try:
                found[name] = query(nvml.nvmlDeviceGetHandleByIndex(0))
            except nvml.NVMLError as error:
                # MIG slices and virtual GPUs do not support every query.
                found[name] = f"unknown: {error}"
    finally:
        nvml.nvmlShutdown()
    return found


def document(setting: Setting, parts: Sequence[Ended], found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of gpu_hour.json: conditions, claims, parts with figures, advice."""
    claims: list[dict[str, str]] = []
    for part in parts:
        claims += part.answer.get("rows", [])
        # A part that broke counts as a failed claim of its own.
        if part.state in (State.FAILED, State.TOO_LONG, State.STARTED):
            claims.append(
                {
                    "claim": part.title,
                    "claimed": "the part ends well",
                    "measured": str(part.state),
                    "verdict": "failed",
                }
            )
    made = {
        "schema_version": 1,
        "conditions": dict(found),
        "claims": claims,
        "parts": [asdict(part) for part in parts],
    }
    return {**made, "advice": advice(made)}


def write_page(made: Mapping[str, Any], path: Path) -> Path:
    """Writes the contents of gpu_hour.json as an HTML page and returns its path."""
    count = {verdict: 0 for verdict in ("holds", "differs", "failed")}
    for row in made["claims"]:
        count[row["verdict"]] += 1
    gpu = made["conditions"].get("gpu", "a CPU")
    title = f"wlb on {made['conditions'].get('gpus', 1)} x {gpu}"
    page = render("page", folder=TEMPLATES, title=title, count=count, **made)
    path.write_text(page, "utf-8")
    return path
