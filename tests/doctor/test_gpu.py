"""Tests what is made of NVML's answers: planted faults of GPUs are found and named."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doctor.patient import UUID, facts, gpu, patient
from wlb.doctor import gpu as checks
from wlb.doctor.facts import Patient, gpu_facts
from wlb.doctor.finding import Verdict


class SickNvml(ModuleType):
    """Answers for two GPUs that are well; attributes plant faults."""

    NVML_CLOCK_SM, NVML_NVLINK_MAX_LINKS, NVML_P2P_CAPS_INDEX_NVLINK = 1, 36, 2
    NVML_P2P_STATUS_OK, NVML_FEATURE_ENABLED = 0, 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlClocksThrottleReasonGpuIdle = 1
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 32

    class NVMLError(Exception):
        pass

    def __init__(self, **planted: Any) -> None:
        super().__init__("pynvml")
        self.links = 18
        self.inactive = 0
        self.unlinked: set[str] = set()
        self.hidden: set[str] = set()
        self.reasons = 1 | 4
        self.application: tuple[int, int] | None = (1980, 1980)
        self.ecc = (1, 1)
        self.errors = 0
        self.remapped: tuple[int, ...] | None = (0, 0, 0, 0)
        self.started = 0
        for name, value in planted.items():
            assert hasattr(self, name)
            setattr(self, name, value)

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.86.10"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid in self.hidden:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetPciInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(busId=b"00000000:1B:00.0")

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= self.links:
            raise self.NVMLError("Not Supported")
        return int(link >= self.inactive)

    def nvmlDeviceGetP2PStatus(self, own: str, other: str, index: int) -> int:
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 5 if other in self.unlinked else 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1755

    def nvmlDeviceGetApplicationsClock(self, handle: str, kind: int) -> int:
        if self.application is None:
            raise self.NVMLError("Not Supported")
        return self.application[0]

    def nvmlDeviceGetDefaultApplicationsClock(self, handle: str, kind: int) -> int:
        assert self.application is not None
        return self.application[1]

    def nvmlDeviceGetEccMode(self, handle: str) -> tuple[int, int]:
        return self.ecc

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        return self.errors

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, ...]:
        if self.remapped is None:
            raise self.NVMLError("Not Supported")
        return self.remapped


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch):
    def install(**planted: Any) -> SickNvml:
        nvml = SickNvml(**planted)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return install


def with_gpus(**sets: Any) -> Patient:
    """Rank 0 of two TP ranks on one node with a GPU each, seen without a mesh of theirs."""
    return patient(facts(0, gpu=gpu(0)), facts(1, gpu=gpu(1)), **{"parallel__tp": 2, **sets})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(
            name="NVIDIA H100 80GB HBM3",
            major=9,
            minor=0,
            total_memory=80 << 30,
            uuid=UUID.format(device if isinstance(device, int) else device.index),
        ),
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_facts_of_a_gpu(plant, two_gpus: None) -> None:
    nvml = plant()
    found = gpu_facts(torch.device("cuda", 1))
    assert found == gpu(1, bus="0000:1b:00.0")
    assert nvml.started == 0
    plant(hidden={UUID.format(1)})
    hidden = gpu_facts(torch.device("cuda", 1))
    assert (hidden.driver, hidden.driver_cuda) == ("", (0, 0))
    assert hidden.no_nvml == "NVML does not know this GPU: Not Found"


@pytest.mark.parametrize(
    ("driver_cuda", "cuda", "verdict"),
    [
        ((12, 8), "12.6", Verdict.PASS),
        ((13, 0), "12.8", Verdict.PASS),
        ((12, 4), "12.8", Verdict.WARN),
        ((12, 4), "13.0", Verdict.FAIL),
    ],
)
def test_a_driver_older_than_torch_s_cuda(driver_cuda, cuda: str, verdict: Verdict) -> None:
    mine = facts(0, gpu=gpu(driver_cuda=driver_cuda), cuda=cuda)
    on_gpu = replace(patient(mine), device=torch.device("cuda", 0))
    found = checks.driver(on_gpu)
    assert found.verdict == verdict
    assert f"torch built for {cuda}" in found.found
    assert checks.driver(patient(mine)).verdict == Verdict.SKIP  # its ranks are on the CPU
    unknown = facts(0, gpu=gpu(driver="", no_nvml="NVML does not start"))
    assert checks.driver(replace(on_gpu, everyone=(unknown,))).found == "NVML does not start"


def test_tp_ranks_without_nvlink_are_named(plant, two_gpus: None) -> None:
    nvml = plant()
    well = checks.nvlink(with_gpus())
    assert (well.verdict, nvml.started) == (Verdict.PASS, 0)
    assert well.found == "connected to all 1 other TP ranks of the node; 18 of 18 links are active"
    plant(unlinked={UUID.format(1)}, inactive=18)
    broken = checks.nvlink(with_gpus())
    assert broken.verdict == Verdict.FAIL
    assert broken.found == "not connected to GPU 1; 0 of 18 links are active"
    plant(unlinked={UUID.format(1)})  # bridged in pairs, and this is not its pair
    assert checks.nvlink(with_gpus()).verdict == Verdict.WARN
    plant(unlinked={UUID.format(1)}, links=0)
    pcie = checks.nvlink(with_gpus())
    assert (pcie.verdict, "use PCIe" in pcie.remedy) == (Verdict.WARN, True)
    plant(hidden={UUID.format(1)})
    assert checks.nvlink(with_gpus()).verdict == Verdict.WARN
    assert checks.nvlink(with_gpus(parallel__tp=1)).verdict == Verdict.SKIP
    assert checks.nvlink(patient(facts())).verdict == Verdict.SKIP


def test_tp_peers_are_those_of_this_node(two_gpus: None) -> None:
    everyone = [facts(rank, gpu=gpu(rank)) for rank in range(8)]
    one = patient(*everyone, preset="7b_128k", parallel__tp=4)
    mesh: Any = SimpleNamespace(at=SimpleNamespace(tp=1))
    world = replace(one.world, rank=5, local_rank=1)
    at_5 = replace(one, mesh=mesh, world=world)  # TP ranks 4 to 7: 4 and 5 on node n2
    assert checks.tp_peers(at_5) == [("rank 4", UUID.format(4))]


def busy(read) -> None:
    read()
    read()


@pytest.mark.parametrize(
    ("planted", "verdict", "said"),
    [
        ({}, Verdict.PASS, "SM clock 1755 to 1755 MHz under load; limited by software_power_cap"),
        ({"application": None, "reasons": 1}, Verdict.PASS, "1755 MHz under load"),
        ({"reasons": 8 | 4}, Verdict.FAIL, "limited by hardware_slowdown, software_power_cap"),
        ({"reasons": 32}, Verdict.WARN, "limited by software_thermal"),
        ({"application": (1200, 1980)}, Verdict.WARN, "1200 MHz is below the default of 1980 MHz"),
    ],
)
def test_a_throttled_gpu_is_found(plant, planted, verdict: Verdict, said: str) -> None:
    plant(**planted)
    found = checks.clocks(with_gpus(), busy)
    assert found.verdict == verdict
    assert said in found.found


def test_without_nvml_clocks_are_a_warning_and_nothing_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = checks.clocks(with_gpus(), lambda read: pytest.fail("not asked"))
    assert found.verdict == Verdict.WARN
    assert "nvidia-ml-py is not installed" in found.found
    assert checks.memory_errors(with_gpus()).verdict == Verdict.SKIP


@pytest.mark.parametrize(
    ("planted", "verdict", "said"),
    [
        ({}, Verdict.PASS, "0 uncorrected errors"),
        ({"remapped": None}, Verdict.PASS, "0 uncorrected errors"),
        ({"ecc": (0, 0)}, Verdict.WARN, "ECC is off"),
        ({"errors": 3}, Verdict.FAIL, "3 uncorrected errors"),
        ({"remapped": (1, 0, 1, 0)}, Verdict.FAIL, "defective memory rows will be replaced"),
        ({"remapped": (0, 9, 0, 1)}, Verdict.FAIL, "defective memory rows could not be replaced"),
    ],
)
def test_errors_of_memory_are_found(plant, planted, verdict: Verdict, said: str) -> None:
    plant(**planted)
    found = checks.memory_errors(with_gpus())
    assert found.verdict == verdict
    assert said in found.found


def test_gpus_that_are_not_equal_or_missing_are_named() -> None:
    equal = [facts(rank, gpu=gpu(rank)) for rank in range(4)]
    assert checks.equal_gpus(equal).found == "4 x NVIDIA H100 80GB HBM3 of 80.0 GiB"
    other = facts(3, gpu=gpu(3, name="NVIDIA A100-SXM4-40GB", memory_bytes=40 << 30))
    unequal = checks.equal_gpus([*equal[:3], other])
    assert unequal.verdict == Verdict.FAIL
    assert "NVIDIA A100-SXM4-40GB of 40.0 GiB: n1" in unequal.found
    missing = [*equal[:2], *(facts(r, problem="there are 1 GPUs for 2 ranks") for r in (2, 3))]
    assert checks.equal_gpus(missing).found == "n1: there are 1 GPUs for 2 ranks"
    on_cpu = checks.equal_gpus([*equal[:2], facts(2), facts(3)])
    assert on_cpu.found == "n1 would compute on CPUs, but the other nodes would compute on GPUs"
    assert checks.equal_gpus([facts(), facts(1)]).verdict == Verdict.SKIP
    spare = [facts(rank, gpu=gpu(rank, num_visible=8)) for rank in range(4)]
    assert checks.equal_gpus(spare).verdict == Verdict.WARN


def test_software_that_differs_is_named_with_its_hosts() -> None:
    ranks = [facts(rank, gpu=gpu(rank)) for rank in range(4)]
    assert checks.equal_software(ranks).found == (
        "wlb abc, torch 2.13.0, python 3.11.7, NCCL 2.27.3, driver 570.86.10"
    )
    older = checks.equal_software([*ranks[:3], facts(3, gpu=gpu(3), torch="2.11.0")])
    assert older.verdict == Verdict.FAIL
    assert older.found == "torch 2.13.0 on n0, n1, 2.11.0 on n1"
    drivers = checks.equal_software([*ranks[:3], facts(3, gpu=gpu(3, driver="550.54"))])
    assert drivers.verdict == Verdict.WARN
