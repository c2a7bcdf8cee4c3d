"""Tests runs of many steps: everything that came in is trained, and sums are over all of it."""

import json
from dataclasses import replace

import numpy as np
import pytest

import wlb.simulate.step as module
from tests.simulate.runs import batches_of, cost_of, spec_of
from wlb.cost import document_flops
from wlb.plan import Layout
from wlb.simulate import RunSimulation, check_memory, simulate_run
from wlb.spec import Policy, RunSpec

MIXED = [4096, 3000, 1096, 2048, 2048, 1000, 3000, 96]


def run_of(spec: RunSpec, lengths: list[int]) -> RunSimulation:
    return simulate_run(spec, cost_of(spec), batches_of(spec, lengths), label="test")


def bounded(spec: RunSpec) -> RunSpec:
    return replace(spec, packing=replace(spec.packing, policy=Policy.BOUNDED, s_max=1.5))


@pytest.mark.parametrize("policy", list(Policy))
def test_what_a_policy_holds_back_is_flushed_and_counts(policy: Policy) -> None:
    spec = spec_of()
    spec = replace(spec, packing=replace(spec.packing, policy=policy))
    lengths = MIXED * 4
    found = run_of(spec, lengths)
    assert int(found.tokens.sum()) == sum(lengths)
    assert found.step_time_s.size == len(found.metrics) == len(found.tokens)
    assert found.time_s == pytest.approx(sum(m.step_time_s for m in found.metrics))
    assert found.tokens_per_s == pytest.approx(sum(lengths) / found.time_s)
    assert (found.bubble > 0).all()
    assert found.bubble.shape == found.peak_memory_bytes.shape == (found.step_time_s.size, 2)


def test_flops_are_those_of_the_documents() -> None:
    spec = spec_of()
    found = run_of(spec, MIXED)
    expected = document_flops(spec.model, np.array(MIXED)).sum()
    assert found.model_flops == pytest.approx(expected)
    peak = expected / found.time_s / 16 / 1e12
    assert found.mfu(peak_tflops=2 * peak) == pytest.approx(0.5)


def test_flops_of_joined_documents_are_those_of_one() -> None:
    spec = spec_of()
    packing = replace(spec.packing, policy=Policy.EXAMPLES, examples=4, layout=Layout.JOINED)
    found = run_of(replace(spec, packing=packing), [1000, 3000, 96, 904] * 4)
    expected = document_flops(spec.model, np.array([5000] * 4)).sum()
    assert found.model_flops == pytest.approx(expected)


def test_delay_is_a_tokens() -> None:
    """Documents that wait a step or more count by their tokens."""
    spec = spec_of()
    queued = replace(
        spec, packing=replace(spec.packing, policy=Policy.VAR_LEN, queue_thresholds=(0.5,))
    )
    # One document of 3,000 tokens comes in step 0 and waits until there are four of them.
    lengths = [3000, *[1000] * 13, 384, *[1000] * 16]
    plain, waits = run_of(spec, lengths), run_of(queued, lengths)
    assert plain.mean_delay < waits.mean_delay
    by_hand = sum(m.mean_delay * m.num_tokens for m in waits.metrics) / sum(lengths)
    assert waits.mean_delay == pytest.approx(by_hand)


def test_imbalance_weighs_steps_by_their_work() -> None:
    found = run_of(spec_of(), MIXED * 3)
    slowest = [m.max_workload_ns for m in found.metrics]
    mean = [m.mean_workload_ns for m in found.metrics]
    assert found.imbalance == pytest.approx(sum(slowest) / sum(mean))
    assert found.imbalance > 1


def test_perfect_balance_is_a_bound() -> None:
    found = run_of(bounded(spec_of(cp=4)), MIXED * 6)
    assert 0.5 * found.time_s < found.balanced_time_s() < found.time_s


def test_chunks_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps walked 64 at a time or one at a time are the same steps."""
    together = run_of(spec_of(), MIXED * 6)
    monkeypatch.setattr(module, "CHUNK", 1)
    one_by_one = run_of(spec_of(), MIXED * 6)
    assert together.step_time_s.size > 3
    assert together.to_json() == one_by_one.to_json()
    assert together.balanced_time_s() == pytest.approx(one_by_one.balanced_time_s())
    assert np.array_equal(together.prices.tokens, one_by_one.prices.tokens)


def test_json_is_plain() -> None:
    found = run_of(spec_of(), [*MIXED, 50])
    assert found.bubble.mean() > found.mean_bubble
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["tokens"] == sum(MIXED) + 50
    assert data["steps"] == len(data["step_time_s"])
    # Of the run's time, not the mean of its steps: a short flush step has large bubbles.
    assert sum(data["bubble"]) / 2 == pytest.approx(found.mean_bubble)


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="no global batches to simulate"):
        simulate_run(spec_of(), cost_of(spec_of()), [])


def test_what_does_not_fit_is_refused_with_its_rank() -> None:
    spec = spec_of()
    check_memory(run_of(spec, MIXED))
    small = replace(spec, cluster=replace(spec.cluster, memory_gib=0.01))
    with pytest.raises(ValueError, match=r"test: pipeline rank 0 \(stages 0\) needs .* bytes"):
        check_memory(run_of(small, MIXED))
