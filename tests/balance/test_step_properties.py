"""Tests what holds under all options of `balance_step`, for drawn lengths and options.

Every sample is in exactly one place, caps, counts, groups and atoms hold, and all ranks have as
many micro-batches. A request may be impossible, and then one UserError says so.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from wlb.balance import StepBalance, balance_step
from wlb.plan import UserError

LENGTHS = st.lists(
    st.one_of(st.integers(1, 60), st.integers(50, 100), st.just(100)), min_size=1, max_size=90
)


def made(lengths: list[int], **options: Any) -> StepBalance:
    """Returns the assignment; a request that cannot be met is no example."""
    try:
        return balance_step(lengths, **options)
    except UserError:
        reject()


def placed(balance: StepBalance) -> list[tuple[int, int, int, int]]:
    """Returns (sample, mini-batch, rank, micro-batch) of everything that is trained."""
    return [
        (int(sample), k, rank, m)
        for k in range(balance.num_mini_batches)
        for rank in range(balance.num_ranks)
        for m, samples in enumerate(balance.of_rank(rank, k))
        for sample in samples
    ]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    lengths = draw(LENGTHS)
    num = len(lengths)
    size = draw(st.sampled_from([1, 2, 4]))
    labels = [i // size for i in range(num)]
    options: dict[str, Any] = {
        "num_ranks": draw(st.integers(1, 5)),
        "max_tokens": draw(st.integers(100, 400)),
        "wait": draw(st.sampled_from(["micro_batch", "step"])),
        "multiple": draw(st.sampled_from([1, 1, 2, 3])),
        "at_least": draw(st.sampled_from([1, 1, 2])),
        "cost": draw(st.sampled_from([50.0, "verl", "slime", "llama2_7b"])),
        "passes": draw(st.sampled_from(["train", "forward"])),
    }
    kind = draw(st.sampled_from(["none", "groups", "rank", "atoms", "both", "ranks"]))
    if kind in ("groups", "rank", "both"):
        options["groups"] = labels
        options["groups_on"] = "rank" if kind == "rank" else "mini_batch"
    if kind in ("atoms", "both"):
        options["atoms"] = [i // 2 for i in range(num)] if size >= 2 else list(range(num))
    if kind == "ranks":
        options["ranks"] = [label % options["num_ranks"] for label in labels]
    elif draw(st.booleans()):
        options["equal_counts"] = True
        options["count_slack"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        if draw(st.booleans()):
            options["mini_batches"] = draw(st.integers(1, 3))
        else:
            options["mini_batches"] = [i * 2 // num for i in (size * label for label in labels)]
    return lengths, options


@given(requests())
def test_every_sample_once_and_every_limit_kept(request: tuple[list[int], dict[str, Any]]) -> None:
    lengths, options = request
    balance = made(lengths, **options)
    where = placed(balance)
    assert sorted(sample for sample, *_ in where) == list(range(len(lengths)))
    ranks = options["num_ranks"]
    cap, multiple = options["max_tokens"], options["multiple"]
    assert balance.num_ranks == ranks
    for k, num in enumerate(balance.num_micro_batches.tolist()):
        assert num % multiple == 0
        assert num >= options["at_least"]
        assert balance.tokens(k).shape == (ranks, num)
        for rank in range(ranks):
            for m in range(num):
                samples = balance.samples(k, rank, m)
                assert samples.size, "no micro-batch is empty"
                tokens = sum(lengths[i] for i in samples)
                assert tokens <= cap
                assert tokens == balance.tokens(k)[rank, m]
        counts = [sum(1 for _, kk, r, _ in where if (kk, r) == (k, rank)) for rank in range(ranks)]
        if options.get("equal_counts"):
            slack, total = options["count_slack"], sum(counts)
            assert max(counts) <= -(-total // ranks) + slack
            assert min(counts) >= total // ranks - slack
    spots = {sample: spot for sample, *spot in where}
    for i, rank in enumerate(options.get("ranks", ())):
        assert spots[i][1] == rank
    for labels, depth in (
        (options.get("atoms"), 3),
        (options.get("groups"), 2 if options.get("groups_on") == "rank" else 1),
    ):
        for i, label in enumerate(labels or ()):
            first = labels.index(label)
            assert spots[i][:depth] == spots[first][:depth]
    if isinstance(options.get("mini_batches"), list):
        assert [spots[i][0] for i in range(len(lengths))] == [
            sorted(set(options["mini_batches"])).index(k) for k in options["mini_batches"]
        ]
    assert balance.imbalance >= balance.lower_bound * (1 - 1e-9)
    assert balance.lower_bound >= 1 - 1e-9
    again = balance_step(np.array(lengths), **options)
    assert again.digest == balance.digest


@given(
    LENGTHS,
    st.sampled_from([2, 4]),
    st.integers(30, 400),
    st.sampled_from([2, 4]),
    st.fixed_dictionaries(
        {"at_least": st.sampled_from([1, 1, 2, 3]), "multiple": st.sampled_from([1, 1, 2])}
    ),
    st.sampled_from([False, False, False, True]),
)
def test_dynamic_cp_keeps_the_cap_of_a_rank(
    lengths: list[int], most: int, cap: int, wide: int, slots: dict[str, int], is_placed: bool
) -> None:
    ranks = most * wide
    options: dict[str, Any] = {"num_ranks": ranks, "max_tokens": cap, "dynamic_cp": most, **slots}
    if is_placed:
        with pytest.raises(UserError, match="`ranks` gives each sample one rank"):
            balance_step(lengths, ranks=[i % ranks for i in range(len(lengths))], **options)
        return
    balance = made(lengths, cost="verl", **options)
    (num,) = balance.num_micro_batches.tolist()
    assert num >= slots["at_least"]
    assert num % slots["multiple"] == 0
    seen = np.concatenate([balance.order[a:b] for a, b in pairwise(balance.offsets)])
    assert sorted(seen.tolist()) == list(range(len(lengths)))
    grid = balance.blocks[0]
    for m in range(grid.shape[1]):
        for rank in range(ranks):
            degree = balance.cp_degree(0, rank, m)
            assert degree <= most
            assert degree & (degree - 1) == 0
            mine = np.flatnonzero(grid[:, m] == grid[rank, m])
            assert mine[0] % degree == 0, "a CP group starts at a multiple of its size"
            assert np.array_equal(mine, np.arange(mine[0], mine[0] + degree))
            assert balance.tokens(0)[rank, m] <= cap * degree
    assert balance.imbalance >= balance.lower_bound * (1 - 1e-9)


@given(st.lists(st.integers(1, 300), min_size=12, max_size=60), st.integers(40, 300))
def test_a_sample_above_the_cap_is_alone_or_refused_by_name(lengths: list[int], cap: int) -> None:
    lengths = [*lengths, *[1] * len(lengths)]  # so that no micro-batch has to be empty
    options: dict[str, Any] = {"num_ranks": 2, "max_tokens": cap}
    longest = int(np.argmax(np.array(lengths) > cap))
    if max(lengths) > cap:
        with pytest.raises(UserError) as refused:
            balance_step(lengths, **options)
        assert f"sample {longest} has {lengths[longest]} tokens" in str(refused.value)
        assert f"max_tokens = {cap}" in str(refused.value)
    balance = balance_step(lengths, **options, too_long="alone")
    for sample, k, rank, m in placed(balance):
        together = balance.samples(k, rank, m)
        if lengths[sample] > cap:
            assert together.tolist() == [sample]
        else:
            assert sum(lengths[i] for i in together) <= cap
