"""Tests context-parallel attention: it computes what one process computes.

Most cases of a CP degree run in one launch, so ranks return numbers that the tests then check.

Shapes: T local rows, C their width, H query heads, G key/value heads, D head size.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from tests.sets import full, nightly
from wlb.cost import FlopsWorkload
from wlb.kernels import Scores, Segments, attend
from wlb.launch.local import run_local
from wlb.parallel.build import kernel_of
from wlb.parallel.context.attention import ContextAttention, HeadShape, take_rows
from wlb.parallel.context.rows import rank_exchange
from wlb.parallel.world import World
from wlb.plan import KeyExchange, ShardingPlan, exchange_of, local_tokens, offsets_of
from wlb.plan.exchange import STAGE_ROWS
from wlb.sharding import NAMES, shard
from wlb.sharding.paper import per_sequence
from wlb.spec import load

pytestmark = pytest.mark.dist

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=50)
CPU = torch.device("cpu")
HEADS = [(4, 4), (4, 2), (4, 1)]
D = 8

Tensors = tuple[Tensor, ...]


def put_rows(parts: Sequence[Tensor], plan: ShardingPlan) -> Tensor:
    """The packed [S, ...] tensor, without padding, from the rows of all ranks."""
    out = parts[0].new_empty((plan.num_tokens, *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        index = torch.from_numpy(plan.for_rank(rank).token_index).to(part.device)
        out[index] = part[: index.numel()]
    return out


@dataclass(frozen=True, kw_only=True)
class Case:
    lengths: tuple[int, ...]
    strategy: str
    heads: tuple[int, int]
    row_multiple: int = 1
    exchange: KeyExchange = KeyExchange.GATHER
    overlap: bool = False
    stages: int = 1
    scores: Scores = Scores()

    @functools.cache  # noqa: B019 (a few dozen cases a process)
    def plan(self, cp: int) -> ShardingPlan:
        made = shard(self.lengths, cp=cp, strategy=self.strategy, cost=COST)
        return replace(made, exchange=self.exchange)

    def qkvg(self, dtype: torch.dtype) -> Tensors:
        """Returns q, k, v and the output's gradient of the packed sequence; bf16 holds the values
        too.
        """
        generator = torch.Generator().manual_seed(sum(self.lengths) + len(self.lengths))
        rows, (h, g) = sum(self.lengths), self.heads
        made = [torch.randn(rows, n, D, generator=generator) for n in (h, g, g, h)]
        return tuple(x.bfloat16().to(dtype) for x in made)


class How(NamedTuple):
    """How keys are exchanged: the fields of `Case`."""

    exchange: KeyExchange
    overlap: bool = False
    stages: int = 1
    scores: Scores = Scores()


HOWS = [
    *(How(exchange, overlap) for exchange in KeyExchange for overlap in (False, True)),
    How(KeyExchange.NEEDED, overlap=True, stages=3),
    How(KeyExchange.GATHER, overlap=True, stages=2),
]
SCORED = [
    How(KeyExchange.NEEDED, scores=Scores(sliding=5)),
    How(KeyExchange.GATHER, overlap=True, scores=Scores(sliding=11, softcap=1.5)),
    How(KeyExchange.NEEDED, overlap=True, stages=2, scores=Scores(softcap=1.5)),
]
"""Windows and caps, which the executor has by layer; in the full set."""


def cases(cp: int, how: How) -> list[Case]:
    lengths = [
        (),
        (1,),
        (2 * cp - 1,),
        (2 * cp + 1,),
        (13, 1, 31, 7, 2, 17),
        (64,),
        (2 * cp, 3, 1, 1, 40),
    ]
    if how.stages > 1:  # up to CP 3 some ranges are long enough to be cut
        lengths.append((how.stages * STAGE_ROWS * min(cp, 2), 200, 7))
    heads = itertools.cycle(HEADS)
    quanta = itertools.cycle([1, 4])
    return [
        Case(
            lengths=some,
            strategy=name,
            heads=next(heads),
            row_multiple=next(quanta),
            **how._asdict(),
        )
        for some, name in itertools.product(lengths, NAMES)
    ]


def one_process(case: Case, dtype: torch.dtype, backend: str) -> Tensors:
    """Returns output and gradients of the packed sequence."""
    # They are the same however the sequence is sharded and keys are exchanged.
    alone = Case(lengths=case.lengths, strategy="", heads=case.heads, scores=case.scores)
    return _one_process(alone, dtype, backend)


@functools.cache
def _one_process(case: Case, dtype: torch.dtype, backend: str) -> Tensors:
    q, k, v, grad = case.qkvg(dtype)
    offsets = offsets_of(case.lengths)
    segments = Segments.from_offsets(offsets, offsets, device="cpu", scores=case.scores)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, segments, backend=backend)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def made(
    case: Case, world: World, dtype: torch.dtype, backend: str, **options: Any
) -> ContextAttention:
    """Returns the attention as the executor makes it."""
    plan, cp = case.plan(world.world_size), world.world_size
    rows = local_tokens(plan.num_tokens, cp=cp, row_multiple=case.row_multiple)
    exchange = exchange_of(
        plan,
        local_tokens=rows,
        own_first=case.overlap,
        stages=case.stages,
        sliding=case.scores.sliding,
    )
    return ContextAttention.from_rows(
        rank_exchange(exchange, world.rank),
        group=dist.group.WORLD if cp > 1 else None,
        heads=HeadShape(
            num_heads=case.heads[0], num_kv_heads=case.heads[1], head_dim=D, dtype=dtype
        ),
        backend=backend,
        device=CPU,
        scores=case.scores,
        **options,
    )


def local_inputs(case: Case, world: World, attention: ContextAttention) -> Tensors:
    plan = case.plan(world.world_size)
    return tuple(
        take_rows(x, plan, rank=world.rank, num_rows=attention.num_rows)
        for x in case.qkvg(attention.heads.dtype)
    )


def run(case: Case, world: World, attention: ContextAttention) -> Tensors:
    """Returns output and gradients of the rank's rows, without padding."""
    q, k, v, grad = local_inputs(case, world, attention)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, attention.begin(k, v))
    num = case.plan(world.world_size).for_rank(world.rank).num_tokens
    return tuple(x[:num] for x in (out.detach(), *torch.autograd.grad(out, inputs, grad)))


def of_rank(case: Case, world: World, whole: Tensors) -> Tensors:
    index = torch.from_numpy(case.plan(world.world_size).for_rank(world.rank).token_index)
    return tuple(x[index] for x in whole)


def worst_error(got: Tensor, expected: Tensor) -> float:
    """Returns max|diff| / max|expected|, but max|diff| of small numbers: a lone token's dq, dk are
    0.
    """
    if not got.numel():
        return 0.0
    return (got.double() - expected).abs().max().item() / max(1.0, expected.abs().max().item())


def square_errors(got: Tensors, expected: Tensors) -> list[float]:
    return [(g.double() - e).square().sum().item() for g, e in zip(got, expected, strict=True)]


def float32(world: World, how: How) -> dict[str, Any]:
    """Returns the worst error by backend, and cases whose bits depend on what they should not."""
    worst = {"sdpa": 0.0, "reference": 0.0}
    other_bits: list[str] = []
    for case in cases(world.world_size, how):
        expected = of_rank(case, world, one_process(case, torch.float64, "reference"))
        for backend in worst:
            got = run(case, world, made(case, world, torch.float32, backend))
            found = [worst_error(*pair) for pair in zip(got, expected, strict=True)]
            worst[backend] = max(worst[backend], *found)
            # The bits of a second time, and of gathered rows that were kept.
            keep = case.heads == HEADS[0]
            other = made(case, world, torch.float32, backend, keep_gathered_kv=keep)
            again = run(case, world, other)
            if not all(map(torch.equal, got, again)):
                other_bits.append(f"{backend} keep={keep} {case}")
    return {"worst": worst, "other_bits": other_bits}


Errors = list[tuple[str, list[float], list[float]]]


def bfloat16(world: World, how: How) -> Errors:
    """Returns (case, square errors of this rank's rows, those of one process in bfloat16)."""
    out: Errors = []
    for case, backend in itertools.product(cases(world.world_size, how), ("sdpa", "reference")):
        if sum(case.lengths) > 2 * world.world_size + 1:
            expected = one_process(case, torch.float64, "reference")
            attention = made(case, world, torch.bfloat16, backend)
            got = run(case, world, attention)
            found = square_errors(got, of_rank(case, world, expected))
            alone = square_errors(one_process(case, torch.bfloat16, backend), expected)
            out.append((f"{backend} {case}", found, alone))
    return out


def both(world: World, how: How) -> tuple[dict[str, Any], Errors]:
    return float32(world, how), bfloat16(world, how)


@pytest.mark.parametrize(
    "how", [*HOWS[1::2], *full(*((how,) for how in (*HOWS[::2], *SCORED)))], ids=str
)
@pytest.mark.parametrize("cp", [2, *full(3), *nightly(1, 4, 8)])
def test_it_is_what_one_process_computes(cp: int, how: How) -> None:
    """All strategies and lengths agree; bits are the same twice, and with gathered rows kept."""
    results = run_local(both, cp, how, start_group=True, timeout_s=600)
    for single, _ in results:
        assert max(single["worst"].values()) < 2e-6
        assert single["other_bits"] == []
    assert max(worst_ratios([half for _, half in results])) <= 2


def worst_ratios(ranks: list[Errors]) -> list[float]:
    """Returns the most that the root of square errors of out, dq, dk and dv is of one process's."""
    worst = [0.0] * 4
    for same in zip(*ranks, strict=True):
        alone = same[0][2]
        sums = [sum(found[i] for _, found, _ in same) for i in range(4)]
        pairs = zip(worst, sums, alone, strict=True)
        worst = [max(w, (s / a) ** 0.5 if s else 0.0) for w, s, a in pairs]
    return worst


def other_bits(world: World) -> list[str]:
    """Returns cases in which an exchange by need has other bits than an all-gather."""
    out: list[str] = []
    for case, dtype in itertools.product(
        cases(world.world_size, How(KeyExchange.GATHER)), (torch.float32, torch.bfloat16)
    ):
        for backend in ("sdpa", "reference"):
            found = [
                run(same, world, made(same, world, dtype, backend))
                for same in (case, replace(case, exchange=KeyExchange.NEEDED))
            ]
            # Two ranks' gradients are added in float32 in either order; more may round otherwise.
            num_equal = 4 if world.world_size == 2 else 2
            pairs = list(zip(*found, strict=True))
            same_bits = all(torch.equal(*pair) for pair in pairs[:num_equal])
            if not (same_bits and all(worst_error(*pair) < 1e-2 for pair in pairs)):
                out.append(f"{dtype} {backend} {case}")
    return out


@pytest.mark.parametrize("cp", [2, *nightly(4)])
def test_rows_that_were_needed_give_the_bits_of_gathered_ones(cp: int) -> None:
    for found in run_local(other_bits, cp, start_group=True, timeout_s=600):
        assert found == []


def compiled(world: World, how: How) -> tuple[list[bool], int]:
    """Returns whether each micro-batch has the eager bits, forward and backward, and graphs
    compiled.
    """

    def layer(x_TC: Tensor, attention: ContextAttention) -> Tensor:
        q, k, v = x_TC.unflatten(1, (-1, D)).split([4, 2, 2], 1)
        k = k * 0.5
        moving = attention.begin(k, v)
        return attention(q.sin(), k, v, moving).flatten(1) * 2

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
    same: list[bool] = []
    lengths = [(5, 11), (40,), (3, 3, 3, 3, 9), (7,), (13, 1, 17)]
    for some, backend in itertools.product(lengths, ("sdpa", "reference")):
        case = Case(lengths=some, strategy="per_document", heads=(4, 2), **how._asdict())
        attention = made(case, world, torch.float32, backend)
        q, k, v, grad = local_inputs(case, world, attention)
        x = torch.cat([q, k, v], 1).flatten(1).requires_grad_()
        results = [(f(x, attention), x) for f in (layer, traced)]
        bits = [(out, torch.autograd.grad(out, x, grad.flatten(1))[0]) for out, x in results]
        same.append(all(map(torch.equal, *bits)))
    return same, counters["stats"]["unique_graphs"]


@pytest.mark.full
@pytest.mark.parametrize("how", [*HOWS[::2], *nightly(*((how,) for how in HOWS[1::2]))], ids=str)
def test_compiled_code_computes_the_same_for_micro_batches_of_any_lengths(how: How) -> None:
    results = run_local(compiled, 2, how, start_group=True, timeout_s=600)
    for same, num_graphs in results:
        assert all(same), same
        # Of each backend one for the first shapes and one for any, and for stages without rows.
        assert num_graphs <= 2 * 2 * how.stages


ARGUMENTS: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": D,
    "dtype": torch.float32,
    "device": "cpu",
}


def front_door(world: World, exchange: KeyExchange) -> tuple[bool, list[str]]:
    """Returns whether rows go there and back with the right output, and what bad tensors are
    told.
    """
    case = Case(
        lengths=(20, 3, 18),
        strategy="per_document",
        heads=(4, 2),
        row_multiple=4,
        exchange=exchange,
    )
    plan = case.plan(world.world_size)
    attention = ContextAttention.from_plan(
        plan, group=dist.group.WORLD, row_multiple=case.row_multiple, **ARGUMENTS
    )
    q, k, v, _ = local_inputs(case, world, attention)
    out = attention(q, k, v)
    parts = [torch.empty_like(out) for _ in range(world.world_size)]
    dist.all_gather(parts, out)
    expected, *_ = one_process(case, torch.float32, "sdpa")
    told: list[str] = []
    for bad in ((q[1:], k, v), (q, k.bfloat16(), v), (q[:, :3], k, v), (q, k, v[:, :1])):
        with pytest.raises(ValueError, match="but this attention needs shape") as caught:
            attention(*bad)
        told.append(str(caught.value))
    return torch.allclose(put_rows(parts, plan), expected, atol=1e-6), told


@pytest.mark.parametrize("exchange", KeyExchange)
def test_the_front_door(exchange: KeyExchange) -> None:
    for same, told in run_local(front_door, 2, exchange, start_group=True, timeout_s=600):
        assert same
        assert told == [
            f"{name}, but this attention needs shape {shape} and dtype torch.float32 on cpu"
            for name, shape in (
                ("q has shape (23, 4, 8) and dtype torch.float32 on cpu", (24, 4, 8)),
                ("k has shape (24, 2, 8) and dtype torch.bfloat16 on cpu", (24, 2, 8)),
                ("q has shape (24, 3, 8) and dtype torch.float32 on cpu", (24, 4, 8)),
                ("v has shape (24, 1, 8) and dtype torch.float32 on cpu", (24, 2, 8)),
            )
        ]


def test_one_rank_needs_no_group() -> None:
    plan = per_sequence([5, 3], cp=1)
    attention = ContextAttention.from_plan(plan, group=None, **ARGUMENTS)
    q, k, v = (torch.randn(8, n, D) for n in (4, 2, 2))
    assert attention.begin(k, v) is None
    segments = Segments.from_offsets([0, 5, 8], [0, 5, 8], device="cpu")
    assert torch.equal(attention(q, k, v), attend(q, k, v, segments, backend="sdpa"))
    with pytest.raises(ValueError, match="the plan is for 2 CP ranks, but the group has 1"):
        ContextAttention.from_plan(per_sequence([5, 3], cp=2), group=None, **ARGUMENTS)


@pytest.mark.parametrize(("asked", "kernel"), [(False, "sdpa"), (True, "sdpa_deterministic")])
def test_the_kernel_adds_in_one_order_if_asked(asked: bool, kernel: str) -> None:
    plan = per_sequence([5, 3], cp=1)
    attention = ContextAttention.from_plan(plan, group=None, deterministic=asked, **ARGUMENTS)
    assert attention.backend == kernel
    spec = load("demo", [f"kernels.deterministic={str(asked).lower()}"])
    assert kernel_of(spec, torch.device("cpu")).kernel == kernel
