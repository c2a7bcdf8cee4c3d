"""Splitting the backward pass must not double it: as many matrix products and collectives."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.case import Case, Reader, packing, pipeline_plan, spec_of
from wlb.parallel.execute import Executor
from wlb.parallel.launch import run_local
from wlb.parallel.mesh import World, build_mesh
from wlb.spec import Schedule

pytestmark = pytest.mark.dist


class Count(TorchDispatchMode):
    """Calls of each operator."""

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


def test_zero_bubble_computes_nothing_twice() -> None:
    whole = run_local(count, 4, Schedule.INTERLEAVED_1F1B, start_group=True, timeout_s=120.0)
    split = run_local(count, 4, Schedule.INTERLEAVED_ZERO_BUBBLE, start_group=True, timeout_s=120.0)
    for one, other in zip(whole, split, strict=True):
        # Only row-parallel layers gather their output's gradient in both passes: 2 a layer, 2
        # layers a rank, 4 micro-batches.
        again = other.pop("all_gather_into_tensor") - one.pop("all_gather_into_tensor")
        assert one == other
        assert one["mm"] > 0
        assert again == 2 * 2 * 4
