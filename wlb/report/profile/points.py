"""Measured points of a sweep beside the fitted times of the same calls, for figures.

Fitted times come from the code that prices plans.
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
"""Tokens at which attention is 1 in Figure 7."""

Record = Mapping[str, Any]
"""kind, point, numbers, failed: as the sweep saves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPoint:
    """A held-out call: measured and predicted ns, forward and backward. table: in the profile."""

    table: int
    kind: str
    label: Mapping[str, int]
    measured_ns: tuple[float, float]
    predicted_ns: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedSample:
    """at: the record's point. Times are of forward and backward; a collective has only one."""

    at: Mapping[str, Any]
    measured_ns: tuple[float, ...]
    fitted_ns: tuple[float, ...]


def measured_of(records: Iterable[Record], kind: str, **at: Any) -> list[Record]:
    """Records of a kind that did not fail, at points with these values."""
    return [
        r
        for r in records
        if r["kind"] == kind
        and not r["failed"]
        and all(r["point"].get(name) == value for name, value in at.items())
    ]


def _passes(record: Record) -> tuple[float, float]:
    numbers = record["numbers"]
    return float(numbers["forward_ns"]), float(numbers["backward_ns"])


def _sample(record: Record, fitted_ns: Iterable[float], **more: Any) -> PlottedSample:
    """A record of both passes beside its fit. more: what `at` has in addition."""
    at = {**record["point"], **more}
    return PlottedSample(at=at, measured_ns=_passes(record), fitted_ns=tuple(fitted_ns))


def layout_of(table: AttentionTable) -> dict[str, int]:
    return {name: getattr(table, name) for name in ("num_heads", "num_kv_heads", "head_dim")}


def segment_ns(
    table: AttentionTable, q: IntArray, kv: IntArray, count: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Fitted ns of one of `count` equal segments of a call, its share of the call's cost included.

    Shape [n] each; the segments of a call are one group.
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
    """Each grid point of the table's kernel and layout: ns of one of its equal segments."""
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
    """Each matrix product; `at` also has its weights (in * out) and forward FLOPs."""
    found: list[PlottedSample] = []
    for record in measured_of(records, "gemm"):
        at = record["point"]
        weights = float(at["rows"] * at["columns"])
        flops = 2 * at["tokens"] * at["rows"] * at["columns"]
        where = np.array([float(at["tokens"])]), np.array([weights])
        surfaces = (profile.gemm.forward, profile.gemm.backward)
        fitted = (
            times * flops * 1e-3 / float(surface.at(*where)[0])
            for times, surface in zip((1, 2), surfaces, strict=True)
        )
        found.append(_sample(record, fitted, weights=weights, flops=flops))
    return found


def elementwise_samples(profile: KernelProfile, records: Sequence[Record]) -> list[PlottedSample]:
    """Each element-wise call and look-up; `at` also has op and the bytes that the model counts."""
    value_bytes = DTYPE_BYTES[profile.dtype]
    found: list[PlottedSample] = []
    for record in measured_of(records, "elementwise") + measured_of(records, "embedding"):
        at, numbers = record["point"], record["numbers"]
        op = Elementwise(at.get("op", Elementwise.EMBEDDING))
        if record["kind"] == "embedding":
            # As `elementwise_values`: read and write; backward reads a row and adds to another.
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
    """Whole decoder layers without attention against W_l and the calls of a layer.

    kind: "layer", which the profile's layer factor is fitted to, or "held_layer".
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
    """The profile with layers that cost the sum of their operators."""
    free = LayerCost(
        forward_factor=1.0,
        backward_factor=1.0,
        forward_call_ns=0,
        backward_call_ns=0,
        provenance=profile.layer.provenance,
    )
    return replace(profile, layer=free)


def collective_samples(profile: KernelProfile, records: Sequence[Record]) -> list[PlottedSample]:
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
    """TFLOP/s of the FLOPs that the segment asks for, without those of padding."""
    flops = (attention_forward_flops, attention_backward_flops)[which](
        np.array([sample.at["q"]]),
        np.array([sample.at["kv"]]),
        num_heads=table.num_heads,
        head_dim=table.head_dim,
    )
    return float(flops[0]) / ns * 1e-3


def gemm_rate(sample: PlottedSample, ns: float, which: int) -> float:
    """TFLOP/s; backward has two products."""
    return (1, 2)[which] * sample.at["flops"] / ns * 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermCurves:
    """Figure 7: ns of all layers over document lengths, forward and backward together.

    lengths: shape [n]; parts, by name: shape [n] each. normal_length, normal_ns: where attention
    is 1, and what it takes there. measured: tokens and ns of attention.
    """

    lengths: IntArray
    parts: Mapping[str, FloatArray]
    normal_length: int
    normal_ns: float
    measured: Sequence[tuple[int, float]]


def workload_at(profile: KernelProfile, model: ModelSpec) -> ProfiledWorkload:
    """At the TP degree whose ranks have the first table's heads; TP 1 where none has."""
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
    """At lengths that the profile's attention table covers."""
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
