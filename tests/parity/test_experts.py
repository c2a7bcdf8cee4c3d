"""Tests that layouts with experts compute what one process computes (fp32, CPU, Gloo)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.body import expect_equal_to_one_process, global_loss, gradient_error, whole
from tests.parity.case import (
    Case,
    Masked,
    Reader,
    fresh_reference,
    packing,
    pipeline_plan,
    reference_loss,
    spec_of,
)
from tests.sets import full, nightly
from wlb.launch.local import run_local
from wlb.model import Llama
from wlb.parallel.execute import Executor
from wlb.parallel.expert_parallel import mixtures_of
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.plan import KeyExchange
from wlb.spec import Dtype, ExpertBalance, ExpertsSpec, Recompute, Schedule, Scoring

pytestmark = pytest.mark.dist

F1B = Schedule.ONE_F_ONE_B
IZB = Schedule.INTERLEAVED_ZERO_BUBBLE
NEEDED = KeyExchange.NEEDED

PLAIN = ExpertsSpec(num=8, per_token=2, hidden_size=16)
SHARED = ExpertsSpec(num=8, per_token=3, hidden_size=16, shared=1, scoring=Scoring.SIGMOID)
TWELVE = ExpertsSpec(num=12, per_token=3, hidden_size=16, shared=1)

QUICK = [
    Case(cp=2, experts=PLAIN, ep=2),
    Case(dp=2, pp=2, experts=SHARED, ep=2, ep_stages=2, v=2, schedule=IZB, num_micro_batches=8),
]
CASES = [
    # Experts as other weights: replicated, sharded by FSDP over all of dp x cp x tp.
    Case(pp=2, schedule=F1B, experts=PLAIN),
    Case(cp=2, experts=SHARED, row_multiple=3),
    Case(tp=2, experts=SHARED),
    Case(dp=2, experts=PLAIN, num_micro_batches=8, reshard=True),
    # Expert parallelism over CP, DP and TP.
    Case(cp=2, pp=2, experts=PLAIN, ep=2, ep_stages=2, v=2),
    # Copies of experts beside those of other weights (HSDP): of each EP group, of FSDP's shards.
    Case(cp=2, dp=2, experts=SHARED, ep=2, shard_size=2, num_micro_batches=8),
    Case(tp=2, cp=2, pp=2, experts=SHARED, ep=4, ep_stages=2, v=2, schedule=IZB),
    # Experts in some layers: a stage of two, and both stages of a rank, have none.
    Case(
        cp=2,
        pp=2,
        experts=replace(PLAIN, dense_layers=(0, 1)),
        ep=2,
        schedule=F1B,
        recompute=Recompute.SELECTIVE,
    ),
    Case(
        pp=2,
        dp=2,
        experts=replace(SHARED, every=2),
        ep=2,
        v=2,
        schedule=IZB,
        num_micro_batches=8,
        reshard=True,
    ),
]

# Eight ranks whose axes other cases have in pairs, and options that others have on fewer ranks.
NIGHTLY = [
    Case(cp=2, dp=2, experts=SHARED, ep=2, ep_stages=2, num_micro_batches=8, reshard=True),
    Case(dp=4, experts=PLAIN, shard_size=2, num_micro_batches=8),
    Case(cp=2, pp=2, experts=TWELVE, ep=2, ep_stages=3, recompute=Recompute.SELECTIVE, v=2),
    Case(
        pp=2,
        dp=2,
        experts=PLAIN,
        ep=2,
        ep_stages=2,
        v=2,
        recompute=Recompute.SELECTIVE,
        schedule=IZB,
        num_micro_batches=8,
    ),
    Case(cp=2, dp=2, experts=PLAIN, ep=4, num_micro_batches=8, row_multiple=4),
    Case(cp=2, pp=2, experts=PLAIN, ep=2, ep_stages=2, recompute=Recompute.FULL, schedule=F1B),
    Case(tp=2, experts=SHARED, ep=2, ep_stages=4),
    Case(
        cp=2, pp=2, dp=2, experts=PLAIN, ep=4, ep_stages=2, v=2, schedule=IZB, num_micro_batches=8
    ),
    Case(tp=2, cp=2, pp=2, v=2, experts=SHARED, exchange=NEEDED, recompute=Recompute.FULL),
    Case(cp=2, dp=2, experts=SHARED, ep=2, num_micro_batches=8, reshard=True),
    Case(cp=2, pp=2, dp=2, experts=PLAIN, ep=2, v=2, schedule=IZB, num_micro_batches=8),
    Case(cp=2, dp=2, experts=SHARED, ep=4, recompute=Recompute.FULL, num_micro_batches=8),
    Case(tp=2, cp=2, dp=2, experts=SHARED, ep=2, shard_size=2, num_micro_batches=8, reshard=True),
    Case(
        cp=2,
        pp=2,
        dp=2,
        experts=TWELVE,
        ep=4,
        ep_stages=3,
        v=2,
        num_micro_batches=8,
        own_first=True,
    ),
    Case(cp=2, pp=2, dp=2, experts=PLAIN, ep=4, schedule=F1B, num_micro_batches=8),
]


@pytest.mark.parametrize("case", [*QUICK, *full(*CASES), *nightly(*NIGHTLY)], ids=str)
def test_layout_equals_one_process(case: Case) -> None:
    expect_equal_to_one_process(case)


AUX = replace(PLAIN, balance=ExpertBalance.AUX_LOSS, aux_coefficient=0.5)
BOTH = replace(AUX, z_loss=0.1)
AUX_CASES = [
    Case(cp=2, experts=BOTH, ep=2, row_multiple=3),
    Case(tp=2, pp=2, experts=replace(BOTH, scoring=Scoring.SIGMOID), schedule=F1B),
    *nightly(
        Case(dp=2, pp=2, experts=BOTH, ep=2, ep_stages=2, v=2, schedule=IZB, num_micro_batches=8),
        Case(tp=2, cp=2, experts=BOTH, ep=4, recompute=Recompute.FULL),
    ),
]


def set_shares(stages: Iterable[Llama]) -> None:
    """Sets each layer's shares of the step before, as if the last expert had most tokens."""
    for mixture in (mixture for stage in stages for mixture in mixtures_of(stage)):
        mixture.load = torch.arange(mixture.spec.num)
        mixture.rebalance()


def auxiliary(world: World, case: Case) -> tuple[float, tuple[float, str], float]:
    """Returns how far gradients are from one process's without an auxiliary loss and with one, and
    how far the former are from the latter. Few tokens have labels.
    """
    spec, plan = spec_of(case), packing(case.num_micro_batches)
    mesh = build_mesh(spec.parallel, torch.device("cpu"), model=spec.model)
    executor, reference = Executor(spec, mesh), fresh_reference(spec)
    mine = pipeline_plan(plan, spec, mesh.at.dp, case.strategy)
    of_labels = 7.0 / plan.num_tokens

    def reference_gradients() -> None:
        reference.zero_grad()
        options: dict[str, Any] = {"reader": Masked(), "loss_scale": of_labels}
        reference_loss(reference, spec, plan, backward=True, **options)

    executor.train_step(mine, Masked(), loss_scale=of_labels)
    reference_gradients()
    before, _ = gradient_error(executor, reference)
    set_shares([*executor.stages.values(), reference])
    reference_gradients()
    differing, _ = gradient_error(executor, reference)
    for parameter in executor.named_parameters().values():
        parameter.grad = None
    executor.train_step(mine, Masked(), loss_scale=of_labels)
    return before, gradient_error(executor, reference), differing


@pytest.mark.full
@pytest.mark.parametrize("case", AUX_CASES, ids=str)
def test_losses_of_the_router_are_of_all_tokens_whatever_has_labels(case: Case) -> None:
    results = run_local(auxiliary, case.world, case, start_group=True, timeout_s=600)
    for before, (error, name), _ in results:
        assert before <= 1e-5
        assert error <= 1e-5, name
    assert max(differing for *_, differing in results) > 0.01


def bf16(world: World, case: Case) -> tuple[float, float, float, str]:
    """Returns losses in bfloat16 and float32, and the worst cosine of a parameter's gradients."""
    spec = spec_of(case)
    spec = replace(spec, training=replace(spec.training, dtype=Dtype.BFLOAT16))
    mesh = build_mesh(spec.parallel, torch.device("cpu"), model=spec.model)
    executor, plan = Executor(spec, mesh), packing(case.num_micro_batches)
    mine = pipeline_plan(plan, spec, mesh.at.dp, case.strategy)
    local = executor.train_step(mine, Reader(), loss_scale=1.0 / plan.num_targets)
    reference = fresh_reference(spec)
    expected = reference_loss(reference, spec, plan, backward=True)
    wanted, worst = dict(reference.named_parameters()), (1.0, "")
    for name, parameter in executor.named_parameters().items():
        assert parameter.dtype == torch.float32
        got, other = parameter.grad, wanted[name].grad
        assert got is not None
        assert other is not None
        cosine = torch.cosine_similarity(whole(got).flatten(), other.flatten(), dim=0)
        worst = min(worst, (cosine.item(), name))
    return global_loss(executor, local), expected, *worst


@pytest.mark.full
def test_bfloat16_is_near_float32() -> None:
    """Rounded logits choose other experts for a few tokens, which changes those gradients."""
    case = Case(cp=2, pp=2, experts=SHARED, ep=2, v=2, schedule=IZB)
    for loss, expected, cosine, name in run_local(
        bf16, case.world, case, start_group=True, timeout_s=600
    ):
        assert loss == pytest.approx(expected, rel=5e-3)
        assert cosine > 0.9, name
