"""Tests layers and layouts with fused kernels: what they launch, and the plain code's numbers."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.fused.interpreter import interpret
from tests.parity.body import gradient_error, run_step
from tests.parity.case import Case, fresh_reference, packing, reference_loss, spec_of
from tests.sets import nightly
from wlb.kernels.fused import select
from wlb.launch.local import run_local
from wlb.model import LocalAttend, Ops, Rows
from wlb.model.llama import DecoderLayer
from wlb.parallel.compiled import num_graphs
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.spec import ModelSpec, Recompute

VIEWS = {"t", "transpose", "view", "_unsafe_view", "detach", "unsqueeze", "split", "slice"}


class Launches(TorchDispatchMode):
    """Lists dispatched ops that compute, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **kwargs or {})


def test_a_layer_launches_products_and_five_fused_kernels() -> None:
    """Without memory, so nothing runs. Plain, the same layer launches 20 more."""
    spec = ModelSpec(hidden_size=64, num_heads=4, num_kv_heads=2, ffn_hidden_size=96)
    names: dict[bool, list[str]] = {}
    for fused in (True, False):
        ops = Ops()
        ops.fused = fused
        with torch.device("meta"):
            layer, table = DecoderLayer(spec, ops), torch.empty(5, 1, 8)
            rows = Rows(cos=table, sin=table, attend=LocalAttend(lambda q, k, v: q))
            x = torch.empty(5, 64)
        with Launches() as seen:
            layer(x, rows)
        names[fused] = seen.names
    kv_q = ["mm", "fused_rotate", "mm", "mm", "fused_rotate"]
    mlp = ["fused_norm", "mm", "mm", "fused_gated", "mm", "add"]
    assert names[True] == ["fused_norm", *kv_q, "mm", "add", *mlp]
    assert len(names[False]) >= len(names[True]) + 20


def fused_step(world: World, case: Case) -> tuple[float, float, tuple[float, str], int]:
    """Returns the losses of the layout and of one process, the gradients' error, and graphs."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        patch.setattr(select, "_why_not", lambda *_: None)
        spec = spec_of(case)
        executor = Executor(spec, build_mesh(spec.parallel, torch.device("cpu")))
        assert all(stage.ops.fused for stage in executor.stages.values())
        loss, _ = run_step(executor, case, shift=0)
        reference = fresh_reference(spec)
        plan = packing(case.num_micro_batches, shift=0)
        expected = reference_loss(reference, spec, plan, backward=True)
        return loss, expected, gradient_error(executor, reference), num_graphs()


CASES = [
    Case(tp=2, cp=2, recompute=Recompute.SELECTIVE),
    # A rank that can hold a single row would take more graphs.
    Case(tp=2, cp=2, compile_backend="aot_eager", recompute=Recompute.FULL, row_multiple=8),
]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("case", [CASES[0], *nightly(CASES[1])], ids=str)
def test_layouts_equal_one_plain_process(case: Case) -> None:
    """Compiled layers are one graph for training and one for evaluation, as without the kernels."""
    case = replace(case, layers=2, head_dim=6)
    for loss, expected, (error, name), graphs in run_local(
        fused_step, case.world, case, start_group=True, timeout_s=600
    ):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert error <= 1e-5, name
        assert graphs == (2 if case.compile_backend else 0)
