"""The hour's results: gpu_hour.json with all numbers, and a page that shows claims first."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from experiments.gpu_hour.running import Ended, State
from experiments.gpu_hour.setting import Setting
from experiments.harness.pages import commit

TEMPLATES = Path(__file__).parent


def conditions(setting: Setting) -> dict[str, Any]:
    """Versions, and the GPUs with their driver, power limit and clocks."""
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
    import pynvml
    from torch.cuda import nccl

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return found | {
        "gpus": setting.gpus,
        "gpu": torch.cuda.get_device_name(0),
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / (1 << 30),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "most_sm_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
    }


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
    return {
        "schema_version": 1,
        "conditions": dict(found),
        "claims": claims,
        "parts": [asdict(part) for part in parts],
    }


def write_page(made: Mapping[str, Any], path: Path) -> Path:
    environment = Environment(
        loader=FileSystemLoader([TEMPLATES, TEMPLATES.parents[1] / "wlb" / "report" / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html.j2")
    count = {verdict: 0 for verdict in ("holds", "differs", "failed")}
    for row in made["claims"]:
        count[row["verdict"]] += 1
    gpu = made["conditions"].get("gpu", "a CPU")
    title = f"wlb on {made['conditions'].get('gpus', 1)} x {gpu}"
    path.write_text(template.render(title=title, count=count, **made), "utf-8")
    return path
