"""Fit the profile `h100` to published figures. No GPU was measured for it.

`python -m kernels_profile.fit_published --csv FILE --out kernels_profile/h100.json` writes it.
FILE is a table of 383 calls of a varlen attention kernel (forward, bf16, 64 / tp query heads of
size 128), with the columns total_tokens, doc_length, num_docs, tp, cp and latency_ms. `fit` models
these calls, and `held_out_errors` tests the model. All other parts of the profile come from a few
published points, which the constants below name.
"""

import argparse
import csv
import datetime
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from wlb.cost.machine import program_version
from wlb.cost.profile import (
    OPTIONAL,
    AttentionTable,
    Collective,
    CollectiveCost,
    Elementwise,
    ElementwiseCost,
    GemmCost,
    HeadCost,
    KernelProfile,
    LayerCost,
    Provenance,
    ProvenanceKind,
    Scope,
)
from wlb.cost.profile_file import save_profile
from wlb.cost.protocol import FORWARD_FLOPS_PER_PAIR, tile_pairs
from wlb.cost.surface import Surface, limit_growth

Array = npt.NDArray[np.float64]

# The attention calls of the table, and the grid of query rows and keys on which throughput is
# fitted.
TILE_ROWS, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 128, 128, 64, 4
Q_AXIS = 2.0 ** np.arange(7, 18)
KV_AXIS = 2.0 ** np.arange(4, 18)
HEADS = np.array([8.0, 16.0, 32.0, 64.0])
SURFACE_SHAPE = (Q_AXIS.size, KV_AXIS.size)
# The fit's parameters are scalars, followed by the log of the surface. The scalars are the log of
# the launch cost, and the log of the efficiency for each number of heads except the last, which has
# 1.
NUM_SCALARS = HEADS.size

# Bandwidth of element-wise operators.
COPY_BYTES_PER_S = 3.0e12
CSV_SOURCE = (
    "DistCA repository: H100 bf16 forward of a FlashAttention-2-class varlen kernel, 383 calls"
)
PLOT_SOURCE = (
    "MagiAttention plots of H100 varlen-causal kernels, read by eye at 1K / 4K / 32K total tokens: "
    "FA2 forward 46/227/344, backward 47/150/263; FA3 forward 60/357/584, backward 53/206/425"
)
NCCL_SOURCE = (
    "NCCL on 8 x H200 (same NVLink generation): all-gather 8 MiB 76 us, 32 MiB 124 us, 64 MiB "
    "207 us, 256 MiB 676 us, 1 GiB 2.59 ms; reduce-scatter 1 GiB 2.74 ms; all-reduce 1 GiB 4.04 ms"
)
MIB = 2**20
GATHER_POINTS = ((8, 76e3), (32, 124e3), (64, 207e3), (256, 676e3), (1024, 2590e3))
"""Size in MiB and time in ns of all-gathers on 8 ranks."""

# TFLOP/s at 4K and 32K total tokens. The points at 1K are left out, because launches dominate them.
FA2_FORWARD, FA2_BACKWARD = (227.0, 344.0), (150.0, 263.0)
FA3_FORWARD, FA3_BACKWARD = (357.0, 584.0), (206.0, 425.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of the table of attention calls. All columns have shape [num_rows]."""

    q: Array  # query rows of each segment
    kv: Array  # keys of each segment
    heads: Array  # query heads on a rank
    num_docs: Array  # segments in a call; all have the same shape
    latency_ns: Array  # measured time of the call

    def __len__(self) -> int:
        return self.q.size

    def take(self, mask: npt.NDArray[np.bool_]) -> "Rows":
        """Return the rows that a mask selects."""
        return Rows(
            q=self.q[mask],
            kv=self.kv[mask],
            heads=self.heads[mask],
            num_docs=self.num_docs[mask],
            latency_ns=self.latency_ns[mask],
        )


def read_rows(path: Path) -> Rows:
    """Read the table of attention calls from a CSV file."""
    with path.open(newline="") as file:
        table = [
            [float(row[k]) for k in ("doc_length", "num_docs", "tp", "cp", "latency_ms")]
            for row in csv.DictReader(file)
        ]
    length, num_docs, tp, cp, latency_ms = np.array(table).T
    # Each of cp ranks has 1 / cp of the queries. Its keys are those of a rank with average work.
    return Rows(
        q=length / cp,
        kv=length * (0.5 + 0.5 / cp),
        heads=NUM_HEADS / tp,
        num_docs=num_docs,
        latency_ns=latency_ms * 1e6,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted model of the attention calls; `fit` has the formula."""

    launch_ns: float  # time of a launch
    heads_efficiency: Array  # throughput for each of HEADS, relative to the last one
    surface: Array  # TFLOP/s, shape [Q_AXIS, KV_AXIS]

    def predict_ns(self, rows: Rows) -> Array:
        """Predict the time of each call, shape [num_rows]."""
        surface = Surface(axis0=Q_AXIS, axis1=KV_AXIS, values=self.surface)
        padded = np.ceil(rows.q / TILE_ROWS) * TILE_ROWS
        return self.launch_ns + _work(rows) * 1e-3 / (
            surface.at(padded, rows.kv) * np.interp(rows.heads, HEADS, self.heads_efficiency)
        )


def _work(rows: Rows) -> Array:
    """Return the FLOPs of each call, counting whole tiles."""
    pairs = tile_pairs(rows.q, rows.kv, tile_rows=TILE_ROWS)
    return FORWARD_FLOPS_PER_PAIR * HEAD_DIM * rows.heads * rows.num_docs * pairs


def _corners(axis: Array, x: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """Return the grid point to the left of each `x`, and how far it is to the next (0 to 1)."""
    left = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, axis.size - 2)
    return left, np.clip((x - axis[left]) / (axis[left + 1] - axis[left]), 0, 1)


def fit(rows: Rows) -> Fit:
    """Fit the logarithm of latency by least squares, with penalties for a rough surface.

    The model of a call is

        latency = launch + num_docs * heads * FLOPs / (TFLOP/s(padded q, kv) * efficiency(heads))

    where FLOPs are counted in whole tiles, q = doc_length / cp, and
    kv = doc_length * (1/2 + 1/(2 cp)). The launch cost, the surface of TFLOP/s and the efficiencies
    are fitted together.
    """
    i, u = _corners(Q_AXIS, np.ceil(rows.q / TILE_ROWS) * TILE_ROWS)
    j, v = _corners(KV_AXIS, rows.kv)
    head = np.searchsorted(HEADS, rows.heads)
    work = _work(rows)

    def residuals(parameters: Array) -> Array:
        # Interpolate the surface at each row.
        log_s = parameters[NUM_SCALARS:].reshape(SURFACE_SHAPE)
        s = np.exp(log_s)
        tflops = (1 - u) * ((1 - v) * s[i, j] + v * s[i, j + 1])
        tflops += u * ((1 - v) * s[i + 1, j] + v * s[i + 1, j + 1])
        efficiency = np.exp(np.append(parameters[1:NUM_SCALARS], 0.0))[head]
        predicted = np.exp(parameters[0]) + work * 1e-3 / (tflops * efficiency)
        return np.concatenate(
            [np.log(predicted / rows.latency_ns), *_penalties(log_s), 0.1 * parameters[1:4]]
        )

    # Start from launches of 50 us, equal efficiencies, and 300 TFLOP/s everywhere.
    start = np.concatenate(
        [
            [np.log(5e4)],
            np.zeros(NUM_SCALARS - 1),
            np.full(Q_AXIS.size * KV_AXIS.size, np.log(300.0)),
        ]
    )
    best = least_squares(residuals, start, max_nfev=80).x
    surface = np.exp(best[NUM_SCALARS:].reshape(SURFACE_SHAPE))
    return Fit(
        launch_ns=float(np.exp(best[0])),
        heads_efficiency=np.exp(np.append(best[1:NUM_SCALARS], 0.0)),
        surface=limit_growth(Q_AXIS, KV_AXIS, surface),
    )


def _penalties(log_s: Array) -> list[Array]:
    """Return the penalties on the logarithm of the surface.

    They penalise curvature and twist (weakly), throughput that grows faster than an axis
    (strongly), throughput that falls along an axis (medium), and throughput above 372 TFLOP/s
    (weakly).
    """
    slope_q, slope_kv = np.diff(log_s, axis=0) / np.log(2), np.diff(log_s, axis=1) / np.log(2)
    terms = [
        0.03 * np.diff(log_s, 2, axis=0),
        0.03 * np.diff(log_s, 2, axis=1),
        0.03 * np.diff(np.diff(log_s, axis=0), axis=1),
        np.maximum(slope_q - 0.98, 0),
        np.maximum(slope_kv - 0.98, 0),
        0.3 * np.minimum(slope_q, 0),
        0.3 * np.minimum(slope_kv, 0),
        0.02 * np.maximum(log_s - np.log(372.0), 0),
    ]
    return [term.ravel() for term in terms]


def errors(rows: Rows, fitted: Fit) -> dict[str, float]:
    """Return the mean, 95th percentile and maximum of the relative errors of a fit."""
    error = np.abs(fitted.predict_ns(rows) / rows.latency_ns - 1)
    return {
        "count": float(len(rows)),
        "mape": round(float(error.mean()), 4),
        "p95": round(float(np.percentile(error, 95)), 4),
        "max": round(float(error.max()), 4),
    }


def held_out_errors(rows: Rows, *, seed: int) -> dict[str, float]:
    """Return the errors on a random fifth of the rows, and on a random fifth of the shapes (q, kv).

    Each time the fit sees only the other rows; for the shapes, no row of a held-out shape.
    """
    rng = np.random.default_rng(seed)
    _, shape_of = np.unique(np.stack([rows.q, rows.kv]), axis=1, return_inverse=True)
    shapes = rng.permutation(shape_of.max() + 1)
    splits = {
        "held_out_rows": rng.random(len(rows)) < 0.2,
        "held_out_shapes": np.isin(shape_of.ravel(), shapes[: shapes.size // 5]),
    }
    return {
        f"{split}_{name}": value
        for split, mask in splits.items()
        for name, value in errors(rows.take(mask), fit(rows.take(~mask))).items()
    }


def by_keys(at_4k: float, at_32k: float) -> Array:
    """Interpolate a factor between 4K and 32K keys, linearly in log keys and constant outside.

    Args:
        at_4k: Factor at 4K keys and below.
        at_32k: Factor at 32K keys and above.

    Returns:
        The factor at each point of KV_AXIS, shape [1, KV_AXIS].
    """
    weight = np.clip(np.log2(KV_AXIS / 4096) / 3, 0, 1)
    return (at_4k + weight * (at_32k - at_4k))[None, :]


def tables(fitted: Fit, residuals: dict[str, float]) -> tuple[AttentionTable, ...]:
    """Return the tables of FlashAttention-2 and FlashAttention-3.

    Forward of FlashAttention-2 is the fit. Its backward, and FlashAttention-3, are the fit times
    ratios that were read from plots.
    """
    shared = {"device": "NVIDIA H100 SXM", "dtype": "bfloat16"}
    ratios = [
        tuple(a / b for a, b in zip(top, bottom, strict=True))
        for top, bottom in (
            (FA2_BACKWARD, FA2_FORWARD),
            (FA3_FORWARD, FA2_FORWARD),
            (FA3_BACKWARD, FA2_FORWARD),
        )
    ]
    fa2_backward, fa3_forward, fa3_backward = (by_keys(*ratio) for ratio in ratios)

    def table(
        backends: tuple[str, ...], forward: Array, backward: Array, note: str
    ) -> AttentionTable:
        def surface(factor: Array) -> Surface:
            values = limit_growth(Q_AXIS, KV_AXIS, fitted.surface * factor)
            return Surface(axis0=Q_AXIS, axis1=KV_AXIS, values=values)

        return AttentionTable(
            backends=backends,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            tile_rows=TILE_ROWS,
            launch_forward_ns=round(fitted.launch_ns),
            launch_backward_ns=round(fitted.launch_ns),
            forward=surface(forward),
            backward=surface(backward),
            heads=HEADS,
            heads_efficiency=fitted.heads_efficiency,
            provenance=Provenance(
                kind=ProvenanceKind.PUBLISHED,
                source=note,
                backend=backends[-1],
                residuals=tuple(residuals.items()),
                **shared,
            ),
        )

    one = np.ones((1, KV_AXIS.size))
    return (
        table(
            ("torch_varlen", "flash_attention_2"),
            one,
            fa2_backward,
            f"forward: {CSV_SOURCE} (residuals are of this fit). backward: forward x FA2's "
            f"backward / forward ratio in {PLOT_SOURCE}. backward launch: assumed as forward's",
        ),
        table(
            ("flash_attention_3",),
            fa3_forward,
            fa3_backward,
            f"FA2's table of this profile x FA3 / FA2 ratios in {PLOT_SOURCE}; residuals are of "
            f"the FA2 fit, FA3 itself is not checked",
        ),
    )


def gather_alpha_beta() -> tuple[float, float]:
    """Fit latency (ns) and bus bandwidth (bytes/s) to the all-gather points, by relative errors."""
    # A rank receives 7/8 of the data of an all-gather on 8 ranks.
    size, time_ns = (np.array(column) for column in zip(*GATHER_POINTS, strict=True))
    wire = size * MIB * 7 / 8
    design = np.stack([np.ones(size.size), wire], axis=1) / time_ns[:, None]
    alpha, ns_per_byte = np.linalg.lstsq(design, np.ones(size.size), rcond=None)[0]
    return float(alpha), 1e9 / float(ns_per_byte)


def collectives() -> tuple[CollectiveCost, ...]:
    """Return the prices of all collectives, inside a node and between nodes."""
    # Only the all-gather has several points. The others have one at 1 GiB, and use its latency.
    alpha, gather = gather_alpha_beta()
    scatter = 1024 * MIB * 7 / 8 / (2.74e-3 - alpha * 1e-9)
    reduce = 2 * 1024 * MIB * 7 / 8 / (4.04e-3 - alpha * 1e-9)
    intra = {
        Collective.ALL_GATHER: (alpha, gather, NCCL_SOURCE),
        Collective.REDUCE_SCATTER: (alpha, scatter, f"{NCCL_SOURCE}; alpha as all-gather's"),
        Collective.ALL_REDUCE: (alpha, reduce, f"{NCCL_SOURCE}; alpha as all-gather's"),
    }
    rows = [
        CollectiveCost(
            op=op,
            scope=Scope.INTRA_NODE,
            alpha_ns=round(a),
            bytes_per_s=float(f"{bandwidth:.4g}"),
            provenance=Provenance(kind=ProvenanceKind.PUBLISHED, source=source),
        )
        for op, (a, bandwidth, source) in intra.items()
    ]
    assumed = Provenance(
        kind=ProvenanceKind.ASSUMED,
        source="NVLink at the all-gather's bandwidth, a fifth of its latency",
    )
    rows.append(
        CollectiveCost(
            op=Collective.P2P,
            scope=Scope.INTRA_NODE,
            alpha_ns=10_000,
            bytes_per_s=float(f"{gather:.4g}"),
            provenance=assumed,
        )
    )
    network = Provenance(
        kind=ProvenanceKind.ASSUMED,
        source="one 400 Gb/s network port a GPU at 80% of its 50 GB/s, 30 us a call",
    )
    rows += [
        CollectiveCost(
            op=op,
            scope=Scope.INTER_NODE,
            alpha_ns=30_000 if op == Collective.P2P else round(alpha) + 30_000,
            bytes_per_s=40e9,
            provenance=network,
        )
        for op in Collective
    ]
    return tuple(rows)


def build(rows: Rows, *, seed: int, command: str) -> tuple[KernelProfile, dict[str, float]]:
    """Make the whole profile.

    Args:
        rows: The attention calls.
        seed: Seed of the held-out rows.
        command: The command to record in the profile.

    Returns:
        The profile, and the errors on held-out rows.
    """
    residuals = held_out_errors(rows, seed=seed)
    fitted = fit(rows)
    gemm = Provenance(
        kind=ProvenanceKind.PUBLISHED,
        source="8192^3 bf16 on H200 runs at 770-800 TFLOP/s and the paper's printed ratios imply "
        "563 in training; 600 taken for training shapes, at any size: small GEMMs are priced low",
    )
    flat = Surface(axis0=[1.0, 131072.0], axis1=[1.0, 65536.0**2], values=np.full((2, 2), 600))
    copy = Provenance(
        kind=ProvenanceKind.PUBLISHED,
        source="device copy on H200 at 4.3 TB/s x 3.35 / 4.8 (ratio of the two memories' "
        "peak); cost a call is assumed",
    )
    profile = KernelProfile(
        name="h100",
        device="NVIDIA H100 SXM 80GB",
        dtype="bfloat16",
        ranks_per_node=8,
        provenance=Provenance(
            kind=ProvenanceKind.PUBLISHED,
            source="fitted to published figures, see each block; nothing measured by this project",
            device="NVIDIA H100 SXM 80GB",
            backend="flash_attention_2",
            dtype="bfloat16",
            date=datetime.date.today().isoformat(),
            commit=program_version(),
            command=command,
            residuals=tuple(residuals.items()),
        ),
        attention=tables(fitted, residuals),
        gemm=GemmCost(forward=flat, backward=flat, provenance=gemm),
        elementwise=tuple(
            ElementwiseCost(
                op=op,
                forward_bytes_per_s=COPY_BYTES_PER_S,
                backward_bytes_per_s=COPY_BYTES_PER_S,
                forward_call_ns=4000,
                backward_call_ns=4000,
                provenance=copy,
            )
            for op in Elementwise
            if op not in OPTIONAL
        ),
        layer=LayerCost(
            forward_factor=1.0,
            backward_factor=1.0,
            forward_call_ns=0,
            backward_call_ns=0,
            provenance=Provenance(
                kind=ProvenanceKind.ASSUMED, source="a layer takes what its operators take"
            ),
        ),
        head=HeadCost(tflops=600, backward_bytes_per_s=COPY_BYTES_PER_S, provenance=gemm),
        collectives=collectives(),
    )
    return profile, residuals


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the H100 profile to published figures.")
    parser.add_argument("--csv", type=Path, required=True, help="published attention table")
    parser.add_argument("--out", type=Path, required=True, help="profile to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the held-out split")
    args = parser.parse_args()
    rows = read_rows(args.csv)
    command = (
        f"python -m kernels_profile.fit_published --csv {args.csv.name} --out "
        f"kernels_profile/{args.out.name} --seed {args.seed}"
    )
    profile, residuals = build(rows, seed=args.seed, command=command)
    save_profile(args.out, profile)
    table = profile.attention[0]
    print(f"{len(rows)} rows; held out: {residuals}")
    print(
        f"launch {table.launch_forward_ns} ns; efficiency by heads "
        f"{dict(zip(HEADS.tolist(), table.heads_efficiency.round(3).tolist(), strict=True))}"
    )
    for cost in profile.collectives:
        print(f"{cost.op} {cost.scope}: {cost.alpha_ns} ns + {cost.bytes_per_s / 1e9:.0f} GB/s")


if __name__ == "__main__":
    main()
