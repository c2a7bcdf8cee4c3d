"""Tests which layouts are tried, and why others are not."""

from dataclasses import replace

import numpy as np
import pytest

from tests.simulate.layout_search.searched import WINDOW, N, spec_of
from tests.words import lacks
from wlb.simulate.layout_search.layouts import (
    LayoutChoices,
    Layouts,
    degrees_of,
    divisors,
    layouts_of,
    need_of,
    pipeline_of,
    planned_bytes,
)
from wlb.simulate.order import pipeline_order
from wlb.simulate.peak_memory import peak_held_bytes, rest_bytes, stage_bytes, stage_gradients
from wlb.spec import EpSection, ExpertsSpec, Recompute, Schedule, check

NONE = Recompute.NONE
SCHEDULES = [
    (Schedule.ONE_F_ONE_B, 1),
    (Schedule.INTERLEAVED_1F1B, 2),
    (Schedule.INTERLEAVED_ZERO_BUBBLE, 2),
]


def degrees(found: Layouts) -> set[str]:
    return {degrees_of(c.spec) for c in found.candidates}


def test_divisors() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)


def test_all_layouts_of_two_devices() -> None:
    found = layouts_of(spec_of(), gpus=2, choices=LayoutChoices())
    named = [f"{degrees_of(c.spec)} | {pipeline_of(c.spec)}" for c in found.candidates]
    pipelines = (
        ["1f1b v 1"]
        + [f"interleaved_1f1b v {v}" for v in (1, 2)]
        + [f"interleaved_zero_bubble v {v}" for v in (1, 2)]
    )
    assert named == [
        "tp 1 cp 1 pp 1 dp 2 | no pipeline",
        *(f"tp 1 cp 1 pp 2 dp 1 | {p}" for p in pipelines),
        "tp 1 cp 2 pp 1 dp 1 | no pipeline",
        "tp 2 cp 1 pp 1 dp 1 | no pipeline",
    ]
    assert all(c.spec.tokens_per_step == N * WINDOW for c in found.candidates)
    assert all(check(c.spec) is c.spec for c in found.candidates)
    # Without recompute 80 GiB leave all the memory that packing can use: no other way is tried.
    (refusal,) = found.refusals.values()
    assert lacks(refusal.reason, "less recompute", "enough memory") == []
    assert refusal.count == 2 * len(named)


def test_what_does_not_divide_is_refused_with_the_checks_own_words() -> None:
    found = layouts_of(spec_of("data.row_multiple=4096"), gpus=32, choices=LayoutChoices())
    by_reason = {r.reason: r for r in found.refusals.values()}
    tp = by_reason["tp does not divide the model"]
    assert "model.num_heads = 8 is not a multiple of parallel.tp = 16" in tp.message
    dp = by_reason["dp does not divide the micro-batches of a step"]
    assert "4 micro-batches per step are not a multiple of parallel.dp = 32" in dp.message
    layers = by_reason["pp does not divide the layers"]
    assert "model.num_layers = 4 must be at least pp 8" in layers.message
    schedule = by_reason["the schedule does not fit the numbers of layers, stages or micro-batches"]
    assert (
        "pp.schedule = 1f1b needs at least parallel.pp = 4 micro-batches per pipeline"
        in schedule.message
    )
    assert (
        "CP ranks need at least 4096 rows each"
        in by_reason["cp is too large for the window"].message
    )


def test_degrees_that_only_one_schedule_takes_are_tried_with_it() -> None:
    """Five micro-batches: an interleaved schedule cannot run them in two rounds, 1F1B can."""
    choices = LayoutChoices(pp=(2,), dp=(1,))
    spec = spec_of("data.num_windows=5", "pp.schedule=1f1b", "pp.virtual_stages=1")
    found = layouts_of(spec, gpus=4, choices=choices)
    assert {c.spec.pp.schedule for c in found.candidates} == {Schedule.ONE_F_ONE_B}
    refused = "the schedule does not fit the numbers of layers, stages or micro-batches"
    assert refused in {r.reason for r in found.refusals.values()}
    assert "pp does not divide the layers" not in {r.reason for r in found.refusals.values()}


def test_experts_are_divided_by_every_degree_that_their_ranks_have() -> None:
    spec = spec_of()
    mixture = replace(spec.model, experts=ExpertsSpec(num=6, hidden_size=704, dense_layers=(0,)))
    spec = replace(spec, model=mixture)
    few = LayoutChoices(tp=(2,), cp=(1,), schedules=(Schedule.ONE_F_ONE_B,), recompute=(NONE,))
    found = layouts_of(spec, gpus=4, choices=few)
    # Two ranks of a stage, or four, and 6 experts: 4 divides no 6.
    assert [degrees_of(c.spec) for c in found.candidates] == [
        *(f"tp 2 cp 1 pp 1 dp 2 ep {ep}" for ep in (1, 2)),
        *(f"tp 2 cp 1 pp 2 dp 1 ep {ep}" for ep in (1, 2)),
    ]
    assert all(check(c.spec) is c.spec for c in found.candidates)
    # A rank that holds half of the experts needs less memory than one that gathers all of them.
    whole, half = (c.need_bytes for c in found.candidates[2:])
    assert half < whole
    only = layouts_of(spec, gpus=4, choices=replace(few, ep=(2,)))
    assert {c.spec.parallel.ep for c in only.candidates} == {2}
    # A rank with three of six experts cannot divide them into two stages, and none travel at EP 1.
    staged = layouts_of(replace(spec, ep=EpSection(stages=2)), gpus=4, choices=few)
    assert {(c.spec.parallel.ep, c.spec.ep.stages) for c in staged.candidates} == {(1, 1), (2, 1)}
    staged = layouts_of(replace(spec, ep=EpSection(stages=6)), gpus=4, choices=few)
    assert {(c.spec.parallel.ep, c.spec.ep.stages) for c in staged.candidates} == {(1, 1), (2, 3)}
    # A rank of EP 1 has all rows, and with EP 2 at most twice the mean.
    loaded = layouts_of(
        replace(spec, cost=replace(spec.cost, expert_load=2.5)), gpus=4, choices=few
    )
    assert {(c.spec.parallel.ep, c.spec.cost.expert_load) for c in loaded.candidates} == {
        (1, 1.0),
        (2, 2.0),
    }
    assert all(check(c.spec) for c in loaded.candidates)
    with pytest.raises(ValueError, match=r"ep = 4 must be a divisor of model\.experts\.num = 6"):
        layouts_of(spec, gpus=4, choices=LayoutChoices(ep=(4,)))
    with pytest.raises(ValueError, match=r"ep = 2 is given, but the model has no experts"):
        layouts_of(spec_of(), gpus=4, choices=LayoutChoices(ep=(2,)))
    with pytest.raises(
        ValueError, match=r"ep does not divide the number of ranks of a stage .*stage, 1, but"
    ):
        layouts_of(spec, gpus=2, choices=LayoutChoices(tp=(1,), pp=(2,), ep=(2,)))


def test_restrictions() -> None:
    choices = LayoutChoices(
        tp=(2,), pp=(2,), schedules=(Schedule.INTERLEAVED_1F1B,), virtual_stages=(2,)
    )
    found = layouts_of(spec_of(), gpus=8, choices=choices)
    assert degrees(found) == {"tp 2 cp 1 pp 2 dp 2", "tp 2 cp 2 pp 2 dp 1"}
    assert {pipeline_of(c.spec) for c in found.candidates} == {"interleaved_1f1b v 2"}
    with pytest.raises(
        ValueError,
        match="cp = 3 must be a divisor of the number of devices, 8; choose from 1, 2, 4",
    ):
        layouts_of(spec_of(), gpus=8, choices=LayoutChoices(cp=(3,)))
    with pytest.raises(
        ValueError, match="no layout of 8 devices satisfies all restrictions on degrees"
    ):
        layouts_of(spec_of(), gpus=8, choices=LayoutChoices(tp=(4,), cp=(4,)))
    with pytest.raises(
        ValueError, match=r"no layout of 32 devices is possible\. Reasons .*: tp .* \(\d+\)"
    ):
        layouts_of(spec_of(), gpus=32, choices=LayoutChoices(tp=(16,)))


@pytest.mark.parametrize(("schedule", "v"), SCHEDULES)
@pytest.mark.parametrize("how", Recompute)
@pytest.mark.parametrize("is_even", [True, False])
def test_memory_of_windows_is_that_of_the_simulated_order(
    schedule: Schedule, v: int, how: Recompute, is_even: bool
) -> None:
    spec = spec_of(f"training.recompute={how}")
    layers = () if is_even else {1: (3, 1), 2: (0, 1, 2, 1)}.get(v, ())
    spec = replace(
        spec, pp=replace(spec.pp, schedule=schedule, virtual_stages=v, stage_layers=layers)
    )
    order = pipeline_order(spec.pp, pp=2, num_micro_batches=N)
    need, rank = need_of(spec)
    passes = stage_bytes(spec, np.full(N, WINDOW))
    per_rank: list[int] = []
    for r in range(2):
        fixed = rest_bytes(spec, pp_rank=r, longest=WINDOW)
        per_rank.append(fixed + int(peak_held_bytes(order[r], passes, stage_gradients(spec))))
    assert need == max(per_rank)
    assert per_rank[rank] == need


def test_less_memory_brings_recompute_and_then_nothing() -> None:
    few = LayoutChoices(tp=(1,), cp=(1,), pp=(2,), schedules=(Schedule.ONE_F_ONE_B,))

    def ways(memory_gib: float) -> list[Recompute]:
        found = layouts_of(spec_of(f"cluster.memory_gib={memory_gib}"), gpus=2, choices=few)
        assert all(c.need_bytes <= planned_bytes(c.spec) for c in found.candidates)
        return [c.spec.training.recompute for c in found.candidates]

    assert ways(80) == [Recompute.NONE]
    needs = {
        c.spec.training.recompute: c.need_bytes / 2**30 / 0.95
        for gib in (2.5, 3, 4, 5, 6, 8)
        for c in layouts_of(spec_of(f"cluster.memory_gib={gib}"), gpus=2, choices=few).candidates
    }
    tight = needs[Recompute.NONE] * 1.01  # a window fits, packing has no room: all ways are tried
    assert ways(tight) == [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL]
    with pytest.raises(
        ValueError, match=r"lacks the least memory is tp 1 cp 1 .* pipeline rank \d \(stages \d\) "
    ):
        ways(0.5)


def test_the_closest_layout_and_the_missing_bytes_are_named() -> None:
    spec = spec_of("cluster.memory_gib=0.1")
    with pytest.raises(
        ValueError, match=r"no layout of 8 devices fits into the 97\.3 MiB that plans"
    ) as error:
        layouts_of(spec, gpus=8, choices=LayoutChoices())
    assert "lacks" in str(error.value)
    assert " bytes (" in str(error.value)
