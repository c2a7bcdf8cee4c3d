"""RMSNorm of rows with any weight, plain or fused, around one (LLaMA) or around zero (Gemma)."""

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from wlb.kernels.backend import sum_dtype
from wlb.kernels.fused import fused_norm
from wlb.spec import ModelSpec


class ZeroCentredNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in float32, which no fused kernel computes."""

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
        wide = sum_dtype(x_TC)
        weight_C = 1 + weight_C.to(wide)
        return rms_norm(x_TC.to(wide), norm.normalized_shape, weight_C, norm.eps).to(x_TC.dtype)
    if not fused:
        return rms_norm(x_TC, norm.normalized_shape, weight_C, norm.eps)
    assert norm.eps is not None
    out_TC, _ = fused_norm(x_TC.flatten(0, -2), weight_C, norm.eps)
    return out_TC.view(x_TC.shape)
