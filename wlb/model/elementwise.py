"""Operators that compute each row separately: norms, RoPE and the gate of MLPs.

Each operator exists twice: as plain torch code, which defines the result, and as a fused Triton
kernel (`wlb.kernels.fused`). Where autograd would save more tensors than backward needs, a custom
function saves fewer and recomputes the rest. Shapes: T rows, C channels, H heads, D head size, F
width of the MLP.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm, silu

from wlb.kernels.fused import fused_gated, fused_norm, fused_rotate
from wlb.kernels.op import sum_dtype
from wlb.spec import Activation, ModelSpec, RopeKind, RopeScaling


class ZeroCentredNorm(nn.RMSNorm):
    """An RMSNorm that multiplies by 1 + weight in float32, as Gemma does; weights start at zero."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x with its last axis normalised."""
        return normalise(self, x, self.weight)


def norm_of(spec: ModelSpec, width: int) -> nn.RMSNorm:
    """Make the model's kind of RMSNorm over `width` channels.

    The norm multiplies by the weight (LLaMA), or by 1 + weight (Gemma).
    """
    made = ZeroCentredNorm if spec.zero_centred_norms else nn.RMSNorm
    return made(width, eps=spec.norm_eps)


def normalise(norm: nn.RMSNorm, x_TC: Tensor, weight_C: Tensor, *, fused: bool = False) -> Tensor:
    """Apply an RMSNorm to rows [T, C] or heads [T, H, C], with a weight that the caller gives.

    Args:
        norm: The module, which determines the kind of norm and eps. Its weight is not read.
        x_TC: Rows or heads.
        weight_C: The weight as a plain tensor, such as the local part of a DTensor.
        fused: Use one Triton kernel.
    """
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
    """Return the RMSNorm of x, multiplied by 1 + weight, and each row's 1 / RMS, [..., 1].

    All products are in float32 (float64 for float64 inputs), and only the result is rounded.
    """
    wide = x.to(sum_dtype(x))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * (1 + weight_C.to(wide.dtype))).to(x.dtype), rstd


class _AroundZero(torch.autograd.Function):
    """RMSNorm times 1 + weight (`_around_zero`), with a backward that saves x in its own dtype.

    Plain autograd would save the rows in float32, which takes twice the memory of bfloat16.
    """

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


def inverse_frequencies(
    spec: ModelSpec, device: torch.device | str = "cpu", *, slides: bool = False
) -> Tensor:
    """Return RoPE's angle per position for each pair of channels, in float32, shape [D / 2].

    D is the number of rotated channels of a head. Channels i and i + D / 2 are a pair, as in
    Hugging Face's code (rotate-half).

    Args:
        spec: Sizes and options of the model.
        device: Device of the result.
        slides: Whether the angles are for layers with a sliding window, which may have another RoPE
            base.
    """
    steps = torch.arange(0, spec.rotated_size, 2, dtype=torch.float64, device=device)
    if slides and spec.sliding_rope_theta:
        return (spec.sliding_rope_theta ** (-steps / spec.rotated_size)).float()
    frequency = spec.rope_theta ** (-steps / spec.rotated_size)
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
    """Scale RoPE's frequencies as Llama 3.1 does.

    Frequencies with long wavelengths are divided by `factor`, and frequencies with short
    wavelengths are kept. Frequencies between them become a blend of both values.
    """
    wavelength = 2 * math.pi / frequency
    low, high = scaling.bounds
    blend = (scaling.original_context / wavelength - low) / (high - low)
    blend = blend.clamp(0.0, 1.0)
    return frequency * (blend + (1 - blend) / scaling.factor)


def _yarn(frequency: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Scale RoPE's frequencies as YaRN does (Peng et al., 2023).

    The first pairs of channels, which make many turns within the original context, keep their
    frequencies. The frequencies of the last pairs are divided by `factor`. Pairs between them get a
    linear blend of both values.

    Args:
        frequency: Angle per position of each pair of channels.
        theta: Base of RoPE.
        scaling: Parameters of the scaling.
    """
    num_pairs = frequency.shape[0]

    def pair_of(turns: float) -> float:
        """Return the index (possibly fractional) of the channel pair that makes `turns` full turns.

        The turns are counted over the length of the original context.
        """
        wavelength = scaling.original_context / turns
        return num_pairs * math.log(wavelength / (2 * math.pi)) / math.log(theta)

    slow, fast = scaling.bounds
    first = max(0, math.floor(pair_of(fast)))
    last = min(2 * num_pairs - 1, math.ceil(pair_of(slow)))
    # Avoid a division by zero if no pairs lie in between.
    width = last - first if last != first else 0.001
    pairs = torch.arange(num_pairs, dtype=frequency.dtype, device=frequency.device)
    divided = ((pairs - first) / width).clamp(0.0, 1.0)
    return frequency * (1 - divided + divided / scaling.factor)


def rope_tables(positions_T: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return RoPE's tables of cos and sin, float32, each [T, 1, D / 2].

    Args:
        positions_T: Position of each row in its document.
        inverse: Angle per position of each pair of channels (`inverse_frequencies`).
    """
    angles = positions_T.float()[:, None, None] * inverse
    return angles.cos(), angles.sin()


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor, *, fused: bool = False) -> Tensor:
    """Apply RoPE in float32: rotate channel pairs (i, i + D / 2) of each head by the row's angles.

    Args:
        x_THD: Queries or keys. If a head has more than D channels, the others are not rotated.
        cos: Table of cosines, [T, 1, D / 2] (`rope_tables`).
        sin: Table of sines.
        fused: Use one Triton kernel.
    """
    rotated = 2 * cos.shape[-1]
    if rotated < x_THD.shape[-1]:
        turned = rotate(x_THD[..., :rotated].contiguous(), cos, sin, fused=fused)
        return torch.cat([turned, x_THD[..., rotated:]], -1)
    if fused:
        return fused_rotate(x_THD, cos, sin, False)
    first, second = x_THD.float().chunk(2, -1)
    out = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return out.to(x_THD.dtype)


def gated(gate_TF: Tensor, up_TF: Tensor, activation: Activation, *, fused: bool = False) -> Tensor:
    """Compute SwiGLU or GeGLU (tanh approximation): activation(gate) * up, all [T, F].

    Only gate and up are saved for backward. Autograd would also save activation(gate), a further
    tensor of the MLP's width. Backward recomputes activation(gate) in the same dtype, so gradients
    are the same to the bit. Under torch.compile the compiler chooses what is saved.

    Args:
        gate_TF: Output of the gate projection.
        up_TF: Output of the up projection.
        activation: SiLU or GELU.
        fused: Use one Triton kernel, which saves the same two tensors.
    """
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
        # Multiply in place, so that at most three tensors of this size exist.
        return d_gate, _activated(gate, ctx.activation).mul_(grad), None
