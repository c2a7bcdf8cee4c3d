"""Chooses the kernel, grid and options of each fused op from the tensors' shapes and strides.

The functions return a `Launch` without launching it, so tests can compile for a GPU exactly what a
run would launch. Block sizes were chosen by inspecting the compiled code (registers, spills, vector
loads), and have **never been timed on a GPU**.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wlb.kernels.fused import kernels

_SUMMING_PROGRAMS = 512
"""Most programs of `norm_backward`, each of which adds up part of the weight's gradient.

This number does not depend on the GPU, so that the sums have the same order on all GPUs.
"""
_NARROW, _NARROW_TILE = 1024, 2048
"""Rows of at most _NARROW columns are normalised several at once, in tiles of _NARROW_TILE values.

Backward then reads 8 KB per tile (two inputs in bfloat16). 512 programs together read 4 MB at a
time; an H100 needs about 2 MB in flight to use its memory bandwidth.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that one launch of a Triton kernel needs."""

    kernel: Any  # a function of `wlb.kernels.fused.kernels`
    grid: tuple[int, ...]  # number of programs in each dimension
    arguments: tuple[Any, ...]  # tensors and numbers, by position
    options: dict[str, Any]  # constants of the kernel and number of warps, by name

    def run(self) -> None:
        """Launch the kernel, unless the grid is empty."""
        if all(self.grid):
            self.kernel[self.grid](*self.arguments, **self.options)


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor, out_THD: Tensor, *, inverse: bool) -> Launch:
    """Describe the launch that applies RoPE to x_THD (`rotate_kernel`), writing to out_THD.

    Args:
        x_THD: Queries or keys.
        cos: Table of cosines, [T, 1, D / 2].
        sin: Table of sines.
        out_THD: Where the result is written.
        inverse: Whether to rotate by the opposite angles, as backward does.
    """
    num_rows, num_heads, head_size = x_THD.shape
    half = head_size // 2
    block = _power_of_2(half)
    rows, heads = max(1, 1024 // block), min(4, _power_of_2(num_heads))
    return Launch(
        kernel=kernels.rotate_kernel,
        grid=(_blocks(num_rows, rows) * _blocks(num_heads, heads),),
        arguments=(x_THD, cos, sin, out_THD, *x_THD.stride()[:2], num_rows),
        options={
            "num_heads": num_heads,
            "half": half,
            "inverse": inverse,
            "ROWS": rows,
            "HEADS": heads,
            "BLOCK": block,
            "num_warps": 4,
        },
    )


def gated(gate_TF: Tensor, up_TF: Tensor, out_TF: Tensor, *, gelu: bool) -> Launch:
    """Describe the launch that writes activation(gate) * up to out_TF.

    With `gelu` the activation is GELU's tanh approximation, otherwise SiLU.
    """
    return _by_row(kernels.gated_kernel, gate_TF, up_TF, out_TF, gelu=gelu)


def gated_backward(
    grad_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, d_gate: Tensor, d_up: Tensor, *, gelu: bool
) -> Launch:
    """Describe the launch that writes the gradients of `gated` to d_gate and d_up.

    `grad_TF` is the gradient of the output of `gated`. With `gelu` the activation is GELU,
    otherwise SiLU.
    """
    tensors = (grad_TF, gate_TF, up_TF, d_gate, d_up)
    return _by_row(kernels.gated_backward_kernel, *tensors, gelu=gelu)


def _by_row(kernel: Any, *tensors_TF: Tensor, gelu: bool) -> Launch:
    num_rows, width = tensors_TF[0].shape
    block = min(2048, _power_of_2(width))
    return Launch(
        kernel=kernel,
        grid=(num_rows, _blocks(width, block)),
        arguments=(*tensors_TF, width),
        options={"GELU": gelu, "BLOCK": block, "num_warps": 8},
    )


def norm(x_TC: Tensor, weight_C: Tensor, out_TC: Tensor, rstd_T: Tensor, eps: float) -> Launch:
    """Describe the launch that writes RMSNorm to out_TC and each row's 1 / RMS to rstd_T."""
    num_rows, width = x_TC.shape
    tile = _norm_tile(width)
    return Launch(
        kernel=kernels.norm_kernel,
        grid=(_blocks(num_rows, tile["ROWS"]),),
        arguments=(x_TC, weight_C, out_TC, rstd_T, num_rows, width, eps),
        options=tile,
    )


def _norm_tile(width: int) -> dict[str, int]:
    """Return the options of the norms' kernels: rows, columns and warps of a thread block.

    A block reads several rows at once if they are narrow (such as heads), because reading a single
    row at a time would not use the whole memory bandwidth.
    """
    block = _power_of_2(width)
    rows = max(1, _NARROW_TILE // block) if block <= _NARROW else 1
    return {"ROWS": rows, "BLOCK": block, "num_warps": _norm_warps(rows * block)}


def _norm_warps(values: int) -> int:
    return min(32, max(1, values // 512))


def norm_programs(num_rows: int, width: int) -> int:
    """Return the number of Triton programs of `norm_backward`.

    Each program writes one partial sum of the weight's gradient.

    Args:
        num_rows: Number of rows to normalise.
        width: Number of columns of a row.
    """
    return min(_SUMMING_PROGRAMS, _blocks(num_rows, _norm_tile(width)["ROWS"]))


def norm_backward(
    grad_TC: Tensor, x_TC: Tensor, weight_C: Tensor, rstd_T: Tensor, dx_TC: Tensor, sums_PC: Tensor
) -> Launch:
    """Describe the launch of RMSNorm's backward.

    Args:
        grad_TC: Gradient of the output.
        x_TC: Input.
        weight_C: Weight.
        rstd_T: 1 / RMS of each row, from forward.
        dx_TC: Where the input's gradient is written.
        sums_PC: Where the partial sums of the weight's gradient are written, one row per program.
    """
    num_rows, width = x_TC.shape
    tile = _norm_tile(width)
    tensors = (grad_TC, x_TC, weight_C, rstd_T, dx_TC, sums_PC)
    return Launch(
        kernel=kernels.norm_backward_kernel,
        grid=(norm_programs(num_rows, width),),
        arguments=(*tensors, num_rows, width),
        options={**tile, "RELOAD": tile["BLOCK"] > 8192},
    )


def sum_uses(dk_KGD: Tensor, dv_KGD: Tensor, inverse_UR: Tensor, out_R2GD: Tensor) -> Launch:
    """Describe the launch that adds up, for each row of K and V, the gradients of its copies.

    Args:
        dk_KGD: Gradient of each key.
        dv_KGD: Gradient of each value.
        inverse_UR: For each row, the indices of the keys that were copied from it
            (`RankStage.inverse`).
        out_R2GD: Where the sums for K and V of each row are written.
    """
    num_uses, num_rows = inverse_UR.shape
    width = dk_KGD.shape[1] * dk_KGD.shape[2]
    tensors = (dk_KGD, dv_KGD, inverse_UR, out_R2GD)
    block = min(1024, _power_of_2(width))
    rows = max(1, 1024 // block)
    strides = (dk_KGD.stride(0), dv_KGD.stride(0))
    return Launch(
        kernel=kernels.sum_uses_kernel,
        grid=(_blocks(num_rows, rows), _blocks(width, block)),
        arguments=(*tensors, *strides, num_uses, num_rows, dk_KGD.shape[0], width),
        options={"ROWS": rows, "BLOCK": block, "num_warps": 4},
    )
