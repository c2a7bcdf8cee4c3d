"""Tests linear layers over context-parallel ranks against one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.model.delta_net_weights import fresh
from wlb.cost import FlopsWorkload
from wlb.launch.local import run_local
from wlb.model.delta_net import GatedDeltaNet
from wlb.model.delta_rule import SpanLayout
from wlb.parallel.context.linear import SpansBefore
from wlb.parallel.world import World
from wlb.plan import ShardingPlan, rank_summaries, summaries_moved
from wlb.sharding import NAMES, shard
from wlb.sharding.paper import RankedSpans, from_spans
from wlb.spec import LinearSpec, ModelSpec

SPEC = ModelSpec(
    hidden_size=16,
    full_every=4,
    linear=LinearSpec(num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=6),
)
COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=3)
BATCHES = [[300, 7, 1, 90, 2, 41], [5, 4, 3, 2, 1, 1, 1, 1], [1], [130]]
PADDING = 3


def plans(cp: int) -> list[ShardingPlan]:
    """Every strategy's, one whose ranks hold tokens by turns, and one with an empty rank."""
    made = [
        shard(lengths, cp=cp, strategy=name, cost=COST) for lengths in BATCHES for name in NAMES
    ]
    turns = np.arange(9)
    spans = RankedSpans(turns * 0, turns, turns + 1, turns % cp)
    made.append(from_spans(np.array([9]), spans, cp=cp, strategy="per_document"))
    return made


def layer() -> GatedDeltaNet:
    return fresh(SPEC).double()


def documents(plan: ShardingPlan) -> Tensor:
    """Rows of all tokens, document after document, and the weights of their outputs."""
    make = torch.Generator().manual_seed(int(plan.num_tokens))
    shape = (2, plan.num_tokens, SPEC.hidden_size)
    return torch.randn(shape, generator=make, dtype=torch.float64)


def whole(plan: ShardingPlan) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, gradients of rows and of weights in one process."""
    rows, weights = documents(plan)
    x, made = rows.requires_grad_(), layer()
    out = made(x, SpanLayout.of(plan.lengths.tolist()))
    (out * weights).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, [p.grad for p in made.parameters() if p.grad is not None]


def cut(world: World, cp: int) -> list[tuple[Tensor, Tensor, list[Tensor], int]]:
    """The same on one rank, for every plan: twice, to see whether bits repeat."""
    found = []
    for plan in plans(cp):
        index = torch.from_numpy(plan.for_rank(world.rank).token_index)
        rows, weights = (part[index] for part in documents(plan))
        padded = torch.cat([rows, torch.ones(PADDING, SPEC.hidden_size)])
        before = SpansBefore(
            rank_summaries(plan, world.rank, latest=SPEC.linear.latest),
            len(padded),
            dist.group.WORLD,
            torch.device("cpu"),
        )
        runs = []
        for _ in range(2):
            x, made = padded.clone().requires_grad_(), layer()
            out = made(x, before.layout, before)[: len(rows)]
            (out * weights).sum().backward()
            assert x.grad is not None
            grads = [p.grad for p in made.parameters() if p.grad is not None]
            runs.append((out.detach(), x.grad[: len(rows)], grads))
        repeats = all(
            torch.equal(a, b)
            for a, b in zip([*runs[0][:2], *runs[0][2]], [*runs[1][:2], *runs[1][2]], strict=True)
        )
        found.append((*runs[0], int(repeats)))
    return found


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("cp", [2, 4])
def test_cut_documents_are_whole_ones(cp: int) -> None:
    """Outputs, gradients of rows, and gradients of weights added up over ranks, in float64."""
    ranks = run_local(cut, cp, cp, start_group=True, timeout_s=600)
    for i, plan in enumerate(plans(cp)):
        out, grad, weights = whole(plan)
        total = [torch.zeros_like(w) for w in weights]
        for rank in range(cp):
            found, of_rows, of_weights, repeats = ranks[rank][i]
            index = torch.from_numpy(plan.for_rank(rank).token_index)
            torch.testing.assert_close(found, out[index], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(of_rows, grad[index], rtol=1e-8, atol=1e-8)
            assert repeats
            total = [t + w for t, w in zip(total, of_weights, strict=True)]
        for found, expected in zip(total, weights, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_what_is_sent_is_what_arrives() -> None:
    """Splits of all ranks pair up, and summaries travel as they are priced."""
    for plan in plans(4):
        made = [rank_summaries(plan, rank, latest=3) for rank in range(plan.cp)]
        for name in ("latest", "before"):
            sent = np.stack([getattr(one, name).splits for one in made])
            received = np.stack([getattr(one, name).received for one in made])
            np.testing.assert_array_equal(sent.T, received)
            for one in made:
                rows = getattr(one, name)
                assert rows.sent.size == rows.splits.sum()
        # Spans that follow each other on a rank are one for the price.
        if not adjacent(plan):
            moved = np.stack([one.before.received for one in made])
            np.testing.assert_array_equal(moved, summaries_moved(plan))


def adjacent(plan: ShardingPlan) -> bool:
    """Whether a rank holds two spans of a document that follow each other."""
    for rank in range(plan.cp):
        spans = {(s.piece, s.start) for s in plan.for_rank(rank).spans}
        if any((s.piece, s.stop) in spans for s in plan.for_rank(rank).spans):
            return True
    return False


def test_an_exchange_by_need_of_keys_changes_nothing_here() -> None:
    plan = shard([50, 20], cp=2, strategy="per_document", cost=COST)
    same = rank_summaries(replace(plan, exchange="needed"), 1, latest=3)
    for a, b in zip(same.before, rank_summaries(plan, 1, latest=3).before, strict=True):
        np.testing.assert_array_equal(a, b)
