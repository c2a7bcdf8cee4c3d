"""KernelProfile: how fast one device runs the parts of a training step.

Every block carries its provenance: measured on the named device, published by a named source, or
assumed. Forward and backward are apart. Attention is a table by kernel backend and head layout:
achieved TFLOP/s of tile-quantised FLOPs over (query rows, keys), Section 5.3. Files:
`profile_file.py`; schema: kernels_profile/README.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise, product
from typing import Any

import numpy as np

from wlb.cost.protocol import BACKWARD_FLOPS_PER_PAIR, FORWARD_FLOPS_PER_PAIR, tile_pairs
from wlb.cost.surface import Cells, Curve, Surface
from wlb.plan import BoolArray, FloatArray, IntArray, UserError


class ProvenanceKind(StrEnum):
    MEASURED = "measured"
    PUBLISHED = "published"
    ASSUMED = "assumed"


class Collective(StrEnum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    P2P = "p2p"

    def wire_share(self, num_ranks: int) -> float:
        """Bytes that a rank moves over the bytes of the whole buffer."""
        match self:
            case Collective.P2P:
                return 1.0
            case Collective.ALL_REDUCE:
                return 2 * (num_ranks - 1) / num_ranks
            case _:
                return (num_ranks - 1) / num_ranks


class Scope(StrEnum):
    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4
"""The head's gradient is float32, and so are dK and dV on their way between CP ranks."""
BACKWARD_TILES = ("backward_tile_rows", "backward_tile_keys")
"""Sides of backward's tiles in an `AttentionTable`, which may be left out where both are forward's
`tile_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The source of numbers. residuals: held-out errors of a fit, fractions by name. environment:
    versions, sizes and conditions of a measurement as plain JSON values.
    """

    kind: ProvenanceKind
    source: str
    device: str = ""
    backend: str = ""
    dtype: str = ""
    date: str = ""
    commit: str = ""
    command: str = ""
    residuals: tuple[tuple[str, float], ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", ProvenanceKind(self.kind))
        object.__setattr__(self, "residuals", tuple((k, float(v)) for k, v in self.residuals))
        if not self.source:
            raise UserError("provenance.source is empty; name who measured or published it")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """What a varlen call takes beyond the sum of its segments: its grid of blocks and its tail.

    A call launches as many blocks for each segment and head as its longest segment has tiles, of
    rows forward and of keys backward; those beyond a shorter segment's end do nothing, but take
    time. The last block of the longest segment runs while others have none left.
    """

    forward_ns: float  # of a block in forward; the grid has heads x segments x most tiles of rows
    backward_ns: float  # of a block in backward; the grid has heads x segments x most tiles of keys
    tail_forward_ns: float  # of a key that the longest block of forward reads
    tail_backward_ns: float  # of a query row that the longest block of backward reads

    def __post_init__(self) -> None:
        costs = [getattr(self, f.name) for f in fields(self)]
        if not all(0 <= cost < np.inf for cost in costs):
            raise UserError(f"blocks have costs {costs} ns, which must be finite and not below 0")

    def ns(
        self,
        num_segments: FloatArray | IntArray,
        most_q: FloatArray,
        most_kv: FloatArray,
        *,
        tile_rows: int,
        backward_tile_keys: int,
        sliding: int = 0,
    ) -> tuple[FloatArray, FloatArray]:
        """Forward and backward ns of calls in one layer, shape [num_calls].

        Args:
            num_segments: Segments times heads.
            most_q: Rows of the segment of a call that has most rows.
            most_kv: Keys of the segment of a call that has most keys.
            tile_rows: Query rows of a block of forward.
            backward_tile_keys: Keys of a block of backward.
            sliding: Keys that a query sees, 0 = all.
        """
        tiles_q, tiles_kv = np.ceil(most_q / tile_rows), np.ceil(most_kv / backward_tile_keys)
        # A tile of rows reads the keys of all its rows' windows; a tile of keys, all their rows.
        keys = sliding + tile_rows if sliding else np.inf
        rows = sliding + backward_tile_keys if sliding else np.inf
        return (
            num_segments * tiles_q * self.forward_ns
            + np.minimum(most_kv, keys) * self.tail_forward_ns,
            num_segments * tiles_kv * self.backward_ns
            + np.minimum(most_q, rows) * self.tail_backward_ns,
        )

    def times(self, forward: float, backward: float) -> "BlockCost":
        """The costs if passes take these factors times as long."""
        return BlockCost(
            forward_ns=self.forward_ns * forward,
            backward_ns=self.backward_ns * backward,
            tail_forward_ns=self.tail_forward_ns * forward,
            tail_backward_ns=self.tail_backward_ns * backward,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """One attention kernel at one head layout. Throughput is in TFLOP/s of tile-quantised FLOPs."""

    backends: tuple[str, ...]
    """The kernel's names (values of `kernels.attention`)."""
    num_heads: int
    """Query heads of the measured calls."""
    num_kv_heads: int
    """Heads of keys and values of the measured calls."""
    head_dim: int
    """Size of a head."""
    tile_rows: int
    """Query rows of a tile of forward; 1 for kernels without tiles."""
    launch_forward_ns: int
    """Forward's time of a varlen call beyond its segments."""
    launch_backward_ns: int
    """Backward's time of a varlen call beyond its segments."""
    forward: Surface
    """Forward's throughput over (query rows, keys)."""
    backward: Surface
    """Backward's throughput over (query rows, keys)."""
    heads: FloatArray
    """Numbers of heads on a rank."""
    heads_efficiency: FloatArray
    """Throughput at these numbers of heads, relative to the surfaces."""
    provenance: Provenance
    """Where the numbers come from."""
    backward_tile_rows: int = 0
    """Query rows of a tile of backward; 0 becomes `tile_rows`."""
    backward_tile_keys: int = 0
    """Keys of a block of backward, by which `blocks` counts them; 0 becomes `tile_rows`."""
    padded_lengths: tuple[int, ...] = ()
    """Rising lengths that rows and keys are rounded up to by kernels that group similar segments
    (SDPA)."""
    group_forward_ns: int = 0
    """Forward's time of each group of segments (`groups`)."""
    group_backward_ns: int = 0
    """Backward's time of each group of segments."""
    square_forward: Curve | None = None
    """Forward's throughput of segments without a prefix (rows = keys), if measured apart; used
    where it exceeds the surface."""
    square_backward: Curve | None = None
    """Backward's throughput of segments without a prefix, likewise."""
    reach: FloatArray | None = None
    """Most keys that were measured with each row of the surface, [rows]; None: all keys were."""
    blocks: BlockCost | None = None
    """What a call's grid takes; None if not measured."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "padded_lengths", tuple(self.padded_lengths))
        self._check_calls()
        for name in ("heads", "heads_efficiency"):
            array = np.array(getattr(self, name), np.float64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if self.heads.shape != self.heads_efficiency.shape or not (np.diff(self.heads) > 0).all():
            raise UserError(
                f"heads {self.heads.tolist()} must rise and match heads_efficiency "
                f"{self.heads_efficiency.tolist()}"
            )
        entries = np.concatenate([self.heads, self.heads_efficiency])
        if not entries.size or not np.all((entries > 0) & (entries < np.inf)):
            raise UserError(
                f"heads {self.heads.tolist()} and heads_efficiency "
                f"{self.heads_efficiency.tolist()} must have entries, all above 0 and finite"
            )
        if not self.backends:
            raise UserError("backends is empty; name the kernel")
        self._check_surfaces()

    def _check_surfaces(self) -> None:
        if (self.square_forward is None) != (self.square_backward is None):
            raise UserError("square_forward and square_backward must both be there, or neither")
        if self.reach is not None:
            object.__setattr__(self, "reach", np.array(self.reach, np.float64))
            if self.reach.shape != self.forward.axis0.shape:
                raise UserError(f"reach has shape {self.reach.shape}, one a row of the surface")
        for axis in ("axis0", "axis1"):
            if not np.array_equal(getattr(self.forward, axis), getattr(self.backward, axis)):
                raise UserError(f"forward and backward surfaces differ in {axis}")

    def _check_calls(self) -> None:
        if isinstance(self.backends, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(f"backends {self.backends!r} must be a list of names")
        object.__setattr__(self, "backends", tuple(self.backends))
        for name in BACKWARD_TILES:
            if getattr(self, name) == 0:
                object.__setattr__(self, name, self.tile_rows)
        for name in ("num_heads", "num_kv_heads", "head_dim", "tile_rows", *BACKWARD_TILES):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} = {value!r} must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        if any(a >= b for a, b in pairwise((0, *self.padded_lengths))):
            raise UserError(f"padded_lengths {self.padded_lengths} must rise from above 0")
        for name in ("launch", "group"):
            costs = [getattr(self, f"{name}_{p}_ns") for p in ("forward", "backward")]
            if not all(0 <= cost < np.inf for cost in costs):
                raise UserError(f"{name} costs {costs} ns must be finite and not below 0")

    def efficiency(self, num_heads: int) -> float:
        """Efficiency at `num_heads` query heads a rank, constant outside the table; plain
        arithmetic gives equal bits on all CPUs.
        """
        left = int(np.searchsorted(self.heads, num_heads, side="right")) - 1
        if left < 0 or left == self.heads.size - 1:
            return float(self.heads_efficiency[max(0, left)])
        low, high = self.heads_efficiency[left], self.heads_efficiency[left + 1]
        weight = (num_heads - self.heads[left]) / (self.heads[left + 1] - self.heads[left])
        return float(low + weight * (high - low))

    def times_ns(
        self, q: FloatArray, kv: FloatArray, *, num_heads: int, head_dim: int, sliding: int = 0
    ) -> tuple[FloatArray, FloatArray]:
        """Forward and backward ns of each segment in one layer, shape [n], without launches and
        groups. Padded rows choose the throughput, so that all lengths of a tile cost the same; a
        segment below the grid costs as much as the smallest in it; zero rows are free.

        sliding: keys that a query sees, 0 = all. Windows are not measured: a tile's keys are
        counted, at the throughput of a segment that is no longer than the window.
        """
        rows, keys = self.forward.floor(self.padded(q), self.padded(kv))
        scale = head_dim * num_heads / self.efficiency(num_heads)
        # Segments without a prefix need no explicit mask, so they are at least as fast as the
        # surface; a measurement that says otherwise is noise.
        is_square = (q == kv) & ((kv <= sliding) if sliding else True)
        capped = np.minimum(keys, sliding) if sliding else keys
        passes = (
            (self.tile_rows, FORWARD_FLOPS_PER_PAIR, self.forward, self.square_forward),
            (self.backward_tile_rows, BACKWARD_FLOPS_PER_PAIR, self.backward, self.square_backward),
        )
        # Passes of equal tiles share what depends on tiles alone.
        of_tiles: dict[int, tuple[FloatArray, FloatArray, Cells]] = {}
        found: list[FloatArray] = []
        for tile, flops_per_pair, surface, square in passes:
            if tile not in of_tiles:
                pairs = tile_pairs(rows, keys, tile_rows=tile, sliding=sliding)
                tiled = _tiled(np.minimum(rows, sliding) if sliding else rows, tile)
                work = np.where(q > 0, pairs * scale, 0.0)
                of_tiles[tile] = work, tiled, surface.cells(tiled, capped)
            work, tiled, cells = of_tiles[tile]
            rates = surface.read(cells)
            if square is not None:
                rates = np.where(is_square, np.maximum(square.at(tiled), rates), rates)
            # FLOPs / (TFLOP/s) is 1e-12 s, hence 1e-3 for ns.
            found.append(work * (flops_per_pair * 1e-3) / rates)
        return found[0], found[1]

    def calls_ns(
        self, q: FloatArray, kv: FloatArray, offsets: IntArray, *, num_heads: int, sliding: int = 0
    ) -> tuple[FloatArray, FloatArray]:
        """Forward and backward ns of each call in one layer without its segments, [num_calls].

        They never fall as a segment grows or is added. offsets, sliding: see `groups`, `times_ns`.
        """
        groups = self.groups(q, kv, offsets)
        forward = self.launch_forward_ns + self.group_forward_ns * groups.astype(np.float64)
        backward = self.launch_backward_ns + self.group_backward_ns * groups.astype(np.float64)
        if self.blocks is None:
            return forward, backward
        call = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
        most_q, most_kv = np.zeros(forward.shape), np.zeros(forward.shape)
        np.maximum.at(most_q, call, q)
        np.maximum.at(most_kv, call, np.where(q > 0, kv, 0.0))
        num_segments = np.bincount(call[q > 0], minlength=forward.size) * num_heads
        grid = self.blocks.ns(
            num_segments,
            most_q,
            most_kv,
            tile_rows=self.tile_rows,
            backward_tile_keys=self.backward_tile_keys,
            sliding=sliding,
        )
        return forward + grid[0], backward + grid[1]

    def groups(self, q: FloatArray, kv: FloatArray, offsets: IntArray) -> IntArray:
        """Groups of segments that each call computes one after the other, shape [num_calls].

        offsets: call i holds segments [offsets[i], offsets[i + 1]). Segments form a group if padded
        rows, padded keys and squareness are equal. 0 where groups cost nothing.
        """
        num_calls = offsets.size - 1
        if not self.group_forward_ns and not self.group_backward_ns:
            return np.zeros(num_calls, np.int64)
        call = np.repeat(np.arange(num_calls), np.diff(offsets))
        kinds = np.stack([call, q == kv, self.padded(q), self.padded(kv)])[:, q > 0]
        order = np.lexsort(kinds)
        is_new = (np.diff(kinds[:, order], axis=1, prepend=-1.0) != 0).any(0)
        return np.bincount(kinds[0, order][is_new].astype(np.int64), minlength=num_calls)

    def extrapolated(self, q: FloatArray, kv: FloatArray) -> BoolArray:
        """Mask of segments outside the surface, whose throughput is clamped."""
        rows, keys = _tiled(self.padded(q), self.tile_rows), self.padded(kv)
        is_outside = self.forward.outside(rows, keys)
        if self.reach is not None:
            axis = self.forward.axis0
            at = np.minimum(np.searchsorted(axis, rows), axis.size - 1)
            is_outside = is_outside | (keys > self.reach[at])
        if self.square_forward is not None:
            is_outside = np.where(q == kv, self.square_forward.outside(rows), is_outside)
        return is_outside & (q > 0)

    def padded(self, lengths: FloatArray) -> FloatArray:
        """Lengths rounded up to the next of padded_lengths."""
        if not self.padded_lengths:
            return lengths
        steps = np.array(self.padded_lengths, np.float64)
        i = np.minimum(np.searchsorted(steps, lengths), steps.size - 1)
        return np.where((lengths > 0) & (lengths <= steps[-1]), steps[i], lengths)


def _tiled(q: FloatArray, tile_rows: int) -> FloatArray:
    """Rows rounded up to whole tiles."""
    return np.ceil(q / tile_rows) * tile_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmCost:
    """Achieved TFLOP/s of matrix products over (tokens, weights); weights = in * out.

    backward: of both products, for the input's gradient and for the weight's.
    """

    forward: Surface
    backward: Surface
    provenance: Provenance


def _check_numbers(what: str, cost: "ElementwiseCost | HeadCost | LayerCost") -> None:
    """UserError for a number that is infinite or not above 0; a time (*_ns) may be 0."""
    for name in (f.name for f in fields(cost) if f.name not in ("op", "provenance")):
        value, is_time = getattr(cost, name), name.endswith("_ns")
        if not (0 < value < np.inf or (is_time and value == 0)):
            least = "at least" if is_time else "above"
            raise UserError(f"{what}: {name} = {value} must be {least} 0 and finite")


class Elementwise(StrEnum):
    NORM = "norm"
    ROTARY = "rotary"
    SWIGLU = "swiglu"
    RESIDUAL = "residual"
    EMBEDDING = "embedding"
    HEAD_NORM = "head_norm"


OPTIONAL = frozenset({Elementwise.HEAD_NORM})
"""Operators that a profile may leave out: older ones, and those of models without norms of heads,
whose `head_norm` is priced as `norm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCost:
    """An operator bound by memory: bytes a second and ns a call. Bytes are those that
    `wlb.cost.flops.elementwise_values` counts; additional traffic lowers bytes_per_s.
    """

    op: Elementwise
    forward_bytes_per_s: float
    backward_bytes_per_s: float
    forward_call_ns: int
    backward_call_ns: int
    provenance: Provenance

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", Elementwise(self.op))
        _check_numbers(self.op, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCost:
    """Output head with cross-entropy: TFLOP/s of its three matrix products, which all run in the
    forward pass (`wlb.model.loss`); backward scales their results and is priced in bytes.
    """

    tflops: float
    backward_bytes_per_s: float
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_numbers("head", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """A decoder layer's time relative to its operators alone. *_factor: on their sum (fresh memory,
    colder caches). *_call_ns: constant a pass (modules, autograd).
    """

    forward_factor: float
    backward_factor: float
    forward_call_ns: int
    backward_call_ns: int
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_numbers("layer", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """alpha + bytes on the wire / bus bandwidth, with nccl-tests' conventions: sizes are of the
    whole buffer (gathered, or before scattering).
    """

    op: Collective
    scope: Scope
    alpha_ns: int
    bytes_per_s: float
    provenance: Provenance

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", Collective(self.op))
        object.__setattr__(self, "scope", Scope(self.scope))
        if not (self.bytes_per_s > 0 and 0 <= self.alpha_ns < np.inf):
            raise UserError(f"alpha_ns = {self.alpha_ns}, bytes_per_s = {self.bytes_per_s}")

    def wire_ns(self, size_bytes: float, *, num_ranks: int) -> float:
        """Bandwidth term only; 0 in a group of one."""
        return size_bytes * self.op.wire_share(num_ranks) / self.bytes_per_s * 1e9

    def time_ns(self, size_bytes: float, *, num_ranks: int) -> float:
        return self.alpha_ns + self.wire_ns(size_bytes, num_ranks=num_ranks) if num_ranks > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelProfile:
    """All tables of one device and dtype; runs log its `name`."""

    name: str  # by which users choose it
    device: str  # that was measured
    dtype: str  # that was measured
    ranks_per_node: int  # larger groups use collectives between nodes
    provenance: Provenance  # source of the numbers
    attention: tuple[AttentionTable, ...]  # by kernel and head layout; the first is the default
    gemm: GemmCost  # matrix products
    elementwise: tuple[ElementwiseCost, ...]  # each operator once
    layer: LayerCost  # what a decoder layer takes besides
    head: HeadCost  # output head
    collectives: tuple[CollectiveCost, ...]  # one for each operation and scope
    power_limit_w: float = 0.0  # of the GPU, in W; 0 where it is unknown

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UserError(f"dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(f"ranks_per_node = {self.ranks_per_node!r} must be at least 1")
        if not self.attention:
            raise UserError(f"profile {self.name!r} has no attention table")
        found = [cost.op for cost in self.elementwise]
        needed = [op for op in Elementwise if op not in OPTIONAL or op in found]
        if sorted(found) != sorted(needed):
            raise UserError(
                f"profile {self.name!r} must have each element-wise operator once "
                f"({', '.join(needed)}), not {', '.join(found)}"
            )
        have = {(c.op, c.scope) for c in self.collectives}
        pairs = product(Collective, Scope)
        missing = [f"{op} {scope}" for op, scope in pairs if (op, scope) not in have]
        if missing:
            raise UserError(f"profile {self.name!r} lacks collectives: {', '.join(missing)}")

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of all attention kernels in the profile."""
        return tuple(sorted({name for table in self.attention for name in table.backends}))

    def table(
        self,
        *,
        backend: str | None = None,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
    ) -> AttentionTable:
        """The table of `backend` (None = the profile's first kernel) nearest in head layout.

        num_kv_heads: None = num_heads. Nearest: by head_dim, then query heads a key head, then
        number of heads. Raises UserError where no table has that name.
        """
        group = num_heads / (num_kv_heads or num_heads)
        name = backend or self.attention[0].backends[0]
        tables = [t for t in self.attention if name in t.backends]
        if not tables:
            raise UserError(
                f"profile {self.name!r} has no attention kernel {name!r} (it has "
                f"{', '.join(self.backends)}); measure one or choose another profile"
            )
        return min(
            tables,
            key=lambda t: (
                _ratio(t.head_dim, head_dim),
                _ratio(t.num_heads / t.num_kv_heads, group),
                _ratio(t.num_heads, num_heads),
            ),
        )

    def elementwise_of(self, op: Elementwise) -> ElementwiseCost:
        """The cost of one element-wise operation; for head_norm that of norm if it is left out."""
        return elementwise_of(self.elementwise, op)

    def collective(
        self, op: Collective, *, span_ranks: int, num_ranks: int | None = None
    ) -> CollectiveCost:
        """Cost of `op` in a group of `num_ranks` evenly spread over `span_ranks` consecutive ranks
        (default: all of them).

        Between nodes every rank has its own link and rings use those of all members, as NCCL does:
        k members a node have k times the bandwidth of one, at most that inside a node.
        """
        by_scope = {c.scope: c for c in self.collectives if c.op == op}
        inside, between = by_scope[Scope.INTRA_NODE], by_scope[Scope.INTER_NODE]
        if span_ranks <= self.ranks_per_node:
            return inside
        members = (num_ranks or span_ranks) * self.ranks_per_node // span_ranks
        if members <= 1 or op == Collective.P2P:
            return between
        most = max(inside.bytes_per_s, between.bytes_per_s)
        return replace(between, bytes_per_s=min(most, members * between.bytes_per_s))


def elementwise_of(costs: Sequence[ElementwiseCost], op: Elementwise) -> ElementwiseCost:
    """`KernelProfile.elementwise_of`, before there is a profile."""
    found = {cost.op: cost for cost in costs}
    return found[op] if op in found or op not in OPTIONAL else found[Elementwise.NORM]


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)
