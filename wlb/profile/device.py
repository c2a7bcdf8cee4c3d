"""Describe the machine of a sweep, and monitor its GPU's clocks, power and throttling.

`describe` returns the same values at every start on a machine. A file of records begins with these
values, so that a later start of the sweep can check that it runs on the same machine. `Monitor`
needs NVML (package nvidia-ml-py). Without NVML, or on a CPU, it takes no samples, and
`Monitor.record` says why.
"""

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from wlb.cost.machine import cpu_name, gpu_power_limit_w, start_nvml
from wlb.kernels.flash import FLASH_BACKENDS

CPU_L2_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
DRIVER_INFO = Path("/proc/driver/nvidia/version")

THROTTLE_REASONS = {
    "nvmlClocksThrottleReasonGpuIdle": "idle",
    "nvmlClocksThrottleReasonApplicationsClocksSetting": "application_clocks",
    "nvmlClocksThrottleReasonSwPowerCap": "software_power_cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware_slowdown",
    "nvmlClocksThrottleReasonSyncBoost": "sync_boost",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "software_thermal",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hardware_thermal",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power_brake",
}
"""NVML constant of a throttling reason -> name of the reason in a record."""


def describe(device: torch.device) -> dict[str, Any]:
    """Return names, versions and memory sizes of the device as plain JSON values.

    A size that the system does not report is 0. The entry "packages" has the versions of the
    installed attention packages.
    """
    found: dict[str, Any] = {
        "device": device.type,
        "name": cpu_name(),
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "packages": _packages(),
        "memory_bytes": _memory_bytes(),
        "l2_bytes": cpu_l2_bytes(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": _driver(),
            "power_limit_w": gpu_power_limit_w(),
            "num_sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
        }
    return found


def cpu_l2_bytes() -> int:
    """Return the size of the first core's L2 cache in bytes, or 0 if it is unknown."""
    with contextlib.suppress(OSError):
        found = re.fullmatch(r"(\d+)([KM]?)", CPU_L2_SIZE.read_text("utf-8").strip())
        if found is not None:
            return int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2]]
    return 0


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return 0


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for flash in FLASH_BACKENDS:
        name = flash.package.distribution
        if flash.package.missing() is not None:
            continue
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "of no known version"
    return found


def _driver() -> str:
    """Return the version of the NVIDIA driver, from NVML or from the file of its kernel module."""
    nvml, _ = start_nvml()
    if nvml is not None:
        try:
            return str(nvml.nvmlSystemGetDriverVersion())
        finally:
            nvml.nvmlShutdown()
    with contextlib.suppress(OSError):
        words = DRIVER_INFO.read_text("utf-8").partition("\n")[0].split()
        versions = [word for word in words if word[0].isdigit() and "." in word]
        if versions:
            return versions[0]
    return "unknown"


def handle_of(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle of a GPU.

    GPUs are identified by UUID, because CUDA_VISIBLE_DEVICES changes their indices in torch, but
    not in NVML.

    Args:
        nvml: The module pynvml.
        uuid: UUID of the GPU as torch returns it, with or without a prefix.
    """
    by_uuid = nvml.nvmlDeviceGetHandleByUUID
    if uuid.startswith(("GPU-", "MIG-")):
        return by_uuid(uuid)
    try:
        return by_uuid(f"GPU-{uuid}")
    except nvml.NVMLError:
        # UUIDs of MIG slices have the prefix MIG instead of GPU.
        return by_uuid(f"MIG-{uuid}")


class Monitor:
    """Samples clocks (MHz), power (W), temperature (C) and throttling of a GPU in a `with` block.

    A thread reads NVML every `every_s` seconds. A reading takes about a millisecond and does not
    hold the GIL.
    """

    def __init__(self, device: torch.device, *, every_s: float = 1.0) -> None:
        if not every_s > 0:
            raise ValueError(f"every_s = {every_s} must be above 0")
        self.device, self.every_s = device, every_s
        self._samples: dict[str, list[float]] = {}
        self._unavailable: dict[str, str] = {}
        self._reasons: Counter[str] = Counter()
        self._why_empty = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None

    def __enter__(self) -> Self:
        if self.device.type != "cuda":
            self._why_empty = "clocks, power and temperature are read from NVIDIA GPUs only"
            return self
        self._nvml, self._why_empty = start_nvml()
        if self._nvml is None:
            return self
        try:
            uuid = str(torch.cuda.get_device_properties(self.device).uuid)
            handle = handle_of(self._nvml, uuid)
        except self._nvml.NVMLError as error:
            self._why_empty = f"NVML does not know this GPU: {error}"
            self._nvml.nvmlShutdown()
            return self
        self._thread = threading.Thread(
            target=self._watch, args=(self._readings(handle),), name="gpu-monitor", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._nvml.nvmlShutdown()
            self._thread = None

    def record(self) -> dict[str, Any]:
        """Return a summary of the samples as plain JSON values. Call it after `stop`.

        Returns:
            A dict that has [min, median, max] of each sampled quantity, by name, and also:

            - "num_samples": Number of samples.
            - "throttled": Reason of throttling -> share of the samples with this reason.
            - "unavailable": Quantity that NVML cannot read -> NVML's error message.
            - "why_empty": Why there are no samples; "" if there are some.
        """
        assert self._thread is None, "stop first"
        throttled = self._samples.get("throttling", [])
        found: dict[str, Any] = {
            name: [min(values), float(np.median(values)), max(values)]
            for name, values in sorted(self._samples.items())
            if name != "throttling"
        }
        return found | {
            "num_samples": max(map(len, self._samples.values()), default=0),
            "throttled": {n: c / len(throttled) for n, c in sorted(self._reasons.items())},
            "unavailable": dict(sorted(self._unavailable.items())),
            "why_empty": self._why_empty,
        }

    def _readings(self, handle: Any) -> dict[str, Callable[[], float]]:
        nvml = self._nvml
        clock, heat = nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetTemperature
        return {
            "sm_clock_mhz": lambda: clock(handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: clock(handle, nvml.NVML_CLOCK_MEM),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": lambda: heat(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttling": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }

    def _watch(self, readings: dict[str, Callable[[], float]]) -> None:
        while True:
            for name, read in readings.items():
                if name in self._unavailable:
                    continue
                try:
                    value = read()
                except self._nvml.NVMLError as error:
                    self._unavailable[name] = str(error)
                    continue
                self._samples.setdefault(name, []).append(float(value))
                if name == "throttling":
                    reasons = THROTTLE_REASONS.items()
                    self._reasons.update(
                        n for c, n in reasons if int(value) & getattr(self._nvml, c, 0)
                    )
            if self._stop.wait(self.every_s):
                return
