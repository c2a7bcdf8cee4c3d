"""Tests the Megatron-Core adapter: batches cut as Megatron cuts, steps, shapes without exchange."""

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # Transformer Engine and Apex are missing
    pytest.importorskip("megatron.core", reason="needs the extra [megatron]")
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
    from megatron.core.transformer import TransformerConfig
    from megatron.core.utils import get_batch_on_this_cp_rank

    from wlb.adapters.megatron import (
        BalancedScheduler,
        PackedSteps,
        PlannedP2P,
        cp_rows,
        on_cp_rank,
        packed_seq_params,
        padded_lengths,
        thd_batch,
    )

import itertools

from tests.train.case import write_store
from wlb import FlopsWorkload, Planner
from wlb.adapters.dealt import RankBalance, work_of
from wlb.data.reader import StoreReader
from wlb.launch.local import run_local
from wlb.plan import UserError, offsets_of

LENGTHS = np.clip(np.random.default_rng(4).lognormal(3.6, 0.9, 200).astype(int) + 1, 1, 300)
WINDOW = 256


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_store(tmp_path_factory.mktemp("megatron") / "store", LENGTHS.tolist())


def planner(dp: int = 2, n: int = 4) -> Planner:
    return Planner.for_lengths(LENGTHS, context_window=WINDOW, num_micro_batches=n, dp=dp)


def steps_of(store: str, *, dp: int = 2, rank: int = 0, cp: int = 2, tp: int = 1) -> PackedSteps:
    return PackedSteps(planner(dp), StoreReader(store, 320), dp_rank=rank, cp=cp, tp=tp)


def all_steps(steps: PackedSteps) -> list[list[dict[str, torch.Tensor]]]:
    out = []
    while True:
        try:
            out.append(list(steps.next()[0]))
        except StopIteration:
            return out


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    cp=st.integers(1, 4),
    tp=st.integers(1, 3),
)
def test_ranks_get_the_chunks_that_megatron_gives_them(
    lengths: list[int], cp: int, tp: int
) -> None:
    """The reference is Megatron's own function for one sequence, document by document."""
    padded = padded_lengths(np.array(lengths), cp=cp, tp=tp)
    multiple = 2 * cp if cp > 1 else 1
    assert (padded >= lengths).all()
    assert not (padded % multiple).any()
    assert (padded[:-1] - lengths[:-1] < multiple).all()
    assert padded.sum() % (cp * tp) == 0
    starts = offsets_of(padded)
    for rank in range(cp):
        expected: list[int] = []
        for a, b in itertools.pairwise(starts):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallel_state, "get_context_parallel_world_size", lambda: cp)
                patch.setattr(parallel_state, "get_context_parallel_rank", lambda r=rank: r)
                cut = get_batch_on_this_cp_rank({"tokens": torch.arange(a, b)[None]})
            expected += cut["tokens"][0].tolist()
        assert cp_rows(starts, cp=cp, rank=rank).tolist() == expected


def test_a_batch_holds_the_documents_and_padding_trains_nothing(store: str) -> None:
    reader, plan = StoreReader(store, 320), next(planner().steps())
    micro_batch = plan.packing.micro_batch(0)
    batch = thd_batch(micro_batch, reader, cp=2, tp=3, pad_token_id=319)
    starts, real = batch["cu_seqlens_padded"].tolist(), batch["cu_seqlens"].tolist()
    assert starts[-1] % (2 * 2 * 3) == 0
    pieces = micro_batch.pieces
    assert len(starts) == len(real) == len(pieces) + 1
    for i, at in enumerate(starts[:-1]):
        n, whole = int(pieces.length[i]), reader.length(int(pieces.document[i]))
        stop = int(pieces.stop[i])
        document = reader.read(int(pieces.document[i]), 0, whole)
        assert real[i + 1] - real[i] == n
        np.testing.assert_array_equal(batch["tokens"][0, at : at + n], document[stop - n : stop])
        following = document[stop - n + 1 : stop + 1]
        np.testing.assert_array_equal(batch["labels"][0, at : at + following.size], following)
        mask = batch["loss_mask"][0, at : starts[i + 1]]
        assert mask.tolist() == [1.0] * following.size + [0.0] * (mask.numel() - following.size)
        assert (batch["tokens"][0, at + n : starts[i + 1]] == 319).all()
        span = batch["position_ids"][0, at : starts[i + 1]]
        assert span.tolist() == list(range(span.numel()))
    assert batch["loss_mask"].sum() == pieces.num_targets.sum()
    found = packed_seq_params(batch)
    assert found.qkv_format == "thd"
    assert found.cu_seqlens_q_padded is batch["cu_seqlens_padded"]
    assert found.max_seqlen_q == max(np.diff(starts))
    halves = [on_cp_rank(batch, cp=2, rank=r) for r in range(2)]
    assert all(h["tokens"].shape == (1, starts[-1] // 2) for h in halves)
    rows = torch.cat([h["tokens"] for h in halves], 1)
    assert sorted(rows[0].tolist()) == sorted(batch["tokens"][0].tolist())
    assert sum(h["loss_mask"].sum() for h in halves) == batch["loss_mask"].sum()


def test_types_are_those_that_megatron_asserts(store: str) -> None:
    batch = next(steps_of(store).next()[0])
    for name in ("tokens", "labels", "position_ids"):
        assert batch[name].dtype == torch.int64
    assert batch["loss_mask"].dtype == torch.float32
    for name in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen"):
        assert batch[name].dtype == torch.int32
        assert batch[name].dim() == 1


def test_ranks_share_every_document_out_and_know_all_shapes(store: str) -> None:
    num_targets, tokens = 0, Counter[int]()
    for rank in range(2):
        steps = steps_of(store, rank=rank, cp=2, tp=2)
        while True:
            try:
                batches, num, total, squares = steps.next()
            except StopIteration:
                break
            made = list(batches)
            assert len(made) == num == 2
            shapes = steps.shapes(hidden_size=8, sequence_parallel=True)
            assert shapes == [(b["tokens"].shape[1] // 4, 1, 8) for b in made]
            assert total**2 >= squares >= total
            for b in made:
                num_targets += int(b["loss_mask"].sum())
                for a, n in zip(b["cu_seqlens_padded"], b["cu_seqlens"].diff(), strict=False):
                    tokens.update(b["tokens"][0, a : a + n].tolist())
    assert num_targets == (LENGTHS - 1).sum()
    reader = StoreReader(store, 320)
    every = Counter(t for i, n in enumerate(LENGTHS) for t in reader.read(i, 0, int(n)).tolist())
    assert tokens == every


def test_it_resumes_exactly(store: str) -> None:
    first, second = steps_of(store), steps_of(store)
    first.next(), first.next()
    second.load_state_dict(first.state_dict())
    rest = [[b["tokens"].tolist() for b in step] for step in all_steps(second)]
    assert rest == [[b["tokens"].tolist() for b in step] for step in all_steps(first)]
    assert rest


def test_a_run_that_had_ended_goes_on_with_more_epochs(store: str) -> None:
    def made(epochs: int) -> PackedSteps:
        planner = Planner.for_lengths(
            LENGTHS, context_window=WINDOW, num_micro_batches=4, s_max=260, epochs=epochs
        )
        return PackedSteps(planner, StoreReader(store, 320), dp_rank=0)

    once, twice = made(1), made(2)
    first = Counter(t for step in all_steps(once) for b in step for t in trained(b))
    assert once.state_dict()["exhausted"]  # its last steps were a flush
    twice.load_state_dict(once.state_dict())
    second = Counter(t for step in all_steps(twice) for b in step for t in trained(b))
    assert first == second


def trained(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["labels"][batch["loss_mask"] > 0].tolist()


def exchange(world: Any, shapes: list[tuple[int, int, int]]) -> list[Any]:
    """Sends micro-batches of `shapes` through two stages by Megatron's communicator, forward and
    back.

    Megatron puts buffers on the current CUDA device and waits for it: here that is the CPU.
    """
    group = torch.distributed.group.WORLD
    config = ModelParallelConfig(
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        batch_p2p_comm=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        comm = PlannedP2P(group, config)
        comm.begin(shapes)
        out: list[Any] = []
        for i, shape in enumerate(shapes):
            x = torch.full(shape, float(i))
            if world.rank == 0:
                comm.send_forward(x, is_last_stage=False)
                out.append(comm.recv_backward([(9, 9, 9)], is_last_stage=False))
            else:
                out.append(comm.recv_forward([(9, 9, 9)], is_first_stage=False))
                comm.send_backward(2 * x, is_first_stage=False)
        flat = [x[0] if isinstance(x, list) else x for x in out]
        return [(tuple(x.shape), float(x.mean())) for x in flat]


@pytest.mark.full
@pytest.mark.dist
def test_stages_exchange_micro_batches_of_any_length_without_their_shapes() -> None:
    shapes = [(5, 1, 4), (17, 1, 4), (1, 1, 4)]
    first, last = run_local(exchange, 2, shapes, start_group=True, timeout_s=600)
    assert first == [(shape, 2.0 * i) for i, shape in enumerate(shapes)]
    assert last == [(shape, float(i)) for i, shape in enumerate(shapes)]


def test_refusals(store: str) -> None:
    with pytest.raises(ValueError, match="dp_rank = 2 must be between 0 and 1"):
        steps_of(store, rank=2)
    with pytest.raises(RuntimeError, match="call next before shapes"):
        steps_of(store).shapes(hidden_size=8)
    comm = PlannedP2P.__new__(PlannedP2P)
    comm.config = ModelParallelConfig()
    with pytest.raises(ValueError, match="variable_seq_lengths = False"):
        comm.begin([])
    comm.config = ModelParallelConfig(variable_seq_lengths=True, pipeline_dtype=torch.float32)
    comm.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(ValueError, match="virtual_pipeline_model_parallel_size = 2"):
        comm.begin([])
    comm.virtual_pipeline_model_parallel_size = None
    comm.begin([(3, 1, 4)])
    assert comm._communicate_shapes(None, None, True, True) == ([3, 1, 4], [3, 1, 4])
    assert comm._communicate_shapes(None, None, False, False) == ([0, 0, 0], [0, 0, 0])
    with pytest.raises(RuntimeError, match="more micro-batches were received"):
        comm._communicate_shapes(None, None, True, False)
    comm.begin([(3, 1, 4), (5, 1, 4)])
    comm._communicate_shapes(None, None, True, False)
    with pytest.raises(RuntimeError, match="1 of the previous step's 2 micro-batches"):
        comm.begin([(3, 1, 4)])


def megatron_config(*, per_token: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        variable_seq_lengths=True,
        pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=per_token,
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_megatrons_mean_of_micro_batches_is_refused(store: str) -> None:
    """By Megatron's own function: what a token weighs in the loss, with and without the option."""

    def weights(config: TransformerConfig) -> list[float]:
        """Returns a trained token's weight in each micro-batch, over the step's mean weight."""
        out: list[float] = []
        for batches in all_steps(steps_of(store)):
            tokens = [batch["loss_mask"].sum().int() for batch in batches]
            losses = [
                forward_step_calc_loss(
                    None,
                    torch.ones(1),
                    lambda x, n=n: (x * n, n, {}),
                    config,
                    None,
                    False,
                    len(batches),
                    [],
                    cp_group_size=1,
                    is_last_stage=True,
                )[0]
                for n in tokens
            ]
            mean = float(sum(losses)) / float(sum(tokens))
            out += [float(x) / float(n) / mean for x, n in zip(losses, tokens, strict=True) if n]
        return out

    right, wrong = megatron_config(per_token=True), megatron_config(per_token=False)
    assert weights(right) == pytest.approx([1.0] * len(weights(right)))
    assert max(weights(wrong)) > 1.1
    reader = StoreReader(store, 320)
    PackedSteps(planner(), reader, dp_rank=0, config=right)
    with pytest.raises(UserError, match=r"calculate_per_token_loss = False .* to True"):
        PackedSteps(planner(), reader, dp_rank=0, config=wrong)
    comm = PlannedP2P.__new__(PlannedP2P)
    comm.config, comm.virtual_pipeline_model_parallel_size = right, None
    comm.begin([])
    comm.config = wrong
    with pytest.raises(UserError, match=r"calculate_per_token_loss = False .* to True"):
        comm.begin([])


class _Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


COST = FlopsWorkload(quadratic_ns=1.0, linear_ns_per_token=100.0)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    dp=st.integers(1, 4),
    cp=st.integers(1, 2),
)
def test_the_scheduler_deals_every_sample_once(lengths: list[int], dp: int, cp: int) -> None:
    samples = [(10 * i, n) for i, n in enumerate(lengths)]
    scheduler = BalancedScheduler(dp=dp, cp=cp, max_tokens=100, cost=COST)
    if len(lengths) < dp * -(-sum(lengths) // 50):
        return  # they may not fill all micro-batches, which is refused
    groups = scheduler.get_groups_and_subsamples(samples)
    tokens = dict(samples)
    for group in groups:
        assert len(group) == dp * cp
        assert all(group)
        for rank in range(0, dp * cp, cp):
            assert all(ids == group[rank] for ids in group[rank : rank + cp])
            assert sum(tokens[i] for i in group[rank]) <= 100
    dealt = Counter(i for group in groups for ids in group[::cp] for i in ids)
    assert dealt == Counter(list(tokens))
    assert scheduler.get_groups_and_subsamples(samples, ModelParallelConfig()) == (groups, groups)


def test_it_stands_in_megatrons_schedulers_place_and_balances_better() -> None:
    samples = [(i, int(n)) for i, n in enumerate(LENGTHS[:64])]
    theirs = BalancedCPScheduler(300, _Group(4)).get_groups_and_subsamples(
        samples, ModelParallelConfig()
    )[1]
    ours = BalancedScheduler(dp=4, max_tokens=300, cost=COST).get_groups_and_subsamples(
        samples, ModelParallelConfig()
    )[1]
    tokens = dict(samples)

    def balance(groups: Any) -> RankBalance:
        """Returns the balance of the whole step, because ranks wait for each other at its end."""
        ranks = [[[tokens[i] for i in g[r]] for g in groups if g[r]] for r in range(4)]
        return RankBalance.of(work_of([ranks], COST))

    assert Counter(i for g in theirs for ids in g for i in ids) == Counter(list(tokens))
    assert balance(ours).imbalance < 1.02
    assert balance(ours).imbalance <= balance(theirs).imbalance


def test_samples_that_cannot_be_scheduled_are_refused() -> None:
    with pytest.raises(ValueError, match="sample 7 has 101 tokens, more than max_tokens"):
        BalancedScheduler(dp=1, max_tokens=100).get_groups_and_subsamples([(7, 101)])
    with pytest.raises(ValueError, match="1 samples cannot fill 2 micro-batches"):
        BalancedScheduler(dp=2, max_tokens=100).get_groups_and_subsamples([(0, 10)])


def test_an_empty_micro_batch_is_padding(store: str) -> None:
    tiny = Planner.for_lengths([5], context_window=8, num_micro_batches=2)
    plan = next(tiny.steps())
    empty = next(i for i in range(2) if not len(plan.packing.micro_batch(i).pieces))
    batch = thd_batch(plan.packing.micro_batch(empty), StoreReader(store, 320), cp=2)
    assert batch["tokens"].shape == (1, 4)
    assert batch["loss_mask"].sum() == 0
    assert batch["cu_seqlens_padded"].tolist() == [0, 4]
