"""KernelProfile: how fast one device runs the parts of a training step.

Each block of numbers carries its provenance: measured on the named device, published by a named
source, or assumed. Forward and backward have separate numbers. Attention is a table for each kernel
and head layout: the TFLOP/s achieved over (query rows, keys), where FLOPs are counted in whole
tiles (Section 5.3). `profile_file.py` reads and writes profiles; kernels_profile/README.md
describes the JSON format.
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
    """How the numbers of a profile were obtained."""

    MEASURED = "measured"
    PUBLISHED = "published"
    ASSUMED = "assumed"


class Collective(StrEnum):
    """A collective operation, or a point-to-point transfer between pipeline ranks."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    P2P = "p2p"

    def wire_share(self, num_ranks: int) -> float:
        """Return the bytes that one rank sends over the bytes of the whole buffer."""
        match self:
            case Collective.P2P:
                return 1.0
            case Collective.ALL_REDUCE:
                return 2 * (num_ranks - 1) / num_ranks
            case _:
                return (num_ranks - 1) / num_ranks


class Scope(StrEnum):
    """Whether the ranks of a group share a node."""

    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of one value, by data type."""
GRADIENT_BYTES = 4
"""Bytes of one gradient value: the head's gradient, dK and dV are float32 while they travel."""
BACKWARD_TILES = ("backward_tile_rows", "backward_tile_keys")
"""Fields of an `AttentionTable` that a profile may leave out if both equal `tile_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where numbers come from."""

    kind: ProvenanceKind  # how the numbers were obtained
    source: str  # who measured or published them
    device: str = ""
    backend: str = ""
    dtype: str = ""
    date: str = ""
    commit: str = ""
    command: str = ""
    residuals: tuple[tuple[str, float], ...] = ()  # held-out errors of a fit: (name, fraction)
    # versions, sizes and conditions of the measurement, as plain JSON values
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", ProvenanceKind(self.kind))
        object.__setattr__(self, "residuals", tuple((k, float(v)) for k, v in self.residuals))
        if not self.source:
            raise UserError("provenance.source is empty; name who measured or published it")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The time of a varlen attention call beyond the sum of its segments.

    A call launches a grid of thread blocks. For each segment and head the grid has as many blocks
    as the longest segment has tiles (tiles of rows in forward, of keys in backward). Blocks beyond
    the end of a shorter segment do nothing, but take time. At the end the last block of the longest
    segment runs while the others are idle: the tail.
    """

    # One block in forward; the grid has segments * heads * (most tiles of rows) blocks.
    forward_ns: float
    # One block in backward; the grid has segments * heads * (most tiles of keys) blocks.
    backward_ns: float
    tail_forward_ns: float  # tail, for each key that the longest block of forward reads
    tail_backward_ns: float  # tail, for each query row that the longest block of backward reads

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
        """Return forward and backward ns of calls in one layer, shape [num_calls] each.

        Args:
            num_segments: Segments times heads of each call.
            most_q: Query rows of the call's segment with most rows.
            most_kv: Keys of the call's segment with most keys.
            tile_rows: Query rows of a forward block.
            backward_tile_keys: Keys of a backward block.
            sliding: Latest keys that a query sees; 0 means all.
        """
        tiles_q, tiles_kv = np.ceil(most_q / tile_rows), np.ceil(most_kv / backward_tile_keys)
        # With a window, a tile of rows reads the keys in its rows' windows; a tile of keys reads
        # the rows whose windows contain them.
        keys = sliding + tile_rows if sliding else np.inf
        rows = sliding + backward_tile_keys if sliding else np.inf
        return (
            num_segments * tiles_q * self.forward_ns
            + np.minimum(most_kv, keys) * self.tail_forward_ns,
            num_segments * tiles_kv * self.backward_ns
            + np.minimum(most_q, rows) * self.tail_backward_ns,
        )

    def times(self, forward: float, backward: float) -> "BlockCost":
        """Return these costs with each pass multiplied by a factor."""
        return BlockCost(
            forward_ns=self.forward_ns * forward,
            backward_ns=self.backward_ns * backward,
            tail_forward_ns=self.tail_forward_ns * forward,
            tail_backward_ns=self.tail_backward_ns * backward,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """One attention kernel at one head layout.

    Throughput is in TFLOP/s, where FLOPs are counted in whole tiles.
    """

    backends: tuple[str, ...]
    """Names of the kernel, as in `kernels.attention`."""
    num_heads: int
    """Query heads of the measured calls."""
    num_kv_heads: int
    """KV heads of the measured calls."""
    head_dim: int
    """Size of a head."""
    tile_rows: int
    """Query rows of a forward tile; 1 for kernels without tiles."""
    launch_forward_ns: int
    """Forward time of a varlen call besides its segments."""
    launch_backward_ns: int
    """Backward time of a varlen call besides its segments."""
    forward: Surface
    """Forward throughput over (query rows, keys)."""
    backward: Surface
    """Backward throughput over (query rows, keys)."""
    heads: FloatArray
    """Measured numbers of heads on a rank, rising."""
    heads_efficiency: FloatArray
    """Throughput at each number in `heads`, relative to the surfaces."""
    provenance: Provenance
    """Where the numbers come from."""
    backward_tile_rows: int = 0
    """Query rows of a backward tile; 0 becomes `tile_rows`."""
    backward_tile_keys: int = 0
    """Keys of a backward block, which `blocks` needs; 0 becomes `tile_rows`."""
    padded_lengths: tuple[int, ...] = ()
    """Lengths to which a kernel that groups similar segments (SDPA) pads rows and keys; rising."""
    group_forward_ns: int = 0
    """Forward time of each group of segments (see `groups`)."""
    group_backward_ns: int = 0
    """Backward time of each group of segments."""
    square_forward: Curve | None = None
    """Forward throughput of segments whose rows equal their keys, i.e. whole documents.

    None if they were not measured separately. It is used where it exceeds the surface.
    """
    square_backward: Curve | None = None
    """Backward throughput of segments whose rows equal their keys; see `square_forward`."""
    reach: FloatArray | None = None
    """Most keys that were measured for each row of the surface, shape [rows]; None: all keys."""
    blocks: BlockCost | None = None
    """Time of a call's grid of thread blocks; None if not measured."""

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
            raise UserError("give both of square_forward and square_backward, or neither")
        if self.reach is not None:
            object.__setattr__(self, "reach", np.array(self.reach, np.float64))
            if self.reach.shape != self.forward.axis0.shape:
                raise UserError(
                    f"reach has shape {self.reach.shape}; it must have one number for each row "
                    f"of the surface"
                )
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
        """Return the relative throughput with `num_heads` query heads on a rank.

        It is constant outside the table. Plain arithmetic gives equal bits on all CPUs.
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
        """Return forward and backward ns of each segment in one layer, without launches and groups.

        All lengths within one tile cost the same. A segment smaller than the measured grid costs as
        much as the smallest one in it. A segment without rows costs nothing.

        Args:
            q: Query rows of each segment, shape [n].
            kv: Keys of each segment, shape [n].
            num_heads: Query heads on the rank.
            head_dim: Size of a head.
            sliding: Latest keys that a query sees; 0 means all. Windows are not measured: the keys
                of a tile are counted, at the throughput of a segment that is no longer than the
                window.
        """
        rows, keys = self.forward.floor(self.padded(q), self.padded(kv))
        scale = head_dim * num_heads / self.efficiency(num_heads)
        # A whole document (rows = keys) is at least as fast as the surface says. A lower
        # measurement is noise.
        is_square = (q == kv) & ((kv <= sliding) if sliding else True)
        capped = np.minimum(keys, sliding) if sliding else keys
        passes = (
            (self.tile_rows, FORWARD_FLOPS_PER_PAIR, self.forward, self.square_forward),
            (self.backward_tile_rows, BACKWARD_FLOPS_PER_PAIR, self.backward, self.square_backward),
        )
        # Passes with equal tiles share the numbers that only depend on tiles.
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
        """Return forward and backward ns of each call in one layer besides its segments.

        The times never fall as a segment grows or is added.

        Args:
            q: Query rows of each segment, shape [n].
            kv: Keys of each segment, shape [n].
            offsets: Call i computes segments [offsets[i], offsets[i + 1]); shape [num_calls + 1].
            num_heads: Query heads on the rank.
            sliding: Latest keys that a query sees; 0 means all.
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
        """Count the groups of segments that each call computes one after the other.

        A kernel for segments of equal size (SDPA) computes segments together if their padded rows
        and padded keys are equal, and if they agree in whether rows = keys.

        Args:
            q: Query rows of each segment, shape [n].
            kv: Keys of each segment, shape [n].
            offsets: Call i computes segments [offsets[i], offsets[i + 1]); shape [num_calls + 1].

        Returns:
            Groups of each call, shape [num_calls]; 0 if groups cost nothing.
        """
        num_calls = offsets.size - 1
        if not self.group_forward_ns and not self.group_backward_ns:
            return np.zeros(num_calls, np.int64)
        call = np.repeat(np.arange(num_calls), np.diff(offsets))
        kinds = np.stack([call, q == kv, self.padded(q), self.padded(kv)])[:, q > 0]
        # Sort segments so that equal kinds of a call are neighbours, and count where the kind
        # changes.
        order = np.lexsort(kinds)
        is_new = (np.diff(kinds[:, order], axis=1, prepend=-1.0) != 0).any(0)
        return np.bincount(kinds[0, order][is_new].astype(np.int64), minlength=num_calls)

    def extrapolated(self, q: FloatArray, kv: FloatArray) -> BoolArray:
        """Return a mask of segments outside the measured surface; its edge prices them."""
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
        """Return lengths rounded up to the next of `padded_lengths`."""
        if not self.padded_lengths:
            return lengths
        steps = np.array(self.padded_lengths, np.float64)
        i = np.minimum(np.searchsorted(steps, lengths), steps.size - 1)
        return np.where((lengths > 0) & (lengths <= steps[-1]), steps[i], lengths)


def _tiled(q: FloatArray, tile_rows: int) -> FloatArray:
    """Return rows rounded up to whole tiles."""
    return np.ceil(q / tile_rows) * tile_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmCost:
    """TFLOP/s of matrix products over (tokens, weights), where weights = inputs * outputs."""

    forward: Surface
    backward: Surface  # both products: input gradient and weight gradient
    provenance: Provenance


def _check_numbers(what: str, cost: "ElementwiseCost | HeadCost | LayerCost") -> None:
    """Check that all numbers are finite and above 0; a time (`*_ns`) may be 0."""
    for name in (f.name for f in fields(cost) if f.name not in ("op", "provenance")):
        value, is_time = getattr(cost, name), name.endswith("_ns")
        if not (0 < value < np.inf or (is_time and value == 0)):
            least = "at least" if is_time else "above"
            raise UserError(f"{what}: {name} = {value} must be {least} 0 and finite")


class Elementwise(StrEnum):
    """Element-wise operators of a model. HEAD_NORM is the norm of each head of Q and K."""

    NORM = "norm"
    ROTARY = "rotary"
    SWIGLU = "swiglu"
    RESIDUAL = "residual"
    EMBEDDING = "embedding"
    HEAD_NORM = "head_norm"


OPTIONAL = frozenset({Elementwise.HEAD_NORM})
"""Operators that a profile may leave out.

`head_norm` is then priced as `norm`. Older profiles lack it, and so do profiles of models that do
not norm heads.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCost:
    """Cost of a memory-bound operator: bytes per second, and ns for each call.

    `wlb.cost.flops.elementwise_values` counts the bytes. If an operator moves more than that, its
    bytes_per_s is lower.
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
    """Cost of the output head with cross-entropy.

    All three matrix products run in the forward pass (`wlb.model.loss`). Backward only scales their
    results.
    """

    tflops: float  # throughput of the three matrix products
    backward_bytes_per_s: float  # throughput of scaling the results in backward
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_numbers("head", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """A decoder layer's time compared with the sum of its operators measured alone."""

    # layer over sum of operators; above 1 due to fresh memory and colder caches
    forward_factor: float
    backward_factor: float  # the same in backward
    forward_call_ns: int  # constant of a forward pass (modules, autograd)
    backward_call_ns: int  # the same in backward
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_numbers("layer", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Cost of a collective: alpha + bytes on the wire / bandwidth.

    Conventions are those of nccl-tests: bytes are those of the whole buffer (after gathering, or
    before scattering).
    """

    op: Collective
    scope: Scope
    alpha_ns: int  # latency
    bytes_per_s: float  # bus bandwidth
    provenance: Provenance

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", Collective(self.op))
        object.__setattr__(self, "scope", Scope(self.scope))
        if not (self.bytes_per_s > 0 and 0 <= self.alpha_ns < np.inf):
            raise UserError(
                f"{self.op}: alpha_ns = {self.alpha_ns} must be finite and at least 0, and "
                f"bytes_per_s = {self.bytes_per_s} above 0"
            )

    def wire_ns(self, size_bytes: float, *, num_ranks: int) -> float:
        """Return the time without latency; 0 in a group of one rank."""
        return size_bytes * self.op.wire_share(num_ranks) / self.bytes_per_s * 1e9

    def time_ns(self, size_bytes: float, *, num_ranks: int) -> float:
        """Return latency plus transfer time; 0 in a group of one rank."""
        return self.alpha_ns + self.wire_ns(size_bytes, num_ranks=num_ranks) if num_ranks > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelProfile:
    """All measured prices of one device and dtype."""

    name: str  # name by which users choose the profile; runs log it
    device: str  # the measured device
    dtype: str  # the measured data type
    ranks_per_node: int  # ranks of a node; larger groups use collectives between nodes
    provenance: Provenance  # where the numbers come from
    # one table per kernel and head layout; the first is the default
    attention: tuple[AttentionTable, ...]
    gemm: GemmCost  # matrix products
    elementwise: tuple[ElementwiseCost, ...]  # each operator once
    layer: LayerCost  # time of a decoder layer compared with its operators
    head: HeadCost  # output head and loss
    collectives: tuple[CollectiveCost, ...]  # one for each operation and scope
    power_limit_w: float = 0.0  # power limit of the GPU in W; 0 if unknown

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UserError(f"unknown dtype {self.dtype!r}; use one of {', '.join(DTYPE_BYTES)}")
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
        """Return the attention table with the most similar head layout.

        Similarity is compared by head_dim first, then by query heads per KV head, then by number of
        heads.

        Args:
            backend: Name of the kernel; None means the profile's first kernel.
            head_dim: Size of a head.
            num_heads: Query heads on the rank.
            num_kv_heads: KV heads on the rank; None means as many as query heads.

        Raises:
            UserError: The profile has no such kernel.
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
        """Return the cost of an element-wise operator; `norm` replaces a missing `head_norm`."""
        return elementwise_of(self.elementwise, op)

    def collective(
        self, op: Collective, *, span_ranks: int, num_ranks: int | None = None
    ) -> CollectiveCost:
        """Return the cost of `op` in a group of ranks.

        Between nodes every rank has its own link, and NCCL's rings use the links of all members. So
        with k members on a node the bandwidth is k times the bandwidth of one link, but at most the
        bandwidth inside a node.

        Args:
            op: The collective.
            span_ranks: Consecutive ranks over which the group is spread.
            num_ranks: Members of the group, evenly spread; None means all of `span_ranks`.
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
    """Do the same as `KernelProfile.elementwise_of`, where there is no profile yet."""
    found = {cost.op: cost for cost in costs}
    return found[op] if op in found or op not in OPTIONAL else found[Elementwise.NORM]


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)
