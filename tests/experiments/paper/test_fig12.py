"""Tests that Figure 12 divides like by like, and averages over configurations."""

import pytest

from experiments.harness.constants import FLASH_2, FLASH_3
from experiments.harness.evaluation import (
    EARLIER_GIB,
    SYSTEMS,
    Case,
    Outcome,
    compared,
    room_of,
    spec_of,
)
from experiments.harness.pages import Table
from experiments.paper.fig12 import __main__ as fig12
from wlb.spec import WindowCut

pytestmark = pytest.mark.full

TIMES = {
    "plain_4d": 8.0,
    "plain_anywhere": 7.0,
    "plain_by_need": 7.5,
    "fixed_4d": 7.8,
    "paper": 6.5,
    "wlb": 6.0,
    "by_need": 5.0,
}


def outcomes(*names: str, scale: float = 1.0) -> dict[str, Outcome]:
    return {
        name: Outcome(
            case=Case(name=name, config="7b_128k", overrides=()),
            time_s=TIMES[name] * scale,
            bound_s=5.9,
            tokens=1000,
            steps=2,
            imbalance=1.0,
            bubble=0.2,
            mean_delay=0.0,
            memory_bytes=2**30,
        )
        for name in names
    }


def cells(table: Table, row: int) -> dict[str, object]:
    return dict(zip(table.columns, table.rows[row], strict=True))


def test_the_loader_and_the_exchange_are_those_of_both_sides() -> None:
    made = fig12.simulated(outcomes(*SYSTEMS))
    like = cells(fig12.like_table({FLASH_2: {"7b_128k": made}}), 0)
    assert like["Plain-4D, cut anywhere"] == pytest.approx(8 / 7)
    assert like["Plain-4D, keys by need"] == pytest.approx(8 / 7.5)
    assert like["ours over Plain-4D, cut anywhere"] == pytest.approx(7 / 6)
    assert like["WLB-LLM over Plain-4D, cut anywhere"] == pytest.approx(7 / 6.5)
    # Over Plain-4D with all-gathers it would be 1.6.
    assert like["keys by need: ours over Plain-4D"] == pytest.approx(7.5 / 5)


def test_other_plain_4ds_differ_in_one_thing() -> None:
    (plain,) = compared("plain_4d", "7b_128k")
    (anywhere,) = compared("plain_anywhere", "7b_128k")
    sections = [spec_of(case).packing for case in (plain, anywhere)]
    assert [one.window_cut for one in sections] == [WindowCut.SHORT, WindowCut.ANYWHERE]
    for case in compared("plain_by_need", "7b_128k"):
        assert spec_of(case).packing == sections[0]
        assert spec_of(case).cp.overlap


def test_ours_plans_with_the_memory_of_a_run() -> None:
    room = room_of("30b_128k")
    assert room < EARLIER_GIB
    assert all(f"packing.memory_gib={room:g}" in c.overrides for c in compared("wlb", "30b_128k"))
    earlier = compared("wlb", "30b_128k", gib=EARLIER_GIB)
    assert all("packing.memory_gib=76" in case.overrides for case in earlier)


def test_configurations_of_each_kernel_stand_beside_their_mean() -> None:
    one, other = (fig12.simulated(outcomes(*SYSTEMS, scale=s)) for s in (1.0, 2.0))
    own = {"7b_128k": one, "70b_128k": other}
    table = fig12.table_of({FLASH_2: own, FLASH_3: own})
    assert [row[0] for row in table.rows] == ["FlashAttention-2"] * 3 + ["FlashAttention-3"] * 3
    assert [row[1] for row in table.rows[:3]] == ["7B-128K", "70B-128K", "mean"]
    assert [row[2] for row in table.rows[:3]] == [4.0, 8.0, None]
    assert cells(table, 2)["ours"] == pytest.approx(8 / 6)
