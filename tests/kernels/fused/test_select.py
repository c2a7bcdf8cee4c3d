"""Tests where fused kernels compute, and what is said where they do not."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.words import lacks
from wlb.kernels.fused import choose_fused, select
from wlb.parallel.build import fused_of
from wlb.plan import UserError
from wlb.spec import Dtype, FusedKernels, ModelSpec, RunSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
AUTO, TRITON, OFF = FusedKernels
BF16 = torch.bfloat16


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Plays an H100 with Triton on which kernels launch, and lets tests break it."""
    select.launch_problem.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(select, "find_spec", lambda name: object())
    monkeypatch.setattr(select, "fused_gated", lambda gate, up, gelu: gate)
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: None)
    yield monkeypatch
    select.launch_problem.cache_clear()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("requested", [AUTO, TRITON])
def test_a_gpu_computes_fused(requested: FusedKernels) -> None:
    choice = choose_fused(requested, device=CUDA, dtype=BF16)
    assert choice.fused
    assert "fused Triton kernels" in choice.line


@pytest.mark.usefixtures("hopper")
def test_off_is_plain_torch() -> None:
    choice = choose_fused(OFF, device=CUDA, dtype=BF16)
    assert not choice.fused
    for word in ("plain torch", "kernels.fused = off", "torch.bfloat16", "cuda"):
        assert word in choice.line


def test_a_cpu_is_plain_torch() -> None:
    choice = choose_fused(AUTO, device=CPU, dtype=BF16)
    assert not choice.fused
    for word in ("plain torch", "auto", "torch.bfloat16", "cpu", "NVIDIA"):
        assert word in choice.line


def test_a_run_prepared_without_a_gpu_counts_on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_fused(AUTO, device=CUDA, dtype=BF16).fused


def refuse(*_: object) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")


BROKEN = [
    (select, "find_spec", lambda name: None, "Triton is not installed"),
    (
        torch.cuda,
        "get_device_capability",
        lambda device: (7, 5),
        "the fused kernels need compute capability 8.0",
    ),
    (
        select,
        "fused_gated",
        refuse,
        "cannot launch a kernel on this GPU: Failed to find C compiler.",
    ),
]


@pytest.mark.parametrize(("owner", "name", "value", "reason"), BROKEN)
def test_what_is_missing_is_said(
    hopper: pytest.MonkeyPatch, owner: object, name: str, value: object, reason: str
) -> None:
    hopper.setattr(owner, name, value)
    choice = choose_fused(AUTO, device=CUDA, dtype=BF16)
    assert not choice.fused
    assert reason in choice.line
    with pytest.raises(UserError, match=reason) as refused:
        choose_fused(TRITON, device=CUDA, dtype=BF16)
    facts = ("kernels.fused = triton", "Set kernels.fused = auto or off")
    assert not lacks(str(refused.value), *facts)


def test_float64_is_plain_torch(hopper: pytest.MonkeyPatch) -> None:
    choice = choose_fused(AUTO, device=CUDA, dtype=torch.float64)
    assert not choice.fused
    supported = "torch.float32, torch.bfloat16, torch.float16"
    assert f"the fused kernels support only {supported}" in choice.line


def test_rows_that_norms_cannot_hold_are_plain_torch(hopper: pytest.MonkeyPatch) -> None:
    asked = {"device": CUDA, "dtype": BF16}
    assert choose_fused(AUTO, norm_width=select.MOST_NORM_WIDTH, **asked).fused
    choice = choose_fused(AUTO, norm_width=16640, **asked)
    assert not choice.fused
    assert (
        "RMSNorm of 16640 columns does not fit into registers (at most 16384 columns)"
        in choice.line
    )
    with pytest.raises(UserError, match="RMSNorm of 16640 columns"):
        choose_fused(TRITON, norm_width=16640, **asked)


def test_a_run_tells_its_widest_norm(hopper: pytest.MonkeyPatch) -> None:
    """Rows of Q have more columns than the model's where its heads are wider, as OLMoE's norms."""
    model = ModelSpec(hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=512)
    wide = RunSpec(model=replace(model, qk_norm_rows=True))
    for spec, fused in ((RunSpec(model=model), True), (wide, False)):
        spec = replace(spec, training=replace(spec.training, dtype=Dtype.BFLOAT16))
        assert fused_of(spec, CUDA).fused == fused
