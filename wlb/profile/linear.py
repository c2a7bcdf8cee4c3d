"""Tasks that measure everything in a layer except attention (W_l in Eq. 2 of the paper).

Forward and backward of one rank are timed separately, without collectives, through the modules of
`wlb.model` and autograd. The kinds of tasks are:

- gemm: the matrix products of a weight.
- elementwise: an element-wise operator. Its forward_bytes and backward_bytes are the bytes that
  `wlb.cost.flops` counts, and not the bytes that eager PyTorch moves.
- embedding, head: the first and the last part of the model.
- layer: a whole layer, in which a function that returns q replaces attention.
- held_layer: whole layers with other numbers of tokens, which only test the fit.

A layer of a TP rank computes norms and residuals of all tokens here, because no other TP rank runs
that could compute a part of them. A task allocates its tensors when it runs, and frees them
afterwards.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from wlb.cost.flops import layer_matrices, rank_model
from wlb.kernels.fused import choose_fused
from wlb.model import Ops
from wlb.model.elementwise import gated, inverse_frequencies, normalise, rope_tables, rotate
from wlb.model.llama import DecoderLayer, LocalAttend, Rows
from wlb.model.loss import head_loss
from wlb.plan import UserError
from wlb.profile.tasks import Numbers, Task
from wlb.profile.timing import KernelTimer
from wlb.spec import FusedKernels, ModelSpec

ROW_PARALLEL = (3, 6)
"""Indices in `layer_matrices` of the output and down projections.

TP divides these two weights by input channels, and all other weights by output channels."""

FORWARD_VALUES = {"norm": 2, "head_norm": 2, "rotary": 2, "swiglu": 3, "residual": 3}
"""Operator -> number of values that forward reads and writes for each token and channel."""
BACKWARD_VALUES = {"norm": 3, "head_norm": 3, "rotary": 2, "swiglu": 5, "residual": 3}
"""Operator -> number of values that backward reads and writes for each token and channel.

The backward of a residual connection sums two gradients: of the sum and of the branch."""

SEED = 20_25


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskBench:
    """Makes tensors for tasks, and times forward and backward passes on them."""

    timer: KernelTimer  # measures the passes
    device: torch.device  # device of the tensors
    dtype: torch.dtype  # dtype of the tensors
    budget_s: float  # seconds for the repeats of a task

    def fuses(self, model: ModelSpec) -> bool:
        """Return whether a run on this device with `kernels.fused = auto` uses fused kernels."""
        choice = choose_fused(
            FusedKernels.AUTO, device=self.device, dtype=self.dtype, norm_width=model.norm_width
        )
        return choice.fused

    def random(self, *shape: int, scale: float = 1.0, grad: bool = False) -> Tensor:
        """Return normally distributed values.

        Constants would give wrong times, because on a GPU the time of a matrix product depends on
        its values. The more bits flip, the more power the product takes.

        Args:
            *shape: Shape of the tensor.
            scale: Standard deviation.
            grad: Whether the tensor requires gradients.
        """
        generator = torch.Generator(self.device).manual_seed(SEED)
        values = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return values.mul_(scale).requires_grad_(grad)

    def integers(self, below: int, count: int) -> Tensor:
        """Return `count` random integers from 0 to `below` - 1."""
        generator = torch.Generator(self.device).manual_seed(SEED)
        return torch.randint(below, (count,), generator=generator, device=self.device)

    def passes(self, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> Numbers:
        """Time a forward and a backward pass. `backward` is called with the result of `forward`."""
        timings = self.timer.time_passes(forward, backward, budget_s=self.budget_s)
        numbers: Numbers = {}
        for name, timing in zip(("forward", "backward"), timings, strict=True):
            numbers[f"{name}_ns"] = timing.median_ns
            numbers[f"{name}_low_ns"] = timing.low_ns
            numbers[f"{name}_high_ns"] = timing.high_ns
            numbers[f"{name}_host_ns"] = timing.host_ns
        return {**numbers, "count": timings[0].count}

    def gradients(
        self, forward: Callable[[], Tensor], inputs: Sequence[Tensor], gradient: Tensor
    ) -> Numbers:
        """Time `forward`, and the computation of its gradients by autograd.

        Args:
            forward: The forward pass.
            inputs: Tensors for which gradients are computed.
            gradient: Gradient of the result of `forward`.
        """
        return self.graph(forward, lambda out: torch.autograd.grad(out, inputs, gradient))

    def graph(
        self, forward: Callable[[], Tensor], backward: Callable[[Tensor], Sequence[Tensor]]
    ) -> Numbers:
        """Time an operator's forward, and its backward without autograd's constant overhead.

        The overhead of a call of autograd is about ten times the time of a small operator. Training
        calls autograd once for a stage, not once for each operator, so the overhead is subtracted.
        This is done only on a CPU: times on a GPU do not contain the overhead of the host.

        Args:
            forward: Computes the output.
            backward: Computes the gradients by autograd from the output.
        """
        numbers = self.passes(forward, backward)
        if self.device.type == "cpu":
            entry_ns = self._entry_ns()
            for name in ("backward_ns", "backward_low_ns", "backward_high_ns"):
                numbers[name] = max(0.0, numbers[name] - entry_ns)
            numbers["entry_ns"] = entry_ns
        return numbers

    def _entry_ns(self) -> float:
        """Return the ns that autograd itself takes in backward, measured on a single `view`."""
        x, gradient = torch.zeros(1, requires_grad=True), torch.ones(1)
        _, entered = self.timer.time_passes(
            lambda: x.view(1),
            lambda out: torch.autograd.grad(out, x, gradient),
            budget_s=self.budget_s / 20,
            least=20,
        )
        return entered.median_ns


def linear_tasks(
    model: ModelSpec,
    tp_degrees: Sequence[int],
    tokens: Sequence[int],
    timer: KernelTimer,
    *,
    device: torch.device,
    dtype: torch.dtype,
    loss_chunk: int = 8192,
    held_tokens: Sequence[int] = (),
    budget_s: float = 0.2,
) -> list[Task]:
    """Return the tasks that measure all operators and layers of a model, one for each shape.

    A task measures forward_ns and backward_ns (medians), *_low_ns and *_high_ns (10th and 90th
    percentile), *_host_ns (time of the host) and count (number of repeats). On a CPU it also
    measures entry_ns, the overhead of a call of autograd, and subtracts it from backward_ns.

    Args:
        model: Model of the sweep.
        tp_degrees: TP degrees to measure. At each degree, weights and activations have the shapes
            that they have on one rank.
        tokens: Numbers of rows (tokens of a CP rank) for which operators and layers are measured.
        timer: Timer of the device.
        device: Device to measure.
        dtype: Data type of weights and activations.
        loss_chunk: Number of rows for which logits are computed at a time.
        held_tokens: Numbers of rows for which whole layers are also measured. These times are not
            fitted, but only test the fit.
        budget_s: Seconds for the repeats of a task, both passes together.

    Raises:
        UserError: If the sizes of the model are not multiples of a TP degree.
    """
    _check(model, tp_degrees, tokens)
    bench = _TaskBench(timer=timer, device=device, dtype=dtype, budget_s=budget_s)
    tasks: dict[str, Task] = {}

    def add(kind: str, run: Callable[..., Numbers], *fixed: Any, **point: Any) -> None:
        task = Task(kind=kind, point=point, run=partial(run, bench, *fixed, **point))
        tasks.setdefault(task.key, task)

    # Several TP degrees may have equal shapes. Measure each matrix once, under the first degree.
    counts = sorted(set(tokens))
    matrices: dict[tuple[int, int], int] = {}  # (in, out) -> the first TP degree that has it
    for tp, (kind, *_) in product(tp_degrees, model.layer_kinds):
        for matrix in rank_matrices(kind, tp):
            matrices.setdefault(matrix, tp)
    for count, ((rows, columns), tp) in product(counts, matrices.items()):
        add("gemm", _gemm, tokens=count, rows=rows, columns=columns, tp=tp)
    for count, (op, width) in product(sorted({1, *tokens}), _widths(model, tp_degrees)):
        add("elementwise", _elementwise, model, op=op, tokens=count, width=width)
    for count, tp in product(counts, tp_degrees):
        vocab = model.padded_vocab_size // tp
        ends = {"tokens": count, "hidden": model.hidden_size, "vocab": vocab}
        add("embedding", _embedding, tp, **ends)
        add("head", _head, loss_chunk, **ends)
        add("layer", _layer, model, tokens=count, tp=tp)
    for count, tp in product(held_tokens, tp_degrees):
        add("held_layer", _layer, model, tokens=count, tp=tp)
    return list(tasks.values())


def rank_matrices(model: ModelSpec, tp: int) -> tuple[tuple[int, int], ...]:
    """Return (input channels, output channels) of each weight of a layer on a TP rank.

    Args:
        model: Model whose layers are all of one kind.
        tp: TP degree.
    """
    return tuple(
        (rows // tp, columns) if i in ROW_PARALLEL else (rows, columns // tp)
        for i, (rows, columns) in enumerate(layer_matrices(model.with_kv_copies(tp)))
    )


def _check(model: ModelSpec, tp_degrees: Sequence[int], tokens: Sequence[int]) -> None:
    model.check()
    if model.vocab_size < 1:
        raise UserError(
            "model.vocab_size = 0 takes the vocabulary size of the token store, but a sweep has no "
            "store; set model.vocab_size"
        )
    if min(tokens, default=0) < 1 or min(tp_degrees, default=0) < 1:
        raise UserError(
            f"numbers of tokens {list(tokens)} and TP degrees {list(tp_degrees)} must not be "
            "empty, and each number must be at least 1"
        )
    shared = {
        "num_heads": model.num_heads,
        "padded vocabulary": model.padded_vocab_size,
        **{
            "summed intermediate size of a token's experts"
            if kind.experts.num
            else "ffn_hidden_size": kind.active_ffn_size
            for kind, *_ in model.layer_kinds
        },
    }
    for tp in tp_degrees:
        num_kv = {"num_kv_heads": model.with_kv_copies(tp).num_kv_heads}
        for name, size in (shared | num_kv).items():
            if size % tp:
                raise UserError(
                    f"tp = {tp} does not divide the model's {name} = {size}; lower parallel.tp"
                )


def _gemm(bench: _TaskBench, *, tokens: int, rows: int, columns: int, tp: int) -> Numbers:
    x, grad = bench.random(tokens, rows), bench.random(tokens, columns)
    weight = bench.random(columns, rows, scale=0.02)
    return bench.passes(lambda: x @ weight.t(), lambda _: (grad @ weight, grad.t() @ x))


def _widths(model: ModelSpec, tp_degrees: Iterable[int]) -> list[tuple[str, int]]:
    """Return (operator, channels per token) of all element-wise operators at the TP degrees."""
    widths = {("norm", model.hidden_size), ("residual", model.hidden_size)}
    for tp in tp_degrees:
        head_operators = ("rotary", "head_norm") if model.qk_norm else ("rotary",)
        kv_dim = model.with_kv_copies(tp).kv_dim // tp
        widths |= set(product(head_operators, (model.q_dim // tp, kv_dim)))
        widths |= {("swiglu", kind.active_ffn_size // tp) for kind, *_ in model.layer_kinds}
    return sorted(widths)


def _elementwise(
    bench: _TaskBench, model: ModelSpec, *, op: str, tokens: int, width: int
) -> Numbers:
    measure = {
        "norm": _norm,
        "head_norm": _head_norm,
        "rotary": _rotary,
        "swiglu": _swiglu,
        "residual": _residual,
    }[op]
    value_bytes = tokens * width * bench.dtype.itemsize
    return measure(bench, model, tokens, width) | {
        "forward_bytes": FORWARD_VALUES[op] * value_bytes,
        "backward_bytes": BACKWARD_VALUES[op] * value_bytes,
    }


def _norm(bench: _TaskBench, model: ModelSpec, tokens: int, width: int) -> Numbers:
    norm = nn.RMSNorm(width, eps=model.norm_eps, device=bench.device, dtype=bench.dtype)
    x, fused = bench.random(tokens, width, grad=True), bench.fuses(model)
    gradient = bench.random(tokens, width)
    return bench.gradients(
        lambda: normalise(norm, x, norm.weight, fused=fused), [x, norm.weight], gradient
    )


def _head_norm(bench: _TaskBench, model: ModelSpec, tokens: int, width: int) -> Numbers:
    """Time the RMSNorm of each head, where `width` is head size times number of heads."""
    return _norm(bench, model, tokens * width // model.head_size, model.head_size)


def _rotary(bench: _TaskBench, model: ModelSpec, tokens: int, width: int) -> Numbers:
    shape = (tokens, width // model.head_size, model.head_size)
    x, cos_sin = bench.random(*shape, grad=True), _tables(bench, model, tokens)
    fused = bench.fuses(model)
    return bench.gradients(lambda: rotate(x, *cos_sin, fused=fused), [x], bench.random(*shape))


def _swiglu(bench: _TaskBench, model: ModelSpec, tokens: int, width: int) -> Numbers:
    gate, up = (bench.random(tokens, width, grad=True) for _ in range(2))
    gradient, fused = bench.random(tokens, width), bench.fuses(model)
    return bench.gradients(
        lambda: gated(gate, up, model.activation, fused=fused), [gate, up], gradient
    )


def _residual(bench: _TaskBench, _: ModelSpec, tokens: int, width: int) -> Numbers:
    x, y = (bench.random(tokens, width, grad=True) for _ in range(2))
    by_sum, by_branch = (bench.random(tokens, width) for _ in range(2))

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        # A layer computes x + branch(x), so autograd adds two gradients of x: that of the sum and
        # that of the branch. Here the branch is not computed. Instead, x is a second output of the
        # graph, and its gradient is given, so autograd adds two gradients of x as well.
        return torch.autograd.grad((out, x), (x, y), (by_sum, by_branch))

    return bench.graph(lambda: x + y, backward)


def _tables(bench: _TaskBench, model: ModelSpec, tokens: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(tokens, device=bench.device)
    return rope_tables(positions, inverse_frequencies(model, bench.device))


def _embedding(bench: _TaskBench, tp: int, *, tokens: int, hidden: int, vocab: int) -> Numbers:
    """Measure the embedding on a TP rank, which reads a row for every token.

    The rows of tokens in another rank's part of the vocabulary are then multiplied by 0.
    """
    weight = bench.random(vocab, hidden, grad=True)
    index = bench.integers(vocab * tp, tokens)

    def forward() -> Tensor:
        if tp == 1:
            return nn.functional.embedding(index, weight)
        here = (index >= 0) & (index < vocab)
        return nn.functional.embedding(index.clamp(0, vocab - 1), weight) * here[:, None]

    return bench.gradients(forward, [weight], bench.random(tokens, hidden))


def _head(bench: _TaskBench, chunk: int, *, tokens: int, hidden: int, vocab: int) -> Numbers:
    x = bench.random(tokens, hidden, grad=True)
    weight = bench.random(vocab, hidden, scale=0.02, grad=True)
    labels = bench.integers(vocab, tokens)

    def forward() -> Tensor:
        return head_loss(x, weight, labels, vocab_size=vocab, chunk=chunk)

    return bench.gradients(forward, [x, weight], torch.ones((), device=bench.device))


class _PassThrough(torch.autograd.Function):
    """Takes the place of attention, without its time, in a measured layer.

    Forward returns q. Backward returns the gradients dk and dv that forward was given.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        ctx.gradients = dk, dv
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *grads, *ctx.gradients, None, None


def _layer(bench: _TaskBench, model: ModelSpec, *, tokens: int, tp: int) -> Numbers:
    model, ops = rank_model(model, tp), Ops()
    ops.fused = bench.fuses(model)
    with torch.device(bench.device):
        layer = DecoderLayer(model, ops).to(bench.dtype)
    x, gradient = (bench.random(tokens, model.hidden_size, grad=g) for g in (True, False))
    keys = (tokens, model.num_kv_heads, model.head_size)
    dk, dv = bench.random(*keys), bench.random(*keys)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _PassThrough.apply(q, k, v, dk, dv)  # pyright: ignore[reportAssignmentType]
        return out

    cos, sin = _tables(bench, model, tokens)
    rows = Rows(cos=cos, sin=sin, attend=LocalAttend(attend))
    return bench.gradients(lambda: layer(x, rows), [x, *layer.parameters()], gradient)
