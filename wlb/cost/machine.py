"""Names of this machine and this program, as kernel profiles record them; imports no torch.

NVML (package nvidia-ml-py) names the GPU, so that planning rooms can match a profile too.
"""

import contextlib
import importlib
import platform
import re
import subprocess
from pathlib import Path

from wlb import __version__

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
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        name = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))
    except nvml.NVMLError:
        return ""
    finally:
        nvml.nvmlShutdown()
    return name.decode() if isinstance(name, bytes) else str(name)


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
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return f"wlb-llm {__version__}"
        return done.stdout.strip()
    return f"wlb-llm {__version__}"
