"""KernelProfile: how fast one device runs what a training step is made of.

A profile is one versioned JSON file (`wlb.cost.profile_file` reads it). Every block says
where its numbers come from: "measured" on the named device, "published" by a named source, or
"assumed" where neither exists. Attention is a table by kernel backend and head layout, forward and
backward apart: achieved TFLOP/s over (query rows, keys), of tile-quantised FLOPs (Section 5.3).
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from wlb.cost.flops import (
    BACKWARD_FLOPS_PER_PAIR,
    FORWARD_FLOPS_PER_PAIR,
    FloatArray,
    tile_pairs,
)
from wlb.cost.surface import BoolArray, Surface


class Kind(StrEnum):
    MEASURED = "measured"
    PUBLISHED = "published"
    ASSUMED = "assumed"


class Collective(StrEnum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    P2P = "p2p"


class Scope(StrEnum):
    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where numbers come from. residuals: held-out error of a fit, as fractions, by name."""

    kind: Kind
    source: str
    device: str = ""
    backend: str = ""
    dtype: str = ""
    date: str = ""
    commit: str = ""
    command: str = ""
    residuals: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))
        object.__setattr__(self, "residuals", tuple((k, float(v)) for k, v in self.residuals))
        if not self.source:
            raise ValueError("provenance.source is empty; name who measured or published it")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """One kernel at one head layout.

    backends: names this kernel goes by (`kernels.attention` among them). num_heads, num_kv_heads,
    head_dim: the layout it was measured at. tile_rows: query rows of a tile (128 on Hopper).
    forward, backward: achieved TFLOP/s of tile-quantised FLOPs over (query rows, keys).
    heads, heads_efficiency: throughput at that many heads a rank, relative to the surface, above
    what the launch cost explains. launch_*_ns: once a varlen call, whatever it holds.
    """

    backends: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tile_rows: int
    launch_forward_ns: int
    launch_backward_ns: int
    forward: Surface
    backward: Surface
    heads: FloatArray
    heads_efficiency: FloatArray
    provenance: Provenance

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", tuple(self.backends))
        for name in ("heads", "heads_efficiency"):
            array = np.array(getattr(self, name), np.float64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if self.heads.shape != self.heads_efficiency.shape or not (np.diff(self.heads) > 0).all():
            raise ValueError(
                f"heads {self.heads.tolist()} must rise and match heads_efficiency "
                f"{self.heads_efficiency.tolist()}"
            )
        if not self.heads.size or not np.all((self.heads_efficiency > 0) & (self.heads > 0)):
            raise ValueError(
                f"heads {self.heads.tolist()} and heads_efficiency "
                f"{self.heads_efficiency.tolist()} must have entries, all above 0"
            )
        if not np.all(np.isfinite(self.heads_efficiency)):
            raise ValueError(f"heads_efficiency {self.heads_efficiency.tolist()} must be finite")
        if self.tile_rows < 1 or not self.backends:
            raise ValueError(f"tile_rows = {self.tile_rows}, backends = {self.backends}")
        for axis in ("axis0", "axis1"):
            if not np.array_equal(getattr(self.forward, axis), getattr(self.backward, axis)):
                raise ValueError(f"forward and backward surfaces differ in {axis}")

    def efficiency(self, num_heads: int) -> float:
        """Efficiency at `num_heads` query heads a rank; constant outside the table.

        Plain arithmetic, as in `wlb.cost.surface`: equal bits on any CPU.
        """
        left = int(np.searchsorted(self.heads, num_heads, side="right")) - 1
        if left < 0 or left == self.heads.size - 1:
            return float(self.heads_efficiency[max(0, left)])
        low, high = self.heads_efficiency[left], self.heads_efficiency[left + 1]
        weight = (num_heads - self.heads[left]) / (self.heads[left + 1] - self.heads[left])
        return float(low + weight * (high - low))

    def times_ns(
        self, q: FloatArray, kv: FloatArray, *, num_heads: int, head_dim: int
    ) -> tuple[FloatArray, FloatArray]:
        """Forward and backward time of each segment in one layer, launch apart; shape [n] each.

        Padded query rows choose the throughput, so that all of a tile's lengths cost the same.
        A segment below the grid is priced as the smallest in it; zero rows are free.
        """
        floor_q, floor_kv = self.forward.floor(q, kv)
        work = tile_pairs(floor_q, floor_kv, tile_rows=self.tile_rows)
        work = np.where(q > 0, work * (head_dim * num_heads / self.efficiency(num_heads)), 0.0)
        cells = self.forward.cells(self._padded(floor_q), floor_kv)
        # FLOPs / (TFLOP/s) is 1e-12 s, hence 1e-3 for ns.
        forward = work * (FORWARD_FLOPS_PER_PAIR * 1e-3) / self.forward.read(cells)
        backward = work * (BACKWARD_FLOPS_PER_PAIR * 1e-3) / self.backward.read(cells)
        return forward, backward

    def extrapolated(self, q: FloatArray, kv: FloatArray) -> BoolArray:
        """Which segments lie outside the surface, so that their throughput is clamped."""
        return self.forward.outside(self._padded(q), kv) & (q > 0)

    def _padded(self, q: FloatArray) -> FloatArray:
        return np.ceil(q / self.tile_rows) * self.tile_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmCost:
    """Achieved TFLOP/s of matrix products over (tokens, width); width = sqrt(in * out)."""

    tflops: Surface
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCost:
    """Norms, rotations, SwiGLU, residuals: bytes read and written a second, and cost a call."""

    bytes_per_s: float
    call_ns: int
    provenance: Provenance

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.call_ns < 0:
            raise ValueError(f"bytes_per_s = {self.bytes_per_s}, call_ns = {self.call_ns}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """alpha + bytes on the wire / bandwidth.

    bytes_per_s is bus bandwidth (nccl-tests' convention): `size` is the whole buffer (gathered, or
    before scattering); a rank moves (n - 1) / n of it, twice that for all-reduce, all for p2p.
    """

    op: Collective
    scope: Scope
    alpha_ns: int
    bytes_per_s: float
    provenance: Provenance

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", Collective(self.op))
        object.__setattr__(self, "scope", Scope(self.scope))
        if not self.bytes_per_s > 0 or self.alpha_ns < 0:
            raise ValueError(f"alpha_ns = {self.alpha_ns}, bytes_per_s = {self.bytes_per_s}")

    def wire_ns(self, size_bytes: float, *, num_ranks: int) -> float:
        """Bandwidth term only; 0 in a group of one."""
        match self.op:
            case Collective.P2P:
                share = 1.0
            case Collective.ALL_REDUCE:
                share = 2 * (num_ranks - 1) / num_ranks
            case _:
                share = (num_ranks - 1) / num_ranks
        return size_bytes * share / self.bytes_per_s * 1e9

    def time_ns(self, size_bytes: float, *, num_ranks: int) -> float:
        return self.alpha_ns + self.wire_ns(size_bytes, num_ranks=num_ranks) if num_ranks > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelProfile:
    """All tables of one device and dtype. `name` is how a run says which it was priced with."""

    name: str
    device: str
    dtype: str
    ranks_per_node: int
    provenance: Provenance
    attention: tuple[AttentionTable, ...]
    gemm: GemmCost
    elementwise: ElementwiseCost
    collectives: tuple[CollectiveCost, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"ranks_per_node = {self.ranks_per_node!r} must be at least 1")
        if not self.attention:
            raise ValueError(f"profile {self.name!r} has no attention table")
        have = {(c.op, c.scope) for c in self.collectives}
        missing = [
            f"{op} {scope}" for op in Collective for scope in Scope if (op, scope) not in have
        ]
        if missing:
            raise ValueError(f"profile {self.name!r} lacks collectives: {', '.join(missing)}")

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of all attention kernels in the profile."""
        return tuple(sorted({name for table in self.attention for name in table.backends}))

    def table(self, *, backend: str | None = None, head_dim: int, num_heads: int) -> AttentionTable:
        """The table of `backend` (None = the profile's first kernel) nearest in head layout.

        ValueError where no table goes by that name. Nearest: head_dim first, then number of heads.
        """
        name = backend or self.attention[0].backends[0]
        tables = [t for t in self.attention if name in t.backends]
        if not tables:
            raise ValueError(
                f"profile {self.name!r} has no attention kernel {name!r} (it has "
                f"{', '.join(self.backends)}); measure one or choose another profile"
            )
        return min(
            tables,
            key=lambda t: (_ratio(t.head_dim, head_dim), _ratio(t.num_heads, num_heads)),
        )

    def collective(self, op: Collective, *, span_ranks: int) -> CollectiveCost:
        """Cost of `op` in a group whose ranks spread over `span_ranks` consecutive ranks."""
        scope = Scope.INTRA_NODE if span_ranks <= self.ranks_per_node else Scope.INTER_NODE
        return next(c for c in self.collectives if c.op == op and c.scope == scope)


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)
