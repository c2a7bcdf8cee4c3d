"""Names of this machine and this program, as kernel profiles record them; imports no torch.

NVML (package nvidia-ml-py) names the GPU, so that planning rooms can match a profile too.
"""

import contextlib
import importlib
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from wlb import __version__
from wlb.spec import Dtype, RunSpec

CPU_INFO = Path("/proc/cpuinfo")


def machine_name(device: str) -> str:
    """Name of this machine's "cpu" or first GPU ("cuda"); "" where it is unknown."""
    return cpu_name() if device == "cpu" else gpu_name()


def cpu_name() -> str:
    """Model name of the first core; the architecture where the system does not say."""
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text("utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def gpu_name() -> str:
    """Name of the first GPU; "" where NVML does not tell."""
    name = _of_first_gpu("nvmlDeviceGetName")
    return name.decode() if isinstance(name, bytes) else str(name or "")


def gpu_power_limit_w() -> float:
    """Power limit of the first GPU in W; 0 where NVML does not tell."""
    return float(_of_first_gpu("nvmlDeviceGetEnforcedPowerLimit") or 0) / 1000


def _of_first_gpu(function: str) -> Any:
    """What a function of NVML says of the first GPU; None where it does not."""
    nvml, _ = start_nvml()
    if nvml is None:
        return None
    try:
        return getattr(nvml, function)(nvml.nvmlDeviceGetHandleByIndex(0))
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def start_nvml() -> tuple[Any, str]:
    """Started NVML, which the caller shuts down, or None and the reason."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "package nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"NVML does not start: {error}"
    return nvml, ""


def short_name(device: str) -> str:
    """ "h200" for "NVIDIA H200", "a100" for "NVIDIA A100-SXM4-80GB"; other names as words."""
    model = re.search(r"\b([A-Z]{1,3}\d{2,4}[A-Z]*)\b", device) if "NVIDIA" in device else None
    words = model[1] if model else device
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def is_same(device: str, other: str) -> bool:
    """Whether two names mean one device model; memory and form factor may differ."""
    return short_name(device) == short_name(other)


def program_version() -> str:
    """The checkout's commit ("-dirty" where files differ), or the release."""
    folder = Path(__file__).resolve().parents[2]
    if (folder / ".git").exists():
        command = ["git", "describe", "--always", "--dirty"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
            return done.stdout.strip()
    return f"wlb-llm {__version__}"


PEAK_TFLOPS = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIE": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800 PCIE": 756.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
}
"""Words in a name -> TFLOP/s without sparsity (NVIDIA's data sheets mostly give twice that, with
sparsity). The first match counts."""


def known_peak_tflops(device: str) -> float | None:
    """bfloat16 TFLOP/s of a GPU of this name; None for unknown ones and for slices (MIG)."""
    words = set(re.split(r"[^A-Z0-9]+", device.upper()))
    if "MIG" in words:
        return None
    found = (peak for name, peak in PEAK_TFLOPS.items() if words.issuperset(name.split()))
    return next(found, None)


def rank_peak_tflops(spec: RunSpec, device: str) -> float:
    """Peak TFLOP/s of a rank for MFU: telemetry.peak_tflops, else the bfloat16 table's, else 0."""
    if spec.telemetry.peak_tflops or spec.training.dtype != Dtype.BFLOAT16:
        return spec.telemetry.peak_tflops
    return known_peak_tflops(device) or 0.0
