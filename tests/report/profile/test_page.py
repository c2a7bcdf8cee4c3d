"""Tests a kernel profile's page: each part has its records' numbers, or says why it is missing."""

import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.report.profile.sweep import MODEL, gpu_profile, held_of, residuals_of, sweep_of
from tests.sets import full
from tests.words import lacks
from wlb.cost import BlockCost, KernelProfile, ProfiledWorkload, load_profile
from wlb.report.profile.page import HeldPoint, profile_page
from wlb.report.profile.plots import held_figure, kernel_figure, shown_keys
from wlb.report.profile.points import (
    PlottedSample,
    Record,
    elementwise_samples,
    gemm_samples,
    grid_samples,
    layer_samples,
    measured_of,
    segment_ns,
    terms_of,
    without_layer,
)
from wlb.report.profile.words import time_text
from wlb.spec import ModelSpec, ParallelSpec

PROFILE = gpu_profile()
RECORDS = sweep_of(PROFILE)
HELD = held_of(PROFILE)
FIGURES = {
    *(f"kernel-{i}-{name}" for i in range(2) for name in ("forward", "backward")),
    *("terms", "held-0", "held-1", "gemm", "elementwise", "layers", "collectives"),
}
FAILED: Record = {
    "kind": "grid",
    "point": {"backend": "flash_attention_3", "num_heads": 4, "q": 8, "kv": 131072, "count": 9},
    "numbers": {},
    "failed": "out of memory: tried <20 GiB>",
}


def page_of(
    records: Sequence[Record] = RECORDS,
    held: Sequence[HeldPoint] = HELD,
    profile: KernelProfile = PROFILE,
    model: ModelSpec = MODEL,
) -> str:
    tables = range(len(profile.attention))
    residuals = [residuals_of(held, i) if held else {} for i in tables]
    page = profile_page(profile, model=model, records=records, held=held, residuals=residuals)
    return " ".join(page.split())


@pytest.fixture(scope="module")
def page() -> str:
    return page_of([*RECORDS, FAILED])


def figures(page: str) -> dict[str, ElementTree.Element]:
    """Returns <svg> elements by the prefix of their ids."""
    found: dict[str, ElementTree.Element] = {}
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        (name,) = {x.removesuffix("-figure_1") for x in re.findall(r'id="([^"]+-figure_1)"', svg)}
        found[name] = ElementTree.fromstring(svg)
    return found


def captions(page: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<figcaption>(.*?)</figcaption>", page)]


def caption(page: str, start: str) -> str:
    (text,) = [t for t in captions(page) if t.startswith(start)]
    return text


def rows(page: str) -> list[list[str]]:
    return [
        [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", line)]
        for line in re.findall(r"<tr>(.*?)</tr>", page)
    ]


@pytest.mark.full
def test_the_page_needs_nothing_else_and_is_the_same_again(page: str) -> None:
    assert set(figures(page)) == FIGURES
    links = set(re.findall(r"(?:https?:)?//[\w.]+", page))
    assert links <= {"http://www.w3.org"}  # the name of the XML format, which nothing fetches
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    refs = {r for pair in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page) for r in pair}
    assert refs <= {*ids, ""}
    assert "#000000" not in page  # black would vanish on a dark page
    assert not re.search(r"<(link|script|img|iframe)\b|\bsrc=|url\(h", page)
    assert page == page_of([*RECORDS, FAILED])


def test_failed_points_are_named_and_stand_ins_too(page: str) -> None:
    missing = re.search(r"What was not measured</h2> <ul>(.*?)</ul>", page)
    assert missing is not None
    items = [unescape(x) for x in re.findall(r"<li>(.*?)</li>", missing[1])]
    point = "backend flash_attention_3, num_heads 4, q 8, kv 131072, count 9"
    assert lacks(items[0], "Failed", point, "out of memory: tried <20 GiB>") == []
    assert [x.partition(":")[0] for x in items[1:]] == [
        f"{op}, inter-node" for op in ("all-gather", "reduce-scatter", "all-reduce", "p2p")
    ]
    assert f"{len(RECORDS)} of {len(RECORDS) + 1} points were measured" in page


def test_figure_7_is_the_workload_and_the_measured_documents(page: str) -> None:
    work = ProfiledWorkload(
        model=MODEL, parallel=ParallelSpec(tp=8), profile=PROFILE, backend="torch_varlen"
    )
    said = caption(page, "Forward and backward of all 32 layers on one rank of TP 8, CP 1")
    normal = int(work.attention_ns([4096])[0])
    assert f"1 is attention at 4096 tokens, {time_text(normal)}." in said
    longest = int(work.table.forward.axis1[-1])
    ratio = work.attention_ns([longest])[0] / work.linear_ns([longest])[0]
    assert f"At {longest} tokens it is {ratio:.3g} times total linear." in said
    crossing = re.search(r"From (\d+) tokens on attention takes longer than total linear", said)
    assert crossing is not None
    for tokens, is_longer in ((int(crossing[1]), True), (int(crossing[1]) * 9 // 10, False)):
        assert bool(work.attention_ns([tokens])[0] > work.linear_ns([tokens])[0]) == is_longer

    terms = terms_of(work, RECORDS)
    total = terms.parts["attention"] + terms.parts["total linear"]
    assert total == pytest.approx(work.workload_ns(terms.lengths))
    whole = [
        r
        for r in measured_of(RECORDS, "grid", backend="torch_varlen")
        if r["point"]["q"] == r["point"]["kv"]
    ]
    assert sorted(terms.measured) == sorted(
        (
            r["point"]["q"],
            pytest.approx(
                32 * (r["numbers"]["forward_ns"] + r["numbers"]["backward_ns"])
                / r["point"]["count"]
            ),
        )
        for r in whole
    )  # fmt: skip


def test_figure_10_tells_the_step_of_a_tile(page: str) -> None:
    (forward, _), (backward, _) = (
        [c for c in captions(page) if c.startswith(f"Left: time of one {name}")]
        for name in ("forward", "backward")
    )
    kv = max(r["point"]["kv"] for r in RECORDS if r["kind"] == "grid")
    for which, said in (("forward", forward), ("backward", backward)):
        took = {
            q: record["numbers"][f"{which}_ns"] / record["point"]["count"]
            for q in (16, 128, 256)
            for record in measured_of(RECORDS, "grid", backend="torch_varlen", q=q, kv=kv)
        }
        assert (
            f"Over {kv} keys 128 rows take {took[128] / took[16]:.2f} times as long as 16: one "
            f"tile; 256 rows take {took[256] / took[128]:.2f} times as long as 128: two."
        ) in said


def test_every_point_is_drawn_inside_the_axes() -> None:
    far = replace(HELD[0], measured_ns=(1.0, 2.0), predicted_ns=(5e10, 1.0))
    svg = ElementTree.fromstring(held_figure([*HELD[:24], far], name="h"))
    space = "{http://www.w3.org/2000/svg}"
    marks = [
        (float(use.attrib["x"]), float(use.attrib["y"]))
        for use in svg.iter(f"{space}use")
        if re.search("#0072b2|#d55e00", use.get("style", ""))
    ]
    # A mark in each panel for each point, and one of each kind in each legend.
    assert len(marks) == 2 * (25 + 2)
    panels = [
        [float(rect.attrib[name]) for name in ("x", "y", "width", "height")]
        for rect in svg.iter(f"{space}rect")
    ]
    assert len(panels) == 2
    for x, y in marks:
        assert any(a < x < a + w and b < y < b + h for a, b, w, h in panels)


def test_the_worst_predictions_are_listed(page: str) -> None:
    lists = re.findall(r"The worst (\w+) predictions:</p> <ol>(.*?)</ol>", page)
    assert [name for name, _ in lists] == ["forward", "backward"] * 2
    errors = sorted(
        ((p.predicted_ns[1] / p.measured_ns[1] - 1, p) for p in HELD if p.table == 1),
        key=lambda e: -abs(e[0]),
    )[:3]
    items = re.findall(r"<li>(.*?)</li>", lists[3][1])
    assert len(items) == 3
    for text, (error, point) in zip(items, errors, strict=True):
        assert f"({error:+.1%})" in text
        assert f"measured {time_text(point.measured_ns[1])}" in text
        if point.kind == "held_batch":
            assert f"varlen batch {point.label['index']}, measurement" in text


def test_the_table_of_residuals_has_every_number(page: str) -> None:
    found = {tuple(r[:4]): r[4:] for r in rows(page) if len(r) == 9}
    assert len(found) == 2 * 2 * 3
    residuals = residuals_of(HELD, 1)
    for words, kind, count, again in (
        ("equal segments", "held_pair", 8, ""),
        ("varlen batches", "held_batch", 16, "1.0%"),
    ):
        errors = [f"{residuals[f'{kind}_total_{part}']:.1%}" for part in ("mape", "p95", "max")]
        cells = found["flash_attention_3, 4 heads of 128", "no price", words, "total"]
        assert cells == [str(count), *errors, again]


def test_errors_say_whether_blocks_are_priced() -> None:
    blocks = BlockCost(forward_ns=1, backward_ns=5, tail_forward_ns=0, tail_backward_ns=0)
    first = replace(PROFILE.attention[0], blocks=blocks)
    profile = replace(PROFILE, attention=(first, *PROFILE.attention[1:]))
    page = page_of(RECORDS, HELD, profile=profile)
    said = [r[1] for r in rows(page) if len(r) == 9]
    assert said == ["priced"] * 6 + ["no price"] * 6


def off(samples: Sequence[PlottedSample], which: int) -> str:
    errors = [abs(s.error(which)) for s in samples]
    return f"{np.mean(errors):.1%} (worst {max(errors):.1%})"


def test_captions_of_the_linear_part_have_its_errors(page: str) -> None:
    gemm = gemm_samples(PROFILE, RECORDS)
    record, sample = measured_of(RECORDS, "gemm")[0], gemm[0]
    assert sample.measured_ns == (record["numbers"]["forward_ns"], record["numbers"]["backward_ns"])
    assert f"the fit is {off(gemm, 0)} off in forward time" in caption(page, "Achieved throughput")
    elementwise = elementwise_samples(PROFILE, RECORDS)
    assert f"{off(elementwise, 1)} in backward" in caption(page, "Bytes that")
    held = layer_samples(PROFILE, MODEL, RECORDS, kind="held_layer")
    assert (
        f"No fit has seen the full marks (2): the line is {off(held, 0)} off forward and "
        f"{off(held, 1)} backward."
    ) in caption(page, "One decoder layer")
    cost = next(c for c in PROFILE.collectives if (c.op, c.scope) == ("p2p", "intra_node"))
    assert (
        f"p2p intra-node {time_text(cost.alpha_ns)} + wire bytes / {cost.bytes_per_s / 1e9:.3g}"
    ) in caption(page, "Time of the slowest rank")


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
    ("kinds", "figures_gone", "said"),
    [
        (["collective"], {"collectives"}, "Collectives were not measured"),
        (
            ["grid"],
            {"kernel-0-forward", "kernel-0-backward"},
            "Too little of the grid was measured to draw it.",
        ),
        *full(
            (["layer", "held_layer"], {"layers"}, "Whole layers were not measured."),
            (["gemm"], {"gemm"}, "Matrix products were not measured."),
            (
                ["elementwise", "embedding"],
                {"elementwise"},
                "Element-wise operators were not measured",
            ),
        ),
    ],
)
def test_what_is_missing_is_said(kinds: list[str], figures_gone: set[str], said: str) -> None:
    one = replace(PROFILE, attention=PROFILE.attention[:1])
    page = page_of(
        [r for r in RECORDS if r["kind"] not in kinds],
        [p for p in HELD if p.table == 0],
        profile=one,
    )
    assert set(figures(page)) == {f for f in FIGURES if "-1" not in f} - figures_gone
    assert said in page
    assert page.count("Without any point: ") == len(kinds)


def test_nothing_measured_at_all() -> None:
    page = page_of([], [], replace(load_profile("h100"), name="<h100>"))
    assert set(figures(page)) == {"terms"}
    assert "No whole document was measured at this head layout." in page
    assert page.count("No held-out call was measured.") == 2
    assert "<h1>Kernel profile &lt;h100&gt;</h1>" in page
    assert [r[5:8] for r in rows(page) if len(r) == 9] == [["not measured"] * 3] * 12


def test_a_cpu_with_groups_padding_and_few_points() -> None:
    profile = load_profile("cpu")
    model = replace(
        MODEL, hidden_size=64, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=16,
        ffn_hidden_size=192,
    )  # fmt: skip
    table = profile.attention[0]
    records = sweep_of(profile, model, rows=(8, 64, 512, 2048), tp=2)
    page = page_of(records, [], profile, model)
    assert {"terms", "gemm", "layers", "collectives"} <= set(figures(page))
    samples = grid_samples(table, records)
    keys = shown_keys(samples)
    if keys:
        ElementTree.fromstring(kernel_figure(table, samples, which=0, name="k"))
    assert "GFLOP/s" in page
    if table.group_forward_ns:
        assert f"each such group costs {time_text(table.group_forward_ns)}" in page


def test_what_a_calls_grid_takes_is_told_and_drawn() -> None:
    blocks = BlockCost(forward_ns=1.5, backward_ns=5.5, tail_forward_ns=27.5, tail_backward_ns=23.0)
    first, *others = PROFILE.attention
    table = replace(first, blocks=blocks)
    page = page_of(profile=replace(PROFILE, attention=(table, *others)))
    assert (
        "one costs 1.5 ns forward and 5.5 ns backward, and the end of a call 27.5 ns for each key "
        "of the longest segment and 23 ns for each row."
    ) in page
    q, kv, count = (np.array([n]) for n in (256, 1024, 10))
    with_grid, without = (segment_ns(t, q, kv, count) for t in (table, first))
    heads = table.num_heads
    # The call's grid and tail, divided by its 10 segments.
    tiles_q, tiles_kv = -(-256 // table.tile_rows), -(-1024 // table.tile_rows)
    assert with_grid[0] - without[0] == pytest.approx(heads * tiles_q * 1.5 + 1024 * 2.75)
    assert with_grid[1] - without[1] == pytest.approx(heads * tiles_kv * 5.5 + 256 * 2.3)


@pytest.mark.full
def test_conditions_and_origin_are_told() -> None:
    conditions = {
        "sm_clock_mhz": [1200.0, 1980.0, 1990.0],
        "throttled": {"power_brake": 0.25},
        "why_empty": "",
    }
    environment = {
        "torch": "2.13",
        "memory_bytes": 80 << 30,
        "packages": {"flash-attn": "2.8"},
        "starts": [
            {"date": "2026-11-20", "conditions": {"sm_clock_mhz": [1.0, 2.0, 3.0]}},
            {"date": "2026-11-21", "conditions": conditions},
        ],
    }
    origin = replace(
        PROFILE.provenance, command="wlb profile <x>", commit="abc1", environment=environment
    )
    page = page_of(profile=replace(PROFILE, provenance=origin))
    told = dict(re.findall(r"<dt>(.*?)</dt><dd><code>(.*?)</code></dd>", page))
    assert told["command"] == "wlb profile &lt;x&gt;"
    assert told["commit"] == "abc1"
    assert told["memory"] == "80 GiB"
    assert told["attention packages"] == "flash-attn 2.8"
    assert told["SM clock (MHz)"] == "1200 at least, 1980 at the median, 1990 at most"
    assert told["throttled, share of samples"] == "power-brake 25%"
    assert "clocks and power" not in told
    assert "starts" not in told
