"""Tests what a run says about the kernels that compute it."""

from dataclasses import replace

import pytest
import torch

from wlb.spec import Dtype, ExpertsSpec, ModelSpec, RunSpec
from wlb.train.refuse import computed_by

EXPERTS = ExpertsSpec(num=8, per_token=2, hidden_size=32)


@pytest.mark.parametrize(
    ("experts", "dtype", "device", "waits"),
    [
        (EXPERTS, Dtype.FLOAT32, "cuda", True),
        (EXPERTS, Dtype.BFLOAT16, "cuda", False),
        (EXPERTS, Dtype.FLOAT32, "cpu", False),
        (ExpertsSpec(), Dtype.FLOAT32, "cuda", False),
    ],
)
def test_products_of_experts_that_wait_are_told_once(
    experts: ExpertsSpec, dtype: Dtype, device: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = RunSpec(model=ModelSpec(experts=experts))
    spec = replace(spec, training=replace(spec.training, dtype=dtype))
    kernel, fused, *more = computed_by(spec, device).splitlines()
    assert kernel.startswith("attention kernel")
    assert fused.startswith("RoPE, gated MLPs")
    assert [line.split(":")[0] for line in more] == ["WARNING"] * waits
