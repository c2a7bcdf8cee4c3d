"""Tests the tuner: what it tries, the Pareto front, the recommendation, settings for `--set`."""

from dataclasses import replace

import pytest

from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, lengths_of_family
from wlb.packing import measure, packer_for
from wlb.packing.study.tune import SAME, TunePoint, Tuning, TuningGrid, finish, pareto_front, tune
from wlb.plan import GlobalBatch
from wlb.spec import PackingSection, Policy, RunSpec, load

C = 2048
COST = FlopsWorkload(quadratic_ns=1670 / C, linear_ns_per_token=1000)
SPEC = replace(RunSpec(), data=replace(RunSpec().data, context_window=C, num_windows=4))
GRID = TuningGrid(thresholds=(0.2, 0.63), s_max=(1.1, 2.0), step_tokens=(0.0, 1.5), prices=(1.0,))


def batches(num: int = 40) -> list[GlobalBatch]:
    source = lengths_of_family("wlb_paper", window=C, num_documents=num * 350, seed=1)
    stream = GlobalBatches(source, tokens_per_batch=4 * C, seed=1)
    return [b for b, _ in zip((b for b, _ in stream.iterate()), range(num), strict=False)]


@pytest.fixture(scope="module")
def tuning() -> Tuning:
    return tune(SPEC, batches(), COST, grid=GRID)


def test_every_setting_is_tried_once(tuning: Tuning) -> None:
    # S_max 1.1 and 2.0 without T, 2.0 with T 1.5 (at S_max 1.1 it says nothing): three caps, each
    # with no queue, one, the other, both, and one price.
    assert len(tuning.points) == GRID.size(SPEC) == 3 * 5
    assert len({p.overrides for p in tuning.points}) == 15
    assert all(p.summary.num_steps > 30 for p in tuning.points)


def test_a_cap_on_steps_says_something_where_there_are_more_micro_batches() -> None:
    """Six micro-batches of 1.1 windows are 1.65 global batches of four."""
    packing = replace(SPEC.packing, num_micro_batches=6)
    tried = {(s.s_max, s.step_tokens) for s in GRID.sections(replace(SPEC, packing=packing))}
    assert tried == {(1.1, 0.0), (1.1, 1.5), (2.0, 0.0), (2.0, 1.5)}


def test_a_grouping_method_is_undone(tuning: Tuning) -> None:
    """The setting that the tuner names undoes it."""
    spec = load("sft_demo")
    assert spec.packing.method
    sections = list(GRID.sections(spec))
    assert sections
    for section in sections:
        point = TunePoint(section=section, summary=tuning.points[0].summary, own=spec.packing)
        again = load("sft_demo", point.overrides).packing
        assert again == replace(section, delay_price=again.delay_price)


def test_the_recommended_point_balances_best_within_the_budget(tuning: Tuning) -> None:
    best = tuning.recommended
    assert tuning.is_within_budget
    within = [p for p in tuning.points if p.summary.mean_delay <= 0.5]
    assert best in within
    lowest = min(p.summary.step_time_weighted for p in within)
    alike = [p for p in within if p.summary.step_time_weighted <= lowest + SAME]
    assert best in alike
    # Of settings that differ by less than samples do, the one with the least delay.
    assert best.summary.mean_delay == min(p.summary.mean_delay for p in alike)


def test_without_a_point_in_the_budget_the_least_delay_is_recommended(tuning: Tuning) -> None:
    tight = finish([p for p in tuning.points if p.summary.mean_delay > 0.1], delay_budget=0.05)
    assert not tight.is_within_budget
    least = min(p.summary.mean_delay for p in tight.points)
    assert tight.recommended.summary.mean_delay == least


def test_no_point_dominates_one_of_the_front(tuning: Tuning) -> None:
    for point in tuning.front:
        for other in tuning.points:
            better = [a <= b for a, b in zip(other.objectives, point.objectives, strict=True)]
            assert not all(better) or other.objectives == point.objectives
    rest = [p for p in tuning.points if p not in tuning.front]
    for point in rest:
        assert any(
            all(a <= b for a, b in zip(f.objectives, point.objectives, strict=True))
            for f in tuning.front
        )
    assert pareto_front(tuning.front) == tuning.front


def test_overrides_reproduce_the_point(tuning: Tuning) -> None:
    point = tuning.recommended
    window = [f"data.context_window={C}", "data.num_windows=4"]
    run = load("demo_single", [*window, *point.overrides])
    again = measure(packer_for(run, COST), batches(), cost=COST).summary
    assert again.imbalance == pytest.approx(point.summary.imbalance, rel=1e-3)
    assert again.mean_delay == pytest.approx(point.summary.mean_delay, rel=0.02)


def test_bounded_is_on_the_front_and_beats_one_queue(tuning: Tuning) -> None:
    ours = [p for p in tuning.front if p.section.policy == Policy.BOUNDED]
    assert ours
    one_queue = [p for p in tuning.points if p.section.queue_thresholds == (0.2,)]
    assert max(p.summary.imbalance for p in ours) < min(p.summary.imbalance for p in one_queue)


def test_json_has_the_settings_and_the_numbers(tuning: Tuning) -> None:
    data = tuning.recommended.to_json()
    assert data["set"] == list(tuning.recommended.overrides)
    assert data["mean_delay"] == tuning.recommended.summary.mean_delay


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ()}, "policies is empty"),
        ({"policies": (Policy.ORIGINAL,)}, "policy original has no settings to tune"),
        ({"thresholds": (0.2, 1.5)}, "threshold 1.5 must be above 0 and at most 1"),
        ({"max_queues": -1}, "max_queues = -1"),
        ({"s_max": ()}, "s_max is empty"),
    ],
)
def test_grids_that_cannot_work_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GRID, **change)


def test_nothing_left_to_try() -> None:
    with pytest.raises(ValueError, match="no setting can be tried"):
        tune(SPEC, batches(2), COST, grid=replace(GRID, s_max=(1.1,), step_tokens=(1.5,)))
    with pytest.raises(ValueError, match="delay_budget = -1"):
        tune(SPEC, batches(2), COST, grid=GRID, delay_budget=-1)


def test_settings_without_room_for_a_global_batch_are_left_out() -> None:
    """Three micro-batches of 1.1 windows hold no global batch of four; of 1.4 windows they just
    do.
    """
    run = replace(SPEC, packing=PackingSection(num_micro_batches=3, s_max=1.5))
    grid = TuningGrid(thresholds=(0.2,), s_max=(1.1, 4 / 3, 1.4), step_tokens=(0.0,), prices=(1.0,))
    points = tune(run, batches(12), COST, grid=grid).points
    assert [(p.section.s_max, p.section.policy) for p in points] == [
        (1.4, Policy.VAR_LEN),
        (1.4, Policy.VAR_LEN),
        (1.4, Policy.BOUNDED),
    ]
    with pytest.raises(ValueError, match="too small to hold a global batch"):
        tune(run, batches(2), COST, grid=replace(grid, s_max=(1.1,)))


def test_a_hold_is_not_tuned_and_the_settings_say_so() -> None:
    held = PackingSection(hold=2, queue_thresholds=(0.2,))
    ours = tune(replace(SPEC, packing=held), batches(8), COST, grid=GRID).points
    usual = tune(SPEC, batches(8), COST, grid=GRID).points
    for mine, point in zip(ours, usual, strict=True):
        assert mine.objectives == point.objectives
        assert mine.section.hold == 0
        undone = mine.section.policy == Policy.VAR_LEN
        assert mine.overrides == (*point.overrides, *["packing.hold=0"] * undone)


def test_a_queue_setting_is_written_as_a_list() -> None:
    section = PackingSection(queue_thresholds=(0.2, 0.5), s_max=1.25)
    summary = measure(packer_for(replace(SPEC, packing=section), COST), batches(3), cost=COST)
    point = TunePoint(section=section, summary=summary.summary)
    assert point.overrides == (
        "packing.policy=var_len",
        "packing.s_max=1.25",
        "packing.step_tokens=0",
        "packing.queue_thresholds=[0.2,0.5]",
    )
