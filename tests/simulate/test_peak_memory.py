"""Tests the most activations that a rank holds: by schedule, and in bytes by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tests.simulate.runs import made, spec_of
from wlb.memory import in_flight, memory_of_rank
from wlb.simulate import pipeline_order
from wlb.simulate.peak_memory import PassBytes, pass_bytes, peak_held_bytes
from wlb.spec import ModelSpec, ParallelSpec, PipelineSection, Recompute, RunSpec, Schedule, check

ONE = np.array([1] * 64)
ZERO_BUBBLE = Schedule.INTERLEAVED_ZERO_BUBBLE


def peaks(
    schedule: Schedule, pp: int, v: int, n: int, *, delay: int = 1, **bytes_of: int
) -> list[int]:
    """Returns peaks of every rank, with passes that keep 1 byte and have no output unless told."""
    order = pipeline_order(
        PipelineSection(schedule=schedule, virtual_stages=v, weight_delay=delay),
        pp=pp,
        num_micro_batches=n,
    )
    kept, output, waiting = (
        bytes_of.get(name, other) * ONE[:n]
        for name, other in (("kept", 1), ("output", 0), ("waiting", 1))
    )
    held = PassBytes(kept=kept, output=output, waiting=waiting)
    return [int(peak_held_bytes(passes, [held] * pp * v)) for passes in order]


def test_1f1b_holds_as_many_micro_batches_as_ranks_follow() -> None:
    assert peaks(Schedule.ONE_F_ONE_B, 4, 1, 8) == [4, 3, 2, 1]
    assert peaks(Schedule.ONE_F_ONE_B, 4, 1, 8, output=10) == [44, 33, 22, 11]


@pytest.mark.parametrize(("pp", "v", "n"), [(4, 1, 8), (4, 2, 8), (4, 2, 4), (2, 4, 4), (4, 2, 2)])
def test_interleaved_holds_what_the_estimate_counts(pp: int, v: int, n: int) -> None:
    spec = spec_of(tp=1, cp=1, pp=pp, v=v, n=n, dp=1)
    assert peaks(spec.pp.schedule, pp, v, n) == [in_flight(spec, pp_rank=r) for r in range(pp)]


@pytest.mark.parametrize("delay", [1, 2, 5])
@pytest.mark.parametrize(("pp", "v", "n"), [(4, 1, 8), (4, 2, 8), (4, 2, 4), (2, 4, 4), (4, 2, 2)])
def test_zero_bubble_holds_what_the_estimate_counts(pp: int, v: int, n: int, delay: int) -> None:
    spec = spec_of(tp=1, cp=1, pp=pp, v=v, n=n, dp=1)
    spec = replace(spec, pp=replace(spec.pp, schedule=ZERO_BUBBLE, weight_delay=delay))
    counted = [in_flight(spec, pp_rank=r) for r in range(pp)]
    assert peaks(ZERO_BUBBLE, pp, v, n, delay=delay) == counted


def test_zero_bubble_holds_more_than_its_warm_up() -> None:
    """Rank r puts r weights' passes off, each as large as what forward kept."""
    # Warm-ups of 3, 2, 1 and 0 passes, the one that runs, and r that wait.
    assert peaks(ZERO_BUBBLE, 4, 1, 8) == [4, 4, 4, 4]
    assert peaks(Schedule.ONE_F_ONE_B, 4, 1, 8) == [4, 3, 2, 1]
    # Outputs are gone after the inputs' pass.
    assert peaks(ZERO_BUBBLE, 4, 1, 8, output=10) == [44, 34, 24, 14]


def test_what_waits_for_weights_is_more_than_recompute_keeps() -> None:
    """Forward keeps 1 byte, the inputs' pass leaves 5 for the weights'."""
    # 0F0 0F1 0I0 0W0: 1 + 1, then 5 + 1. 1F0 1I0 1F1 1I1 1W0: 5 + 5.
    assert peaks(ZERO_BUBBLE, 2, 1, 3, waiting=5) == [6, 10]


TINY = replace(
    RunSpec(),
    model=ModelSpec(hidden_size=8, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=12),
    parallel=ParallelSpec(tp=2, cp=2, pp=2, dp=1),
)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        # A layer and token: 4 * 8 + 2 * 8 + 2 * 4 + 3 * 12 float32 values and 4 log-sum-exps.
        (Recompute.NONE, 4 * (92 + 4)),
        (Recompute.SELECTIVE, 4 * (92 - 8 - 36 + 4)),
        (Recompute.FULL, 4 * 8),
    ],
)
def test_bytes_of_a_pass_by_hand(how: Recompute, kept: int) -> None:
    """A layer has 100 tokens, 50 on a CP rank, all over tp = 2. An output is 8 float32 values."""
    spec = replace(TINY, training=replace(TINY.training, recompute=how))
    found = pass_bytes(spec, np.array([[100, 0]]))
    assert found.kept.tolist() == [[50 * kept // 2, 0]]
    assert found.output.tolist() == [[50 * 8 * 4 // 2, 0]]
    assert found.waiting.tolist() == [[50 * 4 * (92 + 4) // 2, 0]]


@pytest.mark.parametrize(
    ("v", "layers"), [(1, ()), (2, ()), (1, (2, 3, 3, 0)), (2, (0, 1, 1, 1, 1, 1, 1, 2))]
)
def test_equal_micro_batches_need_what_the_estimate_says(v: int, layers: tuple[int, ...]) -> None:
    spec = spec_of(pp=4, v=v, n=4 * v, dp=1)
    spec = check(replace(spec, pp=replace(spec.pp, stage_layers=layers)))
    simulator, steps = made(spec, [4096] * 4 * v)
    found = simulator.run(simulator.price(steps)).peak_memory_bytes
    for rank in range(4):
        estimate = memory_of_rank(spec, pp_rank=rank, micro_batch_tokens=4096)
        assert found[0, rank] == estimate.total_bytes


@pytest.mark.parametrize("how", Recompute)
@pytest.mark.parametrize(
    ("v", "n", "delay", "layers"),
    [(1, 8, 1, ()), (2, 8, 4, ()), (2, 3, 2, (0, 1, 2, 1, 1, 1, 1, 1))],
)
def test_what_waits_for_weights_is_in_the_estimate(
    v: int, n: int, delay: int, layers: tuple[int, ...], how: Recompute
) -> None:
    spec = spec_of(pp=4, v=v, n=n, dp=1, schedule=ZERO_BUBBLE)
    pipeline = replace(spec.pp, stage_layers=layers, weight_delay=delay)
    training = replace(spec.training, recompute=how)
    spec = check(replace(spec, pp=pipeline, training=training))
    simulator, steps = made(spec, [4096] * n)
    found = simulator.run(simulator.price(steps)).peak_memory_bytes
    for rank in range(4):
        estimate = memory_of_rank(spec, pp_rank=rank, micro_batch_tokens=4096)
        assert found[0, rank] == estimate.total_bytes


def test_the_pipeline_that_holds_most_counts() -> None:
    spec = spec_of(pp=2, n=2, dp=2)
    # One pipeline has the two full windows, or each has one: either way no more than both full.
    simulator, steps = made(spec, [4096, 4096, 100, 100])
    some = simulator.run(simulator.price(steps))
    simulator, steps = made(spec, [4096] * 4)
    full = simulator.run(simulator.price(steps))
    assert (some.peak_memory_bytes <= full.peak_memory_bytes).all()
    assert (some.peak_activation_bytes > full.peak_activation_bytes // 3).all()
