"""KernelProfile: how fast one device runs the parts of a training step.

Each part of a profile says how its numbers were obtained: measured on the named device, published
by a named source, or assumed. Forward and backward have separate numbers. For each attention kernel
and head layout there is a table of TFLOP/s by (query rows, keys) of a segment, where FLOPs are
counted in whole tiles (Section 5.3). `profile_file.py` reads and writes profiles;
kernels_profile/README.md describes the JSON format.
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
        """Return the bytes that one rank sends in this operation, over those of the whole buffer.

        Args:
            num_ranks: Members of the group.
        """
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
"""Bytes of one value of the head's gradient, and of dK and dV between CP ranks: all are float32."""
BACKWARD_TILES = ("backward_tile_rows", "backward_tile_keys")
"""Fields of `AttentionTable` that a profile's JSON may leave out if both equal `tile_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the numbers of one part of a profile come from."""

    kind: ProvenanceKind  # how the numbers were obtained
    source: str  # who measured or published the numbers
    device: str = ""  # device on which the numbers were measured
    backend: str = ""  # attention kernel or communication library that was measured
    dtype: str = ""  # data type of the measurement
    date: str = ""  # day of the measurement
    commit: str = ""  # commit of the program that measured the numbers
    command: str = ""  # command that measured the numbers
    # Relative errors of fitted numbers on data that the fit did not use: (name, fraction).
    residuals: tuple[tuple[str, float], ...] = ()
    # Versions, sizes and conditions of the measurement, as plain JSON values.
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", ProvenanceKind(self.kind))
        object.__setattr__(self, "residuals", tuple((k, float(v)) for k, v in self.residuals))
        if not self.source:
            raise UserError(
                "provenance.source is empty; set it to the person, program or publication that "
                "the numbers come from"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The time of a varlen attention call beyond the sum of its segments.

    A call launches a grid of thread blocks. For each segment and head the grid has as many blocks
    as the longest segment has tiles (tiles of rows in forward, of keys in backward). Blocks beyond
    the end of a shorter segment do nothing, but take time. At the end the last block of the longest
    segment runs while the others are idle: the tail.
    """

    # Time of one block of forward's grid, which has segments * heads * (row tiles of the longest
    # segment) blocks.
    forward_ns: float
    # Time of one block of backward's grid, which has segments * heads * (key tiles of the longest
    # segment) blocks.
    backward_ns: float
    # Time that a forward call's last block runs alone (the tail), in ns for each key that it reads.
    tail_forward_ns: float
    # The same in backward, in ns for each query row that the last block reads.
    tail_backward_ns: float

    def __post_init__(self) -> None:
        costs = [getattr(self, f.name) for f in fields(self)]
        if not all(0 <= cost < np.inf for cost in costs):
            raise UserError(
                f"attention.blocks has the times {costs} ns, but each must be finite and at least "
                "0; measure the profile again"
            )

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
        """Return how many ns each call takes in addition to the sum of its segments' times.

        The calls are varlen attention calls of one layer.

        Args:
            num_segments: Number of segments times number of heads of each call, shape [num_calls].
            most_q: Query rows of each call's segment with the most rows, shape [num_calls].
            most_kv: Keys of each call's segment with the most keys, shape [num_calls].
            tile_rows: Query rows that one thread block computes in forward.
            backward_tile_keys: Keys that one thread block computes in backward.
            sliding: Size of the sliding window in keys; 0 means no window.

        Returns:
            Forward and backward ns, shape [num_calls] each.
        """
        tiles_q, tiles_kv = np.ceil(most_q / tile_rows), np.ceil(most_kv / backward_tile_keys)
        # With a window, a forward block reads only the keys in the windows of its rows, and a
        # backward block only the rows whose windows contain its keys.
        keys = sliding + tile_rows if sliding else np.inf
        rows = sliding + backward_tile_keys if sliding else np.inf
        return (
            num_segments * tiles_q * self.forward_ns
            + np.minimum(most_kv, keys) * self.tail_forward_ns,
            num_segments * tiles_kv * self.backward_ns
            + np.minimum(most_q, rows) * self.tail_backward_ns,
        )

    def times(self, forward: float, backward: float) -> "BlockCost":
        """Return these costs with forward times multiplied by `forward`, backward by `backward`."""
        return BlockCost(
            forward_ns=self.forward_ns * forward,
            backward_ns=self.backward_ns * backward,
            tail_forward_ns=self.tail_forward_ns * forward,
            tail_backward_ns=self.tail_backward_ns * backward,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """Measured throughput of one attention kernel with one number and size of heads.

    Throughput is in TFLOP/s, where FLOPs are counted in whole tiles.
    """

    backends: tuple[str, ...]
    """Values of `kernels.attention` that select this kernel."""
    num_heads: int
    """Query heads of the measured calls."""
    num_kv_heads: int
    """KV heads of the measured calls."""
    head_dim: int
    """Size of a head."""
    tile_rows: int
    """Query rows of a forward tile; 1 for kernels without tiles."""
    launch_forward_ns: int
    """Forward time of launching a varlen call, which is added to its segments' times."""
    launch_backward_ns: int
    """Backward time of launching a varlen call, which is added to its segments' times."""
    forward: Surface
    """Forward throughput of a segment by (query rows, keys)."""
    backward: Surface
    """Backward throughput of a segment by (query rows, keys)."""
    heads: FloatArray
    """Numbers of query heads on a rank at which throughput was measured, rising."""
    heads_efficiency: FloatArray
    """Throughput with each number of heads in `heads`, relative to `forward` and `backward`."""
    provenance: Provenance
    """Where the numbers come from."""
    backward_tile_rows: int = 0
    """Query rows of a backward tile; 0 becomes `tile_rows`."""
    backward_tile_keys: int = 0
    """Keys of a thread block in backward; 0 becomes `tile_rows`. Only `blocks` uses it."""
    padded_lengths: tuple[int, ...] = ()
    """Lengths, rising, to which SDPA pads rows and keys so that it can batch similar segments."""
    group_forward_ns: int = 0
    """Forward time of launching each group of segments that SDPA batches together."""
    group_backward_ns: int = 0
    """Backward time of launching each group of segments that SDPA batches together."""
    square_forward: Curve | None = None
    """Forward throughput of segments with as many query rows as keys, which are whole documents.

    It is used for sizes at which it is above `forward`. None if there was no separate measurement.
    """
    square_backward: Curve | None = None
    """Backward throughput of segments with as many query rows as keys; see `square_forward`."""
    reach: FloatArray | None = None
    """Most keys that were measured with each number of query rows of the surfaces, shape [rows].

    None means that all combinations were measured.
    """
    blocks: BlockCost | None = None
    """Time of a call's grid of thread blocks, which is added to the times of its segments.

    None if it was not measured.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "padded_lengths", tuple(self.padded_lengths))
        self._check_calls()
        for name in ("heads", "heads_efficiency"):
            array = np.array(getattr(self, name), np.float64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if self.heads.shape != self.heads_efficiency.shape or not (np.diff(self.heads) > 0).all():
            raise UserError(
                f"attention.heads = {self.heads.tolist()} must increase and have as many entries "
                f"as attention.heads_efficiency = {self.heads_efficiency.tolist()}; measure the "
                "profile again"
            )
        entries = np.concatenate([self.heads, self.heads_efficiency])
        if not entries.size or not np.all((entries > 0) & (entries < np.inf)):
            raise UserError(
                f"attention.heads = {self.heads.tolist()} and attention.heads_efficiency = "
                f"{self.heads_efficiency.tolist()} must have at least one entry each, and all "
                "entries must be finite and above 0; measure the profile again"
            )
        if not self.backends:
            raise UserError(
                "attention.backends is empty; give the names of the attention kernels that this "
                "table measures"
            )
        self._check_surfaces()

    def _check_surfaces(self) -> None:
        if (self.square_forward is None) != (self.square_backward is None):
            raise UserError(
                "a profile of attention has only one of square_forward and square_backward; give "
                "both, or leave out both"
            )
        if self.reach is not None:
            object.__setattr__(self, "reach", np.array(self.reach, np.float64))
            if self.reach.shape != self.forward.axis0.shape:
                raise UserError(
                    f"attention.reach has shape {self.reach.shape}, but must have "
                    f"{self.forward.axis0.size} entries, one for each number of query rows on the "
                    "first axis of attention.forward; measure the profile again"
                )
        for axis in ("axis0", "axis1"):
            if not np.array_equal(getattr(self.forward, axis), getattr(self.backward, axis)):
                raise UserError(
                    f"attention.forward and attention.backward have different sizes along {axis}; "
                    "measure both passes at the same sizes"
                )

    def _check_calls(self) -> None:
        if isinstance(self.backends, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(
                f"attention.backends = {self.backends!r} must be a list of kernel names, not a "
                "string; put the name into a list"
            )
        object.__setattr__(self, "backends", tuple(self.backends))
        for name in BACKWARD_TILES:
            if getattr(self, name) == 0:
                object.__setattr__(self, name, self.tile_rows)
        for name in ("num_heads", "num_kv_heads", "head_dim", "tile_rows", *BACKWARD_TILES):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"attention.{name} = {value!r} must be a whole number of at least 1; measure "
                    "the profile again"
                )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"attention.num_heads = {self.num_heads} must be a multiple of "
                f"attention.num_kv_heads = {self.num_kv_heads}; correct the profile"
            )
        if any(a >= b for a, b in pairwise((0, *self.padded_lengths))):
            raise UserError(
                f"the lengths attention.padded_lengths = {self.padded_lengths} must be above 0 and "
                "increase; sort them and remove duplicates"
            )
        for name in ("launch", "group"):
            costs = [getattr(self, f"{name}_{p}_ns") for p in ("forward", "backward")]
            if not all(0 <= cost < np.inf for cost in costs):
                raise UserError(
                    f"attention.{name}_forward_ns and attention.{name}_backward_ns are {costs}, "
                    "but both must be finite and at least 0; measure the profile again"
                )

    def efficiency(self, num_heads: int) -> float:
        """Return the factor by which `num_heads` query heads change the throughput of the kernel.

        The factor is 1 for the number of heads with which `forward` and `backward`, the tables of
        throughput, were measured. It is interpolated between measured numbers of heads, and
        constant outside their range. Only plain arithmetic is used, so that all CPUs compute equal
        bits.
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
        """Return forward and backward ns of each segment in one layer, without launch times.

        Query rows are rounded up to whole tiles. A segment smaller than all measured ones costs as
        much as the smallest measured one. A segment without query rows costs nothing.

        Args:
            q: Query rows of each segment, shape [n].
            kv: Keys of each segment, shape [n].
            num_heads: Query heads on the rank.
            head_dim: Size of a head.
            sliding: Latest keys that a query sees; 0 means all. Kernels were not measured with
                windows. So the pairs inside the windows are counted, and they are priced with the
                throughput that was measured without a window for at most this many keys.
        """
        rows, keys = self.forward.floor(self.padded(q), self.padded(kv))
        scale = head_dim * num_heads / self.efficiency(num_heads)
        # Whole documents (rows = keys) may have a curve of throughput of their own. Below, take the
        # larger of this curve and the surface, because a curve below the surface is noise.
        is_square = (q == kv) & ((kv <= sliding) if sliding else True)
        capped = np.minimum(keys, sliding) if sliding else keys
        passes = (
            (self.tile_rows, FORWARD_FLOPS_PER_PAIR, self.forward, self.square_forward),
            (self.backward_tile_rows, BACKWARD_FLOPS_PER_PAIR, self.backward, self.square_backward),
        )
        # Both passes often have equal tiles. Compute what depends only on tiles once for both.
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
            # FLOPs / (TFLOP/s) has the unit 1e-12 s, and the factor 1e-3 converts it to ns.
            found.append(work * (flops_per_pair * 1e-3) / rates)
        return found[0], found[1]

    def calls_ns(
        self, q: FloatArray, kv: FloatArray, offsets: IntArray, *, num_heads: int, sliding: int = 0
    ) -> tuple[FloatArray, FloatArray]:
        """Return how many ns each varlen call of a layer takes in addition to its segments' times.

        The additional time is that of launching the call, of launching each group of segments that
        SDPA batches (see `groups`), and of the call's grid of thread blocks (see `BlockCost`). It
        never falls if a call gets a longer segment or one more segment.

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

        A kernel for segments of equal size (SDPA) computes segments together if they have equally
        many padded rows and equally many padded keys. Segments with as many rows as keys are not
        grouped with others.

        Args:
            q: Query rows of each segment, shape [n].
            kv: Keys of each segment, shape [n].
            offsets: Call i computes segments [offsets[i], offsets[i + 1]); shape [num_calls + 1].

        Returns:
            Number of groups of each call, shape [num_calls]; 0 if groups cost nothing.
        """
        num_calls = offsets.size - 1
        if not self.group_forward_ns and not self.group_backward_ns:
            return np.zeros(num_calls, np.int64)
        call = np.repeat(np.arange(num_calls), np.diff(offsets))
        kinds = np.stack([call, q == kv, self.padded(q), self.padded(kv)])[:, q > 0]
        # Sort segments so that those of one call and group are neighbours, then count how often the
        # group changes.
        order = np.lexsort(kinds)
        is_new = (np.diff(kinds[:, order], axis=1, prepend=-1.0) != 0).any(0)
        return np.bincount(kinds[0, order][is_new].astype(np.int64), minlength=num_calls)

    def extrapolated(self, q: FloatArray, kv: FloatArray) -> BoolArray:
        """Return which segments are outside the measured sizes.

        Such segments are priced with the throughput of the nearest measured size.

        Args:
            q: Query rows of each segment, shape [n].
            kv: Keys of each segment, shape [n].

        Returns:
            A mask of shape [n].
        """
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
        """Return lengths rounded up to the next entry of `padded_lengths`.

        A length above the last entry is returned unchanged.
        """
        if not self.padded_lengths:
            return lengths
        steps = np.array(self.padded_lengths, np.float64)
        i = np.minimum(np.searchsorted(steps, lengths), steps.size - 1)
        return np.where((lengths > 0) & (lengths <= steps[-1]), steps[i], lengths)


def _tiled(q: FloatArray, tile_rows: int) -> FloatArray:
    """Return numbers of query rows rounded up to a multiple of `tile_rows`."""
    return np.ceil(q / tile_rows) * tile_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GemmCost:
    """TFLOP/s of matrix products by (tokens, weights), where weights = inputs * outputs."""

    forward: Surface  # throughput of the forward product
    backward: Surface  # throughput of the products for input gradient and weight gradient together
    provenance: Provenance  # where the numbers come from


def _check_numbers(what: str, cost: "ElementwiseCost | HeadCost | LayerCost") -> None:
    """Raise UserError unless all numbers of `cost` are finite and above 0; times may be 0.

    Args:
        what: Name of the cost in the error message.
        cost: The cost. Fields that end in `_ns` are times.
    """
    for name in (f.name for f in fields(cost) if f.name not in ("op", "provenance")):
        value, is_time = getattr(cost, name), name.endswith("_ns")
        if not (0 < value < np.inf or (is_time and value == 0)):
            least = "at least" if is_time else "above"
            raise UserError(
                f"{what}: {name} = {value} must be finite and {least} 0; measure the profile again"
            )


class Elementwise(StrEnum):
    """Element-wise operators of a model; HEAD_NORM normalises each head of Q and K (QK norm)."""

    NORM = "norm"
    ROTARY = "rotary"
    SWIGLU = "swiglu"
    RESIDUAL = "residual"
    EMBEDDING = "embedding"
    HEAD_NORM = "head_norm"


OPTIONAL = frozenset({Elementwise.HEAD_NORM})
"""Operators that a profile may leave out.

Without `head_norm`, the price of `norm` is used. Older profiles lack it, and so do profiles of
models without QK norm.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCost:
    """Cost of a memory-bound operator: bytes / throughput, plus a constant time for each call.

    The bytes are those that a fused kernel moves (`wlb.cost.flops.elementwise_values`). A measured
    operator that moves more bytes gets a lower throughput: the same bytes over a longer time.
    """

    op: Elementwise
    forward_bytes_per_s: float  # throughput in forward
    backward_bytes_per_s: float  # throughput in backward
    forward_call_ns: int  # constant time of each forward call
    backward_call_ns: int  # constant time of each backward call
    provenance: Provenance  # where the numbers come from

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
    provenance: Provenance  # where the numbers come from

    def __post_init__(self) -> None:
        _check_numbers("head", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Time of a decoder layer, compared with the sum of the times of its operators run alone."""

    # Forward time of the layer, divided by the sum of its operators' times. The factor is above 1,
    # because the operators of a layer use newly allocated memory and find less data in caches.
    forward_factor: float
    backward_factor: float  # backward time of the layer, divided by the sum of its operators' times
    forward_call_ns: int  # constant time of a layer's forward pass (modules, autograd)
    backward_call_ns: int  # constant time of a layer's backward pass
    provenance: Provenance  # where the numbers come from

    def __post_init__(self) -> None:
        _check_numbers("layer", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Cost of a collective: latency + bytes that a rank sends / bandwidth.

    Sizes and bandwidths follow nccl-tests: the size is that of the whole buffer (after gathering,
    or before scattering), and the bandwidth is the bus bandwidth.
    """

    op: Collective
    scope: Scope  # whether the group is inside a node
    alpha_ns: int  # latency
    bytes_per_s: float  # bus bandwidth
    provenance: Provenance  # where the numbers come from

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", Collective(self.op))
        object.__setattr__(self, "scope", Scope(self.scope))
        if not (self.bytes_per_s > 0 and 0 <= self.alpha_ns < np.inf):
            raise UserError(
                f"collective {self.op}: alpha_ns = {self.alpha_ns} must be finite and at least 0, "
                f"and bytes_per_s = {self.bytes_per_s} must be above 0; measure the profile again"
            )

    def wire_ns(self, size_bytes: float, *, num_ranks: int) -> float:
        """Return the transfer time of the collective in ns, without latency; 0 for one rank.

        Args:
            size_bytes: Bytes of the whole buffer.
            num_ranks: Members of the group.
        """
        return size_bytes * self.op.wire_share(num_ranks) / self.bytes_per_s * 1e9

    def time_ns(self, size_bytes: float, *, num_ranks: int) -> float:
        """Return the time of the collective, latency plus transfer, in ns; 0 for one rank.

        Args:
            size_bytes: Bytes of the whole buffer.
            num_ranks: Members of the group.
        """
        return self.alpha_ns + self.wire_ns(size_bytes, num_ranks=num_ranks) if num_ranks > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelProfile:
    """All measured prices of one device and data type."""

    name: str  # name by which users choose the profile; a run writes it to its log
    device: str  # name of the measured device
    dtype: str  # data type of the measurement
    ranks_per_node: int  # ranks of a node; larger groups use collectives between nodes
    provenance: Provenance  # where the numbers come from
    # One table for each kernel and head layout. The kernel of the first table is the default.
    attention: tuple[AttentionTable, ...]
    gemm: GemmCost  # cost of matrix products
    elementwise: tuple[ElementwiseCost, ...]  # cost of each element-wise operator, in any order
    layer: LayerCost  # time of a decoder layer relative to its operators
    head: HeadCost  # cost of output head and loss
    collectives: tuple[CollectiveCost, ...]  # one cost for each operation and scope
    power_limit_w: float = 0.0  # power limit of the GPU in W; 0 if unknown

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UserError(
                f"dtype = {self.dtype!r} must be one of {', '.join(DTYPE_BYTES)}; measure the "
                "profile again with one of these data types"
            )
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(
                f"ranks_per_node = {self.ranks_per_node!r} must be a whole number of at least 1; "
                "set it to the number of GPUs of a node"
            )
        if not self.attention:
            raise UserError(
                f"kernel profile {self.name!r} has no measurements of attention; measure them with "
                "`wlb profile`, or choose another profile"
            )
        found = [cost.op for cost in self.elementwise]
        needed = [op for op in Elementwise if op not in OPTIONAL or op in found]
        if sorted(found) != sorted(needed):
            raise UserError(
                f"kernel profile {self.name!r} must have each of these element-wise operators "
                f"once: {', '.join(needed)}; it has {', '.join(found) or 'none'}. Measure the "
                "profile again with `wlb profile`"
            )
        have = {(c.op, c.scope) for c in self.collectives}
        pairs = product(Collective, Scope)
        missing = [f"{op} {scope}" for op, scope in pairs if (op, scope) not in have]
        if missing:
            raise UserError(
                f"kernel profile {self.name!r} has no measurements of these collectives: "
                f"{', '.join(missing)}; measure them with `wlb profile`, or choose another profile"
            )

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
        """Return the attention table whose head layout is most similar to the given one.

        The size of a head counts most, then the query heads per KV head, then the number of heads.

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
                f"kernel profile {self.name!r} has no measurements of the attention kernel "
                f"{name!r}, only of {', '.join(self.backends)}; measure the kernel with `wlb "
                "profile`, or choose another profile"
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
        """Return the cost of `op`; if the profile lacks `head_norm`, return the cost of `norm`."""
        return elementwise_of(self.elementwise, op)

    def collective(
        self, op: Collective, *, span_ranks: int, num_ranks: int | None = None
    ) -> CollectiveCost:
        """Return the cost of a collective in a group of ranks.

        Every rank has a network link to other nodes, and NCCL's rings use the links of all members.
        So with k members on a node the bandwidth is k times the bandwidth of one link, but at most
        the bandwidth inside a node.

        Args:
            op: The collective.
            span_ranks: Number of consecutive ranks over which the members of the group are spread.
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
    """Return the cost of operator `op`; if `costs` lacks `head_norm`, return the cost of `norm`."""
    found = {cost.op: cost for cost in costs}
    return found[op] if op in found or op not in OPTIONAL else found[Elementwise.NORM]


def _ratio(a: float, b: float) -> float:
    return max(a / b, b / a)
