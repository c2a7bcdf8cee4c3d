"""Tests tasks of everything but attention: which points, what runs in them, what is counted."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from wlb.cost.flops import elementwise_values, layer_matrices
from wlb.model import build_reference
from wlb.profile import linear
from wlb.profile.linear import (
    BACKWARD_VALUES,
    FORWARD_VALUES,
    linear_tasks,
    rank_matrices,
    rank_model,
)
from wlb.profile.tasks import Task
from wlb.profile.timing import KernelTimer, Timing, make_timer
from wlb.spec import ExpertsSpec, ModelSpec

CPU = torch.device("cpu")
MODEL = ModelSpec(
    vocab_size=300,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=48,
)


class OnceTimer(KernelTimer):
    """Runs each pass once and keeps what it gave; forward takes 1000 ns, backward 3000."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.given: list[tuple[Any, Any]] = []

    def _repeat(self, steps: Any, repeats: Any) -> tuple[Timing, ...]:
        raise AssertionError("only passes are timed")

    def time_passes(
        self,
        forward: Callable[[], Any],
        backward: Callable[[Any], Any],
        *,
        budget_s: float,
        least: int = 5,
        most: int = 1000,
    ) -> tuple[Timing, Timing]:
        out = forward()
        self.given.append((out, backward(out)))
        first, second = (
            Timing(median_ns=ns, low_ns=ns, high_ns=ns, count=1) for ns in (1000.0, 3000.0)
        )
        return first, second


def _tasks(timer: KernelTimer, tokens: tuple[int, ...] = (8,), tps: tuple[int, ...] = (1, 2)):
    return linear_tasks(MODEL, tps, tokens, timer, device=CPU, dtype=torch.float32, loss_chunk=4)


def _task(timer: KernelTimer, kind: str, **point: Any) -> Task:
    (task,) = [
        t for t in _tasks(timer) if t.kind == kind and point.items() <= dict(t.point).items()
    ]
    return task


def test_a_rank_s_matrices():
    # Q, K, V, O, gate, up, down: columns split, but O's and down's rows.
    assert rank_matrices(MODEL, 1) == (
        (32, 64), (32, 32), (32, 32), (64, 32), (32, 48), (32, 48), (48, 32)
    )  # fmt: skip
    assert rank_matrices(MODEL, 2) == (
        (32, 32), (32, 16), (32, 16), (32, 32), (32, 24), (32, 24), (24, 32)
    )  # fmt: skip
    assert rank_matrices(MODEL, 2) == layer_matrices(rank_model(MODEL, 2))


def test_the_points():
    tasks = _tasks(OnceTimer())
    gemms = [t.point for t in tasks if t.kind == "gemm"]
    assert [(g["rows"], g["columns"], g["tp"]) for g in gemms] == [
        (32, 64, 1), (32, 32, 1), (64, 32, 1), (32, 48, 1), (48, 32, 1),
        (32, 16, 2), (32, 24, 2), (24, 32, 2),
    ]  # fmt: skip
    assert {(t.point["op"], t.point["width"], t.point["tokens"]) for t in tasks
            if t.kind == "elementwise"} == {
        (op, width, tokens)
        for tokens in (1, 8)
        for op, width in [
            ("norm", 32), ("residual", 32), ("rotary", 64), ("rotary", 32), ("rotary", 16),
            ("swiglu", 48), ("swiglu", 24),
        ]
    }  # fmt: skip
    ends = [(t.kind, t.point["vocab"]) for t in tasks if t.kind in ("embedding", "head")]
    assert sorted(ends) == [("embedding", 256), ("embedding", 512), ("head", 256), ("head", 512)]
    assert [t.point for t in tasks if t.kind == "layer"] == [
        {"tokens": 8, "tp": 1}, {"tokens": 8, "tp": 2}
    ]  # fmt: skip


def test_norms_of_heads_are_measured_as_rows_of_their_own():
    """Tokens and width are Q's or K's; a row of the norm is one head."""
    model = replace(MODEL, qk_norm=True)
    tasks = linear_tasks(model, [1, 2], [8], OnceTimer(), device=CPU, dtype=torch.float32)
    of_heads = [t for t in tasks if t.point.get("op") == "head_norm"]
    assert {(t.point["width"], t.point["tokens"]) for t in of_heads} == {
        (width, tokens) for width in (64, 32, 16) for tokens in (1, 8)
    }
    rows: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = linear.normalise
        patch.setattr(
            linear, "normalise", lambda n, x, w, **k: rows.append(x.shape) or plain(n, x, w, **k)
        )
        numbers = next(
            t for t in of_heads if t.point == {**t.point, "width": 64, "tokens": 8}
        ).run()
    assert set(rows) == {(8 * 64 // model.head_size, model.head_size)}
    assert (numbers["forward_bytes"], numbers["backward_bytes"]) == (2 * 8 * 64 * 4, 3 * 8 * 64 * 4)


def test_a_model_with_experts_in_some_layers_has_points_of_both_kinds():
    """An MLP of 48, and two experts of 40, which are one MLP of 80."""
    experts = ExpertsSpec(num=4, per_token=2, hidden_size=40, dense_layers=(0,))
    model = replace(MODEL, num_layers=2, experts=experts)
    tasks = linear_tasks(model, (1,), (8,), OnceTimer(), device=CPU, dtype=torch.float32)
    gemms = {(t.point["rows"], t.point["columns"]) for t in tasks if t.kind == "gemm"}
    assert {(32, 48), (48, 32), (32, 80), (80, 32)} <= gemms
    assert {t.point["width"] for t in tasks if t.point.get("op") == "swiglu"} == {48, 80}
    odd = replace(model, ffn_hidden_size=49)
    with pytest.raises(ValueError, match="tp = 2 does not divide the model's ffn_hidden_size = 49"):
        linear_tasks(odd, (2,), (8,), OnceTimer(), device=CPU, dtype=torch.float32)


def test_points_are_measured_once_and_in_a_fixed_order():
    keys = [task.key for task in _tasks(OnceTimer(), tokens=(16, 8, 16), tps=(1, 2, 1))]
    assert max(Counter(keys).values()) == 1
    assert keys == [task.key for task in _tasks(OnceTimer(), tokens=(8, 16))]


def test_every_task_runs_and_keeps_nothing():
    for task in _tasks(OnceTimer()):
        timer = OnceTimer()
        (mine,) = [t for t in _tasks(timer) if t.key == task.key]
        numbers = mine.run()
        assert (numbers["forward_ns"], numbers["count"]) == (1000.0, 1.0)
        out, _ = timer.given[0]
        held = weakref.ref(out)
        del out
        timer.given.clear()
        assert held() is None, task.key


def test_a_gemm_gives_the_output_and_both_gradients():
    timer = OnceTimer()
    numbers = _task(timer, "gemm", rows=32, columns=48).run()
    out, (dx, dweight) = timer.given[0]
    assert (out.shape, dx.shape, dweight.shape) == ((8, 48), (8, 32), (48, 32))
    assert not out.requires_grad
    assert numbers["backward_ns"] == 3000.0


def test_entering_autograd_is_taken_off_backward():
    timer = OnceTimer()
    numbers = _task(timer, "elementwise", op="norm", tokens=8).run()
    assert (numbers["backward_ns"], numbers["entry_ns"]) == (0.0, 3000.0)
    assert len(timer.given) == 2


def test_a_residual_s_backward_adds_the_gradients_of_its_two_uses():
    timer = OnceTimer()
    _task(timer, "elementwise", op="residual", tokens=8).run()
    _, (dx, dy) = timer.given[0]
    # All random tensors of a shape are equal, so the branch's gradient is the sum's.
    assert torch.equal(dx, 2 * dy)
    assert dy.abs().sum() > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_s_backward_reaches_all_its_weights(tp: int):
    timer = OnceTimer()
    _task(timer, "layer", tp=tp).run()
    out, gradients = timer.given[0]
    layer = build_reference(rank_model(MODEL, tp)).model.layers["0"]
    shapes = [p.shape for p in layer.parameters()]
    assert [g.shape for g in gradients] == [(8, 32), *shapes]
    assert all(g.abs().sum() > 0 for g in gradients)
    assert out.shape == (8, 32)


def test_the_head_s_loss_is_near_that_of_guessing():
    timer = OnceTimer()
    _task(timer, "head", vocab=512).run()
    loss, (dx, dweight) = timer.given[0]
    assert loss.item() / 8 == pytest.approx(torch.tensor(512.0).log().item(), rel=0.1)
    assert (dx.shape, dweight.shape) == ((8, 32), (512, 32))


def test_under_tp_tokens_of_other_ranks_embed_to_zero():
    timer = OnceTimer()
    _task(timer, "embedding", vocab=256).run()
    out, (dweight,) = timer.given[0]
    foreign = (out == 0).all(-1)
    assert 0 < int(foreign.sum()) < 8
    # Rows of the weight that got a gradient: one a token of this rank, unless one comes twice.
    assert 0 < int((dweight != 0).any(-1).sum()) <= 8 - int(foreign.sum())


def test_counted_bytes_are_the_cost_model_s():
    widths = [
        *[("norm", MODEL.hidden_size), ("residual", MODEL.hidden_size)] * 2,
        ("rotary", MODEL.q_dim),
        ("rotary", MODEL.kv_dim),
        ("swiglu", MODEL.ffn_hidden_size),
    ]
    counted = {op: (0, 0) for op, _ in widths}
    for op, width in widths:
        forward, backward = counted[op]
        counted[op] = (forward + FORWARD_VALUES[op] * width, backward + BACKWARD_VALUES[op] * width)
    expected = elementwise_values(MODEL)
    del expected["embedding"]
    assert counted == expected
    # Norms of heads have Q's and K's values, those of whole rows too; biases are added to Q, K, V.
    more = elementwise_values(replace(MODEL, qk_norm=True, qkv_bias=True))
    normed, biased = MODEL.q_dim + MODEL.kv_dim, MODEL.q_dim + 2 * MODEL.kv_dim
    assert (more["norm"], more["head_norm"]) == (expected["norm"], (2 * normed, 3 * normed))
    rows = elementwise_values(replace(MODEL, qk_norm_rows=True))
    assert rows["norm"] == (expected["norm"][0] + 2 * normed, expected["norm"][1] + 3 * normed)
    plain = expected["residual"]
    assert more["residual"] == (plain[0] + 2 * biased, plain[1] + biased)
    numbers = _task(OnceTimer(), "elementwise", op="swiglu", tokens=8, width=48).run()
    assert numbers["forward_bytes"] == 3 * 8 * 48 * 4
    assert numbers["backward_bytes"] == 5 * 8 * 48 * 4


def test_real_times():
    timer = make_timer(CPU)
    tasks = linear_tasks(MODEL, (1,), (8,), timer, device=CPU, dtype=torch.float32, budget_s=0.0)
    for task in tasks:
        numbers = task.run()
        assert numbers["forward_ns"] > 0, task.key
        assert numbers["forward_low_ns"] <= numbers["forward_ns"] <= numbers["forward_high_ns"]
        assert numbers["backward_ns"] >= 0, task.key


@pytest.mark.parametrize(
    ("model", "tps", "tokens", "message"),
    [
        (ModelSpec(), (1,), (8,), r"vocab_size = 0"),
        (MODEL, (8,), (8,), r"tp = 8 does not divide the model's num_heads = 4"),
        (MODEL, (1,), (), r"tokens \[\]"),
        (MODEL, (1,), (0,), r"tokens \[0\]"),
        (MODEL, (), (8,), r"TP degrees \[\]"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: ModelSpec, tps: tuple[int, ...], tokens: tuple[int, ...], message: str
):
    with pytest.raises(ValueError, match=message):
        linear_tasks(model, tps, tokens, OnceTimer(), device=CPU, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: none here")
def test_all_tasks_on_a_gpu_in_bf16():
    device = torch.device("cuda", 0)
    tasks = linear_tasks(
        MODEL, (1, 2), (8, 64), make_timer(device), device=device, dtype=torch.bfloat16,
        budget_s=0.0,
    )  # fmt: skip
    for task in tasks:
        numbers = task.run()
        assert min(numbers["forward_ns"], numbers["backward_ns"]) > 0, task.key
        assert "entry_ns" not in numbers
    allocated = torch.cuda.memory_allocated(device)
    tasks[-1].run()
    assert torch.cuda.memory_allocated(device) == allocated
