"""The custom ops that call the fused kernels, and their derivatives for autograd.

torch.compile does not look into custom ops, so a layer remains one graph. Fake and meta tensors
never reach Triton. All ops compute in float32 and round once at the end, whereas plain torch code
rounds after every operation.

Shapes: T rows, H heads, D head size, C channels, F width of the MLP, K keys, R gathered rows, G
key/value heads, U the largest number of keys that are copied from any one row.
"""

from typing import Any

import torch
from torch import Tensor

from wlb.kernels.op import contiguous_like, custom_op, sum_dtype


@custom_op("fused_rotate", fake=lambda x, *_: x.new_empty(x.shape))
def fused_rotate(x_THD: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Apply RoPE as `wlb.model.rotate` does; with `inverse` rotate by the opposite angles.

    Args:
        x_THD: Queries or keys.
        cos: Table of cosines, [T, 1, D / 2].
        sin: Table of sines.
        inverse: Whether to negate the angles.
    """
    from wlb.kernels.fused import launch

    if x_THD.stride(-1) != 1:
        x_THD = x_THD.contiguous()
    out_THD = x_THD.new_empty(x_THD.shape)
    launch.rotate(x_THD, cos.contiguous(), sin.contiguous(), out_THD, inverse=inverse).run()
    return out_THD


def _keep_tables(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _rotate_back(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None, None, None]:
    return fused_rotate(grad_THD, *ctx.saved_tensors, not ctx.inverse), None, None, None


fused_rotate.register_autograd(_rotate_back, setup_context=_keep_tables)


@custom_op("fused_gated", fake=lambda gate, *_: gate.new_empty(gate.shape))
def fused_gated(gate_TF: Tensor, up_TF: Tensor, gelu: bool) -> Tensor:
    """Compute activation(gate) * up, and save only gate and up for backward.

    With `gelu` the activation is GELU's tanh approximation, otherwise SiLU.
    """
    from wlb.kernels.fused import launch

    out_TF = gate_TF.new_empty(gate_TF.shape)
    launch.gated(gate_TF.contiguous(), up_TF.contiguous(), out_TF, gelu=gelu).run()
    return out_TF


def _gated_gradients(_: Tensor, gate_TF: Tensor, up_TF: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    d_gate, d_up = contiguous_like(gate_TF, up_TF)
    return d_gate, d_up


@custom_op("fused_gated_backward", fake=_gated_gradients)
def fused_gated_backward(
    grad_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, gelu: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up for `fused_gated`."""
    from wlb.kernels.fused import launch

    d_gate, d_up = _gated_gradients(grad_TF, gate_TF, up_TF)
    grad, gate, up = (x.contiguous() for x in (grad_TF, gate_TF, up_TF))
    launch.gated_backward(grad, gate, up, d_gate, d_up, gelu=gelu).run()
    return d_gate, d_up


def _keep_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_TF, up_TF, ctx.gelu = inputs
    ctx.save_for_backward(gate_TF, up_TF)


def _gated_back(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, Tensor, None]:
    return *fused_gated_backward(grad_TF, *ctx.saved_tensors, ctx.gelu), None


fused_gated.register_autograd(_gated_back, setup_context=_keep_gated)


def _norm_like(x_TC: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x_TC.new_empty(x_TC.shape), x_TC.new_empty(x_TC.shape[:1], dtype=torch.float32)


@custom_op("fused_norm", fake=_norm_like)
def fused_norm(x_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of rows, [T, C], and each row's 1 / RMS, [T], which is not differentiable."""
    from wlb.kernels.fused import launch

    out_TC, rstd_T = _norm_like(x_TC)
    launch.norm(x_TC.contiguous(), weight_C.contiguous(), out_TC, rstd_T, eps).run()
    return out_TC, rstd_T


@custom_op("fused_norm_backward", fake=lambda _, x, weight, *__: tuple(contiguous_like(x, weight)))
def fused_norm_backward(
    grad_TC: Tensor, x_TC: Tensor, weight_C: Tensor, rstd_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x_TC and weight_C for `fused_norm`.

    The weight's gradient is added up in float32, in an order that depends only on the shape.

    Args:
        grad_TC: Gradient of the output.
        x_TC: Input.
        weight_C: Weight.
        rstd_T: 1 / RMS of each row, from forward.
    """
    from wlb.kernels.fused import launch

    grad_TC, x_TC, weight_C = (x.contiguous() for x in (grad_TC, x_TC, weight_C))
    num_rows, width = x_TC.shape
    dx_TC = torch.empty_like(x_TC)
    sums_PC = rstd_T.new_empty((launch.norm_programs(num_rows, width), width))
    launch.norm_backward(grad_TC, x_TC, weight_C, rstd_T, dx_TC, sums_PC).run()
    return dx_TC, sums_PC.sum(0).to(weight_C.dtype)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_TC, weight_C, _ = inputs
    ctx.save_for_backward(x_TC, weight_C, output[1])
    ctx.set_materialize_grads(False)


def _differentiate_norm(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    # The output was not part of the loss, so there are no gradients.
    if grads[0] is None:
        return None, None, None
    return *fused_norm_backward(grads[0], *ctx.saved_tensors), None


fused_norm.register_autograd(_differentiate_norm, setup_context=_keep_norm)


def _rows_like(dk_KGD: Tensor, _: Tensor, inverse_UR: Tensor) -> Tensor:
    shape = (inverse_UR.shape[1], 2, *dk_KGD.shape[1:])
    return dk_KGD.new_empty(shape, dtype=sum_dtype(dk_KGD))


@custom_op("fused_sum_uses", fake=_rows_like)
def fused_sum_uses(dk_KGD: Tensor, dv_KGD: Tensor, inverse_UR: Tensor) -> Tensor:
    """Return the gradients of rows of K and V, [R, 2, G, D]: for each row the sum over its copies.

    The sums are in float32 (float64 for float64 inputs) and in a fixed order, and equal those of
    the plain torch code to the bit.

    Args:
        dk_KGD: Gradient of each key.
        dv_KGD: Gradient of each value.
        inverse_UR: inverse_UR[u, r] is the index of the (u + 1)-th key that was copied from row r,
            or the number of keys if there are fewer (`RankStage.inverse`).
    """
    from wlb.kernels.fused import launch

    flat = (dk_KGD.shape[2], 1)  # strides of G and D in a contiguous row
    dk_KGD, dv_KGD = (x if x.stride()[1:] == flat else x.contiguous() for x in (dk_KGD, dv_KGD))
    out = _rows_like(dk_KGD, dv_KGD, inverse_UR)
    launch.sum_uses(dk_KGD, dv_KGD, inverse_UR.contiguous(), out).run()
    return out
