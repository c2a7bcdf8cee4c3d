"""Tests what plans may use of a device: literal terms, and estimates that stay within them."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.memory import cpu_budget, gpu_budget, memory_estimate, planned_gib
from wlb.memory.budget import COMMUNICATOR_GIB, GIB, ROUNDING, num_communicators
from wlb.packing import caps_of, first_with_room
from wlb.spec import (
    SYSTEMS,
    FsdpSection,
    ParallelSpec,
    RunSpec,
    load,
    presets,
    resolve_dp,
    system_overrides,
)

LARGE = [name for name in presets() if name[0].isdigit()]


def preset(name: str, *overrides: str) -> RunSpec:
    spec = load(name, ["model.vocab_size=128256", *overrides])
    return resolve_dp(spec, spec.parallel.world_size)


def test_terms_literal() -> None:
    budget = gpu_budget(preset("7b_128k"))
    # Five communicators (the world, tp, cp, pp, dp x cp) of 0.5625 GiB; 6% of what is left.
    left = 80 - 1.0 - 5 * 0.5625
    assert budget.context_bytes == GIB
    assert budget.nccl_bytes == 5 * 0.5625 * GIB
    assert budget.gaps_bytes == pytest.approx(0.06 * left * GIB, abs=1)
    assert budget.planned_bytes == pytest.approx(0.94 * left * GIB, abs=1)
    assert budget.planned_gib == planned_gib(preset("7b_128k")) == 71.616
    sizes = ("71.6 GiB", "80 GiB", "1 GiB", "2.81 GiB", "4.57 GiB")
    assert re.findall(r"[\d.]+ GiB", budget.explanation) == list(sizes)
    assert "cluster.memory_gib" in budget.explanation


def test_a_communicator_is_two_connections_of_nccl() -> None:
    """Sizes of NCCL's src/init.cc and src/include/device.h, in pages of 2 MiB (CUDA_IPC_MIN)."""
    simple, steps = 4 << 20, 8
    ll, ll128 = 8 * 512 * steps * 16, 120 * 640 * steps * 8
    page = 2 << 20
    received = -(-(simple + ll + ll128) // page) * page
    assert received + page == 12 << 20  # and a page for what is sent
    assert 2 * 24 * (received + page) == COMMUNICATOR_GIB * GIB


@pytest.mark.parametrize(
    ("parallel", "shard_size", "number"),
    [
        (ParallelSpec(tp=1, cp=1, pp=1, dp=1), 0, 0),
        (ParallelSpec(tp=8, cp=1, pp=1, dp=1), 0, 2),
        (ParallelSpec(tp=1, cp=1, pp=1, dp=8), 0, 3),
        (ParallelSpec(tp=8, cp=2, pp=4, dp=2), 0, 6),
        (ParallelSpec(tp=8, cp=2, pp=4, dp=2), 2, 8),
    ],
)
def test_groups_of_more_than_one_rank_have_a_communicator(
    parallel: ParallelSpec, shard_size: int, number: int
) -> None:
    spec = replace(RunSpec(), parallel=parallel, fsdp=FsdpSection(shard_size=shard_size))
    assert num_communicators(spec) == number


def test_copies_of_kv_heads_have_communicators() -> None:
    """Of eight TP ranks and two KV heads: four copies of each, and two that differ."""
    spec = replace(RunSpec(), parallel=ParallelSpec(tp=8, cp=1, pp=1, dp=1))
    copied = replace(spec, model=replace(spec.model, num_kv_heads=2))
    alone = replace(spec, model=replace(spec.model, num_kv_heads=1))
    assert [num_communicators(s) for s in (spec, copied, alone)] == [2, 4, 3]


def test_a_cpu_rank_has_no_context() -> None:
    budget = cpu_budget(RunSpec(), gib=0.5, source="cluster.memory_gib")
    assert budget.planned_bytes == pytest.approx(0.94 * 0.5 * GIB, abs=1)
    assert budget.planned_gib * GIB == pytest.approx(budget.planned_bytes)
    assert budget.context_bytes == budget.nccl_bytes == 0


@given(gib=st.floats(0.001, 300), gaps=st.floats(0, 0.99))
def test_terms_and_plans_are_the_device(gib: float, gaps: float) -> None:
    budget = replace(gpu_budget(RunSpec(), gib=gib), gaps=gaps)
    assert budget.planned_bytes >= 0
    if budget.planned_bytes:
        assert budget.planned_bytes + sum(budget.terms.values()) == int(gib * GIB)
    assert budget.planned_gib * GIB <= budget.planned_bytes


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", LARGE)
def test_every_preset_fits_with_every_system(name: str, system: str) -> None:
    """Estimate, kernels' workspace, NCCL, context and gaps come to no more than the device."""
    planned = planned_gib(preset(name))
    alternatives = [preset(name, *o) for o in system_overrides(system, planned_gib=planned)]
    spec = alternatives[first_with_room(alternatives)]
    caps = caps_of(spec) if spec.packing.varies_lengths else (None, None)
    estimate = memory_estimate(spec, micro_batch_tokens=caps[0], step_tokens=caps[1])
    budget = gpu_budget(spec)
    assert estimate.total_bytes <= budget.planned_bytes * ROUNDING
    assert sum(estimate.terms.values()) == estimate.total_bytes
    # Only the largest recomputes: of `wlb` the first alternative has no room for it.
    assert (spec.training.recompute == "selective") == (name == "405b_128k")
