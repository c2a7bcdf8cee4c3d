"""Tests what is done once before the first step: connecting, compiling, freezing garbage."""

import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.case import small_spec, train, write_corpus
from wlb.kernels import BACKENDS, Segments
from wlb.kernels.flash import FLASH2, Flash4Backend
from wlb.kernels.reference import REFERENCE
from wlb.spec import ModelSpec, ParallelSpec, RunSpec
from wlb.train import warm_up
from wlb.train.warm_up import CollectGarbage, CompileAttention


class Compiles(Flash4Backend):
    """Stands in for FlashAttention-4 on a CPU, and notes the kinds of calls that it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Segments, tuple[int, ...]]] = []

    def forward(self, q_THD: Any, k_SGD: Any, v_SGD: Any, segments: Segments) -> Any:
        self.calls.append(("forward", segments, (*q_THD.shape[1:], k_SGD.shape[1])))
        return q_THD, q_THD.new_zeros(q_THD.shape[1], q_THD.shape[0])

    def backward(self, grad_THD: Any, saved: Any, segments: Segments) -> Any:
        self.calls.append(("backward", segments, (*grad_THD.shape[1:], saved[1].shape[1])))
        return saved[:3]


def warmed(patch: pytest.MonkeyPatch, spec: RunSpec, backend: Any) -> list[str]:
    """Begins the hook for a run of this kernel; returns what it says."""
    said: list[str] = []
    choice = SimpleNamespace(kernel="a stand-in")
    patch.setitem(BACKENDS, choice.kernel, backend)
    patch.setattr(warm_up, "kernel_of", lambda *_: choice)
    run: Any = SimpleNamespace(
        spec=spec,
        mesh=SimpleNamespace(device=torch.device("cpu")),
        position=SimpleNamespace(enter=lambda *_, **__: None),
        report=SimpleNamespace(say=said.append),
    )
    CompileAttention().begin(run)
    return said


def test_a_kernel_that_compiles_computes_each_kind_of_call_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ModelSpec(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, sliding_window=1024, full_every=2
    )
    spec = RunSpec(model=model, parallel=ParallelSpec(tp=2, cp=2))
    for overlap, masks in ((False, {True}), (True, {True, False})):
        backend = Compiles()
        run = replace(spec, cp=replace(spec.cp, overlap_stages=int(overlap)))
        (said,) = warmed(monkeypatch, run, backend)
        assert [name for name, *_ in backend.calls] == ["forward", "backward"] * (
            len(backend.calls) // 2
        )
        assert f"for {len(backend.calls) // 2} kinds of calls" in said
        assert {heads for *_, heads in backend.calls} == {(2, 8, 1)}  # of a TP rank
        kinds = {(s.is_causal, s.scores.sliding) for _, s, _ in backend.calls}
        assert kinds == {(True, 1024), *((mask, 0) for mask in masks)}
        for kind in kinds:
            of_kind = [s for _, s, _ in backend.calls if (s.is_causal, s.scores.sliding) == kind]
            sizes = {(s.max_q, s.max_k, s.num_segments > 256) for s in of_kind}
            assert {many for _, _, many in sizes} == {False, True}
            assert len(sizes) == 10


def test_kernels_that_are_compiled_already_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (REFERENCE, FLASH2):
        assert warmed(monkeypatch, RunSpec(), backend) == []


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records collections; restores the collector's state."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    yield calls  # type: ignore[misc]
    gc.unfreeze()
    gc.enable()


def test_garbage_is_collected_between_steps_and_nowhere_else(
    collected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "GARBAGE_INTERVAL", 3)
    hook, run = CollectGarbage(), SimpleNamespace()
    nothing: Any = run
    hook.begin(nothing)
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    when = []
    for step in range(1, 8):
        before = len(collected)
        hook.after_step(nothing, nothing)
        when += [step] * (len(collected) - before)
    assert when == [3, 6]
    hook.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_someone_else_turned_off_stays_off(collected: list[str]) -> None:
    nothing: Any = SimpleNamespace()
    gc.disable()
    hook = CollectGarbage()
    hook.begin(nothing)
    hook.close()
    assert not gc.isenabled()
    assert not collected


@pytest.mark.process
@pytest.mark.dist
@pytest.mark.full
def test_a_run_records_what_it_connected(tmp_path: Path) -> None:
    spec = small_spec(
        tmp_path,
        write_corpus(tmp_path / "texts"),
        parallel={"pp": 2, "dp": 1},
        training={"steps": 1},
    )
    run, _ = train(spec)
    (line,) = (line for line in run.lines if line["kind"] == "connected")
    assert (line["communicators"], line["links"]) == (3, 2)
    kinds = [line["kind"] for line in run.lines]
    assert kinds.index("start") < kinds.index("connected") < kinds.index("step")
