"""Weight gradients that are computed later than the backward pass, for zero-bubble schedules.

In the backward pass, linear layers put their input and output gradient into a queue. torch's
schedule takes the queue through `dw_builder`, and computes the weight gradients when a rank would
otherwise be idle. torch can also split backward itself, but it handles autograd functions wrongly
(https://github.com/pytorch/pytorch/issues/166577, 170277, 174017). Norms, embedding and head
compute their weight gradients in the backward pass.
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
"""Returns the gradients of some weights; its argument is the result of `Begin`, or None."""
Multiply = Callable[[Tensor, Tensor], Tensor]
"""Returns the product of an input and a weight."""
Differentiate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Returns the gradients of input and weight, from the output's gradient, input and weight."""


class WeightQueue:
    """Queue of the weight gradients of the current backward pass that are not computed yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence[Tensor], Begin | None, Compute]] = []

    def push(
        self, parameters: Sequence[Tensor], compute: Compute, *, begin: Begin | None = None
    ) -> None:
        """Queue the computation of some weight gradients.

        Args:
            parameters: The weights.
            compute: Returns this rank's gradient of each weight, given the result of `begin`.
            begin: Starts a collective whose result `compute` needs. None if `compute` needs no
                collective. `begin` is called before the previous entry of the queue is computed, so
                that the collective runs during that computation.
        """
        if any(parameter.requires_grad for parameter in parameters):
            self._waiting.append((parameters, begin, compute))

    def take(self) -> Callable[[], None]:
        """Empty the queue; returns a function that computes and accumulates the gradients."""
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
    """Computes multiply(x, weight), but saves nothing for backward and computes no gradients.

    `_Input`, the autograd function that comes before this one, saves x and computes the gradients
    of x and of the weight. The backward of this function only stores the gradient of the product
    where `_Input` finds it, in grads[i].

    The reason is activation recompute, which stops when all tensors that backward needs are saved.
    An autograd function saves tensors at the end of its forward. If this function saved x,
    recompute would have to run a layer's last product, with its collective, only to save x.
    """

    @staticmethod
    def forward(
        ctx: Any, multiply: Multiply, grads: dict[int, Tensor], i: int, x: Tensor, weight: Tensor
    ) -> Tensor:
        """Return multiply(x, weight).

        Args:
            ctx: Autograd's context.
            multiply: Computes the product.
            grads: Where backward stores the product's gradient.
            i: Key of that gradient in `grads`.
            x: Input.
            weight: Weight.
        """
        ctx.grads, ctx.i = grads, i
        return multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        """Store the product's gradient, from which `_Input` computes the other gradients."""
        ctx.grads[ctx.i] = grads[0]
        return None, None, None, None, None


class _Input(torch.autograd.Function):
    """Returns x for `Product`, saves x and weight, and computes the gradients of both in backward.

    The docstring of `Product` says why `Product` does not do this.
    """

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
    """Return x_TC times the transposed weight, without a collective, [T, F]."""
    return x_TC @ weight_FC.t()


def product(
    x: Tensor, weight: Tensor, *, multiply: Multiply, differentiate: Differentiate
) -> Tensor:
    """Return multiply(x, weight), and in backward let `differentiate` compute the gradients.

    Args:
        x: Input.
        weight: Weight.
        multiply: Returns the product of input and weight.
        differentiate: Returns the gradients of input and weight, from the output's gradient, input
            and weight.
    """
    grads: dict[int, Tensor] = {}
    saved_x = _Input.apply(differentiate, grads, x, weight)
    out: Tensor = Product.apply(multiply, grads, 0, saved_x, weight.detach())  # pyright: ignore[reportAssignmentType]
    return out


class DeferringOps(Ops):
    """Applies layers without tensor parallelism, and defers weight gradients of linear layers.

    Linear layers put the computation of their weight gradients into `queue`.
    """

    def __init__(self) -> None:
        self.queue = WeightQueue()

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        """Return an iterator that applies each linear layer to x_TC when its output is taken."""
        return (self.fan_in(x_TC, linear) for linear in linears)

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        """Apply a linear layer, whose weight gradient is computed later."""
        # Read the parameter in every forward, because FSDP replaces a module's parameters.
        parameter = linear.weight

        def differentiate(grad_TF: Tensor, x_TC: Tensor, weight_FC: Tensor) -> tuple[Tensor, None]:
            self.queue.push([parameter], lambda _: [grad_TF.t() @ x_TC])
            return grad_TF @ weight_FC, None

        out = product(x_TC, parameter, multiply=plain_product, differentiate=differentiate)
        return out if linear.bias is None else out + linear.bias
