"""SwiGLU's elementwise half, silu(gate) * up, that keeps gate and up for backward and no more.

Autograd keeps silu(gate) as well: a fourth tensor of the MLP's width a token beside gate, up and
the product, which the down projection keeps. Here backward computes it again, in the same dtype, so
gradients are the same bits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up, shape [T, F] like both. A compiler chooses itself what it keeps."""
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
        return d_gate, silu(gate).mul_(grad)  # in place: three tensors of that size at most
