"""Tests fits of the linear part on made-up records: found again, robust, refused if too few."""

from dataclasses import replace

import numpy as np
import pytest

from wlb.cost import Elementwise, Provenance, ProvenanceKind
from wlb.cost.flops import elementwise_calls, elementwise_values
from wlb.cost.profile import OPTIONAL, elementwise_of
from wlb.profile.fit_linear import (
    call_and_rate,
    fit_elementwise,
    fit_gemm,
    fit_head,
    fit_layer,
    layer_errors,
    robust_line,
    sum_of_operators,
)
from wlb.profile.linear import rank_matrices
from wlb.profile.tasks import Record
from wlb.spec import ModelSpec

MODEL = ModelSpec(
    hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, ffn_hidden_size=192, vocab_size=512
)
SOURCE = Provenance(kind=ProvenanceKind.MEASURED, source="made up")
TOKENS = (128, 512, 2048, 8192)
RATES = {"norm": 5e9, "residual": 2e10, "rotary": 4e9, "swiglu": 1e10}


def record(kind: str, point: dict, forward_ns: float, backward_ns: float, **more) -> Record:
    numbers = {"forward_ns": forward_ns, "backward_ns": backward_ns, **more}
    return Record(kind=kind, point=point, numbers=numbers)


def gemms() -> list[Record]:
    """Returns GEMM records of 0.1 TFLOP/s forward and 0.05 backward, whatever the shape."""
    return [
        record(
            "gemm",
            {"tokens": tokens, "rows": rows, "columns": columns, "tp": tp},
            2 * tokens * rows * columns / 0.1 * 1e-3,
            4 * tokens * rows * columns / 0.05 * 1e-3,
        )
        for tokens in TOKENS
        for tp in (1, 2)
        for rows, columns in set(rank_matrices(MODEL, tp))
    ]


def operators() -> list[Record]:
    """Returns records of 10 us per call forward, 20 us backward, and bytes at RATES.

    Bytes take twice as long backward.
    """
    made: list[Record] = []
    for tokens in (1, *TOKENS):
        for op, rate in RATES.items():
            size = 100.0 * tokens
            forward_ns, backward_ns = 1e4 + size / rate * 1e9, 2e4 + 2 * size / rate * 1e9
            point = {"op": op, "tokens": tokens, "width": 8}
            more = {"forward_bytes": size, "backward_bytes": size}
            made.append(record("elementwise", point, forward_ns, backward_ns, **more))
    for tokens in TOKENS:
        point = {"tokens": tokens, "hidden": 64, "vocab": 512}
        size = tokens * 64 * 4
        made.append(record("embedding", point, 1e3 + 2 * size / 1e10 * 1e9, 3 * size / 1e9 * 1e9))
        flops = 6 * tokens * 64 * 512
        made.append(record("head", point, flops / 0.08 * 1e-3, 3 * 64 * 512 * 4 / 1e9 * 1e9))
    return made


def sums(tokens: int, tp: int):
    return sum_of_operators(
        MODEL,
        tokens,
        tp,
        gemm=fit_gemm(gemms(), SOURCE),
        elementwise=fit_elementwise(operators(), SOURCE, value_bytes=4),
        value_bytes=4,
    )


def test_gemms_are_found_again():
    cost = fit_gemm(gemms(), SOURCE)
    assert cost.forward.values == pytest.approx(np.full(cost.forward.values.shape, 0.1))
    assert cost.backward.values == pytest.approx(np.full(cost.backward.values.shape, 0.05))
    assert cost.forward.axis0.tolist() == list(TOKENS)


def test_gemms_out_of_memory_take_the_throughput_at_fewer_tokens():
    lost = [
        r
        if r.point["tokens"] < 8192
        else Record(kind="gemm", point=r.point, numbers={}, failed="x")
        for r in gemms()
    ]
    kept = [r for r in gemms() if (r.point["tokens"], r.point["rows"]) == (8192, 64)]
    cost = fit_gemm([*lost, *kept[:1]], SOURCE)
    assert cost.forward.values == pytest.approx(np.full(cost.forward.values.shape, 0.1))


def test_operators_embedding_and_head_are_found_again():
    costs = {c.op: c for c in fit_elementwise(operators(), SOURCE, value_bytes=4)}
    assert set(costs) == set(Elementwise) - OPTIONAL
    for op, rate in RATES.items():
        assert costs[Elementwise(op)].forward_bytes_per_s == pytest.approx(rate, rel=1e-2)
        assert costs[Elementwise(op)].backward_bytes_per_s == pytest.approx(rate / 2, rel=1e-2)
        assert costs[Elementwise(op)].forward_call_ns == pytest.approx(1e4, rel=1e-2)
    assert costs[Elementwise.EMBEDDING].forward_bytes_per_s == pytest.approx(1e10, rel=1e-2)
    head = fit_head(operators(), SOURCE)
    assert head.tflops == pytest.approx(0.08, rel=1e-3)
    assert head.backward_bytes_per_s == pytest.approx(1e9, rel=1e-3)


def test_operators_add_up_to_a_layer_literally():
    """A layer has seven matrices and seven calls; norms and residuals are of all tokens, the rest
    of a TP rank's.
    """
    work, calls = sums(512, 2)
    assert calls == pytest.approx([7e4, 14e4], rel=1e-2)
    flops = 2 * 512 * sum(a * b for a, b in rank_matrices(MODEL, 2))
    expected = np.array([flops / 0.1 * 1e-3, 2 * flops / 0.05 * 1e-3])
    values = elementwise_values(MODEL)
    for op, rate in RATES.items():
        share = 2 if op in ("rotary", "swiglu") else 1
        forward, backward = (v / share * 512 * 4 for v in values[op])
        expected += [forward / rate * 1e9, backward / rate * 2e9]
    assert work == pytest.approx(expected, rel=1e-2)
    assert sum(elementwise_calls(MODEL).values()) == 7


def test_norms_of_heads_are_found_and_counted_where_they_were_measured():
    """Without their measurement they take what norms of rows take."""
    model, rate = replace(MODEL, qk_norm=True), RATES["norm"] / 4
    heads = [
        replace(
            r,
            point=r.point | {"op": "head_norm"},
            numbers=r.numbers | {"forward_ns": 1e4 + r.numbers["forward_bytes"] / rate * 1e9},
        )
        for r in operators()
        if r.point.get("op") == "norm"
    ]
    values = 2 * (MODEL.q_dim + MODEL.kv_dim) * 512 * 4
    took = {}
    for records, measured_rate in (([], RATES["norm"]), (heads, rate)):
        costs = fit_elementwise([*operators(), *records], SOURCE, value_bytes=4)
        found = elementwise_of(costs, Elementwise.HEAD_NORM).forward_bytes_per_s
        assert found == pytest.approx(measured_rate, rel=1e-2)
        gemm = fit_gemm(gemms(), SOURCE)
        both = [
            sum_of_operators(m, 512, 1, gemm=gemm, elementwise=costs, value_bytes=4)
            for m in (MODEL, model)
        ]
        (plain, calls), (work, more_calls) = both
        assert more_calls - calls == pytest.approx([2e4, 4e4], rel=1e-2)
        took[measured_rate] = (work - plain)[0]
        assert took[measured_rate] == pytest.approx(values / measured_rate * 1e9, rel=2e-2)
    assert set(took) == {RATES["norm"], rate}


def layers(kind: str, tokens, disturbed=()) -> list[Record]:
    """Returns layer records of 1.2 times the work forward, 1.5 times backward, and 50 us per
    layer.
    """
    made: list[Record] = []
    for count in tokens:
        for tp in (1, 2):
            work, calls = sums(count, tp)
            forward, backward = 5e4 + calls + work * [1.2, 1.5]
            slow = 3 if (count, tp) in disturbed else 1
            made.append(record(kind, {"tokens": count, "tp": tp}, slow * forward, slow * backward))
    return made


def test_layers_are_found_again_although_one_was_disturbed():
    records = layers("layer", TOKENS, disturbed=[(512, 1)]) + layers("held_layer", (256, 1024))
    cost = fit_layer(records, sums, SOURCE)
    assert cost.forward_factor == pytest.approx(1.2, rel=0.03)
    assert cost.backward_factor == pytest.approx(1.5, rel=0.03)
    assert cost.forward_call_ns == pytest.approx(5e4, rel=0.3)
    errors = layer_errors(records, sums, cost)
    assert errors["layer_forward_mape"] < 0.03
    assert errors["layer_backward_max"] < 0.05
    assert errors["operators_backward_mape"] > 0.2


def test_a_line_through_points_and_one_outlier():
    x = np.array([1.0, 2, 4, 8, 16])
    a, b = robust_line(x, 3 + 2 * x)
    assert (a, b) == (pytest.approx(3, rel=1e-3), pytest.approx(2, rel=1e-3))
    a, b = robust_line(x, (3 + 2 * x) * [1, 1, 5, 1, 1])
    assert (a, b) == (pytest.approx(3, rel=0.1), pytest.approx(2, rel=0.1))
    assert robust_line(x, 5 - 0.1 * x)[1] == pytest.approx(0, abs=1e-3)


def test_an_operator_that_does_not_grow_is_free_a_byte():
    call, rate = call_and_rate([1e3, 1e4, 1e5], [500.0, 500.0, 500.0])
    assert call == pytest.approx(500, rel=0.05)
    assert rate >= 1e11


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (lambda: fit_gemm(gemms()[:1], SOURCE), "but the sweep has 1 and 1"),
        (
            lambda: fit_elementwise([], SOURCE, value_bytes=4),
            "element-wise operator norm was not measured",
        ),
        (lambda: fit_head([], SOURCE), "the output head was not measured"),
        (lambda: fit_layer([], sums, SOURCE), "0 records of whole layers"),
    ],
)
def test_too_little_is_refused(fit, message):
    with pytest.raises(ValueError, match=message):
        fit()
