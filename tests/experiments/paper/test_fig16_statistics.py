"""Tests what the convergence study calls noise."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.paper.fig16.arms import ARMS
from experiments.paper.fig16.page import draw_curves
from experiments.paper.fig16.redraw import redraw
from experiments.paper.fig16.summary import (
    against,
    band,
    final,
    groups_of,
    joint_factor,
    leftover,
    loss_at,
    verdict,
)
from tests.experiments.paper.fig16_runs import all_books, found, result

pytestmark = pytest.mark.full


def test_differences_are_paired_and_noise_is_what_arm_and_seed_leave() -> None:
    """The reference is the textbook's two-way table of arms and seeds."""
    groups = groups_of(found(), all_books())
    assert [g.arm for g in groups] == list(ARMS)
    by_name = {g.arm.name: g for g in groups}
    assert by_name["original"].is_baseline
    assert by_name["hold-0"].is_baseline
    far = by_name["bounded"]  # number 4
    assert far.differences(final) == pytest.approx([0.04, 0.044, 0.048])
    table = np.array([g.values(final) for g in groups])
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    freedom = (len(ARMS) - 1) * 2
    deviation = math.sqrt((rest**2).sum() / freedom)
    assert leftover(groups, final) == (pytest.approx(deviation), freedom)
    expected = stats.t.ppf(0.975, freedom) * deviation * math.sqrt(2 / 3)
    assert band(groups, far, final) == pytest.approx(expected)
    assert verdict(groups, far, final) == "worse"
    held = by_name["hold-8"]  # two further than hold-0
    assert held.differences(final) == pytest.approx([0.02, 0.022, 0.024])
    assert band(groups, held, final) == pytest.approx(expected)
    comparisons = len(ARMS) - 2
    wider = stats.t.ppf(1 - 0.025 / comparisons, freedom) / stats.t.ppf(0.975, freedom)
    assert joint_factor(groups, final) == pytest.approx(wider)


def test_two_arms_are_a_paired_t_test() -> None:
    groups = groups_of(found(), all_books())
    base, far = groups[0], next(g for g in groups if g.arm.name == "bounded")
    noisy = replace(far, results=tuple(result(3.0 + d) for d in (-0.2, 0.1, 0.3)))
    theirs = stats.ttest_rel(noisy.values(final), base.values(final)).confidence_interval(0.95)
    width = band([noisy], noisy, final)
    assert width == pytest.approx((theirs.high - theirs.low) / 2)
    assert verdict([noisy], noisy, final) == "noise"
    assert joint_factor([noisy], final) == 1


def test_an_arm_of_one_seed_is_given_the_others_noise() -> None:
    groups = groups_of(found(), all_books())
    some = found()
    del some["hold-8", 1], some["hold-8", 2]
    fewer = groups_of(some, all_books())
    single = next(g for g in fewer if g.arm.name == "hold-8")
    rest = [g for g in groups if g.arm.name != "hold-8"]  # a run of its own tells of no noise
    deviation, freedom = leftover(fewer, final)
    assert (deviation, freedom) == (pytest.approx(leftover(rest, final)[0]), 2 * (len(ARMS) - 2))
    expected = stats.t.ppf(0.975, freedom) * deviation * math.sqrt(2)
    assert band(fewer, single, final) == pytest.approx(expected)


def test_intervals_hold_what_they_promise() -> None:
    """Arms do not differ here, each has 3 seeds, and losses are drawn anew.

    Then 5% of differences are outside their interval, and in at most 5% of studies any is outside
    the joint one.
    """
    draw = np.random.default_rng(0)
    books, outside, any_outside = all_books(), 0, 0
    studies = 400
    for _ in range(studies):
        seeds = draw.normal(0, 0.05, 3)
        made = {key: result(3.0 + seeds[key[1]] + draw.normal(0, 0.01)) for key in found()}
        groups = groups_of(made, books)
        others = [g for g in groups if not g.is_baseline]
        width = band(groups, others[0], final)
        means = np.array([abs(g.differences(final).mean()) for g in others])
        outside += int((means > width).sum())
        any_outside += bool((means > width * joint_factor(groups, final)).any())
    assert outside / studies / (len(ARMS) - 2) == pytest.approx(0.05, abs=0.02)
    assert 0.005 < any_outside / studies < 0.06


def test_one_seed_says_nothing_about_noise() -> None:
    groups = groups_of(found(1), all_books(1))
    assert verdict(groups, groups[1], final) == "one seed"
    assert math.isnan(band(groups, groups[1], final))


def test_only_seeds_that_the_baseline_has_count() -> None:
    some = found()
    del some["original", 2], some["bounded", 0]
    by_name = {g.arm.name: g for g in groups_of(some, all_books())}
    assert len(by_name["bounded"].results) == 1
    assert len(by_name["original"].results) == len(by_name["even"].results) == 2


def test_policies_are_compared_with_one_that_cuts_as_little() -> None:
    some = found()
    del some["best-fit", 1]
    groups = groups_of(some, all_books())
    beside = {g.arm.name: g for g in against(groups, "best-fit")}  # number 6
    policies = ["fixed-1", "fixed-8", "var_len", "bounded", "even"]
    assert list(beside) == [*policies, "var_len-constant", "bounded-constant"]
    assert beside["bounded"].seeds == (0, 2)
    assert beside["bounded"].differences(final) == pytest.approx([-0.02, -0.024])
    assert against([g for g in groups if g.arm.name != "best-fit"], "best-fit") == []


def test_losses_are_compared_at_equal_tokens() -> None:
    made = result(3.0)
    assert loss_at(2_000_000)(made) == pytest.approx(3.15)
    assert loss_at(2_500_000)(made) == 3.0


def test_the_curves_are_drawn_from_the_runs_alone_with_one_band_of_noise(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="has no run together with the baseline"):
        redraw(tmp_path)
    for (name, seed), made in found().items():
        text = json.dumps(asdict(made))
        (tmp_path / "runs" / f"{name}-seed{seed}.json").write_text(text, "utf-8")
    assert redraw(tmp_path).read_bytes().startswith(b"\x89PNG")
    groups = groups_of(found(), None)
    right = draw_curves(groups, range(0, 2_500_001, 500_000)).axes[1]
    (noise,) = right.collections
    (shape,) = noise.get_paths()
    width = band(groups, groups[1], loss_at(2_500_000))
    assert shape.vertices[:, 1].max() == pytest.approx(width)
