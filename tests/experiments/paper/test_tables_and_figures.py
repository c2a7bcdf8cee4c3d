"""Tests what small experiments compute: shares of tokens, crossings, kernel steps, what fits."""

from pathlib import Path

import numpy as np
import pytest

from experiments.harness.constants import TABLE_1, configuration, title
from experiments.harness.drawing import new_figure, tokens_axis, tokens_text
from experiments.paper.fig03.__main__ import HALF, corpus
from experiments.paper.fig03.__main__ import draw as draw_lengths
from experiments.paper.fig07.__main__ import crossing, growth, parts_of, workload
from experiments.paper.fig07.__main__ import draw as draw_terms
from experiments.paper.fig10.__main__ import forward_us, table_of, tflops
from experiments.paper.fig13.waterfall import WaterfallRow, waterfall_figure
from experiments.paper.fig15.__main__ import rest_ns
from experiments.paper.fig15.case import layer_cost
from experiments.paper.table1 import __main__ as memory
from experiments.paper.table1.__main__ import PACKINGS, fit, words
from wlb.cost import load_profile
from wlb.memory import MemoryEstimate, memory_estimate

pytestmark = pytest.mark.full


def test_documents_are_cut_at_the_window_and_tokens_counted(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("100\n65536\n300000\n")
    found = corpus(str(path), num_tokens=0, seed=0)
    assert found.lengths.tolist() == [100, 300000 - 2 * 131072, 65536, 131072, 131072]
    assert found.num_cut == 1
    assert found.tokens_below(HALF) == (100 + 37856) / 365636
    assert found.documents_below(HALF) == 0.4
    assert found.token_share[-1] == 1.0


def test_the_fitted_family_agrees_with_the_paper() -> None:
    found = corpus("wlb_paper", num_tokens=200_000_000, seed=1)
    assert 0.75 < found.tokens_below(HALF) < 0.82
    assert found.lengths.max() == 131072
    assert draw_lengths([found])


def test_attention_crosses_total_linear_once() -> None:
    cost = workload("7b_128k", load_profile("h100"))
    at = crossing(cost, window=131072)
    assert at is not None
    ahead = cost.attention_ns([at - 1, at]) > cost.linear_ns([at - 1, at])
    assert ahead.tolist() == [False, True]
    assert growth(cost, window=131072) == pytest.approx(2.0, abs=0.03)
    parts = parts_of(cost, np.array([4096]))
    linear = parts["GEMM"] + parts["collectives"] + parts["element-wise"]
    assert parts["total linear"] == pytest.approx(linear)
    assert draw_terms(cost, window=131072, at=at)


def test_few_rows_cost_a_tile() -> None:
    table = table_of(load_profile("h100"), None)
    time = forward_us(table, np.array([16, 128, 129]), np.full(3, 4096))
    assert time[0] == time[1]
    assert time[2] > 1.5 * time[1]
    rate = tflops(table, np.array([16, 128]), np.full(2, 4096))
    assert rate[1] > 7 * rate[0]


@pytest.mark.parametrize("name", TABLE_1)
def test_every_configuration_fits_80_gb(name: str) -> None:
    found = [fit(name, packing) for packing in PACKINGS]
    assert all(f.fits for f in found)
    windows, var_len = found
    assert windows.memory.micro_batch_tokens == configuration(name).data.context_window
    assert windows.memory.total_bytes < var_len.memory.total_bytes


def test_recomputation_is_tried_from_least_to_most(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    largest = memory_estimate(configuration("7b_128k"))

    def chosen(name: str, *overrides: str):
        tried.extend(o.split("=")[1] for o in overrides if o.startswith("training.recompute"))
        return configuration(name)

    def estimate(_: object) -> MemoryEstimate:
        return largest

    monkeypatch.setattr(memory, "configuration", chosen)
    monkeypatch.setattr(memory, "memory_estimate", estimate)
    monkeypatch.setattr(memory, "GPU_BYTES", 1e9)
    found = fit("7b_128k", "windows")
    assert tried == ["none", "selective", "full"]
    assert (found.recompute, found.fits) == ("full", False)
    assert "do not fit: 7B-128K (windows)" in words([found])


def test_axes_of_tokens() -> None:
    _, (left, right) = new_figure(ncols=2)
    left.plot([256, 131072], [1, 2])
    tokens_axis(left)
    assert [tokens_text(x) for x in left.get_xticks()][:2] == ["256", "1K"]
    right.set_xlim(0, 133000)
    tokens_axis(right, log=False)
    assert right.get_xticks().tolist() == [0, 32768, 65536, 98304, 131072]
    assert title("7b_128k") == "7B-128K"


def test_figure_15_counts_the_exchange_of_keys_once() -> None:
    cost = layer_cost(window=131072, cp=4)
    pieces = np.array([100_000, 31_072])
    rest = rest_ns([pieces], cost)
    terms = {name: int(ns.sum()) / 1e6 for name, ns in cost.terms(pieces).items()}
    kept = (ms for name, ms in terms.items() if name.split("_")[0] not in ("attention", "cp"))
    assert rest["linear_ms"] == pytest.approx(sum(kept))
    gather, exchange = cost.kv_exchange_ns(131072, cp=4)
    assert (rest["gather_ms"], rest["exchange_ms"]) == (gather / 1e6, exchange / 1e6)


def test_a_waterfall_ends_where_its_parts_lead():
    rows = [
        WaterfallRow("Plain-4D", 1.0, 1.0),
        WaterfallRow("sharding", 0.03, 1.05),
        WaterfallRow("packing", 0.2),
        WaterfallRow("delay", -0.05),
    ]
    axes = waterfall_figure(rows, total="all", paper=1.33).axes[0]
    boxes = {p.get_gid(): p for p in axes.patches}
    spans = {
        gid: tuple(sorted(round(y, 6) for y in (p.get_y(), p.get_y() + p.get_height())))
        for gid, p in boxes.items()
    }
    bottom = spans["total"][0]
    assert spans["bar0"] == (bottom, 1.0)
    assert spans["bar1"] == (1.0, 1.03)
    assert spans["bar2"] == (1.03, 1.23)
    assert spans["bar3"] == (1.18, 1.23)
    assert spans["total"] == (bottom, 1.18)
    assert f"begins at {axes.get_ylim()[0]:.2f}" in axes.get_ylabel()
    (paper,) = (line for line in axes.lines if line.get_marker() == "D")
    assert paper.get_ydata().tolist() == [1.0, 1.05, 1.33]
    labels = [t.get_text() for t in axes.get_xticklabels()]
    assert labels == ["Plain-4D", "sharding", "packing", "delay", "all"]


def test_a_waterfall_of_large_parts_begins_at_nothing():
    axes = waterfall_figure([WaterfallRow("a", 1.0), WaterfallRow("b", 3.0)]).axes[0]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylabel() == "speed-up"
