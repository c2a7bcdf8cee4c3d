"""Tests that ranks of a model with experts are rehearsed: they match, and take planned memory."""

import pytest

from tests.sets import nightly
from wlb.rehearse.run import ALL, ONE_PER_STAGE, rehearse
from wlb.rehearse.show import verdict
from wlb.spec import load

pytestmark = [pytest.mark.process, pytest.mark.full]

SMALL = ["data.context_window=4096", "model.vocab_size=512", "model.num_layers=12"]


@pytest.mark.parametrize("ranks", ["0,7", *nightly(ALL)])
def test_ranks_of_a_pipeline_exchange_the_same_rows(ranks: str) -> None:
    """Also where backward is split, and where ranks hold equal experts (4 of 8 ranks differ)."""
    keys = ["parallel.tp=2", "parallel.cp=4", "parallel.pp=2", "parallel.ep=4", "ep.stages=2"]
    more = ["pp.schedule=interleaved_zero_bubble", "data.row_multiple=8", "data.num_windows=4"]
    more += ["model.num_layers=4", "pp.virtual_stages=2"]
    spec = load("qwen3_30b_a3b_128k", [*SMALL, *keys, *more])
    found = rehearse(spec, ranks=ranks, steps=1, jobs=2)
    assert found.passed, verdict(found)
    (step,) = found.ranks[0].steps
    exchanged = step.parts["ep"]
    assert exchanged["calls"] > 0
    assert step.parts["expert_shard"]["calls"] > 0
    # Two stages, there and back forward, rows there again and gradients there and back; numbers of
    # rows once, with the loads of a step.
    layers, micro_batches = 2, 4
    assert exchanged["calls"] == layers * micro_batches * (2 * 5 + 1) + 1
    # Stages hide behind each other's products, although these are small.
    assert step.exposed_ns["ep"] < 0.8 * exchanged["time_ns"]
    # The host reads rows of each layer and micro-batch once, although layers are recomputed, and
    # the step's sums.
    waits = [wait.where.partition(":")[0] for wait in step.host_waits]
    assert waits.count("wlb/parallel/expert_exchange.py") == layers * micro_batches
    assert waits.count("wlb/train/reduce.py") == 1


@pytest.mark.parametrize("layers", nightly(48))
def test_every_stage_of_the_preset_takes_the_memory_that_was_planned(layers: int) -> None:
    spec = load("qwen3_30b_a3b_128k", [f"model.num_layers={layers}"])
    found = rehearse(spec, ranks=ONE_PER_STAGE, steps=2, jobs=2)
    assert found.passed, verdict(found)
    for rank in found.ranks:
        step = rank.steps[-1]
        assert step.peak_bytes <= step.estimate_bytes
        # While the host reads numbers of rows, rows are copied into their order.
        waits = [w for w in step.host_waits if w.where.startswith("wlb/parallel/expert_exchange")]
        assert min(wait.left_ns for wait in waits) > 10_000


@pytest.mark.nightly
def test_ranks_of_several_pipelines_exchange_the_rows_of_their_micro_batches() -> None:
    """The EP groups of a stage span two pipelines with micro-batches of other lengths; the first
    stage has no experts.
    """
    keys = ["parallel.tp=1", "parallel.cp=2", "parallel.pp=2", "parallel.dp=2", "parallel.ep=4"]
    more = ["model.num_layers=4", "model.experts.dense_layers=[0,1]", "pp.virtual_stages=1"]
    more += ["data.num_windows=4", "data.row_multiple=8", "eval.interval=1"]
    spec = load("qwen3_30b_a3b_128k", [*SMALL, *keys, *more])
    found = rehearse(spec, ranks=ALL, steps=1, jobs=2)
    assert found.passed, verdict(found)
    by_stage = {pp: [r for r in found.ranks if r.coordinates[2] == pp] for pp in (0, 1)}
    assert len({r.steps[0].num_tokens for r in by_stage[1]}) == 2
    for rank in found.ranks:
        (step,) = rank.steps
        assert ("ep" in step.parts) == (rank.coordinates[2] == 1)
        assert step.peak_bytes <= step.estimate_bytes
