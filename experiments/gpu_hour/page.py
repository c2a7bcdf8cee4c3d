"""The hour's results: gpu_hour.json with all numbers, and a page that shows claims first."""

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
    """Versions, and the GPU with its driver, power limit and clocks as far as NVML tells them."""
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
    return found | _told_by_nvml()


def _told_by_nvml() -> dict[str, Any]:
    nvml, why = start_nvml()
    if nvml is None:
        return {"nvml": why}
    asked = {
        "driver": lambda handle: nvml.nvmlSystemGetDriverVersion(),
        "power_limit_w": lambda handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "most_sm_clock_mhz": lambda handle: nvml.nvmlDeviceGetMaxClockInfo(
            handle, nvml.NVML_CLOCK_SM
        ),
    }
    found: dict[str, Any] = {}
    try:
        for name, ask in asked.items():
            try:
                found[name] = ask(nvml.nvmlDeviceGetHandleByIndex(0))
            except nvml.NVMLError as error:
                # Slices of a GPU and virtual GPUs do not tell everything.
                found[name] = f"unknown: {error}"
    finally:
        nvml.nvmlShutdown()
    return found


def document(setting: Setting, parts: Sequence[Ended], found: Mapping[str, Any]) -> dict[str, Any]:
    """What gpu_hour.json holds: conditions, the table of claims, and each part with its figures."""
    claims: list[dict[str, str]] = []
    for part in parts:
        claims += part.answer.get("rows", [])
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
    count = {verdict: 0 for verdict in ("holds", "differs", "failed")}
    for row in made["claims"]:
        count[row["verdict"]] += 1
    gpu = made["conditions"].get("gpu", "a CPU")
    title = f"wlb on {made['conditions'].get('gpus', 1)} x {gpu}"
    page = render("page", folder=TEMPLATES, title=title, count=count, **made)
    path.write_text(page, "utf-8")
    return path
