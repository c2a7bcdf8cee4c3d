"""Fit the linear part of a profile: GEMMs, element-wise operators, head and whole layers.

- GEMMs: the median TFLOP/s for each number of tokens and each size of the weight (in x out).
- Element-wise operators: time = call + bytes / rate, where `call` is a constant time. The fit is
  robust non-negative least squares of relative errors.
- Head: TFLOP/s of the head's three matrix products, and bytes per second of its backward pass.
- Layer: a factor and a constant that turn the summed times of a layer's operators into the time of
  the whole layer. The error is measured on held-out layers with other numbers of tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from wlb.cost import (
    Elementwise,
    ElementwiseCost,
    GemmCost,
    HeadCost,
    LayerCost,
    Provenance,
    Surface,
    limit_growth,
)
from wlb.cost.flops import elementwise_calls, elementwise_values
from wlb.cost.profile import GRADIENT_BYTES, OPTIONAL, elementwise_of
from wlb.plan import FloatArray, UserError
from wlb.profile.linear import rank_matrices, rank_model
from wlb.profile.tasks import Record, measured
from wlb.spec import ModelSpec

PASSES = ("forward", "backward")
GEMMS = {"forward": 1, "backward": 2}
"""Number of matrix products of a weight in each pass."""
FREE_BYTES_PER_S = 1e14
"""Bytes per second of an operator whose time did not grow with size; no memory is so fast."""


def fit_gemm(records: Sequence[Record], provenance: Provenance) -> GemmCost:
    """Fit the throughput of matrix products as a function of number of tokens and size of weight.

    Args:
        records: Records of the sweep.
        provenance: Provenance of the cost.

    Raises:
        UserError: If fewer than two numbers of tokens or two sizes of weights were measured.
    """
    mine = measured(records, "gemm")
    tokens = np.array(sorted({r.point["tokens"] for r in mine}), np.float64)
    sizes = np.array(sorted({_weights(r) for r in mine}), np.float64)
    if tokens.size < 2 or sizes.size < 2:
        raise UserError(
            "a fit of matrix products needs at least two different numbers of tokens and two sizes "
            f"of weights, but the sweep has {tokens.size} and {sizes.size}; measure more points"
        )
    surfaces: dict[str, Surface] = {}
    for name in PASSES:
        rates: dict[tuple[int, int], list[float]] = {}
        for r in mine:
            flops = 2 * GEMMS[name] * r.point["tokens"] * r.point["rows"] * r.point["columns"]
            row = int(np.searchsorted(tokens, r.point["tokens"]))
            where = row, int(np.searchsorted(sizes, _weights(r)))
            rates.setdefault(where, []).append(flops / r.numbers[f"{name}_ns"] * 1e-3)
        values = np.full((tokens.size, sizes.size), np.nan)
        for where, found in rates.items():
            values[where] = np.median(found)
        values = limit_growth(tokens, sizes, _filled(values))
        surfaces[name] = Surface(axis0=tokens, axis1=sizes, values=values)
    return GemmCost(**surfaces, provenance=provenance)


def _weights(record: Record) -> float:
    return float(record.point["rows"] * record.point["columns"])


def _filled(values: FloatArray) -> FloatArray:
    """Return throughput in which each gap (NaN) has the value of the next smaller number of tokens.

    A gap is a point for which memory ran out.

    Args:
        values: Throughput, shape [numbers of tokens, sizes of weights].
    """
    out = values.copy()
    for j in range(out.shape[1]):
        known = np.flatnonzero(np.isfinite(out[:, j]))
        for i in range(out.shape[0]):
            if not np.isfinite(out[i, j]):
                out[i, j] = out[known[max(0, int(np.searchsorted(known, i)) - 1)], j]
    return out


def fit_elementwise(
    records: Sequence[Record], provenance: Provenance, *, value_bytes: int
) -> tuple[ElementwiseCost, ...]:
    """Fit the cost of each element-wise operator.

    Args:
        records: Records of the sweep.
        provenance: Provenance of the costs.
        value_bytes: Bytes of a value in the data type of the sweep.

    Raises:
        UserError: If an operator that every model needs was not measured.
    """
    costs: list[ElementwiseCost] = []
    for op in Elementwise:
        mine = [r for r in measured(records, "elementwise") if r.point["op"] == op]
        mine += measured(records, "embedding") if op == Elementwise.EMBEDDING else []
        if not mine and op in OPTIONAL:
            continue
        if not mine:
            raise UserError(
                f"the element-wise operator {op} was not measured; run `wlb profile` again with "
                f"another --out"
            )
        values: dict[str, Any] = {}
        for name in PASSES:
            sizes = [_bytes(r, name, value_bytes) for r in mine]
            call, rate = call_and_rate(sizes, [r.numbers[f"{name}_ns"] for r in mine])
            values |= {f"{name}_call_ns": round(call), f"{name}_bytes_per_s": rate}
        costs.append(ElementwiseCost(op=op, provenance=provenance, **values))
    return tuple(costs)


def _bytes(record: Record, name: str, value_bytes: int) -> float:
    if record.kind != "embedding":
        return record.numbers[f"{name}_bytes"]
    # `elementwise_values` of wlb.cost.flops has the same factors for the embedding.
    factor = {"forward": 2, "backward": 3}[name]
    return factor * record.point["tokens"] * record.point["hidden"] * value_bytes


def call_and_rate(sizes: Sequence[float], times_ns: Sequence[float]) -> tuple[float, float]:
    """Fit the times of calls of an element-wise operator, and return its constant ns and bytes/s.

    Args:
        sizes: Bytes that each call reads and writes.
        times_ns: Time of each call in nanoseconds.
    """
    took = np.maximum(np.array(times_ns, np.float64), 1.0)
    call, ns_per_byte = robust_line(np.array(sizes, np.float64), took)
    rate = 1e9 / max(ns_per_byte, 1e9 / FREE_BYTES_PER_S)
    return call, float(f"{rate:.4g}")


def robust_line(
    x: FloatArray, took: FloatArray, offset: FloatArray | float = 0.0
) -> tuple[float, float]:
    """Return non-negative (a, b) for which offset + a + b * x is close to `took`.

    Relative errors are minimised with a robust loss, so that a few disturbed measurements have
    little influence.

    Args:
        x: Size of each measurement, such as a number of bytes, shape [n].
        took: Measured time of each measurement, above 0, shape [n].
        offset: Known part of each time. It is a number, or has shape [n].
    """
    design = np.stack([np.ones(took.size), x], 1)
    rest = np.maximum(took - offset, 0.0) / took
    first, _ = nnls(design / took[:, None], rest)
    # For precision, divide the unknowns by a first estimate, so that they are near 1.
    unit = np.maximum(first, [took.min(), took.max() / max(float(x.max()), 1.0)])

    def residual(z: FloatArray) -> FloatArray:
        return np.log(np.maximum(offset + design @ (z * unit), 1e-3 * took) / took)

    start = np.maximum(first / unit, 1e-6)
    found = least_squares(residual, start, bounds=(0.0, np.inf), loss="soft_l1", f_scale=0.05)
    a, b = (found.x * unit).tolist()
    return a, b


def fit_head(records: Sequence[Record], provenance: Provenance) -> HeadCost:
    """Fit the cost of the output head.

    Only the larger half of the measured numbers of tokens is used, because with few tokens the
    head takes little time, so its cost need not be exact there.

    Args:
        records: Records of the sweep.
        provenance: Provenance of the cost.

    Raises:
        UserError: If the head was not measured.
    """
    mine = measured(records, "head")
    if not mine:
        raise UserError(
            "the output head was not measured; run `wlb profile` again with another --out, because "
            "it skips what it has recorded in a file"
        )
    middle = np.median([r.point["tokens"] for r in mine])
    large = [r for r in mine if r.point["tokens"] >= middle]
    of_weight = [(r, r.point["hidden"] * r.point["vocab"]) for r in large]
    rates = [6 * r.point["tokens"] * n / r.numbers["forward_ns"] * 1e-3 for r, n in of_weight]
    scaled = [3 * n * GRADIENT_BYTES / r.numbers["backward_ns"] * 1e9 for r, n in of_weight]
    return HeadCost(
        tflops=float(f"{np.median(rates):.4g}"),
        backward_bytes_per_s=float(f"{np.median(scaled):.4g}"),
        provenance=provenance,
    )


def sum_of_operators(
    model: ModelSpec,
    tokens: int,
    tp: int,
    *,
    gemm: GemmCost,
    elementwise: Sequence[ElementwiseCost],
    value_bytes: int,
) -> tuple[FloatArray, FloatArray]:
    """Return the summed times of a layer's operators, without attention and collectives.

    Norms and residuals are counted for all `tokens`, as in the measurements of whole layers. In
    training, each TP rank computes only a part of them.

    Args:
        model: Model whose layers are all of one kind.
        tokens: Number of rows of a CP rank.
        tp: TP degree.
        gemm: Cost of matrix products.
        elementwise: Cost of each element-wise operator.
        value_bytes: Bytes of a value.

    Returns:
        (work, calls): the time that grows with sizes, and the constant time of calls. Each is
        [forward ns, backward ns].
    """
    at = np.array([float(tokens)])
    work, calls = np.zeros(2), np.zeros(2)
    for rows, columns in rank_matrices(model, tp):
        weights = np.array([float(rows * columns)])
        flops = 2.0 * tokens * rows * columns * 1e-3
        rates = [float(s.at(at, weights)[0]) for s in (gemm.forward, gemm.backward)]
        work += [flops / rates[0], 2 * flops / rates[1]]
    values = elementwise_values(rank_model(model, tp))
    for op, count in elementwise_calls(model).items():
        cost = elementwise_of(elementwise, Elementwise(op))
        rates = np.array([cost.forward_bytes_per_s, cost.backward_bytes_per_s])
        work += np.array(values[op]) * tokens * value_bytes / rates * 1e9
        calls += [count * cost.forward_call_ns, count * cost.backward_call_ns]
    return work, calls


Operators = Callable[[int, int], tuple[FloatArray, FloatArray]]
"""Function of (number of tokens, TP degree) that returns the result of `sum_of_operators`."""


def fit_layer(records: Sequence[Record], operators: Operators, provenance: Provenance) -> LayerCost:
    """Fit the constant time and the factor of a layer: time = constant + calls + factor * work.

    `work` and `calls` are predicted from the costs of the layer's operators, which were fitted
    before: `work` is the sum of the times that grow with the tokens, and `calls` is the sum of the
    constant times of the operators' calls.

    Args:
        records: Records of the sweep.
        operators: Returns (work, calls) of a layer.
        provenance: Provenance of the cost.

    Raises:
        UserError: If fewer than two layers were measured.
    """
    mine = measured(records, "layer")
    if len(mine) < 2:
        raise UserError(
            f"the sweep has {len(mine)} records of whole layers, but a fit needs at least two; run "
            f"the sweep with more numbers of tokens"
        )
    sums = [operators(r.point["tokens"], r.point["tp"]) for r in mine]
    values: dict[str, Any] = {}
    for i, name in enumerate(PASSES):
        took = np.array([r.numbers[f"{name}_ns"] for r in mine])
        work, calls = (np.array([s[part][i] for s in sums]) for part in (0, 1))
        call, factor = robust_line(work, took, calls)
        values |= {f"{name}_call_ns": round(call), f"{name}_factor": float(f"{factor:.4g}")}
    return LayerCost(**values, provenance=provenance)


def layer_errors(
    records: Sequence[Record], operators: Operators, layer: LayerCost
) -> dict[str, float]:
    """Return, by name, mean and maximum relative errors of the predicted times of held-out layers.

    Names that begin with "layer" are errors of the fitted cost. For comparison, names that begin
    with "operators" are errors of the plain sum of a layer's operators.

    Args:
        records: Records of the sweep.
        operators: Returns (work, calls) of a layer: the summed times of its operators that grow
            with the tokens, and the summed constant times of their calls.
        layer: The fitted cost of a layer.
    """
    call = np.array([layer.forward_call_ns, layer.backward_call_ns])
    factor = np.array([layer.forward_factor, layer.backward_factor])
    found: dict[str, list[float]] = {}
    for r in measured(records, "held_layer"):
        work, calls = operators(r.point["tokens"], r.point["tp"])
        took = np.array([r.numbers[f"{name}_ns"] for name in PASSES])
        predicted = {"layer": call + calls + factor * work, "operators": calls + work}
        for what, ns in predicted.items():
            for name, error in zip(PASSES, (ns / took - 1).tolist(), strict=True):
                found.setdefault(f"{what}_{name}", []).append(abs(error))
    out: dict[str, float] = {}
    for name, errors in found.items():
        out |= {f"{name}_mape": float(np.mean(errors)), f"{name}_max": float(np.max(errors))}
    return out
