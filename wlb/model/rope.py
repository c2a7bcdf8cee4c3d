"""Rotary position embedding, rotate-half layout (Hugging Face's), with Llama-3 frequency scaling.

Shapes: T rows, H heads, D head size.
"""

import math

import torch
from torch import Tensor

from wlb.kernels.fused import fused_rotate
from wlb.spec import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position for each pair of channels, float32, shape [D / 2]."""
    steps = torch.arange(0, spec.head_size, 2, dtype=torch.float64, device=device)
    frequency = spec.rope_theta ** (-steps / spec.head_size)
    if spec.rope_scaling.factor != 1.0:
        frequency = _llama3(frequency, spec.rope_scaling)
    return frequency.float()


def _llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: divide long wavelengths by `factor`, keep short ones, blend in between."""
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_context / wavelength - low) / (high - low)
    blend = blend.clamp(0.0, 1.0)
    return frequency * (blend + (1 - blend) / scaling.factor)


def rope_tables(positions_T: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for rows at `positions_T`, float32, each [T, 1, D / 2]."""
    angles = positions_T.float()[:, None, None] * inverse
    return angles.cos(), angles.sin()


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor, *, fused: bool = False) -> Tensor:
    """Rotate channel pairs (i, i + D/2) by the row's angles, in float32. fused: in one kernel."""
    if fused:
        return fused_rotate(x_THD, cos, sin, False)
    first, second = x_THD.float().chunk(2, -1)
    out = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return out.to(x_THD.dtype)
