"""The Triton kernels of `wlb.kernels.fused`: one pass over memory each, arithmetic in float32.

This file alone imports Triton, when a kernel is first launched. Row numbers are 64-bit (T x C can
exceed 2^31) and not specialised on: their number changes with every micro-batch, and each
specialisation would compile a kernel in the middle of a run. Rows are masked only where a program
has several, so columns are read in vectors of 16 bytes.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit(do_not_specialize=["num_rows"])
def rotate_kernel(
    x,
    cos,
    sin,
    out,
    row_stride,
    head_stride,
    num_rows,
    num_heads: tl.constexpr,
    half: tl.constexpr,
    inverse: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate channel pairs (i, i + half) of [T, H, 2 * half] rows; tables are read once for HEADS
    heads. x has any row and head stride; out is contiguous.
    """
    groups: tl.constexpr = (num_heads + HEADS - 1) // HEADS
    program = tl.program_id(0)
    row = (program // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows)[:, None] & (column < half)
    row = row[:, None]
    c = tl.load(cos + row * half + column, mask)
    s = tl.load(sin + row * half + column, mask)
    if inverse:
        s = -s
    for i in tl.static_range(HEADS):  # pyright: ignore[reportGeneralTypeIssues]
        head = (program % groups) * HEADS + i
        here = mask & (head < num_heads)
        source = x + row * row_stride + head * head_stride + column
        first = tl.load(source, here).to(tl.float32)
        second = tl.load(source + half, here).to(tl.float32)
        target = out + (row * num_heads + head) * (2 * half) + column
        tl.store(target, first * c - second * s, here)
        tl.store(target + half, second * c + first * s, here)


@triton.jit
def gated_kernel(gate, up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """activation(gate) * up of contiguous [T, F] rows; a program has BLOCK columns of one row.

    Both activations are x sigmoid(s(x)): s(x) = x of SiLU, and 2 sqrt(2 / pi) (x + 0.044715 x^3) of
    GELU's tanh approximation, as (1 + tanh(y)) / 2 = sigmoid(2 y).
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    g = tl.load(gate + at, here).to(tl.float32)
    u = tl.load(up + at, here).to(tl.float32)
    inner = g
    if GELU:
        # Without bounds the cube overflows float32, and infinity times 0 in backward is NaN.
        near = tl.minimum(tl.maximum(g, -12.0), 12.0)
        inner = 1.5957691216057308 * near * (1 + 0.044715 * near * near)
    tl.store(out + at, g / (1 + tl.exp(-inner)) * u, here)


@triton.jit
def gated_backward_kernel(
    grad, gate, up, d_gate, d_up, width, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of gate and up from the product's; as in `gated_kernel`."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    dy = tl.load(grad + at, here).to(tl.float32)
    g = tl.load(gate + at, here).to(tl.float32)
    u = tl.load(up + at, here).to(tl.float32)
    inner = g
    rising = g  # x s'(x)
    if GELU:
        near = tl.minimum(tl.maximum(g, -12.0), 12.0)
        inner = 1.5957691216057308 * near * (1 + 0.044715 * near * near)
        rising = 1.5957691216057308 * near * (1 + 0.134145 * near * near)
    sigmoid = 1 / (1 + tl.exp(-inner))
    tl.store(d_gate + at, dy * u * sigmoid * (1 + rising * (1 - sigmoid)), here)
    tl.store(d_up + at, dy * g * sigmoid, here)


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x, weight, out, rstd, num_rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """RMSNorm of ROWS contiguous rows of C columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    here = column < width
    w = tl.load(weight + column, here).to(tl.float32)
    at = row[:, None] * width + column
    if ROWS > 1:
        here = here & (row < num_rows)[:, None]
    value = tl.load(x + at, here, 0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(rstd + row, scale, row < num_rows)
    tl.store(out + at, value * scale[:, None] * w, here)


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward_kernel(
    grad,
    x,
    weight,
    rstd,
    dx,
    d_weight,
    num_rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """The input's gradient, and sums of the weight's, row d_weight[i] of [programs, C]: program i
    has tiles i, i + programs, ... of ROWS rows, each read once for both. RELOAD: read the weight
    again for every tile (from the L1 cache), because it would not fit in registers beside a wide
    row.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    here = column < width
    w = tl.load(weight + column, here, 0.0).to(tl.float32)
    total = tl.full([ROWS, BLOCK], 0.0, tl.float32)
    for first in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        known = row < num_rows
        at = row[:, None] * width + column
        mask = here
        if ROWS > 1:
            mask = mask & known[:, None]
        scale = tl.load(rstd + row, known, 0.0)[:, None]
        unit = tl.load(x + at, mask, 0.0).to(tl.float32) * scale
        dy = tl.load(grad + at, mask, 0.0).to(tl.float32)
        total += dy * unit
        if RELOAD:
            w = tl.load(weight + column, here, 0.0).to(tl.float32)
        dy *= w
        mean = tl.sum(dy * unit, 1)[:, None] / width
        tl.store(dx + at, (dy - unit * mean) * scale, mask)
    tl.store(d_weight + program * width + column, tl.sum(total, 0)[None, :], here)


@triton.jit(
    do_not_specialize=["num_uses", "num_rows", "num_keys"],
    # It is a part of one buffer of index tensors, where each micro-batch has it at another offset.
    do_not_specialize_on_alignment=["inverse"],
)
def sum_uses_kernel(
    dk,
    dv,
    inverse,
    out,
    dk_stride,
    dv_stride,
    num_uses,
    num_rows,
    num_keys,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[r] = the sums over u of dk[inverse[u, r]] and dv[inverse[u, r]], in the order of u."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    known = row < num_rows
    here = column < width
    sum_k = tl.full([ROWS, BLOCK], 0.0, out.dtype.element_ty)
    sum_v = tl.full([ROWS, BLOCK], 0.0, out.dtype.element_ty)
    at = inverse + row
    for _ in range(num_uses):
        key = tl.load(at, known, num_keys)
        used = (key < num_keys)[:, None] & here
        key = key[:, None]
        sum_k += tl.load(dk + key * dk_stride + column, used, 0.0).to(sum_k.dtype)
        sum_v += tl.load(dv + key * dv_stride + column, used, 0.0).to(sum_v.dtype)
        at += num_rows
    target = out + row[:, None] * (2 * width) + column
    mask = known[:, None] & here
    tl.store(target, sum_k, mask)
    tl.store(target + width, sum_v, mask)
