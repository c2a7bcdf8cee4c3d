"""Provides inputs for tests of `wlb doctor`: a run to examine, and facts about ranks and GPUs."""

from dataclasses import replace
from typing import Any

import torch

from wlb.doctor.facts import Facts, GpuFacts, Patient
from wlb.parallel.world import World
from wlb.spec import RunSpec, check, load, resolve_dp

UUID = "GPU-{}"


def gpu(index: int = 0, **changed: Any) -> GpuFacts:
    told: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 80 << 30,
        "capability": (9, 0),
        "uuid": UUID.format(index),
        "num_visible": 2,
        "bus": f"0000:{index:02x}:00.0",
        "driver": "570.86.10",
        "driver_cuda": (12, 8),
    }
    return GpuFacts(**{**told, **changed})


def facts(rank: int = 0, **changed: Any) -> Facts:
    told: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank % 2,
        "local_world_size": 2,
        "node": rank // 2,
        "host": f"n{rank // 2}",
        "python": "3.11.7",
        "torch": "2.13.0",
        "wlb": "abc",
        "cuda": "12.6",
        "nccl": "2.27.3",
    }
    return Facts(**{**told, **changed})


def patient(*everyone: Facts, is_quick: bool = True, preset: str = "demo_single", **sets: Any):
    """Returns a run to examine on the CPU, as rank 0 sees it.

    Args:
        *everyone: Facts of all ranks. Defaults to those of one rank.
        is_quick: Whether the doctor examines quickly.
        preset: Preset of the run.
        **sets: Overrides, as in parallel__tp=2.
    """
    spec = load(preset, [f"{name.replace('__', '.')}={value}" for name, value in sets.items()])
    spec = filled(spec)
    num_ranks = max(1, len(everyone))
    world = World(world_size=num_ranks, local_world_size=num_ranks, rendezvous_file="unused")
    return Patient(
        spec=spec,
        world=world,
        device=torch.device("cpu"),
        is_quick=is_quick,
        everyone=everyone or (facts(local_world_size=1),),
    )


def filled(spec: RunSpec) -> RunSpec:
    spec = resolve_dp(spec, spec.parallel.world_size)
    return check(replace(spec, model=replace(spec.model, vocab_size=512)))
