"""The elementwise half of a gated MLP, activation(gate) * up, saving only gate and up for backward:
SwiGLU (SiLU), or GeGLU (GELU's tanh approximation).

Autograd would also save activation(gate), a fourth tensor of the MLP's width beside gate, up and
the product (which the down projection saves). Backward computes it again, in the same dtype, so
gradients are bit-equal.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from wlb.kernels.fused import fused_gated
from wlb.spec import Activation


def gated(gate_TF: Tensor, up_TF: Tensor, activation: Activation, *, fused: bool = False) -> Tensor:
    """activation(gate) * up, shape [T, F] like both. fused: in one kernel, which also saves
    gate and up alone. Otherwise torch.compile chooses the tensors that it saves."""
    if fused:
        return fused_gated(gate_TF, up_TF, activation == Activation.GELU_TANH)
    if torch.compiler.is_compiling():
        return _activated(gate_TF, activation) * up_TF
    return _Gated.apply(gate_TF, up_TF, activation)  # pyright: ignore[reportReturnType]


def _activated(gate: Tensor, activation: Activation) -> Tensor:
    return silu(gate) if activation == Activation.SILU else gelu(gate, approximate="tanh")


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _activated(gate, activation) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        (grad,) = grads
        if ctx.activation == Activation.SILU:
            d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        else:
            d_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        # The product is made in place, so that at most three tensors of this size exist.
        return d_gate, _activated(gate, ctx.activation).mul_(grad), None
