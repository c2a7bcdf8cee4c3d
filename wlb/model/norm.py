"""RMSNorm of rows with any weight, plain or fused, around one (LLaMA) or around zero (Gemma)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from wlb.kernels.fused import fused_norm
from wlb.kernels.op import sum_dtype
from wlb.spec import ModelSpec


class ZeroCentredNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return normalise(self, x, self.weight)


def norm_of(spec: ModelSpec, width: int) -> nn.RMSNorm:
    """A norm of the model, of `width` channels."""
    made = ZeroCentredNorm if spec.zero_centred_norms else nn.RMSNorm
    return made(width, eps=spec.norm_eps)


def normalise(norm: nn.RMSNorm, x_TC: Tensor, weight_C: Tensor, *, fused: bool = False) -> Tensor:
    """`norm` of rows, [T, C] or heads [T, H, C], with this weight, which may be a local part of
    the module's."""
    if isinstance(norm, ZeroCentredNorm):
        assert norm.eps is not None
        if fused:
            out_TC, _ = fused_norm(x_TC.flatten(0, -2), 1 + weight_C.to(sum_dtype(x_TC)), norm.eps)
            return out_TC.view(x_TC.shape)
        if torch.compiler.is_compiling():
            return _around_zero(x_TC, weight_C, norm.eps)[0]
        return _AroundZero.apply(x_TC, weight_C, norm.eps)  # pyright: ignore[reportReturnType]
    if not fused:
        return rms_norm(x_TC, norm.normalized_shape, weight_C, norm.eps)
    assert norm.eps is not None
    out_TC, _ = fused_norm(x_TC.flatten(0, -2), weight_C, norm.eps)
    return out_TC.view(x_TC.shape)


def _around_zero(x: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, rounded once, and each row's reciprocal root mean square, [..., 1]."""
    wide = x.to(sum_dtype(x))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * (1 + weight_C.to(wide.dtype))).to(x.dtype), rstd


class _AroundZero(torch.autograd.Function):
    """`_around_zero`, which keeps rows in their own dtype; autograd would keep them in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        out, rstd = _around_zero(x, weight_C, eps)
        ctx.save_for_backward(x, weight_C, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_C, rstd = ctx.saved_tensors
        grad = grads[0].to(rstd.dtype)
        normed = x.to(rstd.dtype) * rstd
        dweight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * (1 + weight_C.to(rstd.dtype))
        dx = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * rstd
        return dx.to(x.dtype), dweight.to(weight_C.dtype), None
