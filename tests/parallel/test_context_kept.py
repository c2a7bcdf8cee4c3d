"""Tests what context-parallel attention keeps for backward, and in which dtype gradients travel."""

import gc
import itertools
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.parallel.test_context import HOWS, Case, How, Tensors, local_inputs, made, run
from tests.sets import full
from wlb.cost.key_bytes import KeyBytes, key_bytes
from wlb.launch.local import run_local
from wlb.parallel.context import op
from wlb.parallel.context.attention import ContextAttention
from wlb.parallel.world import World
from wlb.plan import KeyExchange
from wlb.spec import Dtype, ModelSpec, ParallelSpec, RunSpec

pytestmark = pytest.mark.dist


def kept(attention: ContextAttention, inputs: Tensors) -> tuple[int, list[int]]:
    """Returns bytes that a call keeps for backward beside its indices, and rows of what it
    keeps.
    """
    assert attention.exchange is not None
    indices = (*attention.indices, attention.exchange.numbers)
    shared = {x.untyped_storage().data_ptr() for x in indices}
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
    """Returns how many results of the exchange outlive the call while its output lives.

    Gloo's thread lets its own hold on a result go only after it has woken who waits for it, so
    there is a time in which the result lives on whatever the call keeps.
    """
    seen: list[StorageWeakRef] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_collectives", Recorder(seen))
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
    """Passes collectives on, refers weakly to what all-gathers and all-to-alls give, and counts
    all.
    """

    def __init__(self, gathered: list[StorageWeakRef]) -> None:
        self.gathered, self.calls = gathered, Counter[str]()
        self.sent_in: list[torch.dtype] = []
        self.buffers: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Tensor:
            self.calls[name] += 1
            if name in ("reduce_scatter_tensor", "all_to_all_single"):
                self.sent_in.append(args[0].dtype)
            made = getattr(torch.ops._c10d_functional, name)(*args)
            if name in ("all_gather_into_tensor", "all_to_all_single"):
                self.gathered.append(StorageWeakRef(made.untyped_storage()))
                self.buffers.append((made.nbytes, args[0].nbytes))
            return made

        return call


def memory(world: World, exchange: KeyExchange) -> dict[tuple[str, bool], Any]:
    case = Case(lengths=(50, 14), strategy="per_document", heads=(4, 2), exchange=exchange)
    out: dict[tuple[str, bool], Any] = {}
    for backend, keep in itertools.product(("sdpa", "reference"), (False, True)):
        attention = made(case, world, torch.bfloat16, backend, keep_gathered_kv=keep)
        q, k, v, grad = local_inputs(case, world, attention)
        inputs = tuple(x.requires_grad_() for x in (q, k, v))
        with pytest.MonkeyPatch.context() as patch:
            recorder = Recorder([])
            patch.setattr(op, "_collectives", recorder)
            attention(*inputs).backward(grad)
        alive = gathered_alive(attention, inputs, expected=int(keep))
        out[backend, keep] = (*kept(attention, inputs), alive, dict(recorder.calls))
    return out


@pytest.mark.full
@pytest.mark.parametrize("exchange", KeyExchange)
def test_only_local_rows_are_kept_and_one_gather_more_is_made(exchange: KeyExchange) -> None:
    """64 tokens on 2 ranks are 32 local rows of 4 and 2 heads of 8 numbers, 2 bytes per number.

    By need, rank 0 receives the other's 25 + 7 rows, and rank 1 its heads of 13 and 4 rows.
    """
    queries = 2 * 32 * 4 * 8 * 2 + 4 * 4 * 32  # q and output, and a float32 log-sum-exp a head
    row = 2 * 2 * 8 * 2
    for rank, found in enumerate(run_local(memory, 2, exchange, start_group=True, timeout_s=600)):
        num_rows, once, twice = 64, {"all_gather_into_tensor": 1}, {"all_gather_into_tensor": 2}
        again = {"reduce_scatter_tensor": 1}
        if exchange == KeyExchange.NEEDED:
            num_rows, again = (64, 49)[rank], {}
            once, twice = {"all_to_all_single": 2}, {"all_to_all_single": 3}
        for backend in ("sdpa", "reference"):
            num_bytes, rows, alive, calls = found[backend, False]
            assert (num_bytes, rows, alive) == (queries + 32 * row, [], 0)
            assert calls.items() >= (twice | again).items()
            num_bytes, rows, alive, calls = found[backend, True]
            assert (num_bytes, rows, alive) == (queries + num_rows * row, [num_rows], 1)
            assert calls.items() >= (once | again).items()


def buffers(world: World, how: How) -> list[tuple[tuple[int, int], KeyBytes]]:
    """Returns bytes of K and V that arrive and leave in forward, with those that are planned."""
    model = ModelSpec(hidden_size=4 * 8, num_heads=4, num_kv_heads=2, vocab_size=8)
    spec = replace(
        RunSpec(),
        model=model,
        parallel=ParallelSpec(cp=world.world_size),
        cp=replace(RunSpec().cp, overlap_stages=how.stages if how.overlap else 0),
        training=replace(RunSpec().training, dtype=Dtype.BFLOAT16),
    )
    out: list[tuple[tuple[int, int], KeyBytes]] = []
    for lengths in ((50, 14), (33, 1, 7), (9,), ()):
        case = Case(
            lengths=lengths, strategy="balanced", heads=(4, 2), row_multiple=4, **how._asdict()
        )
        attention = made(case, world, torch.bfloat16, "sdpa")
        with pytest.MonkeyPatch.context() as patch:
            recorder = Recorder([])
            patch.setattr(op, "_collectives", recorder)
            attention(*local_inputs(case, world, attention)[:3])
        plan, rows = case.plan(world.world_size), attention.num_rows
        planned = key_bytes(spec, plan, rank=world.rank, local_tokens=rows)
        arrived, sent = (sum(sizes) for sizes in zip(*recorder.buffers, strict=True))
        out.append(((arrived, sent), planned))
    return out


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("cp", [2, *full(4)])
def test_buffers_of_keys_are_those_that_were_planned(cp: int, how: How) -> None:
    for found in run_local(buffers, cp, how, start_group=True, timeout_s=600):
        for used, planned in found:
            assert used == planned


def wire_dtypes(world: World, exchange: KeyExchange) -> list[torch.dtype]:
    """Returns what gradients of keys and values travelled in."""
    case = Case(lengths=(50, 14), strategy="per_document", heads=(4, 2), exchange=exchange)
    recorder = Recorder([])
    attention = made(case, world, torch.bfloat16, "sdpa")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_collectives", recorder)
        run(case, world, attention)
    # Keys travel by all-to-all as well, in forward and again in backward.
    return recorder.sent_in[2::3] if exchange == KeyExchange.NEEDED else recorder.sent_in


@pytest.mark.parametrize("exchange", KeyExchange)
def test_gradients_travel_in_float32(exchange: KeyExchange) -> None:
    for found in run_local(wire_dtypes, 2, exchange, start_group=True, timeout_s=600):
        assert found == [torch.float32]
