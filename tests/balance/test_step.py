"""Tests `balance_step`: literal answers, costs, refusals, mini-batches, bounds, views."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from wlb import FlopsWorkload, StepBalance, balance_step, load_profile
from wlb.balance import slime_flops
from wlb.balance.bound import least_time
from wlb.plan import UserError
from wlb.spec import ModelSpec

RNG = np.random.default_rng(0)
TAILS = np.minimum(RNG.lognormal(7.9, 0.95, 768), 17000).astype(np.int64)


def divided(balance: StepBalance, mini_batch: int = 0) -> list[list[list[int]]]:
    return [[s.tolist() for s in balance.of_rank(r, mini_batch)] for r in range(balance.num_ranks)]


def flat(balance: StepBalance, mini_batch: int) -> list[int]:
    """Returns a mini-batch's samples, rank after rank."""
    return [i for rank in divided(balance, mini_batch) for part in rank for i in part]


def test_a_step_by_hand() -> None:
    """Two ranks, 10 tokens a micro-batch: 8 goes with 2, 6 with 4, 5 with 5 and 9 with 1."""
    balance = balance_step(
        [8, 2, 6, 4, 5, 5, 9, 1], num_ranks=2, max_tokens=10, cost=[8, 2, 6, 4, 5, 5, 9, 1]
    )
    assert balance.num_micro_batches.tolist() == [2]
    assert balance.time(0).tolist() == [[10, 10], [10, 10]]
    assert balance.tokens(0).tolist() == [[10, 10], [10, 10]]
    assert {tuple(part) for rank in divided(balance) for part in rank} == {
        (0, 1), (2, 3), (4, 5), (6, 7),
    }  # fmt: skip
    assert balance.imbalance == balance.lower_bound == 1.0
    assert balance.step_time == 20


def test_slots_may_differ_where_ranks_within_them_are_equal() -> None:
    """Two heavy samples meet in one slot, so that nobody waits although bins are 9 and 1."""
    balance = balance_step([9, 9, 1, 1], num_ranks=2, max_tokens=9, cost=[9, 9, 1, 1])
    assert balance.time(0).tolist() == [[9, 1], [9, 1]]
    assert balance.imbalance == 1.0


def test_what_waits_decides_what_is_best() -> None:
    """Where ranks wait once, 6 + 4 on a rank beside 5 + 5 is perfect; in slots it waits."""
    options: dict[str, Any] = {"num_ranks": 2, "max_tokens": 6, "cost": [6, 4, 5, 5]}
    once = balance_step([6, 4, 5, 5], **options, wait="step")
    assert once.imbalance == 1.0
    assert sorted(once.time(0).sum(1).tolist()) == [10, 10]
    each = balance_step([6, 4, 5, 5], **options)
    assert each.imbalance == each.lower_bound == 1.1, "6 and 5 in one slot, 5 and 4 in the other"


def test_peers_are_beaten_on_heavy_tails_within_the_cap() -> None:
    each = balance_step(TAILS, num_ranks=8, max_tokens=17000, cost="verl")
    assert each.imbalance < 1.01
    assert each.num_micro_batches[0] == -(-TAILS.sum() // (8 * 17000)) == each.tokens(0).shape[1]
    once = balance_step(TAILS, num_ranks=8, max_tokens=17000, cost="verl", wait="step")
    assert once.imbalance < 1.001
    four = balance_step(
        TAILS, num_ranks=8, max_tokens=17000, cost="verl", mini_batches=4, equal_counts=True
    )
    assert four.imbalance < 1.02


def test_mini_batches_are_alike_in_work_and_lengths() -> None:
    """Their means are closer than those of 99 of 100 random splits."""
    balance = balance_step(TAILS, num_ranks=8, max_tokens=17000, cost="verl", mini_batches=4)
    means = [TAILS[flat(balance, k)].mean() for k in range(4)]
    rng = np.random.default_rng(1)
    random = [np.ptp(rng.permutation(TAILS).reshape(4, -1).mean(1)) for _ in range(100)]
    assert np.ptp(means) <= np.quantile(random, 0.01)
    work = np.array([balance.time(k).sum() for k in range(4)])
    assert np.ptp(work) < 1e-3 * work.mean()


def test_given_mini_batches_keep_their_samples_and_order() -> None:
    balance = balance_step(
        [5, 6, 7, 8, 9, 10, 11, 12],
        num_ranks=2,
        max_tokens=30,
        mini_batches=[7, 7, 3, 3, 3, 3, 7, 7],
    )
    assert sorted(flat(balance, 0)) == [2, 3, 4, 5]
    assert sorted(flat(balance, 1)) == [0, 1, 6, 7]


COSTS = {
    "model": FlopsWorkload(linear_ns_per_token=24576.0),
    "ratio": 24576.0,
    "name": "verl",
    "array": 24576.0 * TAILS + TAILS.astype(float) ** 2,
    "function": lambda lengths: 24576.0 * lengths + lengths.astype(float) ** 2,
}


def test_equal_costs_make_the_same_assignment_whatever_says_them() -> None:
    made = {
        name: balance_step(TAILS, num_ranks=8, max_tokens=17000, cost=cost).digest
        for name, cost in COSTS.items()
    }
    assert len(set(made.values())) == 1, made


def test_slimes_flops_are_those_of_its_formula() -> None:
    """Its function gave these for two lengths and a dense model with grouped queries."""
    model = ModelSpec(
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=160,
        vocab_size=97,
    )
    projections = 2 * 64 * 4 * 16 + 4 * 64 * 2 * 16 + 2 * 64 * 64 + 6 * 64 * 160
    by_hand = [3 * (n * projections + 2 * 4 * 16 * n * n) + 2 * n * 64 * 97 for n in (10, 1000)]
    assert slime_flops(np.array([10, 1000]), model).tolist() == by_hand


def test_forward_passes_are_priced_apart_where_the_profile_does() -> None:
    """Attention is a larger share of a forward pass or a smaller one, so times differ."""
    profile = load_profile("h100")
    train = balance_step(TAILS, num_ranks=8, max_tokens=17000, cost=profile)
    forward = balance_step(TAILS, num_ranks=8, max_tokens=17000, cost=profile, passes="forward")
    ratio = train.time(0).sum() / forward.time(0).sum()
    assert 2 < ratio < 4
    assert forward.imbalance < 1.02


REFUSED = {
    "empty": (([],), {}, "lengths is empty"),
    "zero": (([3, 0],), {}, r"lengths\[1\] = 0 must be at least 1"),
    "negative": (([3, -4],), {}, r"lengths\[1\] = -4 must be at least 1"),
    "nan": (([3, 4],), {"cost": [1.0, math.nan]}, "sample 1, which has 4 tokens, is nan"),
    "negative cost": (([3, 4],), {"cost": [-1.0, 1.0]}, "sample 0, which has 3 tokens, is -1"),
    "costs": (([3, 4],), {"cost": [1.0]}, "there are 2 samples"),
    "name": (([3, 4],), {"cost": "trl"}, "cost = 'trl' is unknown"),
    "ratio": (([3, 4],), {"cost": 0.0}, "must be above 0 and finite; it is the length"),
    "cap": (([3, 41],), {}, "sample 1 has 41 tokens.*max_tokens = 40"),
    "atom": (([30, 20, 5],), {"atoms": [0, 0, 1]}, "atom of sample 0 has 50 tokens.*= 40"),
    "few": (([3],), {}, "1 samples .*1 micro-batches.*2 ranks"),
    "fixed": (([30] * 6,), {"num_micro_batches": 2}, "180 tokens do not fit into 2 "),
    "counts": (([3, 4, 5],), {"equal_counts": True}, "3 samples, which .* 2 ranks; .* count_slack"),
    "slack": (([3, 4],), {"count_slack": 1}, "has no effect without equal_counts"),
    "multiple": (([3, 4],), {"num_micro_batches": 3, "multiple": 2}, "3 must be divisible by"),
    "divided": (([3, 4],), {"groups": [0, 0], "mini_batches": [0, 1]}, "0 and 1 are in the same"),
    "group": (([3, 4],), {"groups": [0, 1], "atoms": [0, 0]}, "0 and 1 are in the same atom"),
    "groups": (([3, 4],), {"groups": [0, 0], "groups_on": "rank"}, "1 groups.*2 ranks"),
    "unequal": (
        ([3] * 8,),
        {"groups": [0, 0, 0, 0, 0, 1, 1, 2], "groups_on": "rank", "equal_counts": True},
        "ranks would have . to ., because samples",
    ),
    "mini-batches": (([3, 4],), {"mini_batches": 3}, "2 samples .* too few for mini_batches = 3"),
    "rank": (([3, 4],), {"ranks": [0, 2]}, r"ranks\[1\] = 2 must be from 0 to 1"),
    "entries": (([3, 4],), {"groups": [0]}, "groups has 1 entries, but there are 2 samples"),
    "wait": (([3, 4],), {"wait": "never"}, "wait = 'never' is unknown"),
    "passes": (([3, 4],), {"passes": "back"}, "passes = 'back' is unknown"),
    "degree": (([3, 4],), {"dynamic_cp": 3}, "dynamic_cp = 3 must be a power of two"),
    "too wide": (([3, 90],), {"dynamic_cp": 2}, "90 tokens is too long for dynamic_cp = 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_error_with_sample_and_limit(case: str) -> None:
    arguments, options, says = REFUSED[case]
    with pytest.raises(UserError, match=says):
        balance_step(*arguments, **{"num_ranks": 2, "max_tokens": 40, **options})


@pytest.mark.parametrize("seed", range(6))
def test_nothing_beats_the_bound(seed: int) -> None:
    """All ways of dividing seven samples among two ranks and two slots."""
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.integers(1, 30, 7))[::-1]
    work = lengths.astype(float) ** 2
    cap = int(max(lengths[0], lengths.sum() // 4 + 15) + rng.integers(0, 30))
    places = np.array(list(itertools.product(range(4), repeat=7)))[:, :, None] == np.arange(4)
    loads = (work[:, None] * places).sum(1)
    fits = (lengths[:, None] * places).sum(1).max(1) <= cap
    grid = loads[fits].reshape(-1, 2, 2)
    best = {True: grid.max(1).sum(1).min(), False: grid.sum(2).max(1).min()}
    for slots, least in best.items():
        bound = least_time(work, lengths.astype(float), num_ranks=2, cap=cap, slots_wait=slots)
        assert work.sum() / 2 <= bound <= least


def test_sharding_of_a_micro_batch_over_its_context_parallel_group() -> None:
    balance = balance_step(TAILS, num_ranks=4, max_tokens=34000, cp=2, cost=8192.0)
    samples = balance.samples(0, 1, 0)
    plan = balance.shard(0, 1, 0, strategy="per_document")
    assert plan.lengths.tolist() == TAILS[samples].tolist()
    assert plan.cp == 2
    with pytest.raises(UserError, match="give balance_step a WorkloadModel"):
        balance_step(TAILS, num_ranks=4, max_tokens=34000, cost=TAILS).shard(0, 0, 0)


def test_dynamic_cp_shares_what_no_rank_holds() -> None:
    """A sample of 40 tokens on ranks of 10 needs four of them; the rest stays on single ranks."""
    lengths = [40, *[10] * 12]
    balance = balance_step(lengths, num_ranks=4, max_tokens=10, dynamic_cp=4, cost=lengths)
    degrees = {balance.cp_degree(0, 0, m) for m in range(int(balance.num_micro_batches[0]))}
    assert degrees == {4, 1}
    assert balance.imbalance == 1.0
    assert balance.num_micro_batches.tolist() == [4]


def test_it_prints_a_row_for_each_mini_batch() -> None:
    text = str(balance_step(TAILS, num_ranks=8, max_tokens=17000, cost="verl", mini_batches=2))
    head, *rows, last = text.splitlines()
    assert head.split()[:3] == ["mini-batch", "samples", "micro-batches"]
    assert [row.split()[:2] for row in rows] == [["0", "384"], ["1", "384"]]
    assert last.startswith("imbalance 1.00")


def test_dynamic_cp_makes_at_least_so_many_micro_batches() -> None:
    options: dict[str, Any] = {"num_ranks": 2, "max_tokens": 100, "dynamic_cp": 2, "cost": "verl"}
    lengths = [10] * 20
    assert balance_step(lengths, **options).num_micro_batches.tolist() == [1]
    assert balance_step(lengths, at_least=3, **options).num_micro_batches.tolist() == [3]
    rounded = balance_step(lengths, at_least=3, multiple=2, **options)
    assert rounded.num_micro_batches.tolist() == [4]


@pytest.mark.parametrize("wait", ["micro_batch", "step"])
def test_samples_that_cost_nothing_leave_no_rank_waiting(wait: str) -> None:
    step = balance_step([5, 4, 3, 2], num_ranks=2, max_tokens=9, cost=[0] * 4, wait=wait)
    assert step.imbalance == step.lower_bound == 1.0
    assert "imbalance 1.0000, bound 1.0000" in str(step)


@pytest.mark.parametrize(
    "name",
    [
        *("num_ranks", "max_tokens", "count_slack", "num_micro_batches", "at_least", "multiple"),
        *("cp", "dynamic_cp", "mini_batches"),
    ],
)
def test_options_are_whole_numbers_of_any_kind(name: str) -> None:
    lengths = [50, 40, 30, 20, 10, 90, 80, 70] * 2
    options: dict[str, Any] = {"num_ranks": 2, "max_tokens": 200}
    options["equal_counts"] = name != "dynamic_cp"
    whole = {**options, name: {"max_tokens": 200}.get(name, 2)}
    scalar = {**whole, name: np.uint64(whole[name])}
    assert balance_step(lengths, **scalar).digest == balance_step(lengths, **whole).digest
    with pytest.raises(UserError, match=rf"{name} = 2\.0 must be a whole number; give an int"):
        balance_step(lengths, **{**options, name: 2.0})


def test_a_numpy_scalar_is_a_ratio() -> None:
    lengths = [50, 40, 30, 20, 10, 90]
    expected = balance_step(lengths, num_ranks=2, max_tokens=200, cost=8192).digest
    for cost in (np.int64(8192), np.float32(8192)):
        assert balance_step(lengths, num_ranks=2, max_tokens=200, cost=cost).digest == expected


def test_lengths_without_an_order_of_their_own_are_refused() -> None:
    with pytest.raises(UserError, match=r"lengths is a generator.*list\(lengths\)"):
        balance_step((n for n in (3, 4)), num_ranks=1, max_tokens=9)
    with pytest.raises(UserError, match="lengths is a list of lists of unequal lengths"):
        balance_step([[3, 4], [5]], num_ranks=1, max_tokens=9)
