"""Names of this machine's CPU and GPU and this program's version, as kernel profiles record them.

The GPU's name comes from NVML (package nvidia-ml-py), because planning rooms choose a profile and
never import torch.
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
    """Return the name of this machine's CPU ("cpu") or first GPU ("cuda"); "" if unknown."""
    return cpu_name() if device == "cpu" else gpu_name()


def cpu_name() -> str:
    """Return the model name of this machine's CPU; its architecture if the system has no name."""
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text("utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def gpu_name() -> str:
    """Return the name of the first GPU; "" if there is none or NVML cannot tell."""
    name = _of_first_gpu("nvmlDeviceGetName")
    return name.decode() if isinstance(name, bytes) else str(name or "")


def gpu_power_limit_w() -> float:
    """Return the power limit of the first GPU in W; 0 if there is none or NVML cannot tell."""
    return float(_of_first_gpu("nvmlDeviceGetEnforcedPowerLimit") or 0) / 1000


def _of_first_gpu(function: str) -> Any:
    """Return what the named NVML function says about the first GPU; None if the call fails."""
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
    """Start NVML.

    Returns:
        (NVML's Python module, "") if NVML works; the caller must then call the module's
        nvmlShutdown. (None, the reason) if NVML cannot be used.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "the Python package nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"NVML does not start: {error}"
    return nvml, ""


def short_name(device: str) -> str:
    """Shorten a device name for use in a file name.

    "NVIDIA H200" becomes "h200", and "NVIDIA A100-SXM4-80GB" becomes "a100". The words of a CPU's
    name are written in lower case and joined by underscores.
    """
    model = re.search(r"\b([A-Z]{1,3}\d{2,4}[A-Z]*)\b", device) if "NVIDIA" in device else None
    words = model[1] if model else device
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def is_same(device: str, other: str) -> bool:
    """Return whether two names denote one device model, whatever its memory and form factor."""
    return short_name(device) == short_name(other)


def program_version() -> str:
    """Return the commit of this checkout, or the release if wlb is installed.

    The commit ends with "-dirty" if files were changed.
    """
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
"""Peak dense bfloat16 TFLOP/s of GPUs whose name has these words; the first match counts.

NVIDIA's data sheets mostly state twice these values, which only hold for sparse matrices.
"""


def known_peak_tflops(device: str) -> float | None:
    """Return a GPU's peak dense bfloat16 TFLOP/s by its name; None if unknown or a MIG slice."""
    words = set(re.split(r"[^A-Z0-9]+", device.upper()))
    # A MIG slice has the name of its GPU, but it is slower.
    if "MIG" in words:
        return None
    found = (peak for name, peak in PEAK_TFLOPS.items() if words.issuperset(name.split()))
    return next(found, None)


def rank_peak_tflops(spec: RunSpec, device: str) -> float:
    """Return the peak TFLOP/s of a rank, from which MFU is computed; 0 if unknown.

    The result is cluster.peak_tflops if this key is set. Otherwise the result is known only for
    runs in bfloat16 on the devices of `PEAK_TFLOPS`.
    """
    if spec.cluster.peak_tflops or spec.training.dtype != Dtype.BFLOAT16:
        return spec.cluster.peak_tflops
    return known_peak_tflops(device) or 0.0


def cluster_peak_tflops(spec: RunSpec) -> float:
    """Return the peak TFLOP/s that estimates assume: cluster.peak_tflops, or those of an H100."""
    return spec.cluster.peak_tflops or PEAK_TFLOPS["H100"]
