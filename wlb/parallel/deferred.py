"""Weight gradients that are computed later than the backward pass, for zero-bubble schedules.

Linear layers put (input, output gradient) into a queue. torch's schedule takes the queue through
`dw_builder` and fills bubbles with its work. torch has a split of its own, but it handles autograd
functions wrongly (https://github.com/pytorch/pytorch/issues/166577, 170277, 174017). Norms,
embedding and head compute their weight gradients in the first pass.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wlb.model import Ops

Begin = Callable[[], Tensor]
"""Starts a collective and returns its result, which is still in transfer."""
Compute = Callable[[Tensor | None], Sequence[Tensor]]
"""Returns the gradients of some weights, from the result of `Begin` or None."""
Multiply = Callable[[Tensor, Tensor], Tensor]
"""Returns the product of an input and a weight."""
Differentiate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Returns the gradients of input and weight, from the output's gradient, input and weight."""


class WeightQueue:
    """Weight gradients of the current backward pass that are not computed yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence[Tensor], Begin | None, Compute]] = []

    def push(
        self, parameters: Sequence[Tensor], compute: Compute, *, begin: Begin | None = None
    ) -> None:
        """Queue the computation of some weight gradients.

        Args:
            parameters: The weights.
            compute: Returns the local gradient of each of them, given the result of `begin`.
            begin: Starts a collective whose result `compute` needs; None if it needs none. It is
                called one entry ahead, so that the collective hides behind the gradients computed
                before.
        """
        if any(parameter.requires_grad for parameter in parameters):
            self._waiting.append((parameters, begin, compute))

    def take(self) -> Callable[[], None]:
        """Empty the queue, and return a function that computes and accumulates its gradients."""
        waiting, self._waiting = self._waiting, []

        def begin_next() -> Tensor | None:
            begin = waiting[-1][1] if waiting else None
            return None if begin is None else begin()

        @torch.no_grad()
        def run() -> None:
            begun = begin_next()
            while waiting:
                # Remove entries one by one, so that their activations are freed early.
                parameters, _, compute = waiting.pop()
                current, begun = begun, begin_next()
                for parameter, grad in zip(parameters, compute(current), strict=True):
                    if parameter.requires_grad:
                        _accumulate(parameter, grad)

        return run


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    if isinstance(parameter, DTensor):
        grad = DTensor.from_local(
            grad, parameter.device_mesh, parameter.placements, run_check=False
        )
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class Product(torch.autograd.Function):
    """Computes multiply(x, weight) and saves nothing; backward only stores its gradient.

    The gradient goes to grads[i]. The node that produced x (`_Input`) saves x and runs the backward
    pass. An autograd function saves tensors at the end of its forward. If this one saved x,
    activation recompute would have to repeat a layer's last product and its collective just to save
    it.
    """

    @staticmethod
    def forward(
        ctx: Any, multiply: Multiply, grads: dict[int, Tensor], i: int, x: Tensor, weight: Tensor
    ) -> Tensor:
        """Return the product."""
        ctx.grads, ctx.i = grads, i
        return multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        """Store the gradient of the product."""
        ctx.grads[ctx.i] = grads[0]
        return None, None, None, None, None


class _Input(torch.autograd.Function):
    """Saves x and weight for the `Product` that follows, and runs its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, differentiate: Differentiate, grads: dict[int, Tensor], x: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.differentiate, ctx.grads = differentiate, grads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.differentiate(ctx.grads.pop(0), *ctx.saved_tensors)


def plain_product(x_TC: Tensor, weight_FC: Tensor) -> Tensor:
    """Return x_TC times the transposed weight, [T, F]."""
    return x_TC @ weight_FC.t()


def product(
    x: Tensor, weight: Tensor, *, multiply: Multiply, differentiate: Differentiate
) -> Tensor:
    """Return multiply(x, weight) with gradients from differentiate(gradient, x, weight)."""
    grads: dict[int, Tensor] = {}
    saved_x = _Input.apply(differentiate, grads, x, weight)
    out: Tensor = Product.apply(multiply, grads, 0, saved_x, weight.detach())  # pyright: ignore[reportAssignmentType]
    return out


class DeferringOps(Ops):
    """The plain layers, but linear layers put their weight gradients into `queue`."""

    def __init__(self) -> None:
        self.queue = WeightQueue()

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        """Apply linear layers to the same rows, lazily."""
        return (self.fan_in(x_TC, linear) for linear in linears)

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        """Apply a linear layer."""
        # Read the parameter in every forward, because FSDP replaces a module's parameters.
        parameter = linear.weight

        def differentiate(grad_TF: Tensor, x_TC: Tensor, weight_FC: Tensor) -> tuple[Tensor, None]:
            self.queue.push([parameter], lambda _: [grad_TF.t() @ x_TC])
            return grad_TF @ weight_FC, None

        out = product(x_TC, parameter, multiply=plain_product, differentiate=differentiate)
        return out if linear.bias is None else out + linear.bias
