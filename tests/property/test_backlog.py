"""Tests that no policy falls behind on heavy tails: what is held after a batch stays bounded.

The streams have documents of up to a hundred windows, which arrive whole with one global batch; the
batches that their tokens stand for bring no document.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, LengthSource
from wlb.packing import (
    BoundedPacker,
    CapacityPacker,
    FixedPacker,
    OriginalPacker,
    Packer,
    PackerOptions,
    VarLenPacker,
    WindowCut,
)
from wlb.packing.original import MOST_OPEN
from wlb.plan import Documents, GlobalBatch, IntArray, PackingPlan, imbalance

C = 256
TAILS = ("lognormal", "one window", "two windows", "alternating", "few")


def options(n: int) -> PackerOptions:
    cost = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=C)
    return PackerOptions(num_micro_batches=n, context_window=C, cost=cost)


def lengths_of(tail: str, seed: int) -> IntArray:
    """120 to 3,000 documents of a stream, in tokens; the longest have 100 windows."""
    draw = np.random.default_rng(seed)
    match tail:
        case "lognormal":
            found = draw.lognormal(np.log(draw.uniform(0.2, 12) * C), 1.0, 400)
            return np.clip(found, 1, 100 * C).astype(np.int64)
        case "one window":
            return np.full(400, C)
        case "two windows":
            return np.full(400, 2 * C)
        case "alternating":
            tiny = draw.integers(1, 4, 3000)
            tiny[:: int(draw.integers(20, 200))] = 100 * C
            return tiny
    return draw.integers(20 * C, 100 * C, 120)


def batches_of(tail: str, n: int, seed: int) -> list[GlobalBatch]:
    source = LengthSource(name=tail, lengths=lengths_of(tail, seed))
    stream = GlobalBatches(source, tokens_per_batch=n * C, seed=seed, epochs=1)
    return [batch for (batch, _), _ in zip(stream.iterate(), range(120), strict=False)]


def most_held(packer: Packer, longest: int) -> int:
    """Tokens that a policy may hold after a global batch; longest: document of the stream."""
    n = packer.num_micro_batches
    match packer:
        case BoundedPacker():
            return packer.most_held_tokens
        case FixedPacker():
            return packer.window_batches * n * C
        case OriginalPacker():
            return (MOST_OPEN + 1) * n * C
        case CapacityPacker():
            return (n + 1) * C
        case VarLenPacker():  # queues, and what the last long document left over
            queued = len(packer.queue_thresholds) * (n - 1) * C
            return queued + longest + 2 * n * C
    raise AssertionError(packer)


def packers(n: int) -> st.SearchStrategy[Packer]:
    base, step = options(n), n * C
    return st.one_of(
        st.builds(
            BoundedPacker,
            options=st.just(base),
            s_max=st.sampled_from([C + C // 10, C + C // 2, 2 * C]),
            step_tokens=st.sampled_from([None, step + step // 20, step + step // 2]),
            max_delay=st.integers(1, 12),
        ),
        st.builds(
            VarLenPacker,
            options=st.just(base),
            s_max=st.just(2 * C),
            queue_thresholds=st.sampled_from([(), (C // 2,), (C // 5, C * 2 // 3)]),
        ),
        st.builds(FixedPacker, options=st.just(base), window_batches=st.integers(1, 4)),
        st.builds(OriginalPacker, options=st.just(base), cut=st.sampled_from(WindowCut)),
        st.builds(CapacityPacker, options=st.just(base)),
    )


@given(st.data())
def test_what_is_held_stays_bounded(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    packer = data.draw(packers(n))
    tail, seed = data.draw(st.sampled_from(TAILS)), data.draw(st.integers(0, 99))
    batches = batches_of(tail, n, seed)
    limit = most_held(packer, int(lengths_of(tail, seed).max()))
    carry, placed = packer.start(), 0
    for batch in batches:
        plans, carry = packer.push(batch, carry)
        placed += sum(plan.num_tokens for plan in plans)
        assert carry.num_tokens <= limit, (tail, seed, batch.index)
    arrived = sum(batch.documents.num_tokens for batch in batches)
    assert placed + carry.num_tokens == arrived


def run(packer: Packer, batches: list[GlobalBatch]) -> list[PackingPlan]:
    carry, plans = packer.start(), list[PackingPlan]()
    for batch in batches:
        made, carry = packer.push(batch, carry)
        plans += made
    return plans


@pytest.mark.parametrize("tail", ["lognormal", "few"])
def test_delay_follows_from_the_backlog(tail: str) -> None:
    """`bounded` keeps documents at most a few steps beyond `max_delay`, whatever comes at once."""
    packer = BoundedPacker(options=options(8), s_max=2 * C, step_tokens=12 * C, max_delay=10)
    plans = run(packer, batches_of(tail, 8, seed=3))
    assert len(plans) > 50
    delay = max(int((p.step - p.pieces.arrival_step).max()) for p in plans)
    assert delay <= 10 + 5
    tokens = [p.num_tokens for p in plans]
    assert np.mean(tokens) > 0.95 * 8 * C


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_batches_of_few_documents_wait_for_company(num: int) -> None:
    """With fewer documents than micro-batches a step would leave some micro-batches empty."""
    packer = BoundedPacker(options=options(8), s_max=2 * C, max_delay=10)
    batches = [
        GlobalBatch(index=i, documents=Documents.from_lengths([C] * num, first_id=i * num))
        for i in range(64)
    ]
    plans = run(packer, batches)
    assert len(plans) >= 64 * num // 16
    assert max(imbalance(p.workload_ns) for p in plans) == 1.0


def test_a_batch_without_documents_makes_steps_of_what_waits() -> None:
    """One document of a hundred windows, then nothing for the 99 windows that it stands for."""
    packer = BoundedPacker(options=options(4), s_max=2 * C, max_delay=4)
    batches = batches_of("few", 4, seed=0)
    carry, empty = packer.start(), 0
    for batch in batches:
        plans, carry = packer.push(batch, carry)
        if not len(batch.documents):
            empty += len(plans) > 0
            assert carry.num_tokens < 4 * C or plans
    assert empty > 0
