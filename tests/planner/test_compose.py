"""Tests the planner: dealing, step plans, flush, resuming anywhere, no torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.sets import full, nightly
from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, LengthSource, TokenStoreWriter
from wlb.packing import (
    BoundedPacker,
    CapacityPacker,
    ExamplesPacker,
    FixedPacker,
    OriginalPacker,
    Packer,
    PackerOptions,
    VarLenPacker,
)
from wlb.plan import PlannerState, StepMetrics, StepPlan, digest, int_array
from wlb.plan.tally import Share
from wlb.planner import Planner, open_heldout_planner
from wlb.planner.compose import assign_micro_batches
from wlb.spec import SYSTEMS, Policy, load, system_overrides

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=50)
POLICIES = tuple(map(str, Policy))


def planner(
    *,
    n: int = 4,
    dp: int = 2,
    cp: int = 2,
    seed: int = 0,
    policy: str = "var_len",
    longest: int = 900,
    m: int | None = None,
) -> Planner:
    """Returns a planner.

    n: windows of a global batch
    m: micro-batches, as many by default
    """
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.lognormal(4.0, 1.2, 300).astype(int) + 1, 900)
    lengths[100] = longest
    source = GlobalBatches(
        LengthSource(name="test", lengths=lengths), tokens_per_batch=n * 256, seed=seed, epochs=1
    )
    options = PackerOptions(
        num_micro_batches=m or n, num_windows=n, context_window=256, cost=COST, seed=seed
    )
    original = OriginalPacker(options=replace(options, num_micro_batches=n))
    packers: dict[str, Packer] = {
        "original": original,
        "fixed": FixedPacker(options=options, window_batches=2),
        "var_len": VarLenPacker(options=options, s_max=384, queue_thresholds=(60, 180)),
        "bounded": BoundedPacker(options=options, s_max=512, max_delay=6),
        "capacity": CapacityPacker(options=options),
        "examples": ExamplesPacker(options=options, examples=3),
    }
    return Planner(
        source=source,
        packer=packers[policy],
        baseline=original,
        cost=COST,
        dp=dp,
        cp=cp,
        row_multiple=2,
    )


def test_dealing_gives_equal_numbers_and_near_equal_work() -> None:
    work = int_array("w", [10, 1, 9, 2, 8, 4])
    # 10 to the first, 9 and 8 to the second, 4 and 2 to the first (now full), 1 to the second.
    assert assign_micro_batches(work, work, 2).tolist() == [[0, 3, 5], [1, 2, 4]]
    # Heaviest first gives 10 7 2 and 8 8 7; exchanging the 7 for an 8 makes 19 and 23 20 and 22.
    again = int_array("w", [10, 8, 8, 7, 7, 2])
    assert again[assign_micro_batches(again, again, 2)].sum(1).tolist() == [20, 22]
    assert assign_micro_batches(work, work, 1).tolist() == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="6 micro-batches, which is not a multiple of dp = 4"):
        assign_micro_batches(work, work, 4)


def test_dealing_evens_out_tokens_where_work_allows_it() -> None:
    work = int_array("w", [100, 100, 100, 100, 100, 100, 100, 100])
    tokens = int_array("t", [10, 10, 10, 10, 20, 20, 20, 20])
    by_tokens = assign_micro_batches(work, tokens, 2)
    assert tokens[by_tokens].sum(1).tolist() == [60, 60]
    # Work comes first: exchanging a 90 for a 110 would cost 10%.
    work = int_array("w", [110, 90, 110, 90])
    tokens = int_array("t", [20, 10, 20, 10])
    dealt = assign_micro_batches(work, tokens, 2)
    assert work[dealt].sum(1).tolist() == [200, 200]
    # A pipeline may get 0.1% more work for the sake of tokens, and no more.
    slightly, very = int_array("t", [101, 99, 100, 100]), int_array("t", [30, 10, 20, 20])
    for tokens, more, expected in (
        (slightly, 19, [200, 200]),
        (slightly, 21, [199, 201]),
        # While tokens differ by more than 5% it may be 0.5%.
        (very, 99, [40, 40]),
        (very, 102, [30, 50]),
    ):
        work = int_array("w", [10_000 + more, 10_000 + more, 10_000, 10_000])
        assert sorted(tokens[assign_micro_batches(work, tokens, 2)].sum(1).tolist()) == expected


def test_every_document_token_is_planned_exactly_once() -> None:
    made = planner()
    seen: dict[int, list[tuple[int, int]]] = {}
    targets = 0
    for step in made.steps():
        for piece in (step.packing.pieces[i] for i in range(len(step.packing.pieces))):
            seen.setdefault(piece.document, []).append((piece.start, piece.stop))
        targets += step.num_targets
    lengths = made.source.source.lengths  # type: ignore[attr-defined]
    assert sorted(seen) == list(range(300))
    for document, spans in seen.items():
        ends = [0, *(stop for _, stop in sorted(spans))]
        assert [start for start, _ in sorted(spans)] == ends[:-1]
        assert ends[-1] == lengths[document]
    assert targets == int((lengths - 1).sum())


def fingerprint(made: Planner, plan: StepPlan) -> tuple[int, ...]:
    shards = (made.shard(plan, d).digest() for d in range(made.dp))
    return (plan.step, plan.digest(), *shards)


def test_a_step_plan_survives_json() -> None:
    made = planner()
    plan = next(made.steps())
    again = StepPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert fingerprint(made, again) == fingerprint(made, plan)
    assert (again.predicted, again.baseline) == (plan.predicted, plan.baseline)
    assert fingerprint(made, made.next(again.state)) == fingerprint(made, made.next(plan.state))


REST = [policy for policy in POLICIES if policy not in ("bounded", "var_len", "original")]


@pytest.mark.parametrize("policy", ["bounded", *full("var_len", "original"), *nightly(*REST)])
def test_a_restart_from_any_state_gives_the_same_plans(policy: str) -> None:
    made = planner(policy=policy)
    plans = list(made.steps())
    expected = [fingerprint(made, p) for p in plans]
    assert [p.step for p in plans] == list(range(len(plans)))
    for i, plan in enumerate(plans):
        state = PlannerState.from_json(json.loads(json.dumps(plan.state.to_json())))
        assert state.next_step == i + 1
        again = planner(policy=policy)
        assert [fingerprint(again, p) for p in again.steps(state)] == expected[i + 1 :]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_restart_may_have_another_layout_and_number_of_micro_batches(policy: str) -> None:
    """It may begin at every state, plans already made (a long document, the flush) included."""
    first = planner(n=4, dp=2, policy=policy, longest=9000)
    lengths = first.source.source.lengths  # type: ignore[attr-defined]
    done = ready = 0
    for plan in first.steps():
        done += plan.packing.num_tokens
        ready += len(plan.state.ready)
        again = planner(n=6, dp=3, policy=policy, longest=9000)
        rest = list(again.steps(plan.state))
        assert done + sum(p.packing.num_tokens for p in rest) == int(lengths.sum())
        assert all(p.pipelines.shape == (3, 2) for p in rest)
        assert [p.step for p in rest] == list(range(plan.step + 1, plan.step + 1 + len(rest)))
    # Algorithm 1 and bounded make one step a batch but in the flush.
    assert ready > 0 or policy in ("var_len", "bounded")


@pytest.mark.parametrize("policy", ["var_len", "bounded"])
@pytest.mark.parametrize("m", [6, 8])
def test_global_batches_can_be_packed_into_another_number_of_micro_batches(
    policy: str, m: int
) -> None:
    """Global batches are the same, Plain-4D's windows unchanged, and every token comes once."""
    usual, other = (planner(n=4, m=m, policy=policy) for m in (4, m))
    plans, plain = list(other.steps()), list(usual.steps())
    assert all(p.pipelines.shape == (2, m // 2) for p in plans)
    lengths = usual.source.source.lengths  # type: ignore[attr-defined]
    assert sum(p.packing.num_tokens for p in plans) == int(lengths.sum())
    assert plans[-1].state.num_batches == plain[-1].state.num_batches
    # A batch may make no step of the one and a step of the other; Plain-4D's windows are the same.
    ours, theirs = ([s.baseline for s in made if s.baseline] for made in (plans, plain))
    for counted in ("num_tokens", "num_documents", "max_workload_ns"):
        assert sum(getattr(m, counted) for m in ours) == sum(getattr(m, counted) for m in theirs)
    # And back again in the middle.
    rest = list(usual.steps(plans[3].state))
    done = sum(p.packing.num_tokens for p in plans[:4])
    assert done + sum(p.packing.num_tokens for p in rest) == int(lengths.sum())
    assert all(p.pipelines.shape == (2, 2) for p in rest)


def test_a_restart_may_have_another_policy() -> None:
    """What one policy held back is packed by the next; nothing is lost or trained twice."""
    for before, after in zip(POLICIES, [*POLICIES[1:], POLICIES[0]], strict=True):
        first = planner(policy=before, longest=9000)
        lengths = first.source.source.lengths  # type: ignore[attr-defined]
        done = 0
        for plan in first.steps():
            done += plan.packing.num_tokens
            if plan.step == 7:
                break
        rest = planner(policy=after, longest=9000).steps(plan.state)
        assert done + sum(p.packing.num_tokens for p in rest) == int(lengths.sum())


@pytest.mark.parametrize("policy", POLICIES)
def test_plain_4d_is_predicted_on_the_same_documents(policy: str) -> None:
    """Both packers' steps are of the whole stream, and nothing of it is left out."""
    plans = list(planner(policy=policy).steps())
    ours = sum(p.predicted.num_tokens for p in plans)
    plain = sum(p.baseline.num_tokens for p in plans if p.baseline is not None)
    assert ours == plain


@pytest.mark.parametrize("policy", ["original", "fixed", "var_len"])
def test_the_mean_of_plain_steps_does_not_depend_on_what_they_are_beside(policy: str) -> None:
    """Several of its steps are one where a policy packs two batches at once, and at the end."""
    share, alone = Share(), Share()
    for plan in planner(policy=policy).steps():
        if plan.baseline is not None:
            again = StepMetrics.from_json(plan.baseline.to_json())
            assert again == plan.baseline
            share.add(plan.baseline)
    for plan in replace(planner(policy="original"), baseline=None).steps():
        alone.add(plan.predicted)
    assert share.steps == alone.steps
    assert share.mean_imbalance == pytest.approx(alone.mean_imbalance)
    assert share.weighted_imbalance == pytest.approx(alone.weighted_imbalance)


def test_a_baseline_that_was_off_starts_where_the_run_is() -> None:
    without = replace(planner(), baseline=None)
    plans = list(without.steps())
    assert all(p.baseline is None for p in plans)
    state = plans[4].state
    later = [p.baseline for p in planner().steps(state) if p.baseline is not None]
    lengths = without.source.source.lengths  # type: ignore[attr-defined]
    arrived = sum(p.packing.num_tokens for p in plans[:5]) + state.carry.num_tokens
    assert sum(m.num_tokens for m in later) == int(lengths.sum()) - arrived


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dp": 0}, "dp = 0 must be at least 1"),
        ({"dp": 3}, "num_micro_batches = 4 must be a multiple of dp = 3"),
        ({"cp": 0}, "cp = 0"),
        ({"strategy": "ring"}, "strategy = 'ring' is unknown"),
    ],
)
def test_a_planner_that_cannot_work_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(planner(), **change)


def test_lengths_are_planned_in_global_batches_in_their_order() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 4000).astype(int) + 1
    made = Planner.for_lengths(lengths, context_window=2048, num_micro_batches=2)
    plans = list(made.steps())
    tokens = [p.packing.num_tokens for p in plans]
    assert sum(tokens) == int(lengths.sum())
    assert np.mean(tokens[:-1]) == pytest.approx(2 * 2048, rel=0.02)
    first = [p.packing.pieces.document.mean() for p in plans]
    assert np.all(np.diff(first) > -40)  # documents come in the order they were given
    queued = Planner.for_lengths(
        lengths, context_window=2048, num_micro_batches=2, s_max=2048, queue_thresholds=(700,)
    )
    assert sum(p.packing.num_tokens for p in queued.steps()) == int(lengths.sum())
    assert queued.packer.policy == "var_len"
    assert made.packer.policy == "bounded"
    for bad, message in (([], "no lengths"), ([3, 0], "must be from 1"), ([2.5], "whole")):
        with pytest.raises(ValueError, match=message):
            Planner.for_lengths(bad, context_window=8, num_micro_batches=1)


def test_lengths_of_several_epochs_come_in_another_order_each() -> None:
    made = Planner.for_lengths(
        [3, 5, 7, 2, 6], context_window=8, num_micro_batches=2, epochs=3, shuffle=True, seed=1
    )
    found = np.concatenate([plan.packing.pieces.document for plan in made.steps()])
    assert sorted(found.tolist()) == list(range(15))
    state, seen = made.source.start(), list[int]()
    while (item := made.source.next(state)) is not None:
        batch, state = item
        seen += batch.documents.id.tolist()
    epochs = [[i % 5 for i in seen[at : at + 5]] for at in (0, 5, 10)]
    assert all(sorted(order) == list(range(5)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    refusing = Planner.for_lengths(
        [3, 9], context_window=8, num_micro_batches=1, long_documents="refuse"
    )
    with pytest.raises(ValueError, match="9"):
        next(refusing.steps())


TRAINED = [
    *(system_overrides(name, planned_gib=1)[0] for name in SYSTEMS),
    ("packing.policy=fixed", "packing.window_batches=4"),
    ("packing.policy=bounded", "packing.num_micro_batches=3", "packing.max_delay=2"),
    ("packing.queue_thresholds=[0.2]", "packing.hold=3", "packing.s_max=2.0"),
]
METHODS = [
    (f"packing.method={name}",)
    for name in ("fixed_length", "random_padding", "multipack_posid", "random_posid")
]


@pytest.mark.parametrize("trained", [TRAINED, METHODS])
def test_held_out_windows_are_the_same_whatever_is_trained(
    tmp_path: Path, trained: list[tuple[str, ...]]
) -> None:
    store = str(tmp_path / "heldout")
    with TokenStoreWriter(store, vocab_size=10) as writer:
        for length in np.random.default_rng(3).integers(1, 120, 60).tolist():
            writer.add([1] * length)
    found = set[tuple[int, ...]]()
    for overrides in trained:
        data = ["data.context_window=128", "data.num_windows=2"]
        spec = load("demo_single", [*data, *(o for o in overrides if "memory_gib" not in o)])
        plans = open_heldout_planner(spec, store, "cpu").steps()
        found.add(tuple(digest(*p.packing.pieces.columns().values()) for p in plans))
    assert len(found) == 1


def test_pipelines_get_their_micro_batches_and_equal_rows() -> None:
    made = planner()
    plan = next(made.steps())
    assert sorted(plan.pipelines.ravel().tolist()) == [0, 1, 2, 3]
    for d in range(2):
        mine = made.shard(plan, d)
        assert [m.index for m in mine.micro_batches] == plan.pipelines[d].tolist()
        assert mine.local_tokens == plan.local_tokens(d)
        assert mine.step_rows == plan.packing.num_tokens  # of both pipelines
        for batch, sharding, rows in zip(
            mine.micro_batches, mine.shardings, mine.local_tokens, strict=True
        ):
            sharding.validate()
            assert sharding.lengths.tolist() == batch.lengths.tolist()
            assert rows % 2 == 0
            assert rows * 2 - max(1, batch.num_tokens) < 2 * 2


def test_queues_balance_better_than_plain_windows() -> None:
    """Balance itself is tested, over a run and time-weighted as in Section 7.4, not only output."""
    plans = [p for p in planner().steps() if p.baseline is not None]
    ours = sum(p.predicted.max_workload_ns for p in plans) / sum(
        p.predicted.mean_workload_ns for p in plans
    )
    plain = sum(p.baseline.max_workload_ns for p in plans) / sum(
        p.baseline.mean_workload_ns for p in plans
    )
    assert ours < 1.12 < 1.20 < plain


@pytest.mark.process
def test_readme_example_needs_no_torch() -> None:
    code = """
import sys
from wlb.planner import Planner
lengths = [4096, 900, 700, 60, 60]
planner = Planner.for_lengths(lengths, context_window=4096, num_micro_batches=2, cp=2)
for step in planner.steps():
    pipeline = planner.shard(step, 0)
    for batch, sharding in zip(pipeline.micro_batches, pipeline.shardings):
        for rank in range(2):
            print(batch.lengths.tolist(), sharding.for_rank(rank).cu_seqlens_q.tolist())
assert "torch" not in sys.modules, "torch was imported"
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert any(line.startswith("[4096] [0, ") for line in out.stdout.splitlines())
