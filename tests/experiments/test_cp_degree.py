"""Tests schedules of fixed and dynamic CP degrees: every sample once, and times by hand."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.cp_degree.__main__ import LAYOUTS, gains, rows_of, table
from experiments.cp_degree.groups import Call, SubGroup, check, finished_ns, sub_groups
from experiments.cp_degree.megatron import DevSchedulers, Failed, hybrid
from experiments.cp_degree.methods import Outcome, methods, outcome
from experiments.cp_degree.planner import planned
from experiments.cp_degree.prices import Exchange, Prices, ring_waits_ns
from experiments.cp_degree.rows import RankPrices, filled, grouped
from experiments.cp_degree.steps import Layout, Step, fixed, mixed
from experiments.cp_traffic.__main__ import slowest_ns
from experiments.beyond.step_balance.sources import Missing, Sources
from wlb.plan import UserError
from wlb.sharding import per_document, shard

LAYOUT = Layout(tp=8, num_ranks=4, cp=2, per_replica=2)
DEV = """
import megatron.core.parallel_state
from megatron.core.datasets.data_schedule_utils import one_group

class DpBalancedScheduler:
    def __init__(self, rows, cp, dp, vp):
        self.num_ranks = cp * dp

    def get_groups_and_subsamples(self, samples):
        return one_group([i for i, _ in samples], self.num_ranks)

class DefaultDynamicCPScheduler(DpBalancedScheduler):
    def get_groups_and_subsamples(self, samples):
        raise AssertionError("no place")
"""


@pytest.fixture(scope="module")
def prices() -> Prices:
    return Prices(tp=LAYOUT.tp, rows=LAYOUT.rows)


@pytest.fixture
def step() -> Step:
    lengths = np.array([120_000, 700, 30_000, 60_000, 2_000, 9_000, 100_000, 5_000])
    return Step(lengths, np.array([0, 2, 4, 6, 8]))


def test_ranks_with_the_same_samples_are_a_sub_group() -> None:
    ranks = [[4], [4], [1, 2], [0]]
    assert sub_groups(ranks, packed=True) == [
        SubGroup((0, 1), ((4,),)),
        SubGroup((2,), ((1, 2),)),
        SubGroup((3,), ((0,),)),
    ]
    assert sub_groups(ranks, packed=False)[1] == SubGroup((2,), ((1,), (2,)))
    with pytest.raises(ValueError, match="do not share all their samples"):
        sub_groups([[4], [4, 1]], packed=True)


def test_sub_groups_wait_for_their_ranks_and_with_a_barrier_for_all() -> None:
    """Rank 0 takes 8, rank 1 4; then both share a call of 6 / 2, and rank 2 runs one of 5."""
    schedule = [
        [SubGroup((0,), ((0,),)), SubGroup((1,), ((1,),))],
        [SubGroup((0, 1), ((2,),)), SubGroup((2,), ((3,),))],
    ]

    def price(call: Call, degree: int) -> float:
        return sum((8, 4, 6, 5)[i] for i in call) / degree

    assert finished_ns(schedule, price, num_ranks=3, barrier=False).tolist() == [11, 11, 5]
    assert finished_ns(schedule, price, num_ranks=3, barrier=True).tolist() == [13, 13, 13]


def test_what_a_schedule_may_not_do() -> None:
    lengths = np.array([10, 10])
    whole = [[SubGroup((0,), ((0,),)), SubGroup((1,), ((1,),))]]
    check(whole, lengths, num_ranks=2, rows=10)
    check([[SubGroup((0, 1), ((0, 1),))]], lengths, num_ranks=2, rows=1)
    with pytest.raises(ValueError, match="sample 1 of 2 is in 0 calls"):
        check([whole[0][:1]], lengths, num_ranks=2, rows=10)
    with pytest.raises(ValueError, match="sample 0 of 2 is in 2 calls"):
        check([*whole, whole[0][:1]], lengths, num_ranks=2, rows=10)
    with pytest.raises(ValueError, match="10 tokens on 1 ranks of 9"):
        check(whole, lengths, num_ranks=2, rows=9)
    with pytest.raises(ValueError, match=r"ranks \[0, 0\] of 2"):
        check([[whole[0][0], SubGroup((0,), ((1,),))]], lengths, num_ranks=2, rows=10)


@given(
    st.lists(st.integers(1, 800), min_size=1, max_size=40),
    st.sampled_from([(4, 4), (8, 4), (8, 8), (6, 2), (5, 1)]),
)
def test_planned_has_every_sample_once_and_sub_groups_keep_to_nodes(
    lengths: list[int], shape: tuple[int, int]
) -> None:
    num_ranks, near = shape
    tokens = np.array(lengths)
    work = tokens.astype(float) ** 2

    def price(call: Call, degree: int) -> float:
        return float(work[list(call)].sum()) / degree

    made = planned(tokens, work, price, num_ranks=num_ranks, near=near, rows=200)
    check(made, tokens, num_ranks=num_ranks, rows=200)
    for group in made:
        for sub in group:
            first, last = sub.ranks[0], sub.ranks[-1]
            assert sub.ranks == tuple(range(first, last + 1))
            assert first // near == last // near or first % near == 0
    ends = finished_ns(made, price, num_ranks=num_ranks, barrier=False)
    # Work is shared without loss, so no rank is done later than one that ran all of it.
    assert work.sum() / num_ranks <= ends.max() * (1 + 1e-9) <= work.sum() * (1 + 2e-9)


def test_fixed_degrees_take_whole_micro_batches(step: Step) -> None:
    assert fixed(step, LAYOUT, degree=2) == [
        [SubGroup((0, 1), ((0, 1),)), SubGroup((2, 3), ((2, 3),))],
        [SubGroup((0, 1), ((4, 5),)), SubGroup((2, 3), ((6, 7),))],
    ]
    assert fixed(step, LAYOUT, degree=4) == [
        [SubGroup((0, 1, 2, 3), ((0, 1, 2, 3),))],
        [SubGroup((0, 1, 2, 3), ((4, 5, 6, 7),))],
    ]


def test_equal_counts_have_every_sample_once(step: Step, prices: Prices) -> None:
    def price(call: Call, degree: int) -> float:
        return float(step.lengths[list(call)].sum()) / degree

    made = mixed(step, LAYOUT, prices.work_ns(step.lengths), price)
    check(made, step.lengths, num_ranks=4, rows=LAYOUT.rows)
    assert all(sum(len(sub.ranks) for sub in group) == 4 for group in made)


def test_steps_without_equal_counts_keep_the_fixed_degree(
    monkeypatch: pytest.MonkeyPatch, step: Step, prices: Prices
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise UserError("12 samples cannot fill 13 micro-batches of 8 ranks")

    (method,) = [m for m in methods(None, has_hybrid=False) if m.name.endswith("equal counts")]
    monkeypatch.setattr("experiments.cp_degree.steps.balance_step", refuses)
    found = outcome(method, [step], LAYOUT, prices)
    assert isinstance(found, Outcome)
    assert (found.degree, found.calls) == (LAYOUT.cp, LAYOUT.per_replica)


def test_prices_of_one_rank_have_no_waits(prices: Prices) -> None:
    lengths = np.array([3000, 128])
    found = [
        prices.of(lengths, 1, strategy="per_document", exchange=exchange) for exchange in Exchange
    ]
    assert {(one.total, one.waits, one.rows) for one in found} == {(found[0].total, 0.0, 3128)}
    cost = prices.cost(1)
    kernels = sum(int(x.sum()) for x in cost.segment_times_ns(lengths, lengths))
    launches = sum(int(x[0]) for x in cost.attention_call_ns(lengths, lengths, np.array([0, 2])))
    assert found[0].total == pytest.approx(prices.linear_ns(3128) + kernels + launches)


def test_a_ring_is_hidden_by_attention_of_all_chunks_but_one(prices: Prices) -> None:
    cost = prices.cost(4)
    assert ring_waits_ns(per_document([4096], cp=1), prices.cost(1)) == (0.0, 0.0)
    short, long = (
        ring_waits_ns(per_document(lengths, cp=4), cost) for lengths in ([128] * 800, [98_304])
    )
    there, again, back = cost.transfers_ns(None, 102_400, cp=4)
    assert 0.5 * there < short[0] < there
    assert 0.5 * (again + back) < short[1] < again + back
    assert sum(long) < 0.7 * sum(short)


def test_stages_hide_more_than_own_keys(prices: Prices) -> None:
    lengths = np.array([90_000, 20_000, 10_000, 3000])
    waits = [
        prices.of(lengths, 4, strategy="balanced", exchange=exchange).waits
        for exchange in (Exchange.STAGED, Exchange.OVERLAP, Exchange.NEEDED)
    ]
    assert 0 <= waits[0] < waits[1] < waits[2]


@pytest.mark.parametrize("own", [True, False])
def test_megatron_hybrid_has_every_sample_once(step: Step, prices: Prices, own: bool) -> None:
    pytest.importorskip("megatron.core")

    def estimate(tokens: int, degree: int) -> float:
        return tokens / degree

    made = hybrid(step.lengths, num_ranks=4, rows=LAYOUT.rows, estimate=None if own else estimate)
    check(made, step.lengths, num_ranks=4, rows=LAYOUT.rows)
    calls = [call for group in made for sub in group for call in sub.calls]
    assert all(len(call) == 1 for call in calls), "it runs samples one by one"


def test_branch_dev_is_read_from_a_source_tree(tmp_path: Path, step: Step) -> None:
    folder = tmp_path / "Megatron-LM" / "megatron" / "core" / "datasets"
    folder.mkdir(parents=True)
    (folder / "data_schedule.py").write_text(DEV)
    with pytest.raises(Missing, match=r"git clone .* -b dev .*Megatron-LM"):
        DevSchedulers(Sources(tmp_path))
    utils = "def one_group(samples, ranks):\n    return [[samples for _ in range(ranks)]]\n"
    (folder / "data_schedule_utils.py").write_text(utils)
    dev = DevSchedulers(Sources(tmp_path))
    made = dev.in_order(step.lengths, num_ranks=4, cp=2, rows=LAYOUT.rows)
    assert made == [[SubGroup((0, 1, 2, 3), (tuple(range(8)),))]]
    with pytest.raises(Failed, match="AssertionError: no place"):
        dev.dynamic(step.lengths, num_ranks=4, cp=2, rows=LAYOUT.rows)
    (method,) = [m for m in methods(dev, has_hybrid=False) if m.name == "Megatron dynamic"]
    failed = outcome(method, [step], LAYOUT, Prices(tp=8, rows=LAYOUT.rows))
    assert isinstance(failed, Failed)


def test_tables_of_one_small_cell() -> None:
    ways = methods(None, has_hybrid=False)
    rows = list(rows_of(["wlb_paper"], [LAYOUT], ways, count=1, seed=0))
    lines = {tuple(row[4:6]): row for row in table(rows).rows}
    assert len(lines) == len(ways)
    assert lines["fixed degree, per document", "gather"][7] == 1
    for line in lines.values():
        assert 0.97 < float(line[6]) < 4
        assert all(-1e-9 <= float(share) < 1 for share in line[8:10])
    (found,) = gains(rows).rows
    assert found[:4] == ["fitted distribution (wlb_paper)", 8, 4, 2]
    assert found[4] == lines["fixed degree", "needed, overlap"][6]
    assert found[-2:] == [None, None], "Megatron's schedulers were not asked"
    assert found[8] == pytest.approx(found[4] / min(found[4:8]) - 1)
    assert found[9] == lines["fixed degree", "needed, staged"][6]
    assert found[10] == lines["dynamic", "needed, staged"][6]


def test_layouts_are_of_whole_replicas() -> None:
    for layout in LAYOUTS:
        assert layout.num_ranks % layout.cp == 0
        assert layout.rows * layout.cp >= 131072


def test_ranks_with_equal_rows_are_priced_as_by_the_cost_model() -> None:
    """One document on all ranks, so that all meet: linear work, kernels and waits in stages."""
    priced = RankPrices.of(Layout(tp=8, num_ranks=4, cp=4))
    for stages in (1, 2, 3):
        cost = priced.cost(stages)
        plan = shard([100_000], cp=4, strategy="balanced", cost=cost, exchange="needed")
        usual = sum(priced.linear) * 25_000 + slowest_ns(plan, cost)
        mine = float(priced.times_ns(plan, stages).max(axis=1).sum())
        assert mine == pytest.approx(usual, rel=0.02)


def test_unequal_rows_hold_every_token_within_the_limit() -> None:
    """Ranks are filled by time, and in two groups; some plan has rows that are far from equal."""
    priced, pieces = RankPrices.of(Layout(tp=8, num_ranks=4, cp=4)), np.array([30_000] + [900] * 60)
    for way in (filled, grouped):
        plans = list(way(pieces, priced, most=26_000))
        assert plans
        for plan in plans:
            assert int((plan.stop - plan.start).sum()) == 84_000
            assert np.array_equal(np.unique(plan.piece), np.arange(61))
            assert plan.tokens.max() <= 26_000
        assert max(int(plan.tokens.max() - plan.tokens.min()) for plan in plans) > 2_000
