"""Tests the stages of experts' rows: where every row goes, and what runs while rows travel."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.case import (
    Case,
    Reader,
    fresh_reference,
    packing_of,
    pipeline_plan,
    reference_loss,
    spec_of,
)
from wlb.launch.local import run_local
from wlb.parallel import expert_exchange
from wlb.parallel.build import recompute_layers
from wlb.parallel.execute import Executor
from wlb.parallel.expert_exchange import ExpertAllToAll, RowsBetween, StagedWay
from wlb.parallel.mesh import build_mesh
from wlb.parallel.tensor import local_tensor
from wlb.parallel.world import World
from wlb.spec import ExpertsSpec, Recompute


class Post:
    """Carries all-to-alls between threads, one a rank; a call's rows are there when all have called
    it.
    """

    def __init__(self, size: int) -> None:
        self.ranks = size
        self.barrier = threading.Barrier(size)
        self.parcels: list[list[Tensor]] = [[] for _ in range(size)]
        self.here = threading.local()

    def size(self) -> int:
        return self.ranks

    def rank(self, group: "Post") -> int:
        return group.here.rank

    def carry(
        self, x: Tensor, received: Sequence[int], sent: Sequence[int], group: "Post"
    ) -> Tensor:
        assert group is self
        self.parcels[self.here.rank] = list(x.split(list(sent)))
        self.barrier.wait()
        out = [parcels[self.here.rank] for parcels in self.parcels]
        assert [part.shape[0] for part in out] == list(received)
        self.barrier.wait()
        return torch.cat(out)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Returns work(rank) of all ranks."""

        def as_rank(rank: int) -> Any:
            self.here.rank = rank
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()  # the others would wait for this rank
                raise

        with (
            mock.patch.object(expert_exchange, "start_all_to_all", self.carry),
            mock.patch.object(expert_exchange, "wait", lambda x: x),
            mock.patch.object(expert_exchange.dist, "get_rank", self.rank),
            ThreadPoolExecutor(self.ranks) as pool,
        ):
            ranks = [pool.submit(as_rank, rank) for rank in range(self.ranks)]
            errors = [rank.exception() for rank in ranks]
            for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
                if error is not None:
                    raise error
            return [rank.result() for rank in ranks]


class Delivered(NamedTuple):
    """What one rank got: rows at its experts, where each expert's end, and its own rows back."""

    rows: list[list[int]]
    ends: list[int]
    returned: list[int]


@given(data=st.data())
def test_every_row_arrives_once_in_one_order(data: st.DataObject) -> None:
    """By expert, source rank and token, whatever the stages; also from ranks with few rows or
    none, and to experts that nobody chose.
    """
    size, stages = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    held, per_token = stages * data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    num = size * held
    per_token = min(per_token, num)
    popular = data.draw(st.integers(1, num))
    tokens = [data.draw(st.integers(0, 6)) for _ in range(size)]
    chosen = st.permutations(range(num)).map(lambda p: sorted(p, key=lambda e: e >= popular))
    choices = [[data.draw(chosen)[:per_token] for _ in range(tokens[r])] for r in range(size)]
    post = Post(size)

    def deliver(rank: int) -> Delivered:
        exchange: Any = ExpertAllToAll(post, stages=stages)  # pyright: ignore[reportArgumentType]
        chosen_TK = torch.tensor(choices[rank], dtype=torch.long).view(-1, per_token)
        per_expert = torch.bincount(chosen_TK.flatten(), minlength=num)
        way = exchange.way(chosen_TK, num)
        token_N, slot_N = way.order_N // per_token, way.order_N % per_token
        expert_N = chosen_TK[token_N, slot_N]
        rank_N = torch.full_like(token_N, rank)
        sent = torch.stack([expert_N, rank_N, token_N, slot_N], 1)
        way.there.send(sent, torch.arange(sent.shape[0]), way.order_N.double())
        way.begin()
        for s, stage in enumerate(way.stages):
            rows, scores = way.there.arrived(s)
            # Stages hold equally many experts, and their rows end where the whole's do.
            assert rows.shape[0] == stage.rows.stop - stage.rows.start == stage.ends[-1]
            assert (stage.ends + stage.rows.start).tolist() == way.ends_E[stage.experts].tolist()
            way.there.answer(s, rows, scores)
        whole, scores_M = way.there.whole()
        assert torch.equal(scores_M, (whole[:, 2] * per_token + whole[:, 3]).double())
        returned = torch.full_like(way.order_N, -1)
        for s, rows in enumerate(way.sent):
            back, of_scores = way.there.answers(s)
            assert torch.equal(back[:, 2] * per_token + back[:, 3], way.order_N[rows])
            assert torch.equal(of_scores, way.order_N[rows].double())
            returned[way.order_N[rows]] = back[:, 1]
        assert torch.equal(way.counts_E, per_expert)
        return Delivered(whole.tolist(), way.ends_E.tolist(), returned.tolist())

    got = post.run(deliver)
    every = [
        [expert, rank, token, slot]
        for rank in range(size)
        for token, experts in enumerate(choices[rank])
        for slot, expert in enumerate(experts)
    ]
    for rank, delivered in enumerate(got):
        mine = sorted(row for row in every if row[0] // held == rank)
        assert delivered.rows == mine
        held_here = range(rank * held, (rank + 1) * held)
        assert delivered.ends == [sum(row[0] <= expert for row in mine) for expert in held_here]
        assert delivered.returned == [rank] * tokens[rank] * per_token


def test_bounds_of_stages() -> None:
    between = RowsBetween(received=[[2, 0], [1, 4]], sent=[[0, 0], [3, 1]])
    received, sent = between.bounds()
    assert received == [slice(0, 2), slice(2, 7)]
    assert sent == [slice(0, 0), slice(0, 4)]


WIDTH = 32
WORDS = {"all_to_all_single": "start", "wait_tensor": "wait", "_grouped_mm": "product"}


class Order(TorchDispatchMode):
    """Logs starts and waits of all-to-alls, and grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        word = WORDS.get(func.__name__.split(".")[0])
        # Numbers of rows travel as integers.
        if word is not None and args[0].is_floating_point():
            # Rows travel with a score or its gradient behind them, or without.
            scored = " scored" * (word == "start" and args[0].shape[1] > WIDTH)
            self.log.append(word + scored)
        return func(*args, **(kwargs or {}))

    def take(self) -> list[str]:
        """What was logged since the last call, such as "2 start"."""
        log, self.log = self.log, []
        return [f"{len(list(same))} {word}" for word, same in groupby(log)]


Batches = list[list[str]]


class Ran(NamedTuple):
    """Logs of the last micro-batch, and this rank's gradients of the step."""

    forward: list[str]
    backward: list[str]
    grads: dict[str, Tensor]


def one_step(
    recompute: Recompute, stages: int, parts: tuple[str, ...] = (), *, micro_batches: Batches
) -> Ran:
    experts = ExpertsSpec(num=12, per_token=3, hidden_size=16, shared=1)
    case = Case(cp=2, experts=experts, ep=2, ep_stages=stages, layers=1, recompute=recompute)
    spec = spec_of(replace(case, num_micro_batches=len(micro_batches), parts=parts))
    mesh = build_mesh(spec.parallel, torch.device("cpu"), model=spec.model)
    executor, plan = Executor(spec, mesh), packing_of(micro_batches)
    mine = pipeline_plan(plan, spec, 0, case.strategy)
    made = executor.load(mine, Reader(), loss_scale=1.0)
    (module,) = executor.stages.values()
    assert made.tokens is not None
    log, forward, backward = Order(), list[str](), list[str]()
    for tokens, rows in zip(made.tokens, made.rows, strict=True):
        # Autograd's thread has the mode of the thread that calls it.
        with log:
            loss = module(tokens, rows=rows)
            forward = log.take()
            loss.backward()
            backward = log.take()
    named = executor.named_parameters().items()
    grads = {n: local_tensor(p.grad) for n, p in named if p.grad is not None}
    return Ran(forward, backward, grads)


Logs = dict[tuple[str, int], tuple[list[str], list[str]]]


def steps(world: World) -> tuple[Logs, float]:
    """Returns the logs of steps by recompute and number of stages, and by how much those that
    differ in their stages alone differ at most; ranks have few rows or none in some
    micro-batches.
    """
    logs: Logs = {}
    worst = 0.0
    for recompute in Recompute:
        first = None
        for stages in (1, 2, 3):
            ran = one_step(recompute, stages, micro_batches=[["8:0-1"], [], ["2:0-17", "1:0-3"]])
            logs[str(recompute), stages] = ran.forward, ran.backward
            first = first or ran
            assert ran.grads.keys() == first.grads.keys()
            for name, grad in ran.grads.items():
                error = (grad - first.grads[name]).abs().max() / first.grads[name].abs().max()
                assert torch.isfinite(error), name
                worst = max(worst, error.item())
    return logs, worst


def each_stage(num: int, leaving: str) -> list[str]:
    """The log of a pass once its rows have started: each stage waits, is computed, and is sent."""
    return ["1 wait", "3 product", f"1 {leaving}"] * num


@pytest.mark.dist
@pytest.mark.full
def test_rows_travel_while_others_are_computed() -> None:
    """In backward as well, where weights' gradients hide the last stage; a recomputed layer neither
    exchanges outputs nor multiplies by down again.
    """
    for logs, worst in run_local(steps, 2, start_group=True, timeout_s=300):
        # Products of a CPU round the last rows of a group by where they are in memory.
        assert worst < 1e-6
        for (how, num), (forward, backward) in logs.items():
            assert forward == [f"{num} start scored", *each_stage(num, "start"), f"{num} wait"]
            # Three products for the gradients of a stage's rows, then three for those of weights.
            end = [*each_stage(num, "start scored"), "3 product", f"{num} wait"]
            again = ["1 wait", "2 product"] * num
            rows, gradients = f"{num} start scored", f"{num} start"
            assert (
                backward
                == {
                    "none": [gradients, *end],
                    # Rows that recomputed products need go first if nothing else hides them.
                    "selective": [rows, gradients, *again, *end],
                    "full": [gradients, rows, *again, *end],
                }[how]
            )


def circles(world: World) -> tuple[list[str], int]:
    """Returns the log of a step whose branches end with a norm, by recompute, and how many ways of
    rows are left where nothing but references frees them.
    """
    ways: list[weakref.ref[StagedWay]] = []
    make = StagedWay.__init__

    def watched(way: StagedWay, *args: Any) -> None:
        make(way, *args)
        ways.append(weakref.ref(way))

    unequal: list[str] = []
    gc.collect()
    gc.disable()
    with mock.patch.object(StagedWay, "__init__", watched):
        for how in Recompute:
            ran = one_step(how, 2, ("branch_norms",), micro_batches=[["2:0-17", "1:0-3"]])
            log = [word.split()[:2] for word in ran.forward + ran.backward]
            started, waited = (
                sum(int(n) for n, w in log if w == word) for word in ("start", "wait")
            )
            if started != waited:
                unequal.append(f"{how}: {started} started, {waited} waited for")
            del ran
    left = sum(way() is not None for way in ways)
    gc.enable()
    assert len(ways) == 5  # recomputed layers have a second one
    return unequal, left


@pytest.mark.dist
@pytest.mark.full
def test_nothing_is_left_under_way_or_in_memory() -> None:
    for unequal, left in run_local(circles, 2, start_group=True, timeout_s=300):
        assert unequal == []
        assert left == 0


@pytest.mark.parametrize("parts", [(), ("branch_norms",)])
def test_recomputed_layers_have_the_same_gradients(parts: tuple[str, ...]) -> None:
    """To the bit, also if a norm behind the experts needs their outputs in the second pass."""
    experts = ExpertsSpec(num=8, per_token=2, hidden_size=16, shared=1)
    spec = spec_of(Case(experts=experts, layers=2, parts=parts))
    found: list[dict[str, Tensor]] = []
    for how in Recompute:
        model = fresh_reference(spec)
        recompute_layers(model, how)
        reference_loss(model, spec, packing_of([["2:0-17", "1:0-3"]]), backward=True)
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == {name for name, _ in fresh_reference(spec).named_parameters()}
    for other in found[1:]:
        assert all(torch.equal(grad, other[name]) for name, grad in found[0].items())
