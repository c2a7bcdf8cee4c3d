"""Tests norms around zero against their definition, with weights of any dtype."""

import pytest
import torch

from wlb.model.elementwise import ZeroCentredNorm, norm_of, normalise
from wlb.spec import ModelSpec


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_norm_around_zero_multiplies_by_one_and_its_weight(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator).to(dtype)
    norm = norm_of(ModelSpec(zero_centred_norms=True, norm_eps=1e-3), 8).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(0.01 * torch.randn(8, generator=generator))
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = (expected * (1 + norm.weight.double())).to(dtype)
    got = norm(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected)
    # In bfloat16 weights near zero count, which 1 + weight would round away.
    plain = torch.nn.functional.rms_norm(x, (8,), torch.ones(8, dtype=dtype), 1e-3)
    assert not torch.equal(got, plain)


def test_other_models_have_torchs_norm() -> None:
    made = norm_of(ModelSpec(norm_eps=1e-4), 6)
    assert type(made) is torch.nn.RMSNorm
    assert made.eps == 1e-4
    assert isinstance(norm_of(ModelSpec(zero_centred_norms=True), 6), ZeroCentredNorm)


def test_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (4, 1))
    norm = ZeroCentredNorm(6, eps=1e-3)
    leaves = (x.requires_grad_(), weight[0].detach().requires_grad_())
    assert torch.autograd.gradcheck(lambda x, w: normalise(norm, x, w), leaves)


def test_rows_are_kept_in_their_own_dtype() -> None:
    x = torch.randn(4, 6).bfloat16().requires_grad_()
    norm = ZeroCentredNorm(6, eps=1e-3).bfloat16()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    assert sum(t.nbytes for t in kept) == x.nbytes + norm.weight.nbytes + 4 * 4
