"""Tests that options of FSDP2 compute what one process computes, and do what they are for."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.tensor import DTensor

from tests.parity.body import expect_equal_to_one_process
from tests.parity.case import Case, Reader, packing, pipeline_plan, spec_of
from tests.parity.test_zero_bubble import Count
from tests.sets import full, nightly
from wlb.launch.local import run_local
from wlb.parallel.data import finish_gradients
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World, rank_device
from wlb.spec import Recompute, Schedule

pytestmark = pytest.mark.dist

F1B = Schedule.ONE_F_ONE_B
IZB = Schedule.INTERLEAVED_ZERO_BUBBLE

RESHARD = [
    Case(dp=2, reshard=True, num_micro_batches=8),
    Case(cp=2, reshard=True, recompute=Recompute.FULL),
    Case(dp=2, pp=2, v=2, reshard=True, num_micro_batches=8),
]
HSDP = [Case(dp=4, shard_size=2, num_micro_batches=8)]
NIGHTLY = [
    Case(dp=2, pp=2, reshard=True, schedule=F1B, num_micro_batches=8),
    Case(dp=2, shard_size=1),
    Case(dp=2, cp=2, shard_size=2, num_micro_batches=8),
    Case(tp=2, cp=2, pp=2, v=2, reshard=True, schedule=IZB, num_micro_batches=8),
    Case(dp=2, cp=2, tp=2, shard_size=2, num_micro_batches=8),
    Case(dp=4, pp=2, shard_size=2, schedule=F1B, num_micro_batches=16, reshard=True),
]
CASES = [*RESHARD, *HSDP]


@pytest.mark.parametrize("case", [CASES[0], *full(*CASES[1:]), *nightly(*NIGHTLY)], ids=str)
def test_layout_equals_one_process(case: Case) -> None:
    expect_equal_to_one_process(case)


@dataclass
class Watch:
    """Notes what is gathered of a rank's layers whenever one begins a pass."""

    layers: dict[str, nn.Module]
    gathered: list[int] = field(default_factory=list[int])
    coming: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def see(self, name: str) -> None:
        here = [n for n, layer in self.layers.items() if is_gathered(layer)]
        self.gathered.append(len(here))
        self.coming.setdefault(name, [n for n, layer in self.layers.items() if is_coming(layer)])


def is_gathered(layer: Any) -> bool:
    return not isinstance(layer.mlp.gate_proj.weight, DTensor)


def is_coming(layer: Any) -> bool:
    """Returns whether its gather is posted, as only FSDP itself knows."""
    return layer._get_fsdp_state()._fsdp_param_group._all_gather_result is not None


def watched(world: World, case: Case) -> tuple[list[int], dict[str, list[str]]]:
    """Returns gathered layers at each pass of a step, and layers whose gather is under way.

    The latter are those at the first forward pass of each.
    """
    spec = spec_of(case)
    mesh = build_mesh(spec.parallel, rank_device(world, "cpu"))
    executor = Executor(spec, mesh)
    watch = Watch(
        {n: layer for s in executor.stages.values() for n, layer in s.model.layers.items()}
    )
    for name, layer in watch.layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: watch.see(name))
        layer.register_full_backward_pre_hook(lambda *_, name=name: watch.see(name))
    plan = packing(case.num_micro_batches)
    mine = pipeline_plan(plan, spec, mesh.at.dp, case.strategy)
    executor.train_step(mine, Reader(), loss_scale=1.0)
    assert not any(is_gathered(layer) for layer in watch.layers.values())
    return watch.gathered, watch.coming


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"dp": 2, "pp": 2, "v": 2, "layers": 8},
        *nightly({"dp": 2, "pp": 2, "schedule": F1B, "layers": 8}),
    ],
    ids=str,
)
def test_layers_are_dropped_after_each_pass(layout: dict[str, Any]) -> None:
    kept, dropped = (
        run_local(watched, case.world, case, start_group=True, timeout_s=600)
        for case in (Case(num_micro_batches=8, reshard=r, **layout) for r in (False, True))
    )
    assert all(max(gathered) == 4 for gathered, _ in kept)  # all layers of the rank
    for gathered, _ in dropped:
        assert max(gathered) == 1
        assert len(gathered) > 8


def test_the_next_layer_is_gathered_ahead() -> None:
    case = Case(dp=2)
    names = ["0", "1", "2", "3"]
    for _, coming in run_local(watched, 2, case, start_group=True, timeout_s=600):
        assert coming == {n: names[i + 1 : i + 2] for i, n in enumerate(names)}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Gathers of a rank's step, groups of parameters that FSDP gathers, and its streams."""

    gathers: int
    groups: int
    streams: dict[str, set[int]]


def counted(world: World, case: Case) -> Counted:
    spec = spec_of(case)
    mesh = build_mesh(spec.parallel, rank_device(world, "cpu"))
    executor = Executor(spec, mesh)
    gathers = 0
    gather = param_group.foreach_all_gather

    def counting(*arguments: Any, **named: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return gather(*arguments, **named)

    param_group.foreach_all_gather = counting
    mine = pipeline_plan(packing(case.num_micro_batches), spec, mesh.at.dp, case.strategy)
    executor.train_step(mine, Reader(), loss_scale=1.0)
    modules: Any = [
        m for s in executor.stages.values() for m in s.modules() if isinstance(m, FSDPModule)
    ]
    states = [module._get_fsdp_state() for module in modules]
    contexts = [vars(state._comm_ctx) for state in states]
    streams = {
        name: {id(context[name]) for context in contexts}
        for name in contexts[0]
        if name.endswith("_stream")
    }
    groups = sum(state._fsdp_param_group is not None for state in states)
    return Counted(gathers=gathers, groups=groups, streams=streams)


@pytest.mark.full
def test_stages_gather_once_a_step_on_streams_they_share() -> None:
    """Torch alone would gather one of a rank's four stages twice, on four streams a stage."""
    case = Case(dp=2, pp=2, v=4, layers=8, num_micro_batches=8)
    for found in run_local(counted, case.world, case, start_group=True, timeout_s=600):
        assert found.gathers == found.groups > 4
        assert len(found.streams) >= 4
        assert all(len(ids) == 1 for ids in found.streams.values())


def norm_reductions(world: World, case: Case) -> int:
    """Returns all-reduces after a step's forward pass; the loss makes its own in forward."""
    spec = spec_of(case)
    executor = Executor(spec, build_mesh(spec.parallel, torch.device("cpu")))
    plan = pipeline_plan(packing(case.num_micro_batches), spec, executor.mesh.at.dp, case.strategy)
    made = executor.load(plan, Reader(), loss_scale=1.0)
    (stage,) = executor.stages.values()
    assert made.tokens is not None
    loss = stage(made.tokens[0], rows=made.rows[0])
    with Count() as counted:
        loss.backward()
        finish_gradients(executor.named_parameters(), executor.mesh)
    return counted.calls["all_reduce"]


@pytest.mark.parametrize("case", [Case(tp=2), *full(Case(tp=2, dp=2))], ids=str)
def test_gradients_of_all_norms_are_added_up_at_once(case: Case) -> None:
    """There are 9 norms, whose gradients are partial over tp; with dp 2 FSDP reduces them first."""
    counts = run_local(norm_reductions, case.world, case, start_group=True, timeout_s=600)
    assert counts == [1] * case.world
