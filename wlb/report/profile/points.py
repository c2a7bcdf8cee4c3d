"""Measurements of a kernel profile, with the times that the fitted profile predicts for them.

The predictions are made by the code that also predicts the times of plans.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wlb.cost import AttentionTable, Elementwise, KernelProfile, ProfiledWorkload
from wlb.cost.flops import attention_backward_flops, attention_forward_flops, rank_model
from wlb.cost.profile import DTYPE_BYTES, LayerCost
from wlb.cost.workload import LinearCost
from wlb.plan import FloatArray, IntArray
from wlb.spec import ModelSpec, ParallelSpec, Recompute

PASSES = ("forward", "backward")
"""Names of the passes. Pairs of values in this module are in this order."""
NORMAL_LENGTH = 4096
"""Times in Figure 7 are relative to the time of attention for a document of this many tokens."""

Record = Mapping[str, Any]
"""A saved measurement, as a mapping with these keys: `kind` (such as "gemm"), `point` (the sizes of
the call), `numbers` (the measured values) and `failed` (an error message, or "")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPoint:
    """An attention call that was measured but not used to fit the profile."""

    table: int  # index of the attention table in the profile
    # "held_pair" for a call with segments of equal length, "held_batch" for unequal segments
    kind: str
    label: Mapping[str, int]  # sizes of the call, such as rows, keys and number of segments
    measured_ns: tuple[float, float]  # measured forward and backward time
    predicted_ns: tuple[float, float]  # predicted forward and backward time


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedSample:
    """A measured call, with the time that the fitted profile predicts for it."""

    at: Mapping[str, Any]  # sizes of the call, such as {"tokens": 4096, "tp": 2}
    # measured forward time and backward time; a collective has only one time
    measured_ns: tuple[float, ...]
    fitted_ns: tuple[float, ...]  # predicted times, for the same passes as `measured_ns`


def measured_of(records: Iterable[Record], kind: str, **at: Any) -> list[Record]:
    """Return the measurements of one kind that did not fail.

    Args:
        records: All measurements.
        kind: The kind, such as "gemm".
        **at: Values that the `point` of a measurement must have.
    """
    return [
        r
        for r in records
        if r["kind"] == kind
        and not r["failed"]
        and all(r["point"].get(name) == value for name, value in at.items())
    ]


def _passes(record: Record) -> tuple[float, float]:
    """Return the measured forward and backward time of a record."""
    numbers = record["numbers"]
    return float(numbers["forward_ns"]), float(numbers["backward_ns"])


def _sample(record: Record, fitted_ns: Iterable[float], **more: Any) -> PlottedSample:
    """Return a measurement of a forward and a backward time as a `PlottedSample`.

    Args:
        record: The measurement.
        fitted_ns: Predicted forward and backward time.
        **more: Values that are added to `PlottedSample.at`.
    """
    at = {**record["point"], **more}
    return PlottedSample(at=at, measured_ns=_passes(record), fitted_ns=tuple(fitted_ns))


def layout_of(table: AttentionTable) -> dict[str, int]:
    """Return num_heads, num_kv_heads and head_dim of an attention table by these names."""
    return {name: getattr(table, name) for name in ("num_heads", "num_kv_heads", "head_dim")}


def segment_ns(
    table: AttentionTable, q: IntArray, kv: IntArray, count: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return the predicted times of one segment, for n attention calls of equal segments.

    The time of a call includes the launch of its kernels. It is divided by the number of segments.

    Args:
        table: The fitted attention table.
        q: Query rows of each segment of a call, shape [n].
        kv: Keys of each segment of a call, shape [n].
        count: Number of segments of a call, shape [n].

    Returns:
        Forward and backward times in nanoseconds, shape [n] each.
    """
    forward, backward = table.times_ns(
        q.astype(np.float64),
        kv.astype(np.float64),
        num_heads=table.num_heads,
        head_dim=table.head_dim,
    )
    grid = np.zeros((2, count.size))
    if table.blocks is not None:
        heads = count * table.num_heads
        grid = table.blocks.ns(
            heads,
            q.astype(np.float64),
            kv.astype(np.float64),
            tile_rows=table.tile_rows,
            backward_tile_keys=table.backward_tile_keys,
        )
    return (
        forward + (table.launch_forward_ns + table.group_forward_ns + grid[0]) / count,
        backward + (table.launch_backward_ns + table.group_backward_ns + grid[1]) / count,
    )


def grid_samples(table: AttentionTable, records: Sequence[Record]) -> list[PlottedSample]:
    """Return the measurements to which an attention table was fitted.

    They are sorted by the numbers of keys and of query rows of a segment. The segments of a
    measured call are equal, and its time is divided by their number.

    Args:
        table: The fitted attention table.
        records: All measurements, of which those with the table's kernels and heads are used.
    """
    found: list[PlottedSample] = []
    for backend in table.backends:
        for record in measured_of(records, "grid", backend=backend, **layout_of(table)):
            at = record["point"]
            q, kv, count = (np.array([at[name]], np.int64) for name in ("q", "kv", "count"))
            fitted = segment_ns(table, q, kv, count)
            took = tuple(ns / at["count"] for ns in _passes(record))
            found.append(
                PlottedSample(at=at, measured_ns=took, fitted_ns=tuple(float(f[0]) for f in fitted))
            )
    return sorted(found, key=lambda s: (s.at["kv"], s.at["q"]))


def gemm_samples(profile: KernelProfile, records: Sequence[Record]) -> list[PlottedSample]:
    """Return the measured matrix products with their predicted times.

    In each sample, the field `at` also has the keys "weights" (input size times output size) and
    "flops" (of forward).
    """
    found: list[PlottedSample] = []
    for record in measured_of(records, "gemm"):
        at = record["point"]
        weights = float(at["rows"] * at["columns"])
        flops = 2 * at["tokens"] * at["rows"] * at["columns"]
        where = np.array([float(at["tokens"])]), np.array([weights])
        surfaces = (profile.gemm.forward, profile.gemm.backward)
        fitted = (
            # Backward consists of two products of the same size, so count its FLOPs twice.
            times * flops * 1e-3 / float(surface.at(*where)[0])
            for times, surface in zip((1, 2), surfaces, strict=True)
        )
        found.append(_sample(record, fitted, weights=weights, flops=flops))
    return found


def elementwise_samples(profile: KernelProfile, records: Sequence[Record]) -> list[PlottedSample]:
    """Return the measured element-wise operators with their predicted times.

    In each sample, the field `at` also has the keys "op" (the operator) and "bytes" (a pair: bytes
    read and written in forward, and in backward).
    """
    value_bytes = DTYPE_BYTES[profile.dtype]
    found: list[PlottedSample] = []
    for record in measured_of(records, "elementwise") + measured_of(records, "embedding"):
        at, numbers = record["point"], record["numbers"]
        op = Elementwise(at.get("op", Elementwise.EMBEDDING))
        if record["kind"] == "embedding":
            # Count bytes as `elementwise_values` does. Forward reads and writes a row. Backward
            # reads a row and adds it to another one, which is a further read and a write.
            values = at["tokens"] * at["hidden"] * value_bytes
            sizes = (2 * values, 3 * values)
        else:
            sizes = (numbers["forward_bytes"], numbers["backward_bytes"])
        cost = profile.elementwise_of(op)
        fitted = (
            cost.forward_call_ns + sizes[0] / cost.forward_bytes_per_s * 1e9,
            cost.backward_call_ns + sizes[1] / cost.backward_bytes_per_s * 1e9,
        )
        found.append(_sample(record, fitted, op=str(op), bytes=sizes))
    return found


def layer_samples(
    profile: KernelProfile, model: ModelSpec, records: Sequence[Record], *, kind: str = "layer"
) -> list[PlottedSample]:
    """Return the measured decoder layers without attention, with their predicted times.

    The predicted time is W_l plus the fixed cost of a layer.

    Args:
        profile: The kernel profile.
        model: The model for which the profile was measured.
        records: All measurements.
        kind: "layer" for layers that were used to fit the profile, "held_layer" for others.
    """
    found: list[PlottedSample] = []
    for record in measured_of(records, kind):
        at = record["point"]
        cost = LinearCost(
            model=replace(rank_model(model, at["tp"]), num_layers=1),
            parallel=ParallelSpec(),
            profile=profile,
            micro_batch_tokens=at["tokens"],
            recompute=Recompute.NONE,
        )
        per_token = cost.ns_per_token
        fitted = (
            (per_token[f"gemm_{name}"] + per_token[f"elementwise_{name}"]) * at["tokens"] + call
            for name, call in zip(PASSES, cost.call_ns, strict=True)
        )
        found.append(_sample(record, fitted))
    return found


def without_layer(profile: KernelProfile) -> KernelProfile:
    """Return the profile without the fitted overhead of layers.

    With the returned profile, the predicted time of a layer is exactly the sum of the times of its
    operators.
    """
    free = LayerCost(
        forward_factor=1.0,
        backward_factor=1.0,
        forward_call_ns=0,
        backward_call_ns=0,
        provenance=profile.layer.provenance,
    )
    return replace(profile, layer=free)


def collective_samples(profile: KernelProfile, records: Sequence[Record]) -> list[PlottedSample]:
    """Return the measured collectives with their predicted times."""
    found: list[PlottedSample] = []
    for record in measured_of(records, "collective"):
        at = record["point"]
        cost = next(c for c in profile.collectives if (c.op, c.scope) == (at["op"], at["scope"]))
        fitted = cost.time_ns(at["bytes"], num_ranks=at["ranks"])
        found.append(
            PlottedSample(at=at, measured_ns=(float(record["numbers"]["ns"]),), fitted_ns=(fitted,))
        )
    return found


def attention_rate(table: AttentionTable, sample: PlottedSample, ns: float, which: int) -> float:
    """Return the TFLOP/s of the attention of one segment. Padding to tiles is not counted.

    Args:
        table: Attention table that has the call's number of heads and head size.
        sample: A call whose segments all have `q` query rows and `kv` keys.
        ns: Time of one segment in nanoseconds.
        which: 0 for forward, 1 for backward.
    """
    flops = (attention_forward_flops, attention_backward_flops)[which](
        np.array([sample.at["q"]]),
        np.array([sample.at["kv"]]),
        num_heads=table.num_heads,
        head_dim=table.head_dim,
    )
    return float(flops[0]) / ns * 1e-3


def gemm_rate(sample: PlottedSample, ns: float, which: int) -> float:
    """Return the TFLOP/s of a matrix product. Its backward pass consists of two products.

    Args:
        sample: The product, as `gemm_samples` returns it.
        ns: Time in nanoseconds.
        which: 0 for forward, 1 for backward.
    """
    return (1, 2)[which] * sample.at["flops"] / ns * 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermCurves:
    """Data of the paper's Figure 7: times of all layers, forward plus backward."""

    lengths: IntArray  # document lengths in tokens, shape [n]
    # for each part, such as "attention": predicted time in nanoseconds at each length, shape [n]
    parts: Mapping[str, FloatArray]
    normal_length: int  # document length for which attention is drawn as 1
    normal_ns: float  # predicted time of attention at this length
    # measured attention: pairs (document length in tokens, time in nanoseconds)
    measured: Sequence[tuple[int, float]]


def workload_at(profile: KernelProfile, model: ModelSpec) -> ProfiledWorkload:
    """Return the cost model that predicts times of `model` from `profile`, for the figures.

    TP is chosen so that a rank has as many heads as the profile's first attention table. If no TP
    size fits, TP is 1.
    """
    table = profile.attention[0]
    tp, rest = divmod(model.num_heads, table.num_heads)
    return ProfiledWorkload(
        model=model,
        parallel=ParallelSpec(tp=1 if rest else tp),
        profile=profile,
        backend=table.backends[0],
        micro_batch_tokens=int(table.forward.axis1[-1]),
    )


def terms_of(work: ProfiledWorkload, records: Sequence[Record]) -> TermCurves:
    """Return the data of the paper's Figure 7: times of parts of the model, by document length.

    The lengths are those that the attention table of the cost model covers.

    Args:
        work: The cost model.
        records: All measurements of the profile.
    """
    keys = work.table.forward.axis1
    first, last = int(keys[0]), int(keys[-1])
    normal = min(NORMAL_LENGTH, last)
    lengths = np.unique(np.append(np.geomspace(first, last, 120).round(), normal))
    lengths = lengths.astype(np.int64)
    terms = work.terms(lengths)

    def total(*names: str) -> FloatArray:
        both = [terms[f"{name}_{which}"].astype(np.float64) for name in names for which in PASSES]
        return np.stack(both).sum(0)

    parts = {
        "attention": total("attention"),
        "total linear": total("gemm", "tp_comm", "cp_comm", "elementwise"),
        "GEMM": total("gemm"),
        "collective communication": total("tp_comm", "cp_comm"),
        "element-wise": total("elementwise"),
    }
    layout = (work.heads_per_rank, work.model.head_size)
    # Show measured attention only if it was measured with the heads of the model.
    is_own = (work.table.num_heads, work.table.head_dim) == layout
    return TermCurves(
        lengths=lengths,
        parts=parts,
        normal_length=normal,
        normal_ns=float(parts["attention"][np.searchsorted(lengths, normal)]),
        measured=[
            (s.at["q"], sum(s.measured_ns) * work.num_layers_per_rank)
            for s in grid_samples(work.table, records)
            if is_own and s.at["q"] == s.at["kv"]
        ],
    )
