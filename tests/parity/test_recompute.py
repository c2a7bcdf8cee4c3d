"""Tests layers that run again in backward: same bits, less kept, and exactly what runs again."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.parity.body import gradient_error, run_step, whole
from tests.parity.case import (
    Case,
    Reader,
    fresh_reference,
    packing,
    pipeline_plan,
    reference_loss,
    spec_of,
)
from tests.parity.test_tensor import CU_SEQLENS, micro_batch, saved_bytes
from tests.parity.test_zero_bubble import Count
from tests.sets import full, nightly
from wlb.cost.flops import RECOMPUTED_WORK
from wlb.launch.local import run_local
from wlb.memory.estimate import layer_activation_bytes
from wlb.model import Llama
from wlb.parallel.build import recompute_layers
from wlb.parallel.deferred import DeferringOps
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World, rank_device
from wlb.plan import KeyExchange
from wlb.spec import Recompute, Schedule
from wlb.train.telemetry.clock import Cell, Part, Pass, StepClock, StepTimes

NONE, SELECTIVE, FULL = Recompute
SPEC = spec_of(Case(layers=2))


def plain(how: Recompute) -> Llama:
    """Returns the whole model in one process, nothing distributed."""
    model = fresh_reference(SPEC)
    recompute_layers(model, how)
    return model


def deferring(how: Recompute) -> Llama:
    """Returns `plain` with weight gradients left for later, as zero-bubble schedules want them."""
    model = Llama(SPEC.model, ops=DeferringOps())
    model.load_state_dict(fresh_reference(SPEC).state_dict())
    recompute_layers(model, how)
    return model


def loss_and_gradients(model: Llama) -> tuple[Tensor, dict[str, Tensor | None]]:
    tokens, _, rows = micro_batch(SPEC)
    loss = model(tokens, rows)
    loss.backward()
    if isinstance(model.ops, DeferringOps):
        model.ops.queue.take()()
    return loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("build", [plain, deferring])
@pytest.mark.parametrize("how", [SELECTIVE, FULL])
def test_loss_and_gradients_are_the_same_bits(
    how: Recompute, build: Callable[[Recompute], Llama]
) -> None:
    (loss, grads), (expected, wanted) = (
        loss_and_gradients(b(h)) for b, h in ((build, how), (plain, NONE))
    )
    assert torch.equal(loss, expected)
    assert list(grads) == list(wanted)
    for name, grad in grads.items():
        assert grad is not None
        other = wanted[name]
        assert other is not None
        assert torch.equal(grad, other), name


@pytest.mark.parametrize("how", [SELECTIVE, FULL])
def test_it_keeps_less(how: Recompute) -> None:
    """Whole layer and second half each keep their input alone: 48 rows of 32 float32 values."""
    _, _, rows = micro_batch(SPEC)
    x_TC = torch.randn(CU_SEQLENS[-1], 32, requires_grad=True)
    layers = [plain(h).model.layers["0"] for h in (NONE, how)]
    kept, less = (saved_bytes(layer, x_TC, rows)[1] for layer in layers)
    if how == FULL:
        assert less == 48 * 32 * 4
        return
    # The norm's scale factors, what it multiplies and its output, gate, up and product.
    assert kept - less == 48 * (1 + 2 * 32 + 3 * 48) * 4


@pytest.mark.parametrize("how", Recompute)
def test_what_a_layer_keeps_is_what_the_memory_estimate_counts(how: Recompute) -> None:
    """What the micro-batch's layers share (rotary tables, cu_seqlens) and norms are left out.

    CPU norms are made of several operators, which keep one factor per row and x times it beside
    input and output.
    """
    spec = replace(SPEC, training=replace(SPEC.training, recompute=how))
    x_TC = torch.randn(CU_SEQLENS[-1], 32, requires_grad=True)
    _, _, rows = micro_batch(spec)
    _, kept = saved_bytes(plain(how).model.layers["0"], x_TC, rows)
    shared = (rows.cos.numel() + rows.sin.numel() + 2 * len(CU_SEQLENS)) * 4
    norms = {NONE: 2, SELECTIVE: 1, FULL: 0}[how]
    expected = layer_activation_bytes(spec, micro_batch_tokens=48) + norms * 48 * (1 + 32) * 4
    assert kept == expected + (shared if how != FULL else 0)


def again(how: Recompute) -> dict[str, tuple[int, int]]:
    """Counts calls of the operators that say what ran, forward and backward, of the whole model."""
    tokens, _, rows = micro_batch(SPEC)
    model = plain(how)
    with Count() as forward:
        loss = model(tokens, rows)
    with Count() as backward:
        loss.backward()
    names = ("attend", "attend_backward", "silu", "mm")
    return {name: (forward.calls[name], backward.calls[name]) for name in names}


def test_attention_is_run_again_in_full_only_and_the_last_product_never() -> None:
    none, half, full = (again(how) for how in (NONE, SELECTIVE, FULL))
    assert [calls["attend"] for calls in (none, half, full)] == [(2, 0), (2, 0), (2, 2)]
    # Once a layer in SwiGLU's own backward pass, which does not keep it.
    assert [calls["silu"] for calls in (none, half, full)] == [(2, 2), (2, 4), (2, 4)]
    assert [calls["attend_backward"] for calls in (none, half, full)] == [(0, 2)] * 3
    # Of seven products: gate and up; all but down.
    assert half["mm"][1] - none["mm"][1] == 2 * 2
    assert full["mm"][1] - none["mm"][1] == 2 * 6


def rerun(world: World, case: Case) -> list[tuple[Counter[str], int, int]]:
    """Runs a step of this rank in each way and returns calls and attention's forward time.

    Calls are of operators; nanoseconds are of attention's forward kernels in forward passes and in
    backward passes.
    """
    out: list[tuple[Counter[str], int, int]] = []
    mesh = build_mesh(spec_of(case).parallel, torch.device("cpu"))
    for how in Recompute:
        spec = spec_of(replace(case, recompute=how))
        clock = StepClock.of(mesh.device)
        executor = Executor(spec, mesh, timer=clock)
        mine = pipeline_plan(packing(case.num_micro_batches), spec, mesh.at.dp, case.strategy)
        executor.train_step(mine, Reader(), loss_scale=1.0)  # the first step initialises the stages
        with Count() as counted:
            executor.train_step(mine, Reader(), loss_scale=1.0)
        times = clock.take()
        forward = [times.part_ns(cell, Part.ATTENTION) for cell in cells(times, Pass.FORWARD)]
        out.append((counted.calls, sum(forward), times.total_ns(Part.RECOMPUTE)))
        assert times.total_ns(Part.RECOMPUTE) == sum(
            times.part_ns(cell, Part.RECOMPUTE) for cell in cells(times, Pass.BACKWARD)
        )
    return out


def cells(times: StepTimes, kind: Pass) -> set[Cell]:
    return {cell for cell, _ in times.parts_ns if cell.kind == kind}


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, cp=2, layers=2),
        Case(tp=2, pp=2, layers=4, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE),
    ],
    ids=str,
)
def test_what_a_rank_runs_again(case: Case) -> None:
    """It has 4 micro-batches and 2 layers per rank, and is what the cost model prices."""
    passes = 4 * 2
    priced = (RECOMPUTED_WORK[Recompute.SELECTIVE], RECOMPUTED_WORK[Recompute.FULL])
    names = {
        "all_gather_into_tensor": (1, 2),  # of the MLP's rows, of attention's
        "reduce_scatter_tensor": (0, 1),  # of attention's output
        "mm": (2, 6),
        "gather_kv": (0, 1),
        "context_attend": (0, 1),
    }
    assert names["all_gather_into_tensor"] == tuple(again.tp[0] for again in priced)
    assert names["reduce_scatter_tensor"] == tuple(again.tp[1] for again in priced)
    assert names["mm"] == tuple(len(again.matrices) for again in priced)
    assert names["gather_kv"] == tuple(again.attention for again in priced)
    if case.cp == 1:
        names |= {"gather_kv": (0, 0), "context_attend": (0, 0), "attend": (0, 1)}
    for none, half, all_of_it in run_local(rerun, 4, case, start_group=True, timeout_s=600):
        for name, expected in names.items():
            more = [(calls[name] - none[0][name]) / passes for calls, _, _ in (half, all_of_it)]
            assert tuple(more) == expected, name
        # The clock tells attention that runs again from attention's own backward pass.
        assert (none[2], half[2]) == (0, 0)
        assert 0 < all_of_it[2] < 4 * all_of_it[1]


def steps(world: World, case: Case) -> list[dict[str, object]]:
    """Returns each way's step against one process, and whether it has the bits of the layout's
    own.
    """
    out: list[dict[str, object]] = []
    mesh = build_mesh(spec_of(case).parallel, rank_device(world, "cpu"))
    reference = fresh_reference(spec_of(case))
    expected = reference_loss(
        reference, spec_of(case), packing(case.num_micro_batches), backward=True
    )
    plain: tuple[float, dict[str, Tensor]] | None = None
    for how in Recompute:
        executor = Executor(spec_of(replace(case, recompute=how)), mesh)
        loss, held = run_step(executor, case, shift=0)
        grads = {
            n: whole(p.grad) for n, p in executor.named_parameters().items() if p.grad is not None
        }
        plain = plain or (loss, grads)
        out.append(
            {
                "loss": loss,
                "held_out": held,
                "expected": expected,
                "gradient": gradient_error(executor, reference),
                "is_same": loss == plain[0]
                and all(torch.equal(grad, plain[1][name]) for name, grad in grads.items()),
            }
        )
    return out


@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, v=2),
        *full(Case(tp=2, cp=2), Case(cp=4, exchange=KeyExchange.NEEDED)),
        *nightly(
            Case(pp=2, schedule=Schedule.ONE_F_ONE_B),
            Case(pp=2, v=2, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE),
            Case(tp=2, cp=2, strategy="per_sequence"),
            Case(tp=2, pp=2, v=2, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE),
            Case(cp=2, dp=2, num_micro_batches=8),
            Case(tp=2, cp=2, pp=2, v=2, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE),
        ),
    ],
    ids=str,
)
def test_layouts_equal_one_process(case: Case) -> None:
    for results in run_local(steps, case.world, case, start_group=True, timeout_s=600):
        for result in results:
            assert result["loss"] == pytest.approx(result["expected"], rel=1e-6)
            assert result["held_out"] == pytest.approx(result["expected"], rel=1e-6)
            error, name = result["gradient"]
            assert error <= 1e-5, name
            assert result["is_same"]
