"""Weight gradients that are computed later than the backward pass: what zero-bubble schedules need.

Such a schedule runs a micro-batch's backward for the inputs' gradients first, since the stage
before waits for them, and the weights' gradients in what would be a bubble. Linear layers here
compute only the input's gradient in backward and leave (input, output gradient) in a queue; the
stage's `dw_builder` hands the queue to torch's schedule, which runs it at its W action.

torch can also split a backward pass by itself (`stage_backward_input`), but on 2.11 that fails at
Python autograd functions and adds the gradients of a node's several outputs together, and on every
version it runs such functions whole twice. Norms, embedding and head stay in the first pass.
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
    """Weight gradients of the backward pass at work, not computed yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence[nn.Parameter], Begin | None, Compute]] = []

    def push(
        self, parameters: Sequence[nn.Parameter], compute: Compute, *, begin: Begin | None = None
    ) -> None:
        """compute(begun) gives the local gradient of each of `parameters`, in order.

        begin() starts a collective that compute waits for; it is called while the gradients before
        are computed, so that one hides behind the other. None is passed where there is none.
        """
        if any(parameter.requires_grad for parameter in parameters):
            self._waiting.append((parameters, begin, compute))

    def take(self) -> Callable[[], None]:
        """A function that computes and adds all that waits now; the queue is empty after."""
        waiting, self._waiting = self._waiting, []

        def begin_next() -> Tensor | None:
            begin = waiting[-1][1] if waiting else None
            return None if begin is None else begin()

        @torch.no_grad()
        def run() -> None:
            begun = begin_next()
            while waiting:
                parameters, _, compute = waiting.pop()  # frees its activations as it goes
                this, begun = begun, begin_next()
                for parameter, grad in zip(parameters, compute(this), strict=True):
                    if parameter.requires_grad:
                        _add(parameter, grad)

        return run


def _add(parameter: nn.Parameter, grad: Tensor) -> None:
    if isinstance(parameter, DTensor):
        grad = DTensor.from_local(
            grad, parameter.device_mesh, parameter.placements, run_check=False
        )
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class Product(torch.autograd.Function):
    """x_TC times weight_FC; keeps nothing, and backward only leaves its gradient in grads[i].

    The node that x_TC comes from has the backward pass. It keeps x_TC, which an autograd function
    does at the end of its forward pass: kept here, a layer that is run again (`recompute`) would
    have to compute its last product too.
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
    """x_TC itself, kept for the `Product` that follows; the weight's gradient goes to the queue."""

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
    """The plain layers, with the weight gradients of linear ones left in `queue`."""

    def __init__(self) -> None:
        self.queue = WeightQueue()

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        return (self.fan_in(x_TC, linear) for linear in linears)

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        weight, grads = linear.weight, dict[int, Tensor]()
        kept = _Input.apply(self.queue, weight, grads, x_TC, weight)
        out: Tensor = Product.apply(grads, 0, kept, weight.detach())  # pyright: ignore[reportAssignmentType]
        return out
