"""Tests what is recorded about a sweep's device; a stand-in plays NVML."""

import json
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from wlb.cost import machine, machine_name
from wlb.profile import device as device_file
from wlb.profile.device import THROTTLE_REASONS, Monitor, describe

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
UUID = "01234567-89ab-cdef-0123-456789abcdef"


class FakeNvml(ModuleType):
    """Tells clocks that rise with each reading, and no power, like some GPUs."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksThrottleReasonGpuIdle = 1
    nvmlClocksThrottleReasonSwPowerCap = 4

    class NVMLError(Exception):
        pass

    def __init__(self, *, prefix: str = "GPU-", starts: bool = True) -> None:
        super().__init__("pynvml")
        self.prefix, self.starts = prefix, starts
        self.started, self.asked, self.rounds = 0, [], 0
        self.seen_three = threading.Event()

    def nvmlInit(self) -> None:
        if not self.starts:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.10"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        if not uuid.startswith(self.prefix):
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        assert index == 0
        return "handle"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert handle == "handle"
        return 1000 + 100 * self.rounds if kind == self.NVML_CLOCK_SM else 2600

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 40 + self.rounds

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        # The last reading of a round.
        self.rounds += 1
        if self.rounds == 3:
            self.seen_three.set()
        return 1 | 4 if self.rounds == 1 else 4


def _install(monkeypatch: pytest.MonkeyPatch, nvml: ModuleType | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(
            uuid=UUID,
            name="A GPU",
            major=9,
            minor=0,
            total_memory=80 << 30,
            multi_processor_count=132,
            L2_cache_size=50 << 20,
        ),
    )


def test_a_cpu_described_as_json_values_the_same_each_time():
    found = describe(CPU)
    assert json.loads(json.dumps(found)) == found == describe(CPU)
    assert found["device"] == "cpu"
    assert found["name"] == found["cpu"] != ""
    assert found["torch"] == torch.__version__
    assert found["num_threads"] == torch.get_num_threads()
    assert found["memory_bytes"] > 1 << 20


def test_a_gpu_described(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml()
    _install(monkeypatch, nvml)
    found = describe(CUDA)
    told = ("name", "capability", "driver", "num_sms", "l2_bytes", "memory_bytes")
    assert [found[name] for name in told] == [
        "A GPU", "9.0", "570.86.10", 132, 50 << 20, 80 << 30
    ]  # fmt: skip
    assert found["cpu"] != "A GPU"
    assert found["power_limit_w"] == 700.0
    assert nvml.started == 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 UTC 2024\n"
            "GCC version:  gcc version 12.3.0\n",
            "550.54.15",
        ),
        (None, "unknown"),
    ],
)
def test_the_driver_without_nvml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, version: str
):
    _install(monkeypatch, None)
    path = tmp_path / "version"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(device_file, "DRIVER_INFO", path)
    assert describe(CUDA)["driver"] == version


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU: the second @ 2 GHz\nmodel name\t: other\n",
         "Some CPU: the second @ 2 GHz"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", "from platform"),
        (None, "from platform"),
    ],
)  # fmt: skip
def test_the_cpu_s_name_or_what_the_platform_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, name: str
):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(machine, "CPU_INFO", path)
    monkeypatch.setattr(machine.platform, "processor", lambda: "from platform")
    # Planners, which import no torch, know the machine by the same name.
    assert describe(CPU)["name"] == machine_name("cpu") == name


@pytest.mark.parametrize(
    ("text", "size"),
    [("2048K\n", 2 << 20), ("1M\n", 1 << 20), ("512\n", 512), ("?\n", 0), (None, 0)],
)
def test_the_cpu_s_l2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, size: int):
    path = tmp_path / "size"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(device_file, "CPU_L2_SIZE", path)
    assert describe(CPU)["l2_bytes"] == size


def test_installed_attention_packages_by_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    packages = describe(CPU)["packages"]
    assert packages["flash-attn-3"] == "of no known version"
    monkeypatch.setattr(device_file.metadata, "version", lambda name: f"1.0 of {name}")
    assert describe(CPU)["packages"]["flash-attn-3"] == "1.0 of flash-attn-3"


def test_a_monitored_gpu(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml()
    _install(monkeypatch, nvml)
    with Monitor(CUDA, every_s=0.001) as monitor:
        assert nvml.seen_three.wait(30)
    found = monitor.record()
    last = nvml.rounds - 1
    assert nvml.asked == [f"GPU-{UUID}"]
    assert found["sm_clock_mhz"] == [1000, 1000 + 50 * last, 1000 + 100 * last]
    assert found["memory_clock_mhz"] == [2600, 2600, 2600]
    assert found["temperature_c"] == [40, 40 + last / 2, 40 + last]
    assert found["throttled"] == {"idle": 1 / nvml.rounds, "software_power_cap": 1.0}
    assert found["unavailable"] == {"power_w": "Not Supported"}
    assert (found["num_samples"], found["why_empty"]) == (nvml.rounds, "")
    assert json.loads(json.dumps(found)) == found
    assert nvml.started == 0


def test_a_slice_of_a_gpu_is_found_under_its_own_prefix(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml(prefix="MIG-")
    _install(monkeypatch, nvml)
    with Monitor(CUDA) as monitor:
        pass
    assert nvml.asked == [f"GPU-{UUID}", f"MIG-{UUID}"]
    assert monitor.record()["num_samples"] >= 1


@pytest.mark.parametrize(
    ("device", "nvml", "why"),
    [
        (CPU, FakeNvml(), "from NVIDIA GPUs only"),
        (CUDA, None, "nvidia-ml-py is not installed"),
        (CUDA, FakeNvml(starts=False), "NVML does not start: NVML Shared Library Not Found"),
        (CUDA, FakeNvml(prefix="another"), "NVML does not know this GPU: Not Found"),
    ],
    ids=["cpu", "no package", "no library", "unknown GPU"],
)
def test_an_empty_record_says_why(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, nvml: Any, why: str
):
    _install(monkeypatch, nvml)
    with Monitor(device) as monitor:
        pass
    found = monitor.record()
    assert why in found["why_empty"]
    assert (found["num_samples"], found["throttled"], found["unavailable"]) == (0, {}, {})
    assert nvml is None or nvml.started == 0


def test_the_thread_ends_when_the_sweep_fails(monkeypatch: pytest.MonkeyPatch):
    _install(monkeypatch, FakeNvml())
    with pytest.raises(KeyError), Monitor(CUDA, every_s=60):
        raise KeyError
    assert "gpu-monitor" not in [thread.name for thread in threading.enumerate()]


def test_a_pause_must_be_positive():
    with pytest.raises(ValueError, match=r"every_s = 0 must be above 0"):
        Monitor(CPU, every_s=0)


def test_the_names_are_those_of_the_package():
    nvml = pytest.importorskip("pynvml", reason="package nvidia-ml-py is not installed")
    names = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert [name for name in (*names, *THROTTLE_REASONS) if not hasattr(nvml, name)] == []
    assert issubclass(nvml.NVMLError_LibraryNotFound, nvml.NVMLError)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: none here")
def test_a_real_gpu():
    pytest.importorskip("pynvml", reason="package nvidia-ml-py is not installed")
    found = describe(CUDA)
    assert found["driver"][0].isdigit()
    assert min(found["num_sms"], found["l2_bytes"], found["memory_bytes"]) > 0
    with Monitor(CUDA, every_s=0.01) as monitor:
        torch.ones(1024, 1024, device=CUDA).sum().item()
    assert monitor.record()["why_empty"] == ""
    assert monitor.record()["num_samples"] >= 1
