"""Tests context-parallel attention: it computes what one process computes; what it keeps.

Most cases of a CP degree run in one launch, so ranks return numbers that the tests then check.

Shapes: T local rows, C their width, H query heads, G key/value heads, D head size.
"""

import functools
import gc
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from tests.sets import full
from wlb.cost import FlopsWorkload
from wlb.kernels import Segments, attend
from wlb.launch.local import run_local
from wlb.parallel import context_op
from wlb.parallel.build import kernel_of
from wlb.parallel.context import ContextAttention, HeadShape, take_rows
from wlb.parallel.rows import attention_rows
from wlb.parallel.world import World
from wlb.plan import ShardingPlan, local_tokens, offsets_of
from wlb.sharding import NAMES, per_sequence, shard
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

    @functools.cache  # noqa: B019 (a few dozen cases a process)
    def plan(self, cp: int) -> ShardingPlan:
        return shard(self.lengths, cp=cp, strategy=self.strategy, cost=COST)

    def qkvg(self, dtype: torch.dtype) -> Tensors:
        """Returns q, k, v and the output's gradient of the packed sequence; bf16 holds the values
        too."""
        generator = torch.Generator().manual_seed(sum(self.lengths) + len(self.lengths))
        rows, (h, g) = sum(self.lengths), self.heads
        made = [torch.randn(rows, n, D, generator=generator) for n in (h, g, g, h)]
        return tuple(x.bfloat16().to(dtype) for x in made)


def cases(cp: int) -> list[Case]:
    lengths = [
        (),
        (1,),
        (2 * cp - 1,),
        (2 * cp + 1,),
        (13, 1, 31, 7, 2, 17),
        (64,),
        (2 * cp, 3, 1, 1, 40),
    ]
    heads = itertools.cycle(HEADS)
    quanta = itertools.cycle([1, 4])
    return [
        Case(lengths=some, strategy=name, heads=next(heads), row_multiple=next(quanta))
        for some, name in itertools.product(lengths, NAMES)
    ]


def one_process(case: Case, dtype: torch.dtype, backend: str) -> Tensors:
    """Returns output and gradients of the packed sequence."""
    q, k, v, grad = case.qkvg(dtype)
    offsets = offsets_of(case.lengths)
    segments = Segments.from_offsets(offsets, offsets, device="cpu")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, segments, backend=backend)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def made(
    case: Case, world: World, dtype: torch.dtype, backend: str, **options: Any
) -> ContextAttention:
    """Returns the attention as the executor makes it."""
    plan, cp = case.plan(world.world_size), world.world_size
    rows = local_tokens(plan.num_tokens, cp=cp, row_multiple=case.row_multiple)
    return ContextAttention.from_rows(
        attention_rows(plan, world.rank, rows),
        group=dist.group.WORLD if cp > 1 else None,
        heads=HeadShape(
            num_heads=case.heads[0], num_kv_heads=case.heads[1], head_dim=D, dtype=dtype
        ),
        backend=backend,
        device=CPU,
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
    0."""
    if not got.numel():
        return 0.0
    return (got.double() - expected).abs().max().item() / max(1.0, expected.abs().max().item())


def square_errors(got: Tensors, expected: Tensors) -> list[float]:
    return [(g.double() - e).square().sum().item() for g, e in zip(got, expected, strict=True)]


def float32(world: World) -> dict[str, Any]:
    """Returns the worst error by backend, and cases whose bits depend on what they should not."""
    worst = {"sdpa": 0.0, "reference": 0.0}
    other_bits: list[str] = []
    for case in cases(world.world_size):
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


def bfloat16(world: World, added_in: torch.dtype = torch.float32) -> Errors:
    """Returns (case, square errors of this rank's rows, those of one process in bfloat16)."""
    out: Errors = []
    for case, backend in itertools.product(cases(world.world_size), ("sdpa", "reference")):
        if sum(case.lengths) > 2 * world.world_size + 1:
            expected = one_process(case, torch.float64, "reference")
            attention = made(case, world, torch.bfloat16, backend, gradient_dtype=added_in)
            got = run(case, world, attention)
            found = square_errors(got, of_rank(case, world, expected))
            alone = square_errors(one_process(case, torch.bfloat16, backend), expected)
            out.append((f"{backend} {case}", found, alone))
    return out


def both(world: World) -> tuple[dict[str, Any], Errors]:
    return float32(world), bfloat16(world)


@pytest.mark.parametrize("cp", [1, 2, *full(4, 8)])
def test_it_is_what_one_process_computes(cp: int) -> None:
    """All strategies and lengths agree; bits are the same twice, and with gathered rows kept."""
    results = run_local(both, cp, start_group=True, timeout_s=600)
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


def wire_dtypes(world: World) -> list[torch.dtype]:
    """Returns what gradients of keys and values were reduced in, with either option."""
    case = Case(lengths=(50, 14), strategy="per_document", heads=(4, 2))
    recorder = Recorder([])
    for added_in in (torch.float32, torch.bfloat16):
        attention = made(case, world, torch.bfloat16, "sdpa", gradient_dtype=added_in)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(context_op, "_collectives", recorder)
            run(case, world, attention)
    return recorder.reduced_in


def test_the_option_says_what_gradients_travel_in() -> None:
    for found in run_local(wire_dtypes, 2, start_group=True, timeout_s=600):
        assert found == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_compiled_code_knows_what_gradients_travel_in(wire: torch.dtype, fused: bool) -> None:
    """If it expected another dtype than the slot's, autograd would convert what still travels."""
    with FakeTensorMode():
        q, k = (torch.empty(6, n, D, dtype=torch.bfloat16) for n in (4, 2))
        index = torch.empty(12, dtype=torch.int64)
        offsets = torch.empty(3, dtype=torch.int32)
        where = (offsets, offsets, 6, 12, "sdpa", 2, "0")
        gathered, slot = context_op.gather_kv(k, k, 2, "0", wire)
        out, lse, again = context_op.context_attend(
            q, k, k, gathered, slot, index, index[None], *where, False, fused
        )
        _, travelling = context_op.context_attend_backward(
            out, q, k, k, None, out, lse, index, index[None], *where, wire, fused
        )
        received = context_op.receive_kv_gradient(travelling, k.dtype)
    assert (travelling.dtype, travelling.shape) == (slot.dtype, slot.shape) == (wire, (6, 2, 2, D))
    assert (again.dtype, again.shape) == (gathered.dtype, gathered.shape)
    assert received.dtype == k.dtype


@pytest.mark.full
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_gradients_that_are_added_in_bfloat16_round_once_a_rank(cp: int) -> None:
    """Only those of keys and values are worse for it."""
    narrow = torch.bfloat16
    found = worst_ratios(run_local(bfloat16, cp, narrow, start_group=True, timeout_s=600))
    assert max(found[:2]) <= 2
    assert max(found[2:]) <= 3


def compiled(world: World) -> tuple[list[bool], int]:
    """Returns whether each micro-batch has the eager bits, forward and backward, and graphs
    compiled."""

    def layer(x_TC: Tensor, attention: ContextAttention) -> Tensor:
        q, k, v = x_TC.unflatten(1, (-1, D)).split([4, 2, 2], 1)
        k = k * 0.5
        moving = attention.begin(k, v)
        return attention(q.sin(), k, v, moving).flatten(1) * 2

    traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
    same: list[bool] = []
    lengths = [(5, 11), (40,), (3, 3, 3, 3, 9), (7,), (13, 1, 17)]
    for some, backend in itertools.product(lengths, ("sdpa", "reference")):
        case = Case(lengths=some, strategy="per_document", heads=(4, 2))
        attention = made(case, world, torch.float32, backend)
        q, k, v, grad = local_inputs(case, world, attention)
        x = torch.cat([q, k, v], 1).flatten(1).requires_grad_()
        results = [(f(x, attention), x) for f in (layer, traced)]
        bits = [(out, torch.autograd.grad(out, x, grad.flatten(1))[0]) for out, x in results]
        same.append(all(map(torch.equal, *bits)))
    return same, counters["stats"]["unique_graphs"]


@pytest.mark.full
def test_compiled_code_computes_the_same_for_micro_batches_of_any_lengths() -> None:
    for same, num_graphs in run_local(compiled, 2, start_group=True, timeout_s=600):
        assert all(same), same
        assert num_graphs <= 2 * 2  # of each backend one for the first shapes and one for any


def kept(attention: ContextAttention, inputs: Tensors) -> tuple[int, list[int]]:
    """Returns bytes that a call keeps for backward beside its indices, and rows of what it
    keeps."""
    segments = attention.segments
    indices = [attention.index, attention.inverse, segments.cu_seqlens_q, segments.cu_seqlens_k]
    shared = {x.untyped_storage().data_ptr() for x in indices if x is not None}
    found: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if (address := x.untyped_storage().data_ptr()) not in shared:
            found[address] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(*inputs)
    assert out.requires_grad
    return sum(x.untyped_storage().nbytes() for x in found.values()), [
        x.shape[0] for x in found.values() if x.dim() == 4
    ]


def gathered_alive(attention: ContextAttention, inputs: Tensors, expected: int) -> int:
    """Returns how many results of the all-gather outlive the call while its output lives.

    Gloo's thread lets its own hold on a result go only after it has woken who waits for it, so
    there is a time in which the result lives on whatever the call keeps.
    """
    seen: list[StorageWeakRef] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_op, "_collectives", Recorder(seen))
        out = attention(*inputs)
    gc.collect()
    assert out.requires_grad
    deadline = time.monotonic() + 600
    while (num_alive := sum(not x.expired() for x in seen)) > expected:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return num_alive


class Recorder:
    """Passes collectives on, refers weakly to what all-gathers give, and counts all."""

    def __init__(self, gathered: list[StorageWeakRef]) -> None:
        self.gathered, self.calls = gathered, Counter[str]()
        self.reduced_in: list[torch.dtype] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Tensor:
            self.calls[name] += 1
            if name == "reduce_scatter_tensor":
                self.reduced_in.append(args[0].dtype)
            made = getattr(torch.ops._c10d_functional, name)(*args)
            if name == "all_gather_into_tensor":
                self.gathered.append(StorageWeakRef(made.untyped_storage()))
            return made

        return call


def memory(world: World) -> dict[tuple[str, bool], Any]:
    case = Case(lengths=(50, 14), strategy="per_document", heads=(4, 2))
    out: dict[tuple[str, bool], Any] = {}
    for backend, keep in itertools.product(("sdpa", "reference"), (False, True)):
        attention = made(case, world, torch.bfloat16, backend, keep_gathered_kv=keep)
        q, k, v, grad = local_inputs(case, world, attention)
        inputs = tuple(x.requires_grad_() for x in (q, k, v))
        with pytest.MonkeyPatch.context() as patch:
            recorder = Recorder([])
            patch.setattr(context_op, "_collectives", recorder)
            attention(*inputs).backward(grad)
        alive = gathered_alive(attention, inputs, expected=int(keep))
        out[backend, keep] = (*kept(attention, inputs), alive, dict(recorder.calls))
    return out


def test_only_local_rows_are_kept_and_one_gather_more_is_made() -> None:
    """64 tokens on 2 ranks are 32 local rows of 4 and 2 heads of 8 numbers, 2 bytes per number."""
    queries = 2 * 32 * 4 * 8 * 2 + 4 * 4 * 32  # q and output, and a float32 log-sum-exp a head
    local, everywhere = 2 * 32 * 2 * 8 * 2, 2 * 64 * 2 * 8 * 2
    for found in run_local(memory, 2, start_group=True, timeout_s=600):
        for backend in ("sdpa", "reference"):
            num_bytes, rows, alive, calls = found[backend, False]
            assert (num_bytes, rows, alive) == (queries + local, [], 0)
            assert calls["all_gather_into_tensor"] == 2
            assert calls["reduce_scatter_tensor"] == 1
            num_bytes, rows, alive, calls = found[backend, True]
            assert (num_bytes, rows, alive) == (queries + everywhere, [64], 1)
            assert calls["all_gather_into_tensor"] == calls["reduce_scatter_tensor"] == 1


ARGUMENTS: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": D,
    "dtype": torch.float32,
    "device": "cpu",
}


def front_door(world: World) -> tuple[bool, list[str]]:
    """Returns whether rows go there and back with the right output, and what bad tensors are
    told."""
    case = Case(lengths=(20, 3, 18), strategy="per_document", heads=(4, 2), row_multiple=4)
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
        with pytest.raises(ValueError, match="but this attention was made for") as caught:
            attention(*bad)
        told.append(str(caught.value))
    return torch.allclose(put_rows(parts, plan), expected, atol=1e-6), told


def test_the_front_door() -> None:
    for same, told in run_local(front_door, 2, start_group=True, timeout_s=600):
        assert same
        assert told == [
            f"{name}, but this attention was made for {shape}, torch.float32 on cpu"
            for name, shape in (
                ("q is (23, 4, 8), torch.float32 on cpu", (24, 4, 8)),
                ("k is (24, 2, 8), torch.bfloat16 on cpu", (24, 2, 8)),
                ("q is (24, 3, 8), torch.float32 on cpu", (24, 4, 8)),
                ("v is (24, 1, 8), torch.float32 on cpu", (24, 2, 8)),
            )
        ]


def test_one_rank_needs_no_group() -> None:
    plan = per_sequence([5, 3], cp=1)
    attention = ContextAttention.from_plan(plan, group=None, **ARGUMENTS)
    q, k, v = (torch.randn(8, n, D) for n in (4, 2, 2))
    assert attention.begin(k, v) is None
    segments = Segments.from_offsets([0, 5, 8], [0, 5, 8], device="cpu")
    assert torch.equal(attention(q, k, v), attend(q, k, v, segments, backend="sdpa"))
    with pytest.raises(ValueError, match="the plan is for cp = 2 ranks, the group has 1"):
        ContextAttention.from_plan(per_sequence([5, 3], cp=2), group=None, **ARGUMENTS)


@pytest.mark.parametrize(("asked", "kernel"), [(False, "sdpa"), (True, "sdpa_deterministic")])
def test_the_kernel_adds_in_one_order_if_asked(asked: bool, kernel: str) -> None:
    plan = per_sequence([5, 3], cp=1)
    attention = ContextAttention.from_plan(plan, group=None, deterministic=asked, **ARGUMENTS)
    assert attention.backend == kernel
    spec = load("demo", [f"kernels.deterministic={str(asked).lower()}"])
    assert kernel_of(spec, torch.device("cpu")).kernel == kernel
