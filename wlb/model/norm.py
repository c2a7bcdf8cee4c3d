"""RMSNorm of rows with any weight, plain or fused."""

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from wlb.kernels.fused import fused_norm


def normalise(norm: nn.RMSNorm, x_TC: Tensor, weight_C: Tensor, *, fused: bool = False) -> Tensor:
    """`norm` of rows, [T, C] or heads [T, H, C], with this weight, which may be a local part of
    the module's."""
    if not fused:
        return rms_norm(x_TC, norm.normalized_shape, weight_C, norm.eps)
    assert norm.eps is not None
    out_TC, _ = fused_norm(x_TC.flatten(0, -2), weight_C, norm.eps)
    return out_TC.view(x_TC.shape)
