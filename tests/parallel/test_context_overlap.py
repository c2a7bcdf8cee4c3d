"""Tests what of a layer's backward pass lies between starts and waits of its collectives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.case import Case, Reader, packing, packing_of, pipeline_plan, spec_of
from tests.sets import full
from wlb.kernels.op import observing
from wlb.launch.local import run_local
from wlb.parallel import collectives
from wlb.parallel.context import op
from wlb.parallel.context.attention import ContextAttention
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.tensor import local_tensor
from wlb.parallel.world import World
from wlb.plan import KeyExchange
from wlb.spec import Recompute, Schedule

pytestmark = pytest.mark.dist

COLLECTIVES = torch.ops._c10d_functional
STARTS = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}


class Order(TorchDispatchMode):
    """Logs starts and waits of collectives, and products by the layer's weights.

    A weight is known by its sizes: each has two products in backward, of which one has rows on the
    left. The model's width is 32, that of queries 128, of keys 64 and of the MLP 48.
    """

    def __init__(self, num_rows: int, tp: int) -> None:
        super().__init__()
        columns = {"q": 128, "kv": 64, "mlp": 48}
        rows = {"o": 128, "mlp": 48}
        self.names = {(size // tp, 32): name for name, size in columns.items()}
        self.names |= {(32, size // tp): name for name, size in rows.items()}
        self.num_rows, self.log = num_rows, list[str]()
        self._started: dict[int, str] = {}
        # All-to-alls of keys and of their gradients take turns.
        self._by_need = cycle(STARTS.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            if left.shape[0] != self.num_rows:
                self.log.append(self.names[left.shape[0], right.shape[1]])
            elif right.is_contiguous():
                self.log.append(self.names[right.shape[0], right.shape[1]])
            else:  # a forward pass multiplies by the transposed weight
                self.log.append(f"{self.names[right.shape[1], right.shape[0]]} again")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Logs inside: collectives of custom ops too, into which the mode does not look."""
        calls = {name: self._starting(name, text) for name, text in STARTS.items()}
        calls["all_to_all_single"] = self._starting("all_to_all_single", "")
        proxy = SimpleNamespace(**calls, wait_tensor=self._wait)
        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(op, "_collectives", proxy)
            patch.setattr(collectives, "_ops", proxy)
            yield

    def _starting(self, op: str, text: str) -> Callable[..., Tensor]:
        def call(x: Tensor, *args: Any) -> Tensor:
            made = getattr(COLLECTIVES, op)(x, *args)
            kind = text or next(self._by_need)
            name = f"{kind} kv" if x.dim() == 4 else kind
            self._started[made.untyped_storage().data_ptr()] = name
            self.log.append(f"{name} starts")
            return made

        return call

    @contextmanager
    def attention(self, *, is_backward: bool) -> Iterator[None]:
        """Logs kernels of attention, of which this is the observer."""
        self.log.append("attention" if is_backward else "attention again")
        yield

    def _wait(self, x: Tensor) -> Tensor:
        name = self._started.pop(x.untyped_storage().data_ptr(), None)
        self.log += [] if name is None else [f"{name} is there"]  # of a first wait
        return COLLECTIVES.wait_tensor(x)


def short(log: list[str]) -> list[str]:
    """Returns the log with equal neighbours as one, such as "3 mlp"."""
    out: list[tuple[str, int]] = []
    for text in log:
        before = out.pop() if out and out[-1][0] == text else (text, 0)
        out.append((text, before[1] + 1))
    return [text if count == 1 else f"{count} {text}" for text, count in out]


def backward_order(world: World, case: Case) -> list[str]:
    """Returns the order of the backward pass of the last of two layers, without the head."""
    spec = spec_of(case)
    executor = Executor(spec, build_mesh(spec.parallel, torch.device("cpu")))
    plan = packing_of([["3:0-24", "6:0-10"]])
    mine = pipeline_plan(plan, spec, 0, case.strategy)
    executor.train_step(mine, Reader(), loss_scale=1.0)  # the first step initialises the stages
    made = executor.load(mine, Reader(), loss_scale=1.0)
    (stage,) = executor.stages.values()
    assert made.tokens is not None
    loss = stage(made.tokens[0], rows=made.rows[0])
    order = Order(mine.local_tokens[0], case.tp)
    with order.logged(), observing(order) if case.own_first else nullcontext():
        loss.backward()
    embedding = 2 * (case.tp > 1)  # its gather's start and wait
    return short(order.log[: (len(order.log) - embedding) // 2])


ALONE = Case(cp=2, layers=2, head_dim=16, num_micro_batches=1)
BY_NEED = replace(ALONE, exchange=KeyExchange.NEEDED)


ATTENTION = ["gather kv is there", "scatter kv starts", "2 q", "scatter kv is there", "4 kv"]
OWN_LAST = [
    *["gather kv is there", "attention", "scatter kv starts", "attention", "2 q"],
    *["scatter kv is there", "4 kv"],
]
OWN_FIRST = [
    *["2 kv again", "gather kv starts", "q again", "attention again", "gather kv is there"],
    *["attention again", "o again"],
]
AGAIN = ["2 kv again", "gather kv starts", "q again", "gather kv is there", "o again"]
TP_MLP = [
    *["gather starts", "gather is there", "2 mlp", "gather starts", "2 mlp"],
    *["scatter starts", "gather is there", "2 mlp", "scatter is there"],
]
TP_ATTENTION = [
    *["gather starts", "gather is there", "2 o", "gather kv is there", "scatter kv starts"],
    *["gather starts", "q", "scatter kv is there", "2 kv"],
    *["scatter starts", "gather is there", "2 kv", "q", "scatter is there"],
]
NONE, SELECTIVE, FULL = Recompute


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (ALONE, ["gather kv starts", "6 mlp", "2 o", *ATTENTION]),
        (BY_NEED, ["gather kv starts", "6 mlp", "2 o", *ATTENTION]),
        *full(
            (
                replace(ALONE, recompute=SELECTIVE),
                ["gather kv starts", "2 mlp again", "6 mlp", "2 o", *ATTENTION],
            ),
            # The gather of attention that runs again serves its backward.
            (
                replace(ALONE, recompute=FULL),
                [*AGAIN, "2 mlp again", "6 mlp", "2 o", *ATTENTION[1:]],
            ),
            (
                replace(BY_NEED, recompute=FULL),
                [*AGAIN, "2 mlp again", "6 mlp", "2 o", *ATTENTION[1:]],
            ),
            (replace(BY_NEED, own_first=True), ["gather kv starts", "6 mlp", "2 o", *OWN_LAST]),
            (
                replace(ALONE, own_first=True, recompute=FULL),
                [*OWN_FIRST, "2 mlp again", "6 mlp", "2 o", *OWN_LAST[1:]],
            ),
            (replace(ALONE, tp=2), ["gather kv starts", *TP_MLP, *TP_ATTENTION]),
            (
                replace(ALONE, compile_backend="aot_eager"),
                ["gather kv starts", "6 mlp", "2 o", *ATTENTION],
            ),
            (
                replace(BY_NEED, compile_backend="aot_eager"),
                ["gather kv starts", "6 mlp", "2 o", *ATTENTION],
            ),
            (
                replace(ALONE, compile_backend="aot_eager", recompute=FULL),
                [*AGAIN, "2 mlp again", "6 mlp", "2 o", *ATTENTION[1:]],
            ),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_products_run_while_keys_and_their_gradients_travel(
    case: Case, expected: list[str]
) -> None:
    for found in run_local(backward_order, case.world, case, start_group=True, timeout_s=600):
        assert found == expected


def has_same_bits(world: World, case: Case) -> bool:
    """Returns whether a step has the gradients of one that waits for each collective at once."""
    spec = spec_of(case)
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    mine = pipeline_plan(packing(case.num_micro_batches), spec, mesh.at.dp, case.strategy)

    def gradients() -> list[Tensor]:
        executor = Executor(spec, mesh)
        executor.train_step(mine, Reader(), loss_scale=1.0)
        grads = (p.grad for p in executor.named_parameters().values())
        return [local_tensor(grad) for grad in grads if grad is not None]

    def at_once(op: str) -> Callable[..., Tensor]:
        return lambda *args: COLLECTIVES.wait_tensor(getattr(COLLECTIVES, op)(*args))

    overlapped = gradients()
    ops = (*STARTS, "all_to_all_single")
    proxy = SimpleNamespace(**{op: at_once(op) for op in ops}, **WAITED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_collectives", proxy)
        patch.setattr(collectives, "_ops", proxy)
        patch.setattr(ContextAttention, "add", lambda _, x_SC, y_SC, __: x_SC + y_SC)
        serial = gradients()
    assert len(overlapped) == len(serial) > 0
    return all(map(torch.equal, overlapped, serial))


WAITED = {"wait_tensor": COLLECTIVES.wait_tensor, "all_reduce": COLLECTIVES.all_reduce}
ZERO_BUBBLE = Case(tp=2, cp=2, pp=2, v=2, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE)


@pytest.mark.parametrize(
    "case",
    [
        Case(cp=2, layers=2),
        *full(
            Case(cp=4, layers=2, exchange=KeyExchange.NEEDED),
            Case(cp=4, layers=2, exchange=KeyExchange.NEEDED, own_first=True),
            Case(cp=4, layers=2, recompute=FULL),
            Case(tp=2, cp=2, layers=2, recompute=SELECTIVE, reshard=True),
            ZERO_BUBBLE,
        ),
    ],
    ids=str,
)
def test_overlap_changes_no_bit(case: Case) -> None:
    assert all(run_local(has_same_bits, case.world, case, start_group=True, timeout_s=600))
