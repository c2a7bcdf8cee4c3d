"""The planner: dealing, step plans, flush, resuming anywhere, no torch."""

import json
import subprocess
import sys

import numpy as np
import pytest

from wlb.corpus import GlobalBatches, LengthSource
from wlb.cost import FlopsWorkload
from wlb.packing import OriginalPacker, PackerOptions, VarLenPacker
from wlb.plan import PlannerState, StepPlan, int_array
from wlb.planner import Planner, deal, with_shardings

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=50)


def planner(
    *, n: int = 4, dp: int = 2, cp: int = 2, seed: int = 0, policy: str = "var_len"
) -> Planner:
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.lognormal(4.0, 1.2, 300).astype(int) + 1, 900)
    source = GlobalBatches(
        LengthSource(name="test", lengths=lengths), tokens_per_batch=n * 256, seed=seed, epochs=1
    )
    options = PackerOptions(num_micro_batches=n, context_window=256, cost=COST, seed=seed)
    original = OriginalPacker(options=options)
    packer = VarLenPacker(options=options, s_max=384, queue_thresholds=(60, 180))
    return Planner(
        source=source,
        packer=original if policy == "original" else packer,
        baseline=original,
        cost=COST,
        dp=dp,
        cp=cp,
        quantum=2,
    )


def test_dealing_gives_equal_numbers_and_near_equal_work() -> None:
    work = int_array("w", [10, 1, 9, 2, 8, 4])
    # 10 to the first, 9 and 8 to the second, 4 and 2 to the first (now full), 1 to the second.
    assert deal(work, 2).tolist() == [[0, 3, 5], [1, 2, 4]]
    assert deal(work, 1).tolist() == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="6 micro-batches cannot be dealt to 4 pipelines"):
        deal(work, 4)


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


@pytest.mark.parametrize("policy", ["var_len", "original"])
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


def test_a_restart_may_have_another_layout_and_number_of_micro_batches() -> None:
    first = planner(n=4, dp=2)
    plans = list(first.steps())
    middle = plans[len(plans) // 2].state
    second = planner(n=6, dp=3)
    done = sum(p.packing.num_tokens for p in plans[: len(plans) // 2 + 1])
    rest = list(second.steps(middle))
    lengths = first.source.source.lengths  # type: ignore[attr-defined]
    assert done + sum(p.packing.num_tokens for p in rest) == int(lengths.sum())
    assert all(p.pipelines.shape == (3, 2) for p in rest)


def test_pipelines_get_their_micro_batches_and_equal_rows() -> None:
    made = planner()
    plan = next(made.steps())
    assert sorted(plan.pipelines.ravel().tolist()) == [0, 1, 2, 3]
    for d in range(2):
        mine = made.shard(plan, d)
        assert [m.index for m in mine.micro_batches] == plan.pipelines[d].tolist()
        assert mine.local_tokens == plan.local_tokens(d)
        for batch, sharding, rows in zip(
            mine.micro_batches, mine.shardings, mine.local_tokens, strict=True
        ):
            sharding.validate()
            assert sharding.lengths.tolist() == batch.lengths.tolist()
            assert rows % 2 == 0
            assert rows * 2 - max(1, batch.num_tokens) < 2 * 2
        named = with_shardings(plan.predicted, mine)
        assert sum(count for _, count in named.sharding_counts) == 2
        assert named.cp_imbalance >= 1.0


def test_queues_balance_better_than_plain_windows() -> None:
    """Balance itself, not only output: over a run, time-weighted as in Section 7.4."""
    plans = [p for p in planner().steps() if p.baseline is not None]
    ours = sum(p.predicted.max_workload_ns for p in plans) / sum(
        p.predicted.mean_workload_ns for p in plans
    )
    plain = sum(p.baseline.max_workload_ns for p in plans) / sum(
        p.baseline.mean_workload_ns for p in plans
    )
    assert ours < 1.10 < 1.20 < plain


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
    assert out.stdout.splitlines()[0].startswith("[4096] [0, ")
