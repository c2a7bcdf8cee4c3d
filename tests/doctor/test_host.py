"""Tests what a node gives its ranks, with too little of it planted."""

import os
import resource
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.doctor.patient import facts, gpu, patient
from tests.sets import nightly
from wlb.doctor import host
from wlb.doctor.finding import Verdict
from wlb.launch.local import run_local
from wlb.parallel.host import open_files_needed
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World, rank_device
from wlb.spec import load, resolve_dp

Usage = namedtuple("Usage", "total used free")
NEVER = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "verdict", "said"),
    [
        ((1 << 20, 1 << 20), Verdict.PASS, "1048576"),
        ((NEVER, NEVER), Verdict.PASS, "unlimited"),
        ((100, 1 << 20), Verdict.PASS, "limits on open files: soft 100, hard 1048576"),
        ((100, NEVER), Verdict.PASS, "soft 100, hard unlimited"),
        (
            (50, 100),
            Verdict.FAIL,
            "limits on open files: soft 50, hard 100; rank 0 of 1 ranks needs about ",
        ),
    ],
)
def test_too_few_file_descriptors_are_found(monkeypatch, limits, verdict: Verdict, said) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    found = host.descriptors(patient())
    assert found.verdict == verdict
    assert said in found.found + found.remedy


def open_files(world: World, layout: str) -> int:
    spec = resolve_dp(
        load("demo_single", [layout, "parallel.dp=2", "data.num_windows=4"]), world.world_size
    )
    mesh = build_mesh(spec.parallel, rank_device(world, "cpu"))
    saver = dist.new_group(backend="gloo")
    for group in (*mesh.groups, saver, dist.group.WORLD):
        dist.all_reduce(torch.zeros(1), group=group)
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_ranks", "layout"), [(4, "parallel.tp=2"), *nightly((8, "parallel.cp=4"))]
)
def test_ranks_open_no_more_files_than_are_said_to_be_needed(num_ranks: int, layout: str) -> None:
    opened = run_local(open_files, num_ranks, layout, start_group=True, timeout_s=600)
    assert max(opened) <= open_files_needed(0, num_ranks, "cpu")


def machine_with(folder: Path, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    """Plants a GPU on that NUMA node, and nodes of cores 0-3 and 4-7."""
    (folder / "pci" / gpu().bus).mkdir(parents=True)
    (folder / "pci" / gpu().bus / "numa_node").write_text(f"{node}\n")
    for number, cores in enumerate(("0-3", "4-5,6-7")):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(host, "PCI", folder / "pci")
    monkeypatch.setattr(host, "NODES", folder)


@pytest.mark.parametrize(
    ("node", "cores", "verdict", "said"),
    [
        ("1", {4, 5}, Verdict.PASS, "the GPU is on NUMA node 1, with 2 of this rank's 2 CPU cores"),
        ("1", {0, 4}, Verdict.WARN, "1 of this rank's 2 CPU cores"),
        ("1", {0, 1}, Verdict.WARN, "bound to another NUMA node"),
        ("-1", {0, 1}, Verdict.SKIP, "does not name the NUMA node"),
    ],
)
def test_a_rank_that_is_bound_far_from_its_gpu_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, cores, verdict: Verdict, said: str
) -> None:
    machine_with(tmp_path, monkeypatch, node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    found = host.numa(patient(facts(gpu=gpu())))
    assert found.verdict == verdict
    assert said in found.found
    assert host.numa(patient(facts())).verdict == Verdict.SKIP


def test_cores_of_a_list() -> None:
    assert host.cores_of("0-2,8\n") == {0, 1, 2, 8}
    assert host.cores_of("\n") == frozenset()


def test_too_little_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
    two = patient(facts(0), facts(1))
    found = host.shared_memory(two)
    assert (found.verdict, "--shm-size" in found.remedy) == (Verdict.WARN, True)
    on_gpus = replace(two, device=torch.device("cuda", 0))
    assert host.shared_memory(on_gpus).verdict == Verdict.FAIL
    assert host.shared_memory(patient()).verdict == Verdict.PASS
    monkeypatch.undo()
    monkeypatch.setattr(host, "SHM", tmp_path / "none")
    assert host.shared_memory(two).verdict == Verdict.FAIL


def test_a_disk_too_small_for_checkpoints_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = patient().spec.model.num_parameters * host.CHECKPOINT_BYTES
    for free, verdict in ((one - 1, "fail"), (2 * one, "warn"), (3 * one, "pass")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free, 0, free))
        found = host.disk(patient(run__output_dir=str(tmp_path / "not" / "there")))
        assert found.verdict == verdict
        assert found.found.startswith(f"{tmp_path} has ")

    # Of several checkpoints that are there, a save removes the oldest where it finds no room.
    for step in (5, 10):
        folder = tmp_path / "runs" / "run" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(one - 1, 0, one - 1))
    again = patient(run__output_dir=str(tmp_path / "runs"), run__name="run")
    assert host.disk(again).verdict == "warn"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(one, 0, one))
    assert host.disk(again).verdict == "pass"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(3 * one, 0, 3 * one))
    nine = patient(run__output_dir=str(tmp_path), checkpoint__keep=9)
    assert host.disk(nine).verdict == "warn"  # with room for three, which was enough above
    assert "10 checkpoints at the same time" in host.disk(nine).remedy


def test_too_little_memory_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "MEM_INFO", tmp_path / "meminfo")
    host.MEM_INFO.write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    well = host.memory(patient(facts(0), facts(1), parallel__tp=2))
    assert well.verdict == Verdict.PASS
    assert well.found.startswith("2.0 GiB of 4.0 GiB a rank free")
    host.MEM_INFO.write_text("MemTotal: 8388608 kB\nMemAvailable: 1024 kB\n")
    assert host.memory(patient()).verdict == Verdict.FAIL
    host.MEM_INFO.write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    refused = host.memory(patient(cluster__memory_gib=0.01))  # as `wlb train` refuses it
    assert refused.verdict == Verdict.FAIL
    host.MEM_INFO.write_text("")
    assert host.memory(patient()).verdict == Verdict.SKIP
    # One process cannot say what the ranks of a larger layout have.
    assert host.memory(patient(preset="7b_128k")).verdict == Verdict.SKIP
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30 << 30, 80 << 30))
    on_gpu = replace(patient(preset="7b_128k", cluster__memory_gib=80), device=torch.device("cuda"))
    found = host.memory(on_gpu)
    assert found.verdict == Verdict.FAIL
    assert found.found.startswith("30.0 GiB of 80.0 GiB free; the fullest rank needs about ")
