"""Fused Triton kernels for operators other than matrix products and attention, as custom ops."""

from wlb.kernels.fused.op import fused_gated as fused_gated
from wlb.kernels.fused.op import fused_norm as fused_norm
from wlb.kernels.fused.op import fused_rotate as fused_rotate
from wlb.kernels.fused.op import fused_sum_uses as fused_sum_uses
from wlb.kernels.fused.select import choose_fused as choose_fused
