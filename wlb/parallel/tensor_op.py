"""The products of tensor parallelism as custom ops, for layers that torch.compile compiles.

The ops contain their collectives. Otherwise the compiler would merge the gather of a layer's input
in forward with the same gather in backward, and keep the result that TP+SP means to drop. It also
cannot trace how the autograd functions of `wlb.parallel.tensor` hand gradients to each other, so
here a product's gradient travels through a `slot`: an output of `gather_rows` that has the
product's shape but no memory. Shapes: as in `wlb.parallel.tensor`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wlb.parallel.collectives import all_gather
from wlb.parallel.tensor import Products, TensorParallelOps, tp_shard


@torch.library.custom_op("wlb::gather_rows", mutates_args=())
def gather_rows(
    x_SC: Tensor, weights_FC: list[Tensor], num_ranks: int, group_name: str
) -> tuple[Tensor, list[Tensor]]:
    """All ranks' rows, not differentiable, and a slot for the product with each weight."""
    x_TC = all_gather(x_SC, Products(num_ranks, group_name))
    return x_TC, [x_SC.new_zeros(()).expand(len(x_TC), len(w)) for w in weights_FC]


@gather_rows.register_fake
def _(
    x_SC: Tensor, weights_FC: list[Tensor], num_ranks: int, group_name: str
) -> tuple[Tensor, list[Tensor]]:
    num_rows = num_ranks * x_SC.shape[0]
    slots = [x_SC.new_empty(()).expand(num_rows, w.shape[0]) for w in weights_FC]
    return x_SC.new_empty((num_rows, x_SC.shape[1])), slots


@torch.library.custom_op("wlb::slotted_product", mutates_args=())
def slotted_product(x_TC: Tensor, weight_FC: Tensor, slot_TF: Tensor) -> Tensor:
    """The product, [T, F]; its gradient goes to the slot."""
    return x_TC @ weight_FC.t()


@slotted_product.register_fake
def _(x_TC: Tensor, weight_FC: Tensor, slot_TF: Tensor) -> Tensor:
    return x_TC.new_empty((x_TC.shape[0], weight_FC.shape[0]))


slotted_product.register_autograd(lambda _, grad_TF: (None, None, grad_TF))


@torch.library.custom_op("wlb::gather_products", mutates_args=())
def gather_products(
    x_SC: Tensor, weights_FC: list[Tensor], num_ranks: int, group_name: str
) -> list[Tensor]:
    """Products of all ranks' rows with each weight, overlapped with the gather."""
    return Products(num_ranks, group_name, True).gathered(x_SC, weights_FC)


@gather_products.register_fake
def _(x_SC: Tensor, weights_FC: list[Tensor], num_ranks: int, group_name: str) -> list[Tensor]:
    num_rows = num_ranks * x_SC.shape[0]
    return [x_SC.new_empty((num_rows, w.shape[0])) for w in weights_FC]


@torch.library.custom_op("wlb::gathered_backward", mutates_args=())
def gathered_backward(
    grads_TF: list[Tensor],
    x_SC: Tensor,
    weights_FC: list[Tensor],
    num_ranks: int,
    group_name: str,
    overlaps: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of x_SC and of the weights."""
    return Products(num_ranks, group_name, overlaps).gathered_backward(grads_TF, x_SC, weights_FC)


@gathered_backward.register_fake
def _(
    grads_TF: list[Tensor], x_SC: Tensor, weights_FC: list[Tensor], *_: Any
) -> tuple[Tensor, list[Tensor]]:
    return x_SC.new_empty(x_SC.shape), [w.new_empty(w.shape) for w in weights_FC]


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x_SC, weights_FC, ctx.num_ranks, ctx.group_name = inputs
    ctx.overlaps = isinstance(output, list)
    ctx.save_for_backward(x_SC, *weights_FC)


def _differentiate_gathered(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    x_SC, *weights_FC = ctx.saved_tensors
    dx_SC, dweights = gathered_backward(
        grads[-1], x_SC, weights_FC, ctx.num_ranks, ctx.group_name, ctx.overlaps
    )
    return dx_SC, dweights, None, None


for op in (gather_rows, gather_products):
    op.register_autograd(_differentiate_gathered, setup_context=_keep_gathered)


@torch.library.custom_op("wlb::product_scatter", mutates_args=())
def product_scatter(
    x_TF: Tensor, weight_CF: Tensor, num_ranks: int, group_name: str, overlaps: bool
) -> Tensor:
    """x_TF times weight_CF, reduce-scattered by rows: [S, C]."""
    return Products(num_ranks, group_name, overlaps).scattered(x_TF, weight_CF)


@product_scatter.register_fake
def _(x_TF: Tensor, weight_CF: Tensor, num_ranks: int, *_: Any) -> Tensor:
    return x_TF.new_empty((x_TF.shape[0] // num_ranks, weight_CF.shape[0]))


@torch.library.custom_op("wlb::product_scatter_backward", mutates_args=())
def product_scatter_backward(
    grad_SC: Tensor,
    x_TF: Tensor,
    weight_CF: Tensor,
    num_ranks: int,
    group_name: str,
    overlaps: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x_TF and of the weight."""
    products = Products(num_ranks, group_name, overlaps)
    grad_TC, dx_TF = products.scattered_backward(grad_SC, weight_CF)
    return dx_TF, grad_TC.t() @ x_TF


@product_scatter_backward.register_fake
def _(grad_SC: Tensor, x_TF: Tensor, weight_CF: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x_TF.new_empty(x_TF.shape), weight_CF.new_empty(weight_CF.shape)


def _keep_scattered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TF, weight_CF, *ctx.static = inputs
    ctx.save_for_backward(x_TF, weight_CF)


def _differentiate_scattered(ctx: Any, grad_SC: Tensor) -> tuple[Any, ...]:
    dx, dweight = product_scatter_backward(grad_SC, *ctx.saved_tensors, *ctx.static)
    return dx, dweight, None, None, None


product_scatter.register_autograd(_differentiate_scattered, setup_context=_keep_scattered)


class TracedTensorParallelOps(TensorParallelOps):
    """`TensorParallelOps` that torch.compile can trace into one graph per layer."""

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        weights = [tp_shard(linear.weight) for linear in linears]
        num_ranks, group_name = self.products.num_ranks, self.products.group_name
        if self.products.overlaps:
            yield from gather_products(x_TC, weights, num_ranks, group_name)
            return
        gathered, slots = gather_rows(x_TC, weights, num_ranks, group_name)
        for weight, slot in zip(weights, slots, strict=True):
            yield slotted_product(gathered.detach(), weight.detach(), slot)

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        products = self.products
        return product_scatter(
            x_TC,
            tp_shard(linear.weight),
            products.num_ranks,
            products.group_name,
            products.overlaps,
        )
