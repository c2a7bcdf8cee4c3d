"""Tests `tp.overlap` on CPU, with the fallback implementations of torch's operators.

The tests check what goes into the operators and what is made of what they give. Nothing goes over
NVLink here.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric

from tests.parity.body import gradient_error, run_step
from tests.parity.case import Case, fresh_reference, packing, reference_loss, spec_of
from tests.sets import full, nightly
from tests.train.case import small_spec, train, write_corpus
from wlb.launch.local import run_local
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.tensor import refuse_overlap
from wlb.parallel.world import World
from wlb.spec import Recompute, Schedule

FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def with_fallbacks() -> tuple[Counter[str], torch.library.Library]:
    """Registers torch's fallbacks for CPU; counts their calls while the library lives."""
    calls: Counter[str] = Counter()
    library = torch.library.Library("symm_mem", "IMPL")

    def implement(name: str) -> None:
        fallback = getattr(symmetric, f"_{name}_fallback")

        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return fallback(*args, **options)

        library.impl(name, counted, "CPU")

    for name in FUSED:
        implement(name)
    return calls, library


def overlapped(world: World, case: Case) -> dict[str, object]:
    calls, _library = with_fallbacks()
    spec = spec_of(case)
    executor = Executor(spec, build_mesh(spec.parallel, torch.device("cpu")))
    plan, reference = packing(case.num_micro_batches), fresh_reference(spec)
    expected = reference_loss(reference, spec, plan, backward=True)
    loss, held = run_step(executor, case, shift=0)
    layers = sum(len(stage.model.layers) for stage in executor.stages.values())
    each = case.num_micro_batches // case.dp * layers
    return {
        "loss": loss,
        "held_out": held,
        "expected": expected,
        "gradient": gradient_error(executor, reference),
        "calls": {name: calls[name] / each for name in FUSED},
    }


# A layer has two blocks: each gathers and scatters in the evaluation, in forward and in backward.
IZB = Schedule.INTERLEAVED_ZERO_BUBBLE
PLAIN = {"fused_all_gather_matmul": 6, "fused_matmul_reduce_scatter": 6}
CASES: list[tuple[Case, dict[str, int]]] = [
    (Case(tp=2, overlap=True), PLAIN),
    (Case(tp=2, cp=2, overlap=True), PLAIN),
    # Again: the gathers of both blocks, and attention's scatter; never the last product.
    (
        Case(tp=2, overlap=True, recompute=Recompute.FULL),
        {"fused_all_gather_matmul": 8, "fused_matmul_reduce_scatter": 7},
    ),
    (Case(tp=2, pp=2, v=2, overlap=True, schedule=IZB, layers=4), PLAIN),
]
COMPILED = (Case(tp=2, overlap=True, layers=1, compile_backend="aot_eager"), PLAIN)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "calls"), [CASES[0], *full(*CASES[2:]), *nightly(CASES[1], COMPILED)], ids=str
)
def test_loss_and_gradients_are_those_of_one_process(case: Case, calls: dict[str, int]) -> None:
    for result in run_local(overlapped, case.world, case, start_group=True, timeout_s=600):
        assert result["loss"] == pytest.approx(result["expected"], rel=1e-6)
        assert result["held_out"] == pytest.approx(result["expected"], rel=1e-6)
        error, name = result["gradient"]
        assert error <= 1e-5, name
        assert result["calls"] == calls


def test_ranks_on_cpu_are_refused_before_one_starts(tmp_path: Any) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    spec = small_spec(tmp_path, corpus, parallel={"tp": 2}, tp={"overlap": True})
    with pytest.raises(ValueError, match=r"tp.overlap = true needs .* ranks compute on cpu"):
        train(spec)
    assert not (tmp_path / "runs" / "small").exists()


def test_gpus_that_do_not_reach_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one > other)
    with pytest.raises(ValueError, match=r"GPU 0 cannot reach the memory of GPU 1; set tp.overlap"):
        refuse_overlap(torch.device("cuda"), 2)


def test_a_torch_without_the_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "symm_mem", object())
    with pytest.raises(ValueError, match="has no symm_mem::fused_all_gather_matmul"):
        refuse_overlap(torch.device("cuda"), 2)
