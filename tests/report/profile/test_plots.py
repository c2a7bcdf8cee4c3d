"""Tests the figures of a kernel profile: all that was measured is drawn, beside its fitted time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.report.profile.sweep import MODEL, gpu_profile, held_of, sweep_of
from tests.sets import full
from wlb.cost import BlockCost, KernelProfile, ProfiledWorkload, load_profile
from wlb.report.profile.plots import held_figure, profile_figures
from wlb.report.profile.points import (
    HeldPoint,
    Record,
    layer_samples,
    measured_of,
    segment_ns,
    terms_of,
    without_layer,
    workload_at,
)
from wlb.spec import ModelSpec, ParallelSpec

PROFILE = gpu_profile()
RECORDS = sweep_of(PROFILE)
HELD = held_of(PROFILE)
KERNELS = tuple(f"{backend}-4x128" for backend in ("torch_varlen", "flash_attention_3"))


def names(*kernels: str) -> set[str]:
    """Returns names of all figures of a profile with these attention kernels."""
    passes = {f"figure10-{kernel}-{name}" for kernel in kernels for name in ("forward", "backward")}
    held = {f"held_out-{kernel}" for kernel in kernels}
    return {"figure7", "gemm", "elementwise", "layers", "collectives", *passes, *held}


def figures_of(
    records: Sequence[Record] = RECORDS,
    held: Sequence[HeldPoint] = HELD,
    profile: KernelProfile = PROFILE,
    model: ModelSpec = MODEL,
) -> dict[str, Any]:
    return profile_figures(profile, model=model, records=records, held=held)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return figures_of()


def points(axes: Any) -> list[tuple[float, float]]:
    """Returns what is drawn as marks, as (x, y)."""
    marked = [line for line in axes.lines if line.get_linestyle() == "None"]
    return [(float(x), float(y)) for line in marked for x, y in zip(*line.get_data(), strict=True)]


def test_every_part_of_a_sweep_has_its_figure(figures: dict[str, Any]) -> None:
    assert set(figures) == names(*KERNELS)
    for kernel in KERNELS:
        title = figures[f"figure10-{kernel}-forward"].axes[0].get_title(loc="left")
        assert title == kernel.replace("-", ", ")


def test_figure_7_is_the_workload_and_the_measured_documents(figures: dict[str, Any]) -> None:
    work = workload_at(PROFILE, MODEL)
    assert work.parallel == ParallelSpec(tp=8)
    terms = terms_of(work, RECORDS)
    expected = ProfiledWorkload(
        model=MODEL, parallel=ParallelSpec(tp=8), profile=PROFILE, backend="torch_varlen"
    )
    total = terms.parts["attention"] + terms.parts["total linear"]
    assert total == pytest.approx(expected.workload_ns(terms.lengths))
    assert (terms.normal_length, terms.normal_ns) == (4096, work.attention_ns([4096])[0])
    whole = [
        r
        for r in measured_of(RECORDS, "grid", backend="torch_varlen")
        if r["point"]["q"] == r["point"]["kv"]
    ]
    measured = {
        r["point"]["q"]: 32 * sum(r["numbers"].values()) / r["point"]["count"] for r in whole
    }
    (axes,) = figures["figure7"].axes
    drawn = {line.get_label(): line for line in axes.lines}
    tokens, relative = drawn["attention, measured"].get_data()
    assert dict(zip(tokens, relative, strict=True)) == pytest.approx(
        {q: ns / terms.normal_ns for q, ns in measured.items()}
    )
    assert drawn["total linear"].get_ydata() == pytest.approx(
        terms.parts["total linear"] / terms.normal_ns
    )


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_figure_10_has_the_measured_time_of_a_segment(figures: dict[str, Any], which: str) -> None:
    kv = max(r["point"]["kv"] for r in RECORDS if r["kind"] == "grid")
    left, right = figures[f"figure10-torch_varlen-4x128-{which}"].axes
    drawn = {line.get_label(): line for line in left.lines}
    rows, seconds = drawn[f"{kv // 1024}K keys"].get_data()
    took = {
        r["point"]["q"]: r["numbers"][f"{which}_ns"] / r["point"]["count"] * 1e-9
        for r in measured_of(RECORDS, "grid", backend="torch_varlen", kv=kv)
        if r["point"]["q"] <= 512
    }
    assert dict(zip(rows, seconds, strict=True)) == pytest.approx(took)
    assert {16, 128, 256} <= set(rows)
    assert right.get_ylabel() == f"{which}, TFLOP/s"


def test_every_held_out_call_is_drawn_inside_the_axes() -> None:
    far = replace(HELD[0], measured_ns=(1.0, 2.0), predicted_ns=(5e10, 1.0))
    held = [*HELD[:24], far]
    for which, axes in enumerate(held_figure(held, title="h").axes):
        drawn = points(axes)
        called = [(p.measured_ns[which] * 1e-9, p.predicted_ns[which] * 1e-9) for p in held]
        assert np.array(sorted(drawn)) == pytest.approx(np.array(sorted(called)))
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        assert all(left < x < right and low < y < high for x, y in drawn)


def test_layers_are_priced_as_the_fit_prices_them() -> None:
    fit = pytest.importorskip("wlb.profile.fit_linear")
    for sample in layer_samples(without_layer(PROFILE), MODEL, RECORDS):
        work, calls = fit.sum_of_operators(
            MODEL,
            sample.at["tokens"],
            gemm=PROFILE.gemm,
            elementwise=PROFILE.elementwise,
            value_bytes=2,
            tp=8,
        )
        assert sample.fitted_ns == pytest.approx(tuple(work + calls))


@pytest.mark.parametrize(
    ("kinds", "gone"),
    [
        (["collective"], {"collectives"}),
        (["grid"], {f"figure10-{KERNELS[0]}-{name}" for name in ("forward", "backward")}),
        *full(
            (["layer", "held_layer"], {"layers"}),
            (["gemm"], {"gemm"}),
            (["elementwise", "embedding"], {"elementwise"}),
        ),
    ],
)
def test_what_was_not_measured_has_no_figure(kinds: list[str], gone: set[str]) -> None:
    one = replace(PROFILE, attention=PROFILE.attention[:1])
    made = figures_of([r for r in RECORDS if r["kind"] not in kinds], HELD, profile=one)
    assert set(made) == names(KERNELS[0]) - gone


def test_of_nothing_measured_the_prices_are_drawn() -> None:
    (figure,) = figures_of([], [], load_profile("h100")).values()
    assert points(figure.axes[0]) == []
    assert "total linear" in [line.get_label() for line in figure.axes[0].lines]


def test_a_cpu_with_groups_padding_and_few_points() -> None:
    profile = load_profile("cpu")
    model = replace(
        MODEL, hidden_size=64, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=16,
        ffn_hidden_size=192,
    )  # fmt: skip
    records = sweep_of(profile, model, rows=(8, 64, 512, 2048), tp=2)
    made = figures_of(records, [], profile, model)
    assert {"figure7", "gemm", "layers", "collectives"} <= set(made)
    assert made["gemm"].axes[0].get_ylabel() == "forward, GFLOP/s"


def test_a_calls_grid_is_part_of_a_segments_time() -> None:
    blocks = BlockCost(forward_ns=1.5, backward_ns=5.5, tail_forward_ns=27.5, tail_backward_ns=23.0)
    first = PROFILE.attention[0]
    table = replace(first, blocks=blocks)
    q, kv, count = (np.array([n]) for n in (256, 1024, 10))
    with_grid, without = (segment_ns(t, q, kv, count) for t in (table, first))
    heads = table.num_heads
    # The call's grid and tail, divided by its 10 segments.
    tiles_q, tiles_kv = -(-256 // table.tile_rows), -(-1024 // table.backward_tile_keys)
    assert with_grid[0] - without[0] == pytest.approx(heads * tiles_q * 1.5 + 1024 * 2.75)
    assert with_grid[1] - without[1] == pytest.approx(heads * tiles_kv * 5.5 + 256 * 2.3)
