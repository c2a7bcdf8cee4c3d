"""Weight gradients computed later than the backward pass, as zero-bubble schedules need.

Such a schedule first computes the gradients of a micro-batch's inputs, which the previous stage
waits for, and fills bubbles with the weight gradients. Linear layers here queue (input, output
gradient) for torch's schedule, which takes them through `dw_builder`. torch's own split handles
autograd functions wrongly (https://github.com/pytorch/pytorch/issues/166577, 170277, 174017).
Norms, embedding and head compute their weight gradients in the first pass.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wlb.model import Ops

Begin = Callable[[], Tensor]
Compute = Callable[[Tensor | None], Sequence[Tensor]]


class WeightQueue:
    """Weight gradients of the current backward pass that are not computed yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence[nn.Parameter], Begin | None, Compute]] = []

    def push(
        self, parameters: Sequence[nn.Parameter], compute: Compute, *, begin: Begin | None = None
    ) -> None:
        """Queue compute(begun), which returns the local gradient of each of `parameters`.

        begin() starts a collective whose result is `begun` (None without a collective). It is
        called one entry ahead, so that it hides behind the gradients computed before.
        """
        if any(parameter.requires_grad for parameter in parameters):
            self._waiting.append((parameters, begin, compute))

    def take(self) -> Callable[[], None]:
        """Empty the queue; returns a function that computes and accumulates what was in it."""
        waiting, self._waiting = self._waiting, []

        def begin_next() -> Tensor | None:
            begin = waiting[-1][1] if waiting else None
            return None if begin is None else begin()

        @torch.no_grad()
        def run() -> None:
            begun = begin_next()
            while waiting:
                parameters, _, compute = waiting.pop()  # frees each entry's activations early
                current, begun = begun, begin_next()
                for parameter, grad in zip(parameters, compute(current), strict=True):
                    if parameter.requires_grad:
                        _accumulate(parameter, grad)

        return run


def _accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    if isinstance(parameter, DTensor):
        grad = DTensor.from_local(
            grad, parameter.device_mesh, parameter.placements, run_check=False
        )
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class Product(torch.autograd.Function):
    """x_TC times weight_FC; saves nothing, and backward only stores its gradient in grads[i].

    The node that produced x_TC saves it and runs the backward pass. Autograd functions save tensors
    at the end of forward, so if this one saved x_TC, activation recompute would have to repeat a
    layer's last product.
    """

    @staticmethod
    def forward(
        ctx: Any, grads: dict[int, Tensor], i: int, x_TC: Tensor, weight_FC: Tensor
    ) -> Tensor:
        ctx.grads, ctx.i = grads, i
        return x_TC @ weight_FC.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.grads[ctx.i] = grads[0]
        return None, None, None, None


class _Input(torch.autograd.Function):
    """Save x_TC for the `Product` that follows; backward queues the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        queue: WeightQueue,
        parameter: nn.Parameter,
        grads: dict[int, Tensor],
        x_TC: Tensor,
        weight_FC: Tensor,
    ) -> Tensor:
        ctx.queue, ctx.parameter, ctx.grads = queue, parameter, grads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TC, weight_FC)
        return x_TC.view_as(x_TC)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        x_TC, weight_FC = ctx.saved_tensors
        grad_TF = ctx.grads.pop(0)
        ctx.queue.push([ctx.parameter], lambda _: [grad_TF.t() @ x_TC])
        return None, None, None, grad_TF @ weight_FC, None


class DeferringOps(Ops):
    """The plain layers, except that linear layers put their weight gradients into `queue`."""

    def __init__(self) -> None:
        self.queue = WeightQueue()

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        return (self.fan_in(x_TC, linear) for linear in linears)

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        weight, grads = linear.weight, dict[int, Tensor]()
        kept = _Input.apply(self.queue, weight, grads, x_TC, weight)
        out: Tensor = Product.apply(grads, 0, kept, weight.detach())  # pyright: ignore[reportAssignmentType]
        return out
