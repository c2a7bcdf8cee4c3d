"""Measures the CPU profile: one thread, float32, in about a minute.

    python -m kernels_profile.measure_cpu --out kernels_profile/cpu.json

Attention: `wlb.kernels.attend` (SDPA) on up to 16 equal segments, which it computes in one batched
call: causal where q = kv, else a bottom-right mask, which computes the whole rectangle. Time a
segment, forward and backward apart, least over two passes through the grid; unequal segments cost
more, since the kernel pads them to common lengths. The launch cost is a call on one row and one
key. A CPU has no tile (tile_rows = 1).

GEMMs: square matrices by tokens and width. Element-wise: a norm, a residual and SwiGLU of eager
PyTorch over the bytes the cost model counts for them, so that eager PyTorch's extra passes lower
the achieved bytes/s. Collectives: Gloo between two local processes, alpha and bandwidth from a
small and a large buffer; the same numbers stand for inter-node, as assumed. Figures move with what
else runs on the machine; compute is timed in CPU time, which leaves out being preempted.
"""

import argparse
import datetime
import math
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from kernels_profile.fit_published import commit
from wlb.cost.flops import (
    BACKWARD_FLOPS_PER_PAIR,
    FORWARD_FLOPS_PER_PAIR,
    tile_pairs,
)
from wlb.cost.profile import (
    AttentionTable,
    Collective,
    CollectiveCost,
    ElementwiseCost,
    GemmCost,
    KernelProfile,
    Kind,
    Provenance,
    Scope,
)
from wlb.cost.profile_file import save_profile
from wlb.cost.surface import Surface, limit_growth
from wlb.kernels.attend import attend
from wlb.kernels.segments import Segments

Array = npt.NDArray[np.float64]

Q_AXIS = np.array([1, 16, 64, 256, 1024, 4096])
KV_AXIS = np.array([1, 16, 64, 256, 1024, 4096, 8192])
LAYOUTS = ((2, 16), (4, 16), (8, 64))  # (heads, head size)
TOKENS = (16, 128, 1024, 4096)
WIDTHS = (32, 64, 128, 256, 512, 1024)
BUFFER_BYTES = (2**12, 2**22)


def least_s(call: Callable[[], Any], *, budget_s: float = 0.03, most: int = 30) -> float:
    """Least CPU time of a call over a few repetitions, one at least after a warm-up call."""
    call()
    best, spent, count = math.inf, 0.0, 0
    while count < most and (count == 0 or spent < budget_s):
        start = time.process_time()
        call()
        took = time.process_time() - start
        best, spent, count = min(best, took), spent + took, count + 1
    return best


def segment_s(
    num_heads: int, head_dim: int, q: int, kv: int, *, most: int = 16
) -> tuple[float, float]:
    """Forward and backward time of a segment, in a batch of as many as make 2,048 keys."""
    batch = max(1, min(most, 2048 // kv))
    rows = torch.randn(batch * q, num_heads, head_dim, requires_grad=True)
    keys, values = (
        torch.randn(batch * kv, num_heads, head_dim, requires_grad=True) for _ in range(2)
    )
    count = np.arange(batch + 1)
    segments = Segments.from_offsets(count * q, count * kv, device="cpu")

    def forward() -> torch.Tensor:
        return attend(rows, keys, values, segments, backend="sdpa")

    out = forward()
    gradient = torch.randn_like(out)
    forward_s = least_s(forward)
    backward_s = least_s(
        lambda: torch.autograd.grad(out, (rows, keys, values), gradient, retain_graph=True)
    )
    return forward_s / batch, backward_s / batch


def segment_tflops(num_heads: int, head_dim: int, q: int, kv: int) -> tuple[float, float]:
    pairs = float(tile_pairs(np.array([float(q)]), np.array([float(kv)]), tile_rows=1)[0])
    forward_s, backward_s = segment_s(num_heads, head_dim, q, kv)
    work = pairs * num_heads * head_dim * 1e-12
    return work * FORWARD_FLOPS_PER_PAIR / forward_s, work * BACKWARD_FLOPS_PER_PAIR / backward_s


def fill_below_diagonal(values: Array) -> Array:
    """q > kv cannot happen, but interpolation on the diagonal reads those corners.

    A corner next to the diagonal is set so that its cell is a plane, which makes the diagonal
    (whole documents) linear between its own measured points, but not so low that the growth limit
    would pull the diagonal down. The rest keeps time constant.
    """
    out = values.copy()
    for i in range(1, out.shape[0]):
        a, b, d = out[i - 1, i - 1], out[i - 1, i], out[i, i]
        out[i, i - 1] = max(a + d - b, d * KV_AXIS[i - 1] / KV_AXIS[i])
        out[i, : i - 1] = out[i, i - 1] * KV_AXIS[: i - 1] / KV_AXIS[i - 1]
    return out


def attention_table(num_heads: int, head_dim: int, provenance: Provenance) -> AttentionTable:
    forward, backward = np.zeros((2, Q_AXIS.size, KV_AXIS.size))
    for _ in range(2):
        for i, q in enumerate(Q_AXIS.tolist()):
            for j, kv in enumerate(KV_AXIS.tolist()):
                if q <= kv:
                    rates = segment_tflops(num_heads, head_dim, q, kv)
                    forward[i, j] = max(forward[i, j], rates[0])
                    backward[i, j] = max(backward[i, j], rates[1])
    surfaces = [
        Surface(
            axis0=Q_AXIS,
            axis1=KV_AXIS,
            values=limit_growth(Q_AXIS, KV_AXIS, fill_below_diagonal(values)),
        )
        for values in (forward, backward)
    ]
    launch_forward_s, launch_backward_s = segment_s(num_heads, head_dim, 1, 1, most=1)
    heads, efficiency = heads_efficiency(num_heads, head_dim)
    return AttentionTable(
        backends=("sdpa",),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        tile_rows=1,
        launch_forward_ns=round(launch_forward_s * 1e9),
        launch_backward_ns=round(launch_backward_s * 1e9),
        forward=surfaces[0],
        backward=surfaces[1],
        heads=heads,
        heads_efficiency=efficiency,
        provenance=provenance,
    )


def heads_efficiency(num_heads: int, head_dim: int) -> tuple[Array, Array]:
    """Throughput at other head counts relative to `num_heads`, at one middling segment."""
    heads = sorted({1, 2, 4, 8, num_heads})
    rate = {h: h / sum(segment_s(h, head_dim, 256, 256)) for h in heads}
    return np.array(heads, float), np.array([rate[h] / rate[num_heads] for h in heads])


def gemm_tflops() -> Array:
    out = np.zeros((len(TOKENS), len(WIDTHS)))
    for i, tokens in enumerate(TOKENS):
        for j, width in enumerate(WIDTHS):
            x, w = torch.randn(tokens, width), torch.randn(width, width)
            took = least_s(lambda x=x, w=w: x @ w, budget_s=0.03)
            out[i, j] = 2 * tokens * width * width / took * 1e-12
    return limit_growth(np.array(TOKENS), np.array(WIDTHS), out)


def elementwise(tokens: int, width: int) -> float:
    """Seconds of one norm, one residual addition and one SwiGLU, forward and backward."""
    x, gate, up = (torch.randn(tokens, width, requires_grad=True) for _ in range(3))
    weight = torch.ones(width, requires_grad=True)
    gradient = torch.randn(tokens, width)

    def step() -> None:
        y = F.rms_norm(x, (width,), weight) + x
        z = F.silu(gate) * up
        torch.autograd.grad((y, z), (x, gate, up, weight), (gradient, gradient))

    return least_s(step)


ELEMENTWISE_VALUES = 2 + 3 + 3 + 3 + 3 + 5
"""Values a token and channel counted for `elementwise`: norm, residual, SwiGLU; then backward."""
ELEMENTWISE_OPS = 6


def gloo_times(rank: int, file: str, out: str) -> None:
    """Rank 0 saves the least seconds of each collective and buffer size."""
    torch.set_num_threads(1)
    # torch 2.13 renames two collectives; 2.11, also supported, has only the old names.
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    times = np.zeros((len(Collective), len(BUFFER_BYTES)))
    for j, size in enumerate(BUFFER_BYTES):
        whole, half = torch.zeros(size // 4), torch.zeros(size // 8)
        calls: dict[Collective, Callable[[], Any]] = {
            Collective.ALL_GATHER: lambda w=whole, h=half: dist.all_gather_into_tensor(w, h),
            Collective.REDUCE_SCATTER: lambda w=whole, h=half: dist.reduce_scatter_tensor(h, w),
            Collective.ALL_REDUCE: lambda w=whole: dist.all_reduce(w),
            Collective.P2P: lambda w=whole: dist.send(w, 1) if rank == 0 else dist.recv(w, 0),
        }
        for i, op in enumerate(Collective):
            samples = np.zeros(20)
            for k in range(samples.size):
                dist.barrier()
                start = time.perf_counter()
                calls[op]()
                samples[k] = time.perf_counter() - start
            times[i, j] = samples[2:].min()
    if rank == 0:
        np.save(out, times)
    dist.destroy_process_group()


def collectives(provenance: Provenance) -> tuple[CollectiveCost, ...]:
    with TemporaryDirectory() as folder:
        out = str(Path(folder) / "times.npy")
        mp.spawn(gloo_times, args=(str(Path(folder) / "store"), out), nprocs=2)
        times = np.load(out)
    assumed = Provenance(kind=Kind.ASSUMED, source="as measured between processes of one machine")
    share = {Collective.P2P: 1.0, Collective.ALL_REDUCE: 1.0}
    costs: list[CollectiveCost] = []
    for op, (small_s, large_s) in zip(Collective, times.tolist(), strict=True):
        wire = (BUFFER_BYTES[1] - BUFFER_BYTES[0]) * share.get(op, 0.5)
        per_byte = max(large_s - small_s, 1e-9) / wire
        alpha_s = max(0.0, small_s - BUFFER_BYTES[0] * share.get(op, 0.5) * per_byte)
        for scope in Scope:
            costs.append(
                CollectiveCost(
                    op=op,
                    scope=scope,
                    alpha_ns=round(alpha_s * 1e9),
                    bytes_per_s=float(f"{1 / per_byte:.4g}"),
                    provenance=provenance if scope == Scope.INTRA_NODE else assumed,
                )
            )
    return tuple(costs)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def build(command: str) -> KernelProfile:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    provenance = Provenance(
        kind=Kind.MEASURED,
        source="this script, one thread",
        device=cpu_name(),
        backend=f"torch {torch.__version__}",
        dtype="float32",
        date=datetime.date.today().isoformat(),
        commit=commit(),
        command=command,
    )
    block = Provenance(kind=Kind.MEASURED, source="this script, one thread")
    gloo = Provenance(kind=Kind.MEASURED, source="Gloo, two processes of one machine, one thread")
    big, small = elementwise(1024, 512), elementwise(1, 16)
    return KernelProfile(
        name="cpu",
        device=cpu_name(),
        dtype="float32",
        ranks_per_node=1024,
        provenance=provenance,
        attention=tuple(attention_table(heads, size, block) for heads, size in LAYOUTS),
        gemm=GemmCost(
            tflops=Surface(axis0=TOKENS, axis1=WIDTHS, values=gemm_tflops()), provenance=block
        ),
        elementwise=ElementwiseCost(
            bytes_per_s=float(f"{1024 * 512 * 4 * ELEMENTWISE_VALUES / (big - small):.4g}"),
            call_ns=round(small / ELEMENTWISE_OPS * 1e9),
            provenance=block,
        ),
        collectives=collectives(gloo),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the CPU profile, one thread, float32.")
    parser.add_argument("--out", type=Path, required=True, help="profile to write")
    args = parser.parse_args()
    start = time.perf_counter()
    profile = build(f"python -m kernels_profile.measure_cpu --out kernels_profile/{args.out.name}")
    save_profile(args.out, profile)
    print(f"{profile.device}: {time.perf_counter() - start:.0f} s")
    with np.printoptions(precision=4, suppress=True, linewidth=120):
        for table in profile.attention:
            print(f"attention {table.num_heads} x {table.head_dim}, TFLOP/s, q {Q_AXIS} by kv")
            print(table.forward.values, table.backward.values, sep="\n")
        print("GEMM TFLOP/s", profile.gemm.tflops.values, sep="\n")
    print(profile.elementwise)
    for cost in profile.collectives:
        print(f"{cost.op} {cost.scope}: {cost.alpha_ns} ns + {cost.bytes_per_s / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
