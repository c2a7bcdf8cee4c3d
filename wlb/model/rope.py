"""Rotary position embedding, rotate-half layout (Hugging Face's), with scaled frequencies.

Shapes: T rows, H heads, D head size.
"""

import math

import torch
from torch import Tensor

from wlb.kernels.fused import fused_rotate
from wlb.spec import ModelSpec, RopeKind, RopeScaling


def inverse_frequencies(
    spec: ModelSpec, device: torch.device | str = "cpu", *, slides: bool = False
) -> Tensor:
    """Angle per position for each pair of channels, float32, shape [D / 2]. slides: of layers with
    a sliding window."""
    steps = torch.arange(0, spec.head_size, 2, dtype=torch.float64, device=device)
    if slides and spec.sliding_rope_theta:
        return (spec.sliding_rope_theta ** (-steps / spec.head_size)).float()
    frequency = spec.rope_theta ** (-steps / spec.head_size)
    return _scaled(frequency, spec.rope_theta, spec.rope_scaling).float()


def _scaled(frequency: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    if not scaling.is_on:
        return frequency
    match scaling.kind:
        case RopeKind.LLAMA3:
            return _llama3(frequency, scaling)
        case RopeKind.LINEAR:
            return frequency / scaling.factor
        case RopeKind.YARN:
            return _yarn(frequency, theta, scaling)


def _llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: divide long wavelengths by `factor`, keep short ones, blend in between."""
    wavelength = 2 * math.pi / frequency
    low, high = scaling.bounds
    blend = (scaling.original_context / wavelength - low) / (high - low)
    blend = blend.clamp(0.0, 1.0)
    return frequency * (blend + (1 - blend) / scaling.factor)


def _yarn(frequency: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN (Peng et al., 2023): keep the first pairs, which turn often in the original context,
    divide the last by `factor`, and blend linearly, pair by pair, in between."""
    num_pairs = frequency.shape[0]

    def pair_of(turns: float) -> float:
        """The pair, not a whole number, that turns so often in the original context."""
        wavelength = scaling.original_context / turns
        return num_pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

    slow, fast = scaling.bounds
    first = max(0, math.floor(pair_of(fast)))
    last = min(2 * num_pairs - 1, math.ceil(pair_of(slow)))
    # The last pair that is kept may be the first that is divided.
    width = last - first if last != first else 0.001
    pairs = torch.arange(num_pairs, dtype=frequency.dtype, device=frequency.device)
    divided = ((pairs - first) / width).clamp(0.0, 1.0)
    return frequency * (1 - divided + divided / scaling.factor)


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
