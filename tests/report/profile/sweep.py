"""Provides the records of an invented sweep: predictions of a profile plus noise."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.models import LLAMA2_7B as MODEL
from wlb.cost import AttentionTable, Collective, KernelProfile, Scope, load_profile
from wlb.cost.flops import elementwise_values
from wlb.report.profile.points import (
    HeldPoint,
    Record,
    collective_samples,
    elementwise_samples,
    gemm_samples,
    layer_samples,
    layout_of,
    segment_ns,
)
from wlb.spec import ModelSpec

ROWS = (16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 1024, 4096, 16384, 32768)


def gpu_profile(*, heads: int = 4) -> KernelProfile:
    """Returns the published H100 profile as if it had been measured with a rank's heads."""
    profile = load_profile("h100")
    measured = replace(profile.provenance, kind="measured", source="wlb profile")
    return replace(
        profile,
        attention=tuple(
            replace(table, num_heads=heads, num_kv_heads=heads, provenance=measured)
            for table in profile.attention
        ),
        collectives=tuple(
            replace(c, provenance=measured) if c.scope == Scope.INTRA_NODE else c
            for c in profile.collectives
        ),
    )


def sweep_of(
    profile: KernelProfile,
    model: ModelSpec = MODEL,
    *,
    rows: Sequence[int] = ROWS,
    tp: int = 8,
    noise: float = 0.03,
) -> list[Record]:
    """Returns the records of a sweep, apart from held-out attention calls."""
    rng = np.random.default_rng(0)

    def noisy(record: dict[str, Any], fitted: Sequence[float]) -> Record:
        names = ("ns",) if len(fitted) == 1 else ("forward_ns", "backward_ns")
        took = np.array(fitted) * np.exp(rng.normal(0, noise, len(fitted)))
        numbers = dict(zip(names, took.tolist(), strict=True))
        return {**record, "numbers": {**record["numbers"], **numbers}}

    records: list[Record] = []
    for table in profile.attention:
        for record, fitted in _grid(table, rows):
            records.append(noisy(record, fitted))
    samplers = {
        "gemm": lambda r: gemm_samples(profile, r),
        "elementwise": lambda r: elementwise_samples(profile, r),
        "embedding": lambda r: elementwise_samples(profile, r),
        "layer": lambda r: layer_samples(profile, model, r),
        "held_layer": lambda r: layer_samples(profile, model, r, kind="held_layer"),
        "collective": lambda r: collective_samples(profile, r),
    }
    for record in _linear(model, tp):
        (sample,) = samplers[record["kind"]]([record])
        records.append(noisy(record, sample.fitted_ns))
    head = {"tokens": 4096, "hidden": model.hidden_size, "vocab": 4000}
    records.append(_record("head", head, forward_ns=2e6, backward_ns=1e5))
    return records


def held_of(profile: KernelProfile, *, noise: float = 0.05) -> list[HeldPoint]:
    """Returns held-out attention calls of each table.

    There are eight calls of equal segments, and eight packed batches that are measured twice.
    """
    rng = np.random.default_rng(1)
    points: list[HeldPoint] = []
    for i, _ in enumerate(profile.attention):
        for n in range(24):
            predicted = np.exp(rng.uniform(np.log(1e5), np.log(3e8))) * np.array([1.0, 2.6])
            measured = predicted * np.exp(rng.normal(0, noise, 2))
            is_pair = n < 8
            label = {"q": 100 + n, "kv": 5000 + n, "count": 4}
            points.append(
                HeldPoint(
                    table=i,
                    kind="held_pair" if is_pair else "held_batch",
                    label=label if is_pair else {"index": 1000 + n % 8, "repeat": n // 16},
                    measured_ns=(float(measured[0]), float(measured[1])),
                    predicted_ns=(float(predicted[0]), float(predicted[1])),
                )
            )
    return points


def _record(kind: str, point: dict[str, Any], **numbers: float) -> dict[str, Any]:
    return {"kind": kind, "point": point, "numbers": numbers, "failed": ""}


def _grid(
    table: AttentionTable, rows: Sequence[int]
) -> Iterator[tuple[dict[str, Any], tuple[float, float]]]:
    for i, q in enumerate(rows):
        for kv in rows[i:]:
            count = max(1, 1024 // (table.num_heads * -(-q // table.tile_rows)))
            point = {"backend": table.backends[0], **layout_of(table)}
            times = segment_ns(table, *(np.array([x]) for x in (q, kv, count)))
            whole = (float(times[0][0]) * count, float(times[1][0]) * count)
            yield _record("grid", {**point, "q": q, "kv": kv, "count": count}), whole


def _linear(model: ModelSpec, tp: int) -> Iterator[dict[str, Any]]:
    """Yields records of linear operations and collectives, with placeholders for times."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size // tp
    for tokens in (128, 512, 2048, 8192, 32768):
        for rows, columns in ((hidden, model.q_dim // tp), (hidden, ffn), (ffn, hidden)):
            point = {"tokens": tokens, "rows": rows, "columns": columns, "tp": tp}
            yield _record("gemm", point, forward_ns=1, backward_ns=1)
        for op in elementwise_values(model):
            if op != "embedding":
                width = ffn if op == "swiglu" else hidden
                yield _record(
                    "elementwise",
                    {"op": op, "tokens": tokens, "width": width},
                    forward_ns=1,
                    backward_ns=1,
                    forward_bytes=4 * tokens * width,
                    backward_bytes=6 * tokens * width,
                )
        point = {"tokens": tokens, "hidden": hidden, "vocab": 4000}
        yield _record("embedding", point, forward_ns=1, backward_ns=1)
        yield _record("layer", {"tokens": tokens, "tp": tp}, forward_ns=1, backward_ns=1)
    for tokens in (300, 3000):
        yield _record("held_layer", {"tokens": tokens, "tp": tp}, forward_ns=1, backward_ns=1)
    for op in Collective:
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28):
            point = {"op": str(op), "scope": "intra_node", "ranks": 8, "bytes": size}
            yield _record("collective", point, ns=1)
