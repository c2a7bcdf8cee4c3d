"""Tests that gated MLPs that keep two tensors have autograd's values and gradients, bit by bit."""

import pytest
import torch
from torch import Tensor, nn

from wlb.model.elementwise import gated
from wlb.spec import Activation


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = (3 * torch.randn(33, 24, generator=generator) for _ in range(3))
    return gate.to(dtype), up.to(dtype), grad.to(dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gated(gate, up, Activation.SILU)


def plain(gate: Tensor, activation: Activation) -> Tensor:
    if activation == Activation.SILU:
        return nn.functional.silu(gate)
    return nn.functional.gelu(gate, approximate="tanh")


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_bits_as_autograd(dtype: torch.dtype, activation: Activation) -> None:
    gate, up, grad = inputs(dtype)
    mine = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    theirs = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    out, expected = gated(*mine, activation), plain(theirs[0], activation) * theirs[1]
    assert torch.equal(out, expected)
    before = grad.clone()
    out.backward(grad)
    expected.backward(grad)
    assert torch.equal(grad, before)  # others may read it
    for x, y in zip(mine, theirs, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)


def test_gradients_of_what_needs_them() -> None:
    gate, up, _ = inputs(torch.float64)
    assert torch.autograd.gradcheck(swiglu, (gate[:4].requires_grad_(), up[:4].requires_grad_()))
    up.requires_grad_()
    swiglu(gate.detach(), up).sum().backward()
    assert torch.equal(up.grad, nn.functional.silu(gate.detach()))


def test_it_keeps_gate_and_up_alone() -> None:
    gate, up, _ = inputs(torch.float32)
    gate.requires_grad_()
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        swiglu(gate, up.requires_grad_())
    assert kept == [x.untyped_storage().data_ptr() for x in (gate, up)]
