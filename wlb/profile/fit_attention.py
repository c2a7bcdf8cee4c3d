"""Fit an AttentionTable to measured calls, and report its errors on held-out calls.

1. Calls on tiny segments give the fixed cost of a call, and of a group of similar segments.
2. Grid points give throughput: FLOPs, rounded up to whole tiles, divided by the call's time without
   its fixed cost.
3. Robust least squares on random batches fits factors for short and for long segments (with and
   without keys before the first query), and corrects the fixed costs.
4. For kernels whose thread blocks compute tiles, step 3 also fits the cost of a call's grid of
   blocks (`BlockCost`). Steps 2 and 3 are then repeated with that cost subtracted.

The growth of throughput is limited so that predicted time never falls as segments grow. Errors are
those of the finished table on all held-out calls, predicted in the same way as in runs. The README
of this folder explains the steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from wlb.cost import (
    AttentionTable,
    BlockCost,
    Curve,
    Provenance,
    Surface,
    limit_curve_growth,
    limit_growth,
    tile_pairs,
)
from wlb.cost.protocol import BACKWARD_FLOPS_PER_PAIR, FORWARD_FLOPS_PER_PAIR
from wlb.plan import FloatArray, IntArray, UserError
from wlb.profile.attention import HeadLayout
from wlb.profile.tasks import Record, measured

PASSES = ("forward", "backward")
FLOPS = {"forward": FORWARD_FLOPS_PER_PAIR, "backward": BACKWARD_FLOPS_PER_PAIR}
LONG_ROWS = 256
"""Fewest queries of a segment that counts as long in the fit of factors."""
EQUAL_CALLS_WEIGHT = 0.3
"""Summed weight of all calls on equal segments, if all random batches together have weight 1."""
MOST_FACTOR = 2.0
"""Largest factor. Factors are clipped to [1 / MOST_FACTOR, MOST_FACTOR], with a note.

A factor outside this range means that grid points and random batches contradict each other, as
after a sweep on a busy machine."""

NUM_FACTORS_FROM = 4
"""Index of the first feature of a call that belongs to its segments.

The features before it are call, groups, blocks and tail (`_features`)."""
FIRST_BLOCK_NS = 0.1
"""Value from which the fit of the costs of a block and of the tail starts, in nanoseconds."""

Call = tuple[IntArray, IntArray]
"""Numbers of queries and of keys of a call's segments, shape [num_segments] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRecords:
    """A head layout, and the records of a sweep to which its attention table is fitted."""

    layout: HeadLayout
    records: Sequence[Record]  # all records of the sweep
    call_of: Callable[[Record], Call]  # returns the segments of a record's call

    def of(self, kind: str) -> list[Record]:
        """Return this layout's records of one kind of task, without tasks that failed."""
        mine = self.layout.name.items()
        return [r for r in measured(self.records, kind) if mine <= r.point.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutCall:
    """A measured call that the fit did not use, with its measured and predicted time."""

    kind: str  # "held_pair" (equal segments) or "held_batch" (segments of random lengths)
    label: Mapping[str, int]  # the whole numbers in `Record.point`, such as sizes of the call
    measured_ns: tuple[float, float]  # time of forward and of backward
    predicted_ns: tuple[float, float]  # time of forward and of backward


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedAttention:
    """A fitted table with its errors on held-out calls."""

    table: AttentionTable
    residuals: dict[str, float]  # relative errors by name, such as "held_batch_total_mape"
    notes: tuple[str, ...]  # sentences on what is missing or doubtful
    points: tuple[HeldOutCall, ...] = field(repr=False)  # the held-out calls


def fit_attention(
    attention: AttentionRecords, *, backends: tuple[str, ...], provenance: Provenance
) -> FittedAttention:
    """Fit an attention table to the records of one head layout, and measure its errors.

    Args:
        attention: Head layout and records.
        backends: Names of the kernels that the table is for.
        provenance: Provenance of the table, to which errors are added.

    Raises:
        UserError: If too little of the grid was measured.
    """
    table = _from_grid(attention, backends, provenance)
    fitted, notes = _fit_batches(attention, table, has_blocks=False)
    # Kernels that group similar segments have no grid of tiles, so blocks cost nothing. If there
    # are notes, the measured times cannot be trusted, and a fitted cost of blocks would hide that.
    if attention.layout.tiles.forward_rows > 1 and not notes:
        fitted, _ = _fit_batches(attention, table, has_blocks=True)
        table = _from_grid(attention, backends, provenance, blocks=fitted.blocks)
        fitted, notes = _fit_batches(attention, table, has_blocks=True)
    table = fitted
    table = replace(table, **_heads(attention))
    points = tuple(held_out(attention, table))
    residuals = errors(points) | retest(attention)
    provenance = replace(provenance, residuals=tuple(residuals.items()))
    table = replace(table, provenance=provenance)
    return FittedAttention(table=table, residuals=residuals, notes=tuple(notes), points=points)


def _from_grid(
    attention: AttentionRecords,
    backends: tuple[str, ...],
    provenance: Provenance,
    *,
    blocks: BlockCost | None = None,
) -> AttentionTable:
    """Fit an attention table to calls on equal segments alone.

    The table has the fixed costs of a call and the throughput of segments, both not yet corrected
    with random batches (`_fit_batches`).

    Args:
        attention: Head layout and records.
        backends: Names of the kernels that the table is for.
        provenance: Provenance of the table.
        blocks: Cost of thread blocks to subtract from the times of calls; None subtracts nothing.
    """
    layout = attention.layout
    calls, grid = attention.of("call"), attention.of("grid")
    num_q = len({r.point["q"] for r in grid})
    if not calls or num_q < 2:
        raise UserError(
            f"{layout.backend} with {layout.num_heads} heads has too few measurements for a fit: "
            f"{len(calls)} single calls (at least 1 is needed) and grid points with {num_q} "
            f"different numbers of queries (at least 2 are needed); run `wlb profile` "
            f"again with another --out"
        )
    values: dict[str, object] = {}
    surfaces: dict[str, Surface] = {}
    reach: FloatArray | None = None
    for name in PASSES:
        # Step 1. The cost of a group is the additional time of a call that has a second segment in
        # another group.
        alone = calls[0].numbers[f"{name}_ns"]
        two = [r.numbers[f"{name}_ns"] for r in attention.of("two_groups")]
        group = min(alone, max(0.0, two[0] - alone)) if two else 0.0
        values |= {f"launch_{name}_ns": round(alone - group), f"group_{name}_ns": round(group)}
        # Step 2. Compute the throughput of segments.
        fixed_ns = _fixed_ns(attention, grid, name, alone, group, blocks)
        rates = _rates(layout, grid, name, fixed_ns)
        surfaces[name] = rates.surface
        if rates.square is not None:
            values[f"square_{name}"] = rates.square
        if name == "forward":
            reach = rates.reach
    tiles = layout.tiles
    return AttentionTable(
        backends=backends,
        num_heads=layout.num_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        tile_rows=tiles.forward_rows,
        backward_tile_rows=tiles.backward_rows,
        backward_tile_keys=tiles.backward_keys,
        padded_lengths=layout.padded_lengths,
        blocks=blocks,
        heads=np.array([layout.num_heads]),
        heads_efficiency=np.ones(1),
        provenance=provenance,
        **_on_shared_rows(surfaces, reach),  # pyright: ignore[reportArgumentType]
        **values,  # pyright: ignore[reportArgumentType]
    )


def _on_shared_rows(
    surfaces: Mapping[str, Surface], reach: FloatArray | None
) -> dict[str, Surface | FloatArray | None]:
    """Return the throughput surfaces of both passes with the same nodes (numbers of queries).

    A surface is interpolated between its nodes. Both passes were measured with the same numbers of
    queries, but the nodes are where tiles end, and forward and backward have different tiles. So
    each surface gets the nodes of both. Interpolated values do not change.

    Args:
        surfaces: Throughput of each pass, by its name.
        reach: For each node of forward's surface, the most keys that were measured; None if nothing
            is missing.

    Returns:
        The surfaces by the name of the pass, and under "reach" the argument `reach` for the shared
        nodes.
    """
    forward_rows = surfaces["forward"].axis0
    rows = np.union1d(forward_rows, surfaces["backward"].axis0)
    if reach is not None:
        reach = reach[np.minimum(np.searchsorted(forward_rows, rows), forward_rows.size - 1)]
    shared = {
        name: replace(surface, axis0=rows, values=surface.at(rows[:, None], surface.axis1[None]))
        for name, surface in surfaces.items()
    }
    return {**shared, "reach": reach}


def _fixed_ns(
    attention: AttentionRecords,
    grid: Sequence[Record],
    name: str,
    call_ns: float,
    group_ns: float,
    blocks: BlockCost | None,
) -> list[float]:
    """Return, for each grid point, the ns of its call besides the prices of its segments.

    They are the launch, a second group of segments, and thread blocks.

    Args:
        attention: Head layout and records.
        grid: Records of grid points.
        name: The pass: "forward" or "backward".
        call_ns: Fixed ns of a call whose segments the kernel computes as one group.
        group_ns: Additional ns if the kernel computes them as two groups.
        blocks: Cost of thread blocks; None means 0.
    """
    layout = attention.layout
    return [
        call_ns
        + group_ns * record.point["has_other"]
        + _grid_ns(layout, blocks, attention.call_of(record))[PASSES.index(name)]
        for record in grid
    ]


def _grid_ns(layout: HeadLayout, blocks: BlockCost | None, call: Call) -> tuple[float, float]:
    """Return the part of a call's forward and backward ns that its grid of thread blocks costs.

    It includes the tail: the time in which only the last block of the longest segment runs.

    Args:
        layout: Kernel and heads.
        blocks: Cost of thread blocks; None means 0.
        call: Segments of the call.
    """
    if blocks is None:
        return 0.0, 0.0
    q, kv = call
    most_q, most_kv = (np.array([x.max()], np.float64) for x in (q, kv))
    forward, backward = blocks.ns(
        np.array([q.size * layout.num_heads]),
        most_q,
        most_kv,
        tile_rows=layout.tiles.forward_rows,
        backward_tile_keys=layout.tiles.backward_keys,
    )
    return float(forward[0]), float(backward[0])


class _Rates(NamedTuple):
    """Throughput of segments in forward or in backward, computed from the times of grid points."""

    surface: Surface
    """TFLOP/s of a segment as a function of its numbers of queries and of keys."""
    square: Curve | None
    """TFLOP/s of segments with as many queries as keys; None if the kernel groups no segments."""
    reach: FloatArray | None
    """For each number of queries, the most keys that were measured. None if this is the largest
    number of keys of the grid for all numbers of queries."""


def _rates(
    layout: HeadLayout, grid: Sequence[Record], name: str, fixed_ns: Sequence[float]
) -> _Rates:
    """Return the throughput of segments in forward or in backward, from measured calls.

    Args:
        layout: Kernel and heads.
        grid: Records of calls on equal segments ("grid points"). A record has the number of
            segments, and the queries and keys of each.
        name: "forward" or "backward".
        fixed_ns: For each record, the ns of its call besides the times of its segments.
    """
    # Kernels that group segments differ in throughput on segments with a prefix (q < kv) and on
    # square segments (q = kv), so square segments get a separate curve.
    is_apart = bool(layout.padded_lengths)
    tile = layout.tiles.forward_rows if name == "forward" else layout.tiles.backward_rows
    found: dict[tuple[bool, int, int], list[float]] = {}
    for record, fixed in zip(grid, fixed_ns, strict=True):
        q, kv, count = (record.point[k] for k in ("q", "kv", "count"))
        took = record.numbers[f"{name}_ns"]
        # The fixed cost is uncertain, so at least a fifth of the call's time counts for segments.
        price = max(took - fixed, 0.2 * took) / count
        # Query rows of a segment after the kernel has padded it.
        rows = next((n for n in layout.padded_lengths if n >= q), q)
        sides = (np.array([float(x)]) for x in (q if q == kv else rows, kv))
        work = float(tile_pairs(*sides, tile_rows=tile)[0])
        rate = work * layout.num_heads * layout.head_dim * FLOPS[name] / price * 1e-3
        # Square segments are in the curve and leave gaps (n, n) in the surface. Fill such a gap
        # with the measured point (n - 1, n), which has a prefix.
        node = kv if is_apart and q == kv - 1 else -(-rows // tile) * tile
        found.setdefault((is_apart and q == kv, node, kv), []).append(rate)
    square = {q: float(np.median(r)) for (is_square, q, _), r in sorted(found.items()) if is_square}
    axis_q = np.array(sorted({q for _, q, _ in found}), np.float64)
    axis_kv = np.array(sorted({kv for _, _, kv in found}), np.float64)
    values = np.full((axis_q.size, axis_kv.size), np.nan)
    for (is_square, q, kv), rates in found.items():
        if not is_square:
            values[np.searchsorted(axis_q, q), np.searchsorted(axis_kv, kv)] = np.median(rates)
    values = limit_growth(axis_q, axis_kv, fill_gaps(axis_q, axis_kv, values))
    surface = Surface(axis0=axis_q, axis1=axis_kv, values=values)
    reach = np.array([max(kv for _, row, kv in found if row == q) for q in axis_q], np.float64)
    curve = None
    if is_apart:
        lengths = np.array(list(square), np.float64)
        limited = limit_curve_growth(lengths, np.array(list(square.values())))
        curve = Curve(axis=lengths, values=limited)
    return _Rates(surface, curve, reach if reach.min() < axis_kv[-1] else None)


def fill_gaps(axis_q: FloatArray, axis_kv: FloatArray, values: FloatArray) -> FloatArray:
    """Return throughput with all gaps filled.

    Points with more queries than keys do not exist, but interpolation reads them too. Their
    throughput is chosen so that time does not depend on the number of keys. A point for which
    memory ran out gets the throughput of the next smaller number of keys. If memory ran out for all
    points of a number of queries, they get the throughput of the next smaller number of queries.

    Args:
        axis_q: Numbers of queries of the grid, shape [num_rows].
        axis_kv: Numbers of keys of the grid, shape [num_keys].
        values: Throughput, shape [num_rows, num_keys]. NaN marks a gap.

    Raises:
        UserError: If nothing was measured with the smallest number of queries.
    """
    out = values.copy()
    for i in range(axis_q.size):
        known = np.flatnonzero(np.isfinite(out[i]))
        if not known.size:
            if i == 0:
                raise UserError(
                    f"no attention call with {axis_q[0]:.0f} queries was measured; run "
                    f"`wlb profile` again with another --out, because it skips what it has "
                    f"recorded in a file"
                )
            out[i] = out[i - 1]
            known = np.flatnonzero(np.isfinite(out[i]))
        for j in range(known[0] + 1, axis_kv.size):
            if not np.isfinite(out[i, j]):
                out[i, j] = out[i, j - 1]
        first = known[0]
        out[i, :first] = out[i, first] * axis_kv[:first] / axis_kv[first]
    return out


def predict(table: AttentionTable, call: Call) -> tuple[float, float]:
    """Return the predicted forward and backward ns of a varlen call.

    Args:
        table: Attention table for the call's numbers of heads.
        call: Segments of the call.
    """
    q, kv, *times = _times(table, call)
    calls = table.calls_ns(q, kv, np.array([0, q.size]), num_heads=table.num_heads)
    forward, backward = (float(a[0] + t.sum()) for a, t in zip(calls, times, strict=True))
    return forward, backward


def _times(table: AttentionTable, call: Call) -> tuple[FloatArray, ...]:
    """Return (queries, keys, forward ns, backward ns) of each segment, as predicted by `table`."""
    q, kv = (x.astype(np.float64) for x in call)
    times = table.times_ns(q, kv, num_heads=table.num_heads, head_dim=table.head_dim)
    return q, kv, *times


def _fit_batches(
    attention: AttentionRecords, table: AttentionTable, *, has_blocks: bool
) -> tuple[AttentionTable, list[str]]:
    """Correct an attention table so that it predicts the times of random batches better.

    The fit finds factors for the times of segments, and new values for the fixed costs of calls.

    Args:
        attention: Head layout and records.
        table: Table fitted to calls on equal segments.
        has_blocks: Whether to fit the cost of a call's grid of thread blocks, too.

    Returns:
        The corrected table, and notes on what is missing or doubtful.
    """
    batches = attention.of("batch")
    if not batches:
        return table, [
            "no random batch was measured, so prices come from calls on equal segments alone and "
            "thread blocks have no price; run `wlb profile` again with another --out"
        ]
    notes: list[str] = []
    # The fit also uses calls on equal segments, so that it stays near the grid points. All these
    # calls together have less weight than the batches.
    alone = [r for kind in ("call", "two_groups", "grid") for r in attention.of(kind)]
    weight = EQUAL_CALLS_WEIGHT * len(batches) / len(alone)
    weights = np.repeat([1.0, weight], [len(batches), len(alone)])
    evidence = [*batches, *alone]
    calls = [attention.call_of(r) for r in evidence]
    changed: dict[str, object] = {}
    of_grid: dict[str, float] = {}
    for i, name in enumerate(PASSES):
        of_call = [getattr(table, f"{what}_{name}_ns") for what in ("launch", "group")]
        of_call += [FIRST_BLOCK_NS * has_blocks] * 2
        features = np.array([_features(table, call, i) for call in calls])
        took = np.array([r.numbers[f"{name}_ns"] for r in evidence])
        is_grouped = bool(table.padded_lengths)
        start = np.append(of_call, np.ones(features.shape[1] - NUM_FACTORS_FROM))
        found = _robust(features, took, weights, start, is_grouped=is_grouped)
        factors = found[NUM_FACTORS_FROM:]
        bad = [round(x, 2) for x in factors.tolist() if not 1 / MOST_FACTOR < x < MOST_FACTOR]
        if bad:
            notes.append(
                f"{attention.layout.backend} with {table.num_heads} heads, fitted "
                f"{'with' if has_blocks else 'without'} a price of thread blocks: in random "
                f"batches the {name} of segments took {', '.join(map(str, bad))} times as long as "
                f"in calls on equal segments; the machine may have been busy or throttled, so "
                f"remove the records and measure again"
            )
            factors = np.clip(factors, 1 / MOST_FACTOR, MOST_FACTOR)
        changed |= {f"launch_{name}_ns": round(found[0]), f"group_{name}_ns": round(found[1])}
        changed |= _scaled(table, name, factors)
        block_ns, tail_ns = (round(x, 2) for x in found[2:NUM_FACTORS_FROM].tolist())
        of_grid |= {f"{name}_ns": block_ns, f"tail_{name}_ns": tail_ns}
    changed["blocks"] = BlockCost(**of_grid) if has_blocks and any(of_grid.values()) else None
    return replace(table, **changed), notes  # pyright: ignore[reportArgumentType]


def _features(table: AttentionTable, call: Call, which: int) -> list[float]:
    """Return the features of a call.

    The dot product of the features and the fitted costs and factors is the time of the call in ns.
    The features are [1, groups, blocks, tail, short, long]:

    - groups: Number of groups of similar segments.
    - blocks: Number of thread blocks.
    - tail: In forward the number of keys of the segment that has most keys, in backward the number
      of queries of the segment that has most queries.
    - short, long: Summed ns that the table predicts for short segments and for long segments. For
      kernels that group segments there are four sums: two over segments with a prefix (keys before
      the first query), then two over segments without a prefix.

    Args:
        table: Table that predicts the ns of segments.
        call: Segments of the call.
        which: 0 for forward, 1 for backward.
    """
    q, kv, *passes = _times(table, call)
    times = passes[which]
    # `groups` returns 0 if a group costs nothing, so set a cost to get the number of groups.
    counted = replace(table, group_forward_ns=1)
    groups = float(counted.groups(q, kv, np.array([0, q.size]))[0])
    is_long, is_square = q >= LONG_ROWS, (q == kv) & (table.square_forward is not None)
    sides = (~is_square, is_square) if table.square_forward is not None else (~is_square,)
    kinds = [a & b for a in sides for b in (~is_long, is_long)]
    most = (q.max(), kv.max())
    tiles = np.ceil(most[which] / (table.tile_rows, table.backward_tile_keys)[which])
    blocks, tail = table.num_heads * q.size * tiles, most[1 - which]
    return [1.0, groups, blocks, tail, *(float(times[kind].sum()) for kind in kinds)]


def _robust(
    features: FloatArray,
    took: FloatArray,
    weights: FloatArray,
    start: FloatArray,
    *,
    is_grouped: bool,
) -> FloatArray:
    """Return non-negative x for which features @ x has the smallest relative errors to `took`.

    The robust loss gives outliers little weight. The first entries of x are fixed costs of a call.
    Each further entry is a factor for the predicted times of one kind of segments, such as short
    ones (`_features`). If random batches have hardly any segments of a kind, its factor keeps the
    value in `start`.

    Args:
        features: Features of each call, shape [num_calls, num_features].
        took: Measured ns of each call, shape [num_calls].
        weights: Weight of each call in the fit, shape [num_calls]. The function takes calls with
            weight 1 for random batches, so all other calls must have another weight.
        start: Initial x, shape [num_features].
        is_grouped: Whether the kernel processes similar segments in groups. Then x[1], the cost of
            each group, is fitted too.
    """
    is_free = np.ones(start.size, bool)
    is_free[1] = is_grouped
    is_free[2:NUM_FACTORS_FROM] = start[2:NUM_FACTORS_FROM] > 0
    of_segments = features[:, NUM_FACTORS_FROM:] > 0.05 * took[:, None]
    is_free[NUM_FACTORS_FROM:] = (of_segments & (weights == 1)[:, None]).sum(0) >= 5
    scale = np.where(start > 0, start, 1.0)

    def all_of(x: FloatArray) -> FloatArray:
        out = start.copy()
        out[is_free] = x * scale[is_free]
        return out

    root = np.sqrt(weights)

    def residual(x: FloatArray) -> FloatArray:
        return root * np.log(np.maximum(features @ all_of(x), 1.0) / took)

    first = start[is_free] / scale[is_free]
    found = least_squares(residual, first, bounds=(0.0, np.inf), loss="soft_l1", f_scale=0.1)
    return all_of(found.x)


def _scaled(table: AttentionTable, name: str, factors: FloatArray) -> dict[str, object]:
    """Return corrected fields of a table: the throughput of one pass divided by fitted factors.

    Short segments (up to LONG_ROWS / 2 queries) and long ones (from LONG_ROWS queries) have
    separate factors. In between, the factor changes gradually.

    Args:
        table: The table.
        name: The pass: "forward" or "backward".
        factors: (factor of short segments, factor of long segments). For kernels that group
            segments, the two factors of segments that have as many queries as keys follow.
    """
    surface: Surface = getattr(table, name)
    curve: Curve | None = getattr(table, f"square_{name}")

    def factor(rows: FloatArray, short: float, long: float) -> FloatArray:
        weight = np.clip(np.log2(rows / (LONG_ROWS / 2)), 0.0, 1.0)
        return short + (long - short) * weight

    with_prefix = surface.values / factor(surface.axis0, factors[0], factors[1])[:, None]
    out: dict[str, object] = {
        name: replace(surface, values=limit_growth(surface.axis0, surface.axis1, with_prefix))
    }
    if curve is not None:
        without = curve.values / factor(curve.axis, factors[2], factors[3])
        limited = limit_curve_growth(curve.axis, without)
        out[f"square_{name}"] = replace(curve, values=limited)
    return out


def _heads(attention: AttentionRecords) -> dict[str, FloatArray]:
    """Return the table's fields `heads` and `heads_efficiency`, from tasks of kind "heads".

    `heads` are the measured numbers of heads. `heads_efficiency` is the throughput with each number
    of heads, divided by the throughput with the layout's number of heads.
    """
    layout = attention.layout
    rates: dict[int, dict[tuple[int, int], float]] = {}
    for record in measured(attention.records, "heads"):
        at = record.point
        group = at["num_heads"] // at["num_kv_heads"]
        if (at["backend"], at["head_dim"], group) == layout.kernel:
            took = sum(record.numbers[f"{name}_ns"] for name in PASSES)
            rate = at["num_heads"] * at["count"] / took
            rates.setdefault(at["num_heads"], {})[at["q"], at["kv"]] = rate
    of_layout = rates.get(layout.num_heads, {})
    found = {layout.num_heads: 1.0}
    for heads, of_points in rates.items():
        shared = of_layout.keys() & of_points.keys()
        if shared:
            found[heads] = float(np.median([of_points[p] / of_layout[p] for p in shared]))
    heads = sorted(found)
    return {
        "heads": np.array(heads, np.float64),
        "heads_efficiency": np.array([found[h] for h in heads]),
    }


def held_out(attention: AttentionRecords, table: AttentionTable) -> list[HeldOutCall]:
    """Return measured and predicted times of all calls that were kept out of the fit.

    Args:
        attention: The measurements.
        table: The fitted table, which predicts the times.
    """
    return [
        HeldOutCall(
            kind=kind,
            label={k: v for k, v in record.point.items() if isinstance(v, int)},
            measured_ns=(record.numbers["forward_ns"], record.numbers["backward_ns"]),
            predicted_ns=predict(table, attention.call_of(record)),
        )
        for kind in ("held_pair", "held_batch")
        for record in attention.of(kind)
    ]


def errors(points: Sequence[HeldOutCall]) -> dict[str, float]:
    """Return the mean, the 95th percentile and the maximum of relative errors of predicted times.

    The name of an error consists of the kind of call, the pass and the statistic, as in
    held_batch_forward_mape.

    Args:
        points: Held-out calls.
    """
    out: dict[str, float] = {}
    for kind in ("held_pair", "held_batch"):
        mine = [p for p in points if p.kind == kind]
        if not mine:
            continue
        took = np.array([p.measured_ns for p in mine])
        predicted = np.array([p.predicted_ns for p in mine])
        for i, name in enumerate((*PASSES, "total")):
            a, b = (x.sum(1) if name == "total" else x[:, i] for x in (predicted, took))
            error = np.abs(a / b - 1)
            out |= {
                f"{kind}_{name}_mape": float(error.mean()),
                f"{kind}_{name}_p95": float(np.percentile(error, 95)),
                f"{kind}_{name}_max": float(error.max()),
            }
    return out


def retest(attention: AttentionRecords) -> dict[str, float]:
    """Return the mean relative difference between two measurements of the same held-out batch.

    The result has, by name, a mean over batches for each pass and for the sum of both passes.
    """
    by_index: dict[int, list[Record]] = {}
    for record in attention.of("held_batch"):
        by_index.setdefault(record.point["index"], []).append(record)
    pairs = [(r[0].numbers, r[1].numbers) for r in by_index.values() if len(r) == 2]
    if not pairs:
        return {}
    out: dict[str, float] = {}
    for name in (*PASSES, "total"):
        keys = [f"{n}_ns" for n in PASSES] if name == "total" else [f"{name}_ns"]
        ratio = [sum(a[k] for k in keys) / sum(b[k] for k in keys) for a, b in pairs]
        out[f"retest_{name}"] = float(np.abs(np.array(ratio) - 1).mean())
    return out
