"""Tests that tables fit, the page is self-contained, and figures are of what was measured."""

import re
from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, lengths_of_family
from wlb.packing import PackingRun
from wlb.packing.study.compare import compare, variants_of
from wlb.packing.study.saving import saving_of
from wlb.packing.study.tune import Tuning, TuningGrid, tune
from wlb.plan import int_array
from wlb.report.packing.page import packing_page
from wlb.report.packing.plots import (
    delay_figure,
    imbalance_figure,
    length_figure,
    trade_figure,
    tuning_figure,
)
from wlb.report.packing.tables import COLUMNS, facts_of, packing_table, remarks, tuning_table
from wlb.spec import RunSpec

C = 2048
COST = FlopsWorkload(quadratic_ns=1670 / C, linear_ns_per_token=1000)
SPEC = replace(RunSpec(), data=replace(RunSpec().data, context_window=C, num_windows=4))
SOURCE = lengths_of_family("wlb_paper", window=C, num_documents=6000, seed=1)
STREAM = GlobalBatches(SOURCE, tokens_per_batch=4 * C, seed=1)
BATCHES = [b for b, _ in zip((b for b, _ in STREAM.iterate()), range(12), strict=False)]


@pytest.fixture(scope="module")
def runs() -> list[PackingRun]:
    return list(compare(SPEC, BATCHES, COST))


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    return tune(SPEC, BATCHES, COST, grid=TuningGrid(thresholds=(0.2, 0.63), s_max=(1.5,)))


def printed(table: object, width: int) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 260])
def test_the_table_goes_into_blocks_rather_than_cut_a_number(
    runs: list[PackingRun], width: int
) -> None:
    summaries = [r.summary for r in runs]
    text = printed(packing_table(summaries, title="t", own=""), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    for summary in summaries:
        row = re.compile(f"│ {re.escape(summary.label)} +│")
        lines = [x for x in text.splitlines() if row.match(x)]
        cells = [cell.strip() for line in lines for cell in line.split("│")[2:-1]]
        assert cells == [cell(summary) for _, cell in COLUMNS]
    heads = [line for line in text.splitlines() if "┃ policy" in line]
    assert len(heads) == 1 if width == 260 else len(heads) > 1


def test_facts_of_lengths() -> None:
    facts = facts_of("some", int_array("l", [10, 20, 30, 40, 300]), window=100)
    assert (facts.num_documents, facts.num_tokens, facts.median) == (5, 400, 30)
    assert (facts.num_long, facts.long_share) == (1, 0.75)
    assert facts.short_share == 0.25
    assert "75.0% of tokens) are longer than the window and are cut into pieces" in facts.lines[1]
    assert (
        facts_of("some", int_array("l", [10]), window=100)
        .lines[1]
        .endswith("no document is longer than the window.")
    )
    assert facts.to_json()["longest"] == 300


def test_the_page_needs_nothing_else_and_escapes_what_it_is_given(runs: list[PackingRun]) -> None:
    page = packing_page(
        title="<b>lengths</b> & more",
        facts=facts_of("<script>", SOURCE.lengths, window=C),
        lengths=SOURCE.lengths,
        runs=runs,
        own=runs[0].summary.label,
        answer=["Saves <much>."],
        saving=saving_of([run.summary for run in runs]),
        hours=0.125,
        assumes=("h100", "prices"),
        provenance=[("command", "wlb plan <x>")],
        notes=["a < b"],
    )
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;lengths&lt;/b&gt; &amp; more" in page
    assert "wlb plan &lt;x&gt;" in page
    assert '<p class="answer">Saves &lt;much&gt;.</p>' in page
    assert "<b>12.5%</b>" in page
    links = set(re.findall(r"(?:https?:)?//[\w.]+", page))
    assert links <= {"http://www.w3.org"}  # the name of the XML format, which nothing fetches
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {
        ref for pair in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page) for ref in pair
    } <= {*ids, ""}
    assert "#000000" not in page  # black would vanish on a dark page
    assert not re.search(r"<(link|script|img|iframe)\b|\bsrc=|url\(h", page)
    assert page.count("<svg") == page.count("</svg>") == 4
    for run in runs:
        assert f"<td>{run.summary.label}</td>" in page
        assert f"<td>{run.summary.imbalance:.3f}</td>" in page
    assert page.count('class="own"') == 3  # the best in the short table, the own in both long ones
    assert variants_of(SPEC)[0].label == runs[0].summary.label


def test_figures_are_svg_with_their_texts(runs: list[PackingRun]) -> None:
    for svg, texts in (
        (length_figure(SOURCE.lengths, window=C), ["document length (tokens)", "of tokens"]),
        (imbalance_figure(runs), ["imbalance of the step", "var_len"]),
        (delay_figure(runs), ["delay (steps)"]),
    ):
        ElementTree.fromstring(svg)
        assert all(text in svg for text in texts)


def test_every_point_of_the_trade_is_named_and_the_run_is_among_the_lines(
    runs: list[PackingRun],
) -> None:
    trade = trade_figure([r.summary for r in runs])
    own = runs[4].summary.label
    lines = imbalance_figure(runs, own=own)
    for run in runs:
        assert f">{run.summary.label}</text>" in trade
    assert f">{own}</text>" in lines


def test_a_row_without_a_step_is_no_perfect_balance(runs: list[PackingRun]) -> None:
    fine = runs[1].summary
    none = replace(
        fine,
        label="holds all",
        num_steps=0,
        imbalance=1.0,
        step_time_weighted=1.0,
        flushed_tokens=fine.num_tokens,
    )
    some = replace(fine, label="holds some", flushed_tokens=fine.num_tokens // 4)
    (line,) = [
        x
        for x in printed(packing_table([fine, none], title="t"), 260).splitlines()
        if "holds all" in x
    ]
    assert "1.000" not in line
    assert line.count(" - ") >= 3
    late = replace(fine, label="is late", num_overdue=7, max_delay=12)
    even = replace(runs[1], tokens=np.full(runs[1].tokens.shape, 1000))
    said = remarks([replace(even, summary=s) for s in (fine, none, some, late)])
    assert [text.partition(":")[0] for text in said] == ["holds all", "holds some", "is late"]
    starved = replace(even, tokens=int_array("t", [1000, 249, 0, 1000, 250, 1000]))
    (text,) = remarks([even, starved])
    assert text.startswith(f"{fine.label}: 1 of 5 steps are starved")
    assert "the smallest has 249 tokens" in text
    assert "7 pieces" in said[2]
    assert "up to 12 steps" in said[2]
    assert "the policy completed no step" in said[0]
    assert "25% of tokens still waited" in said[1]
    page = packing_page(
        title="t",
        facts=facts_of("l", SOURCE.lengths, window=C),
        lengths=SOURCE.lengths,
        runs=[runs[1], replace(runs[1], summary=none)],
        own="",
        answer=[],
        saving=None,
        hours=None,
        assumes=("h100", "prices"),
        provenance=[],
    )
    assert f"<td>{none.label}</td><td>-</td><td>-</td>" in page
    assert ">holds all</text>" not in page


def test_figures_of_the_smallest_inputs() -> None:
    ElementTree.fromstring(length_figure(int_array("l", [1]), window=2))
    run = PackingRun(
        summary=next(iter(compare(SPEC, BATCHES[:1], COST))).summary,
        imbalance=np.ones(1),
        tokens=int_array("t", [1]),
        delay_tokens=int_array("d", [1]),
    )
    for figure in (imbalance_figure([run]), delay_figure([run])):
        ElementTree.fromstring(figure)


def test_equal_figures_are_equal_bytes(runs: list[PackingRun]) -> None:
    assert imbalance_figure(runs) == imbalance_figure(runs)


def test_the_front_and_the_recommendation(tuning: Tuning, tmp_path: object) -> None:
    text = printed(tuning_table(tuning, rows=3), 120)
    (line,) = [x for x in text.splitlines() if "->" in x]
    assert tuning.recommended.summary.label in line
    assert f"Pareto front of {len(tuning.points)} settings" in text
    figure = tuning_figure(tuning)
    labels = [axis.get_xlabel() for axis in figure.axes]
    assert labels[0] == "mean delay (steps)"
    assert len(labels) == 4
    shown = sum(len(c.get_offsets()) for c in figure.axes[0].collections)
    assert shown == len(tuning.points) + len(tuning.front)
