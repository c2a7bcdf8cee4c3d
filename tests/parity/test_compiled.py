"""Tests compiled decoder layers: the numbers of eager ones, one graph for 20 micro-batch lengths.

They compile with aot_eager, which traces and differentiates as inductor does and needs no C++
compiler.
"""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx
from torch._dynamo import register_backend

from tests.parity.body import global_loss, gradient_error
from tests.parity.case import (
    Case,
    Reader,
    fresh_reference,
    packing_of,
    pipeline_plan,
    reference_loss,
    spec_of,
)
from tests.sets import nightly
from wlb.launch.local import run_local
from wlb.parallel.compiled import num_graphs
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.plan import KeyExchange, PackingPlan
from wlb.spec import Activation, ExpertsSpec, Recompute, Schedule
from wlb.train.telemetry.clock import Part, StepClock

pytestmark = [pytest.mark.full, pytest.mark.dist]

SHARED = ExpertsSpec(num=8, per_token=3, hidden_size=16, shared=1)
ALTERNATING = replace(SHARED, every=2)
EMPTY = packing_of([[]] * 4)


def of_many_lengths() -> PackingPlan:
    """Returns 20 micro-batches of 9 to 59 tokens, in one to three segments.

    The first has 32 tokens, the model's width, in two segments of which the longer has 24: numbers
    that must not be taken for constants, or for each other. 9 are more than one row for each of
    four ranks.
    """
    first = [["7:0-24", "4:0-8"]]
    more = [[f"7:0-{9 + 2 * i}", *["2:0-9", "6:0-5"][: i % 3]] for i in range(19)]
    return packing_of(first + more)


def compiled(world: World, case: Case) -> dict[str, object]:
    """Returns loss and gradients of a step against one process, and numbers of graphs.

    Graphs are counted after the step, after an evaluation of it, and after a step of micro-batches
    without a token. A function may have 3 of them; torch's own limit is 8.
    """
    torch._dynamo.config.recompile_limit = 3
    spec = spec_of(case)
    mesh = build_mesh(spec.parallel, torch.device("cpu"), model=spec.model)
    clock = StepClock.of(mesh.device)
    executor = Executor(spec, mesh, timer=clock)
    plan, reference = of_many_lengths(), fresh_reference(spec)
    expected = reference_loss(reference, spec, plan, backward=True)
    mine = pipeline_plan(plan, spec, mesh.at.dp, case.strategy)
    begin = num_graphs()
    local = executor.train_step(mine, Reader(), loss_scale=1.0 / plan.num_targets)
    trained = num_graphs() - begin
    times = clock.take()
    error = gradient_error(executor, reference)
    held = global_loss(executor, executor.evaluate(mine, Reader())) / plan.num_targets
    evaluated = num_graphs() - begin - trained
    if case.world == 1:
        nothing = pipeline_plan(EMPTY, spec, mesh.at.dp, case.strategy)
        executor.train_step(nothing, Reader(), loss_scale=1.0)
    return {
        "loss": global_loss(executor, local),
        "held_out": held,
        "expected": expected,
        "gradient": error,
        "graphs": (trained, evaluated, num_graphs() - begin - trained - evaluated),
        "is_timed": times.total_ns(Part.ATTENTION) > 0,
        "attends_again": times.total_ns(Part.RECOMPUTE) > 0,
    }


def symbols(world: World, case: Case) -> list[tuple[int, ...]]:
    """Returns what of a layer's graph inputs is symbolic.

    Sizes that are symbols are given by dimension, a number that is one as (-1, value).
    """
    seen: list[tuple[int, ...]] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor):
                sizes = enumerate(value.shape)
                seen.append(tuple(dim for dim, size in sizes if not isinstance(size, int)))
            elif isinstance(value, torch.SymInt) and value.node.maybe_as_int() is None:
                seen.append((-1, value.node.hint))
        return graph.forward

    register_backend(look, name="look")
    executor = Executor(spec := spec_of(case), build_mesh(spec.parallel, torch.device("cpu")))
    plan = of_many_lengths()
    mine = pipeline_plan(plan, spec, 0, case.strategy)
    executor.train_step(mine, Reader(), loss_scale=1.0 / plan.num_targets)
    return seen


def hold(case: Case, graphs: tuple[int, int, int]) -> None:
    for result in run_local(compiled, case.world, case, start_group=True, timeout_s=600):
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-6)
        assert result["held_out"] == pytest.approx(result["expected"], rel=1e-6)
        error, name = result["gradient"]
        assert error <= 1e-5, name
        assert result["graphs"] == graphs
        assert result["is_timed"]
        assert result["attends_again"] == (case.recompute == Recompute.FULL)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, schedule=Schedule.ONE_F_ONE_B),
        Case(cp=2, own_first=True),
        Case(
            cp=2,
            exchange=KeyExchange.NEEDED,
            head_dim=8,
            parts=("branch_norms", "zero_centred_norms", "scaled_embeddings"),
            keys=(("sliding_window", 5), ("activation", Activation.GELU_TANH)),
        ),
        # Experts run eagerly between graphs of attention.
        Case(tp=2, cp=2, experts=SHARED, ep=2, exchange=KeyExchange.NEEDED),
        # Other cases have each of these parts, some on fewer ranks.
        *nightly(
            Case(cp=2, experts=SHARED, ep=2, recompute=Recompute.SELECTIVE, own_first=True),
            Case(dp=2),
            Case(tp=2, recompute=Recompute.SELECTIVE),
            Case(tp=2, cp=2),
            Case(cp=2, recompute=Recompute.FULL),
            Case(cp=2, exchange=KeyExchange.NEEDED),
            Case(cp=4, exchange=KeyExchange.NEEDED, recompute=Recompute.FULL),
            Case(cp=2, experts=ALTERNATING, ep=2, recompute=Recompute.FULL),
            Case(cp=4, exchange=KeyExchange.NEEDED, own_first=True, recompute=Recompute.FULL),
            Case(tp=2, cp=2, strategy="per_sequence", recompute=Recompute.FULL),
        ),
    ],
    ids=str,
)
def test_layouts_equal_one_process_with_one_graph_of_a_kind_for_all_lengths(case: Case) -> None:
    kinds = case.experts.every
    hold(
        replace(case, compile_backend="aot_eager", num_micro_batches=20, layers=2),
        (kinds, kinds, 0),
    )


def test_micro_batches_without_a_token_are_one_more_graph() -> None:
    hold(Case(compile_backend="aot_eager", num_micro_batches=20, layers=2), (1, 1, 1))


def test_only_lengths_are_symbols() -> None:
    """A head's size as a symbol made inductor's backward pass divide for each element."""
    case = Case(compile_backend="look", num_micro_batches=20, layers=2)
    (seen,) = run_local(symbols, 1, case, start_group=True, timeout_s=600)
    assert (0,) in seen  # rows
    sizes = {found for found in seen if found[:1] != (-1,)}
    assert sizes <= {(), (0,)}
    head = spec_of(case).model.head_size
    assert not {(-1, head), (-1, head // 2)} & set(seen)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_computes_the_same() -> None:
    hold(Case(compile_backend="inductor", num_micro_batches=20, layers=2), (1, 1, 1))
