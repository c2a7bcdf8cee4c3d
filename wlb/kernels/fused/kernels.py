"""The Triton kernels of `wlb.kernels.fused`, which compute in one pass over memory, in float32.

This is the only file that imports Triton, and it is imported when a kernel is first launched. Row
indices are 64-bit, because T * C can exceed 2^31. Triton must not specialise on the number of rows:
it changes with every micro-batch, and each specialisation would compile a kernel in the middle of a
run. A program that processes a single row uses no row mask, because with a row mask Triton would
not read the columns in vectors of 16 bytes.
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
    """Apply RoPE: rotate the channel pairs (i, i + half) of rows [T, H, 2 * half].

    With `inverse` the angles are negated, as backward needs. A program computes ROWS rows of HEADS
    heads, and reads cos and sin of its rows once. x may have any row and head stride; out is
    contiguous.
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
    """Compute activation(gate) * up of rows [T, F]; a program computes BLOCK columns of one row.

    Both activations have the form x * sigmoid(s(x)). For SiLU s(x) = x. For GELU's tanh
    approximation s(x) = 2 sqrt(2 / pi) (x + 0.044715 x^3), because (1 + tanh(y)) / 2 = sigmoid(2
    y).
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    g = tl.load(gate + at, here).to(tl.float32)
    u = tl.load(up + at, here).to(tl.float32)
    inner = g
    if GELU:
        # Limit g, because its cube could overflow float32, and in backward infinity times 0 is NaN.
        bounded = tl.minimum(tl.maximum(g, -12.0), 12.0)
        inner = 1.5957691216057308 * bounded * (1 + 0.044715 * bounded * bounded)
    tl.store(out + at, g / (1 + tl.exp(-inner)) * u, here)


@triton.jit
def gated_backward_kernel(
    grad, gate, up, d_gate, d_up, width, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the gradients of gate and up for `gated_kernel`, from the gradient of its output."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    dy = tl.load(grad + at, here).to(tl.float32)
    g = tl.load(gate + at, here).to(tl.float32)
    u = tl.load(up + at, here).to(tl.float32)
    inner = g
    slope = g  # g * s'(g), with s as in `gated_kernel`
    if GELU:
        bounded = tl.minimum(tl.maximum(g, -12.0), 12.0)
        inner = 1.5957691216057308 * bounded * (1 + 0.044715 * bounded * bounded)
        slope = 1.5957691216057308 * bounded * (1 + 0.134145 * bounded * bounded)
    sigmoid = 1 / (1 + tl.exp(-inner))
    tl.store(d_gate + at, dy * u * sigmoid * (1 + slope * (1 - sigmoid)), here)
    tl.store(d_up + at, dy * g * sigmoid, here)


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x, weight, out, rstd, num_rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute RMSNorm of rows with `width` columns, and store each row's 1 / RMS in rstd.

    A program computes ROWS rows, which are contiguous in memory.
    """
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
    """Compute the gradient of RMSNorm's input, and partial sums of its weight's gradient.

    Program i of n processes the tiles i, i + n, i + 2n, ... of ROWS rows each, and reads each row
    once for both results. The program writes its partial sum to row i of d_weight, which has shape
    [n, C].

    With RELOAD the weight is read again for every tile (from the L1 cache), because it does not fit
    into registers beside a wide row.
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
    # `inverse` is a slice of a larger buffer, at another offset in each micro-batch, so its
    # alignment varies. Without this, Triton would compile a kernel for each alignment.
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
    """Add up, for each row of K and V, the gradients of its copies.

    out[r] is the sum over u of dk[inverse[u, r]], followed by the sum over u of dv[inverse[u, r]],
    in the order of u. If row r has at most u copies, inverse[u, r] is num_keys and adds nothing.
    """
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
