"""Measured points of a profile's sweep, with the times that the fitted profile gives for them.

Fitted times are computed by the same code that prices plans.
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
NORMAL_LENGTH = 4096
"""Document length in tokens at which Figure 7 sets the time of attention to 1."""

Record = Mapping[str, Any]
"""A saved record of the sweep, with the keys kind, point, numbers and failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPoint:
    """A held-out call: it was measured, but not used to fit the profile."""

    table: int  # index of the attention table in the profile
    kind: str  # kind of record: equal segments (held_pair) or batches of unequal ones (held_batch)
    label: Mapping[str, int]  # what was called, such as rows, keys and count
    measured_ns: tuple[float, float]  # forward and backward
    predicted_ns: tuple[float, float]  # forward and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedSample:
    """A measured call and its fitted time."""

    at: Mapping[str, Any]  # the record's point: what was called
    measured_ns: tuple[float, ...]  # forward and backward; one value for a collective
    fitted_ns: tuple[float, ...]  # the same by the profile


def measured_of(records: Iterable[Record], kind: str, **at: Any) -> list[Record]:
    """Return the records of a kind that did not fail and whose points have these values."""
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
    """Return a record of both passes with its fitted times; `more` is added to its point."""
    at = {**record["point"], **more}
    return PlottedSample(at=at, measured_ns=_passes(record), fitted_ns=tuple(fitted_ns))


def layout_of(table: AttentionTable) -> dict[str, int]:
    """Return the heads of an attention table as they are named in records."""
    return {name: getattr(table, name) for name in ("num_heads", "num_kv_heads", "head_dim")}


def segment_ns(
    table: AttentionTable, q: IntArray, kv: IntArray, count: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return the fitted forward and backward time of one segment of a call with equal segments.

    A segment's share of the call's fixed cost is included.

    Args:
        table: Fitted attention table.
        q: Query rows of a segment, shape [n].
        kv: Keys of a segment, shape [n].
        count: Segments of the call, shape [n]. They all form one group.
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
    """Return the grid points of a table's kernels and head layout, as times of one segment."""
    found: list[PlottedSample] = []
    for backend in table.backends:
        for record in measured_of(records, "grid", backend=backend, **layout_of(table)):
            at = record["point"]
            q, kv, count = (np.array([at[name]], np.int64) for name in ("q", "kv", "count"))
            fitted = segment_ns(table, q, kv, count)
            # The call has `count` equal segments.
            took = tuple(ns / at["count"] for ns in _passes(record))
            found.append(
                PlottedSample(at=at, measured_ns=took, fitted_ns=tuple(float(f[0]) for f in fitted))
            )
    return sorted(found, key=lambda s: (s.at["kv"], s.at["q"]))


def gemm_samples(profile: KernelProfile, records: Sequence[Record]) -> list[PlottedSample]:
    """Return the matrix products; `at` also has the weights (in * out) and the forward FLOPs."""
    found: list[PlottedSample] = []
    for record in measured_of(records, "gemm"):
        at = record["point"]
        weights = float(at["rows"] * at["columns"])
        flops = 2 * at["tokens"] * at["rows"] * at["columns"]
        where = np.array([float(at["tokens"])]), np.array([weights])
        surfaces = (profile.gemm.forward, profile.gemm.backward)
        fitted = (
            # Backward is two products of the same size.
            times * flops * 1e-3 / float(surface.at(*where)[0])
            for times, surface in zip((1, 2), surfaces, strict=True)
        )
        found.append(_sample(record, fitted, weights=weights, flops=flops))
    return found


def elementwise_samples(profile: KernelProfile, records: Sequence[Record]) -> list[PlottedSample]:
    """Return the element-wise calls; `at` also has the operator and the bytes that it moves."""
    value_bytes = DTYPE_BYTES[profile.dtype]
    found: list[PlottedSample] = []
    for record in measured_of(records, "elementwise") + measured_of(records, "embedding"):
        at, numbers = record["point"], record["numbers"]
        op = Elementwise(at.get("op", Elementwise.EMBEDDING))
        if record["kind"] == "embedding":
            # As in `elementwise_values`: forward reads and writes a row, and backward reads one row
            # and adds it to another (one more read and a write).
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
    """Return whole decoder layers without attention, with W_l plus the fixed cost of a layer.

    Args:
        profile: The kernel profile.
        model: The model.
        records: Records of the sweep.
        kind: "layer" for records to which the profile's layer factor is fitted, or "held_layer".
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
    """Return the profile with layers that cost exactly the sum of their operators."""
    free = LayerCost(
        forward_factor=1.0,
        backward_factor=1.0,
        forward_call_ns=0,
        backward_call_ns=0,
        provenance=profile.layer.provenance,
    )
    return replace(profile, layer=free)


def collective_samples(profile: KernelProfile, records: Sequence[Record]) -> list[PlottedSample]:
    """Return the collectives."""
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
    """Return the TFLOP/s of a segment's attention, without counting padding."""
    flops = (attention_forward_flops, attention_backward_flops)[which](
        np.array([sample.at["q"]]),
        np.array([sample.at["kv"]]),
        num_heads=table.num_heads,
        head_dim=table.head_dim,
    )
    return float(flops[0]) / ns * 1e-3


def gemm_rate(sample: PlottedSample, ns: float, which: int) -> float:
    """Return the TFLOP/s of a matrix product; backward consists of two products."""
    return (1, 2)[which] * sample.at["flops"] / ns * 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermCurves:
    """Figure 7: time of all layers over document lengths, forward and backward together."""

    lengths: IntArray  # document lengths in tokens, shape [n]
    parts: Mapping[str, FloatArray]  # time of each part in nanoseconds, by its name; shape [n] each
    normal_length: int  # length at which attention is drawn as 1
    normal_ns: float  # time of attention at this length
    measured: Sequence[tuple[int, float]]  # tokens, and nanoseconds of attention


def workload_at(profile: KernelProfile, model: ModelSpec) -> ProfiledWorkload:
    """Return the cost model at the TP degree whose ranks have the heads of the first table.

    If no degree has them, TP is 1.
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
    """Return the curves of Figure 7, at lengths that the profile's attention table covers."""
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
    # Measured points are comparable only if the table has the model's heads.
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
