"""Tests what a run is predicted to take, and what another packing is predicted to save."""

from dataclasses import replace
from itertools import islice

import pytest

from wlb.cost import workload_for
from wlb.data import GlobalBatches, lengths_of_family
from wlb.plan import GlobalBatch
from wlb.simulate import simulate_run
from wlb.simulate.forecast import (
    batches_to_compare,
    forecast,
    packed_by,
    simulated_shares,
    steps_to_simulate,
)
from wlb.spec import Policy, RunSpec, WindowCut, load


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return load("7b_64k", ["model.vocab_size=32000", "training.steps=1000"])


@pytest.fixture(scope="module")
def batches(spec: RunSpec) -> list[GlobalBatch]:
    window = spec.data.context_window
    source = lengths_of_family("wlb_paper", window=window, num_documents=20_000, seed=0)
    stream = GlobalBatches(source, tokens_per_batch=spec.tokens_per_step, seed=0)
    return [batch for batch, _ in islice(stream.iterate(), 24)]


def test_days_follow_from_tokens_a_second(spec: RunSpec, batches: list[GlobalBatch]) -> None:
    made = forecast(spec, workload_for(spec, "cuda"), batches)
    simulation = made.simulation
    assert made.tokens_per_s == simulation.tokens.sum() / simulation.step_time_s.sum()
    assert made.step_time_s == spec.tokens_per_step / made.tokens_per_s
    assert made.days == pytest.approx(1000 * made.step_time_s / 86_400)
    assert made.checkpoint_bytes == 12 * spec.model.num_parameters
    assert made.mfu == simulation.mfu(peak_tflops=989.0)
    assert made.first.plan.step == 0
    on_cpu = replace(made, is_cpu=True)
    assert (on_cpu.peak_tflops, on_cpu.mfu) == (0.0, None)


def test_gathers_of_every_pass_take_time(spec: RunSpec, batches: list[GlobalBatch]) -> None:
    sharded = replace(spec, fsdp=replace(spec.fsdp, reshard_after_forward=True))
    cost = workload_for(spec, "cuda")
    made, plain = (forecast(s, cost, batches[:4]) for s in (sharded, spec))
    assert made.days > plain.days


def test_what_is_saved_is_of_the_same_documents(spec: RunSpec, batches: list[GlobalBatch]) -> None:
    cost = workload_for(spec, "cuda")
    short = replace(spec.packing, policy=Policy.ORIGINAL, window_cut=WindowCut.SHORT)
    usual = packed_by(spec, short)
    best = packed_by(spec, replace(spec.packing, policy=Policy.BOUNDED))
    share, none = simulated_shares(cost, batches, usual=usual, ours=[best, usual])
    assert 0 < share.saved < 1
    assert none.saved == 0
    (back,) = simulated_shares(cost, batches, usual=best, ours=[usual])
    assert (1 - share.saved) * (1 - back.saved) == pytest.approx(1)
    assert share.error is not None
    # A few steps are too few to say how far the documents decide.
    (few,) = simulated_shares(cost, batches[:12], usual=usual, ours=[best])
    assert few.error is None


def test_the_error_of_a_share_falls_with_the_steps(spec: RunSpec) -> None:
    cost = workload_for(spec, "cuda")
    usual = packed_by(spec, replace(spec.packing, policy=Policy.ORIGINAL))
    found: list[tuple[float, float]] = []
    for count in (32, 320):
        source = lengths_of_family(
            "wlb_paper", window=spec.data.context_window, num_documents=80_000, seed=3
        )
        stream = GlobalBatches(source, tokens_per_batch=spec.tokens_per_step, seed=3)
        some = [batch for batch, _ in islice(stream.iterate(), count)]
        (share,) = simulated_shares(cost, some, usual=usual, ours=[spec])
        own = simulate_run(spec, cost, some)
        assert share.error is not None
        found.append((share.error, own.standard_error))
    (few, few_steps), (many, many_steps) = found
    assert many < few / 1.5
    assert many_steps < few_steps / 2


def test_large_steps_are_predicted_from_fewer_of_them(spec: RunSpec) -> None:
    counts = [replace(spec, data=replace(spec.data, num_windows=n)) for n in (4, 16, 2048)]
    assert [steps_to_simulate(s) for s in counts] == [8, 4, 2]
    assert [batches_to_compare(s) for s in counts] == [512, 128, 8]
