"""SwiGLU's elementwise half, silu(gate) * up, saving only gate and up for backward.

Autograd would also save silu(gate), a fourth tensor of the MLP's width beside gate, up and the
product (which the down projection saves). Backward computes it again, in the same dtype, so
gradients are bit-equal.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from wlb.kernels.fused import fused_swiglu


def swiglu(gate_TF: Tensor, up_TF: Tensor, *, fused: bool = False) -> Tensor:
    """silu(gate) * up, shape [T, F] like both. fused: in one kernel, which also saves gate and up
    alone. Otherwise torch.compile chooses the tensors that it saves."""
    if fused:
        return fused_swiglu(gate_TF, up_TF)
    if torch.compiler.is_compiling():
        return silu(gate_TF) * up_TF
    return _SwiGlu.apply(gate_TF, up_TF)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (grad,) = grads
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        # The product is made in place, so that at most three tensors of this size exist.
        return d_gate, silu(gate).mul_(grad)
