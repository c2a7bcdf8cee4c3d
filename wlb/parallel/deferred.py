"""Weight gradients that are computed later than the backward pass: what zero-bubble schedules need.

Such a schedule runs a micro-batch's backward for the inputs' gradients first, since the stage
before waits for them, and the weights' gradients in what would be a bubble. Linear layers here
compute only the input's gradient in backward and leave (input, output gradient) in a queue; the
stage's `dw_builder` hands the queue to torch's schedule, which runs it at its W action.

torch can also split a backward pass by itself (`stage_backward_input`), but on 2.11 that fails at
Python autograd functions and adds the gradients of a node's several outputs together, and on every
version it runs such functions whole twice. Norms, embedding and head stay in the first pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wlb.model import Ops

Compute = Callable[[], Sequence[Tensor]]


class WeightQueue:
    """Weight gradients of the backward pass at work, not computed yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence[nn.Parameter], Compute]] = []

    def push(self, parameters: Sequence[nn.Parameter], compute: Compute) -> None:
        """compute() gives the local gradient of each of `parameters`, in order."""
        self._waiting.append((parameters, compute))

    def take(self) -> Callable[[], None]:
        """A function that computes and adds all that waits now; the queue is empty after."""
        waiting, self._waiting = self._waiting, []

        @torch.no_grad()
        def run() -> None:
            while waiting:
                parameters, compute = waiting.pop()  # frees its activations as it goes
                for parameter, grad in zip(parameters, compute(), strict=True):
                    _add(parameter, grad)

        return run


def _add(parameter: nn.Parameter, grad: Tensor) -> None:
    if isinstance(parameter, DTensor):
        grad = DTensor.from_local(
            grad, parameter.device_mesh, parameter.placements, run_check=False
        )
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class _Linears(torch.autograd.Function):
    """x_TC times each weight_FC; the weights' gradients go to the queue."""

    @staticmethod
    def forward(
        ctx: Any,
        queue: WeightQueue,
        parameters: Sequence[nn.Parameter],
        x_TC: Tensor,
        *weights_FC: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.queue, ctx.parameters = queue, parameters
        ctx.save_for_backward(x_TC, *weights_FC)
        return tuple(x_TC @ weight.t() for weight in weights_FC)

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, *weights = ctx.saved_tensors
        ctx.queue.push(ctx.parameters, lambda: [grad.t() @ x_TC for grad in grads_TF])
        dx_TC = grads_TF[0] @ weights[0]
        for grad, weight in zip(grads_TF[1:], weights[1:], strict=True):
            dx_TC.addmm_(grad, weight)
        return None, None, dx_TC, *([None] * len(weights))


class DeferringOps(Ops):
    """The plain layers, with the weight gradients of linear ones left in `queue`."""

    def __init__(self) -> None:
        self.queue = WeightQueue()

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        weights = [linear.weight for linear in linears]
        out: tuple[Tensor, ...] = _Linears.apply(self.queue, weights, x_TC, *weights)  # pyright: ignore[reportAssignmentType]
        return out

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        return self.fan_out(x_TC, linear)[0]
