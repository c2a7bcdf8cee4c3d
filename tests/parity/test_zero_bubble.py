"""Tests a layer's matrix products and collectives: splitting the backward pass adds none."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.case import Case, Reader, packing, pipeline_plan, spec_of
from tests.parity.test_tensor import CU_SEQLENS, micro_batch
from wlb.launch.local import run_local
from wlb.model import Llama
from wlb.parallel.build import build_stages
from wlb.parallel.deferred import WeightQueue
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.tensor import TensorParallelOps
from wlb.parallel.world import World
from wlb.spec import Schedule

pytestmark = pytest.mark.dist


class Count(TorchDispatchMode):
    """Counts calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def count(world: World, schedule: Schedule) -> dict[str, int]:
    case = Case(tp=2, pp=2, v=2, schedule=schedule)
    spec = spec_of(case)
    executor = Executor(spec, build_mesh(spec.parallel, torch.device("cpu")))
    plan = pipeline_plan(packing(4), spec, 0, "per_document")
    executor.train_step(plan, Reader(), loss_scale=1.0)  # the first step initialises the stages
    with Count() as counted:
        executor.train_step(plan, Reader(), loss_scale=1.0)
    names = ("mm", "addmm_", "all_gather_into_tensor", "reduce_scatter_tensor")
    return {name: counted.calls[name] for name in names}


@pytest.mark.full
def test_zero_bubble_computes_nothing_twice() -> None:
    whole = run_local(count, 4, Schedule.INTERLEAVED_1F1B, start_group=True, timeout_s=600)
    split = run_local(count, 4, Schedule.INTERLEAVED_ZERO_BUBBLE, start_group=True, timeout_s=600)
    for one, other in zip(whole, split, strict=True):
        # Only row-parallel layers gather their output's gradient in both passes: 2 a layer, 2
        # layers a rank, 4 micro-batches.
        again = other.pop("all_gather_into_tensor") - one.pop("all_gather_into_tensor")
        assert one == other
        assert one["mm"] > 0
        assert again == 2 * 2 * 4


def layer(world: World, is_split: bool) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Counts calls of one decoder layer: forward, backward, and weight gradients left for later."""
    spec = spec_of(Case(tp=2, layers=2))
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    (stage,) = build_stages(spec, mesh).values()
    assert isinstance(stage, Llama)
    assert isinstance(stage.ops, TensorParallelOps)
    stage.ops.queue = WeightQueue() if is_split else None
    _, _, rows = micro_batch(spec)
    x_SC = torch.randn(CU_SEQLENS[-1] // 2, spec.model.hidden_size, requires_grad=True)
    with Count() as forward:
        out = stage.model.layers["0"](x_SC, rows)
    with Count() as backward:
        out.sum().backward()
    with Count() as later:
        if stage.ops.queue is not None:
            stage.ops.queue.take()()
    return forward.calls, backward.calls, later.calls


def frozen(world: World) -> dict[str, bool]:
    """Returns which parameters of a decoder layer have a gradient once the queue is empty."""
    spec = spec_of(Case(tp=world.world_size, layers=2))
    (stage,) = build_stages(spec, build_mesh(spec.parallel, torch.device("cpu"))).values()
    assert isinstance(stage, Llama)
    stage.ops.queue = queue = WeightQueue()
    layer = stage.model.layers["0"]
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("q_proj" not in name and "down_proj" not in name)
    _, _, rows = micro_batch(spec)
    x_SC = torch.randn(CU_SEQLENS[-1] // world.world_size, spec.model.hidden_size)
    layer(x_SC.requires_grad_(), rows).sum().backward()
    queue.take()()
    return {name: p.grad is not None for name, p in layer.named_parameters()}


def test_frozen_weights_get_no_gradient() -> None:
    for found in run_local(frozen, 2, start_group=True, timeout_s=600):
        assert all(found[n] == ("q_proj" not in n and "down_proj" not in n) for n in found)
        assert sum(found.values()) == len(found) - 2


@pytest.mark.parametrize("is_split", [False, True])
def test_queries_keys_and_values_share_their_collectives(is_split: bool) -> None:
    """Keys leave before queries are computed, and yet each pass has two gathers and two scatters.

    They are of attention's and the MLP's rows; backward gathers both inputs again, now or later.
    """
    for forward, backward, later in run_local(layer, 2, is_split, start_group=True, timeout_s=600):
        gathers = [calls["all_gather_into_tensor"] for calls in (forward, backward, later)]
        scatters = [calls["reduce_scatter_tensor"] for calls in (forward, backward, later)]
        products = [calls["mm"] + calls["addmm_"] for calls in (forward, backward, later)]
        assert gathers == ([2, 2, 4] if is_split else [2, 4, 0])
        assert scatters == [2, 2, 0]
        assert products == ([7, 7, 7] if is_split else [7, 14, 0])
