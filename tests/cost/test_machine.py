"""Tests which profile a machine gets, and what is said if it is not the machine's own."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.words import lacks
from wlb.cost import load_profile, machine, matching_profile, mismatches, profile_file, save_profile
from wlb.cost.machine import gpu_name, gpu_power_limit_w, is_same, machine_name, short_name
from wlb.cost.workload import workload_for
from wlb.spec import AttentionBackend, load


class FakeError(Exception):
    pass


def fake_nvml(name, *, fails="", power_mw=700_000):
    def call(what, result=None):
        def inner(*_):
            if what == fails:
                raise FakeError(what)
            return result

        return inner

    return SimpleNamespace(
        NVMLError=FakeError,
        nvmlInit=call("init"),
        nvmlShutdown=call("shutdown"),
        nvmlDeviceGetHandleByIndex=call("handle", 0),
        nvmlDeviceGetName=call("name", name),
        nvmlDeviceGetEnforcedPowerLimit=call("power", power_mw),
    )


def test_the_gpus_name_comes_from_its_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("NVIDIA H200"))
    assert machine_name("cuda") == "NVIDIA H200"
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(b"NVIDIA H200"))
    assert gpu_name() == "NVIDIA H200"
    for fails in ("init", "handle", "name"):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("x", fails=fails))
        assert gpu_name() == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert gpu_name() == ""


def test_the_gpus_power_limit_comes_from_its_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("NVIDIA H100", power_mw=500_000))
    assert gpu_power_limit_w() == 500.0
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml("NVIDIA H100", fails="power"))
    assert gpu_power_limit_w() == 0.0


def test_the_power_limit_chooses_among_profiles_of_a_device(monkeypatch):
    """A board of 500 W is another GPU than the measured one of 700 W, whose name it has."""
    name = "NVIDIA H100 80GB HBM3"
    assert matching_profile("cuda", name, power_limit_w=700.0).name == "h100_sxm"
    assert matching_profile("cuda", name, power_limit_w=690.0).name == "h100_sxm"
    assert matching_profile("cuda", name, power_limit_w=500.0).name == "h100_runs_500w"
    assert matching_profile("cuda", name).name == "h100_sxm"
    # No profile is of 600 W: the measured one is taken, and a run says so.
    assert matching_profile("cuda", name, power_limit_w=600.0).name == "h100_sxm"
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(name, power_mw=500_000))
    of_run = workload_for(load("7b_128k", ["cost.profile=auto"]), "cuda")
    assert of_run.profile.name == "h100_runs_500w"
    assert "power limit" not in " ".join(mismatches(of_run))
    told = workload_for(load("7b_128k", ["cost.profile=h100_sxm"]), "cuda")
    assert "a power limit of 700 W, but this GPU has a limit of 500 W" in " ".join(mismatches(told))


def test_the_cpus_name_comes_from_the_kernel(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n")
    monkeypatch.setattr(machine, "CPU_INFO", info)
    assert machine_name("cpu") == "Some CPU @ 3 GHz"
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "none")
    assert machine_name("cpu") != ""


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("AMD EPYC 7B13", "amd_epyc_7b13"),
    ],
)
def test_short_names(device, name):
    assert short_name(device) == name


def test_memory_and_form_make_no_other_gpu():
    assert is_same("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM 80GB")
    assert not is_same("NVIDIA H100 80GB HBM3", "NVIDIA H200")


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """Adds a folder of profiles to the shipped ones: three of an H200, one of an old format,
    CPUs'.
    """
    measured = replace(
        load_profile("h100"),
        name="h200",
        device="NVIDIA H200",
        provenance=replace(load_profile("cpu").provenance, kind="measured"),
    )
    fa3 = tuple(t for t in measured.attention if "flash_attention_3" in t.backends)
    fa2 = tuple(t for t in measured.attention if "flash_attention_2" in t.backends)
    published = replace(measured, name="a_published", provenance=load_profile("h100").provenance)
    save_profile(tmp_path / "a_published.json", published)
    save_profile(tmp_path / "h200.json", replace(measured, attention=fa2))
    (tmp_path / "a100.json").write_text('{"schema_version": 1, "device": "NVIDIA A100"}')
    cpu = load_profile("cpu")
    epyc = replace(cpu, name="epyc", device="AMD EPYC 9654 96-Core Processor")
    save_profile(tmp_path / "epyc.json", epyc)
    save_profile(tmp_path / "own.json", replace(cpu, name="own"))  # measured on the same device
    save_profile(tmp_path / "h200_fa3.json", replace(measured, name="h200_fa3", attention=fa3))
    folders = profile_file._folders()
    monkeypatch.setattr(profile_file, "_folders", lambda: [*folders, tmp_path])


@pytest.mark.usefixtures("shipped")
def test_the_machines_own_measured_profile_is_taken_and_one_with_the_kernel_first():
    """Profiles of other devices need not even load."""
    assert matching_profile("cuda", "NVIDIA H200", "flash_attention_2").name == "h200"
    assert matching_profile("cuda", "NVIDIA H200", "flash_attention_3").name == "h200_fa3"
    assert matching_profile("cuda", "NVIDIA H100 80GB HBM3").name == "h100_sxm"
    assert matching_profile("cuda", "NVIDIA L4").name == "h100_runs"
    assert matching_profile("cuda", "").name == "h100_runs"
    assert matching_profile("cpu", "Some CPU").name == "cpu"
    assert matching_profile("cpu", "AMD EPYC 9654 96-Core Processor").name == "epyc"
    assert matching_profile("cpu", load_profile("cpu").device).name == "own"


@pytest.mark.usefixtures("shipped")
def test_a_run_says_what_does_not_match(monkeypatch):
    def notes(gpu: str, **kernels) -> str:
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpu))
        spec = load("7b_128k", ["cost.profile=auto"])
        spec = replace(spec, kernels=replace(spec.kernels, **kernels))
        cost = workload_for(spec, "cuda")
        return "; ".join([cost.profile.name, *mismatches(cost)])

    assert notes("NVIDIA H200").startswith("h200; ")
    assert "this machine has" not in notes("NVIDIA H200")
    expected = "was measured on NVIDIA H100 80GB HBM3, but this machine has NVIDIA L4"
    assert expected in notes("NVIDIA L4")
    assert notes("NVIDIA L4").startswith("h100_runs; ")
    told = notes("NVIDIA H200", attention=AttentionBackend.FLASH_ATTENTION_4)
    assert "flash_attention_4 was not measured, so it is priced as torch_varlen" in told


def test_pieces_beyond_what_was_measured_are_told():
    spec = load("7b_128k", [])
    assert not any("extrapolated" in note for note in mismatches(workload_for(spec, "cuda")))
    longer = load("7b_128k", ["data.context_window=524288"])
    pieces, products = [n for n in mismatches(workload_for(longer, "cuda")) if "extrapolated" in n]
    assert "pieces of up to 524288 tokens is extrapolated, because only" in pieces
    assert "131072 keys" in pieces
    assert lacks(products, "matrix products", "262,144 tokens", "131,072") == []
    small = load("7b_128k", ["cost.profile=cpu"])
    assert any("weights are extrapolated" in n for n in mismatches(workload_for(small, "cuda")))
