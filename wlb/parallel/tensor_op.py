"""Tensor-parallel matrix products as custom ops, for layers that torch.compile compiles.

The ops contain their collectives, so that the compiler cannot merge the gathers of forward and
backward. In eager mode the autograd functions of `wlb.parallel.tensor` pass gradients to each other
through a Python object, which torch.compile cannot trace. Here gradients travel through **slots**
instead. A slot is a placeholder: it has the shape of a product, but takes no memory, because it is
one value, expanded. `gather_rows` returns a slot for each product, and the product takes it as an
argument. In backward, the product returns the gradient of its output as the gradient of the slot.
So the backward of `gather_rows` gets the gradients of all products, and computes all other
gradients from them. Shapes: as in `wlb.parallel.tensor`.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from wlb.kernels.op import contiguous_like, custom_op
from wlb.parallel.collectives import all_gather
from wlb.parallel.tensor import Products, TensorParallelOps, local_tensor


def _rows_like(x_SC: Tensor, num_ranks: int, width: int) -> Tensor:
    """Allocate a tensor for the rows of all `num_ranks` ranks, with `width` columns."""
    return x_SC.new_empty((num_ranks * x_SC.shape[0], width))


def _begins_early(weights_FC: list[Tensor]) -> bool:
    """Return whether the last of several layers starts its backward before the others.

    The layers have the same input. The last one starts early if they are the projections to K, V
    and Q: Q's part of the input's gradient is computed while the gradients of K and V still travel
    between CP ranks. This needs memory for one more tensor with all rows.

    Args:
        weights_FC: Weights of the layers.
    """
    return len(weights_FC) > 2


def _slots_like(x_SC: Tensor, weights_FC: list[Tensor], num_ranks: int) -> list[Tensor]:
    """Make the slots by which the backward of `gather_rows` gets the gradients of the products.

    A slot is a placeholder without memory. A product's backward returns the gradient of its output
    as the gradient of the slot. There is one slot for each layer's output. If `begin_backward` runs
    for these layers, there are two more slots, for its two results.

    Args:
        x_SC: This rank's 1/tp of the rows of the layers' input.
        weights_FC: Weight of each layer.
        num_ranks: Number of TP ranks.
    """
    num_rows, width = num_ranks * x_SC.shape[0], x_SC.shape[1]
    widths = [w.shape[0] for w in weights_FC] + [width] * 2 * _begins_early(weights_FC)
    return [x_SC.new_zeros(()).expand(num_rows, size) for size in widths]


@custom_op(
    "gather_rows",
    fake=lambda x, weights, n, _: (_rows_like(x, n, x.shape[1]), _slots_like(x, weights, n)),
)
def gather_rows(
    x_SC: Tensor, weights_FC: list[Tensor], num_ranks: int, group_name: str
) -> tuple[Tensor, list[Tensor]]:
    """Gather all ranks' rows; returns the rows, and a slot for the product with each weight.

    A slot connects a product to this op in autograd's graph (see the module's docstring): in
    backward, the gradient of the product arrives here as the slot's gradient. No gradient flows
    through the gathered rows themselves.

    Args:
        x_SC: This rank's rows.
        weights_FC: Weights of the layers that read the rows.
        num_ranks: Number of TP ranks.
        group_name: Name of the tp group.
    """
    x_TC = all_gather(x_SC, Products(num_ranks, group_name))
    return x_TC, _slots_like(x_SC, weights_FC, num_ranks)


@custom_op("slotted_product", fake=lambda x, weight, _: _rows_like(x, 1, weight.shape[0]))
def slotted_product(x_TC: Tensor, weight_FC: Tensor, slot_TF: Tensor) -> Tensor:
    """Return x_TC times the transposed weight, [T, F].

    slot_TF is a placeholder without memory, made for this product by `gather_rows`. In backward the
    gradient of the product becomes the gradient of slot_TF, and so reaches the backward of
    `gather_rows`, which computes the gradients of the input and of the weight.
    """
    return x_TC @ weight_FC.t()


slotted_product.register_autograd(lambda _, grad_TF: (None, None, grad_TF))


@custom_op(
    "begin_backward",
    fake=lambda _, x, __, n, ___: tuple(_rows_like(x, n, x.shape[1]) for _ in range(2)),
)
def begin_backward(
    grad_TF: Tensor, x_SC: Tensor, weight_FC: Tensor, num_ranks: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """Start the backward of layers with the same input, given only the last output's gradient.

    Args:
        grad_TF: Gradient of the last layer's output.
        x_SC: Input of the layers, 1/tp of the rows.
        weight_FC: Weight of the last layer.
        num_ranks: Number of TP ranks.
        group_name: Name of the tp group.

    Returns:
        What the last layer adds to the input's gradient, for all rows [T, C], and the gathered rows
        of x_SC [T, C]. They are still in transfer, so only `gathered_backward` may read them.
    """
    return Products(num_ranks, group_name).begin_backward(grad_TF, x_SC, weight_FC)


@custom_op("early_product", fake=lambda x, weight, *_: _rows_like(x, 1, weight.shape[0]))
def early_product(
    x_TC: Tensor, weight_FC: Tensor, slots: list[Tensor], x_SC: Tensor, n: int, group_name: str
) -> Tensor:
    """Return x_TC times the transposed weight, [T, F], for the last of the layers that read x_TC.

    Its backward does not wait for the gradients of the other layers (see `_begins_early`).

    Args:
        x_TC: All ranks' rows.
        weight_FC: Weight of the layer.
        slots: The last three of the placeholders that `gather_rows` returned. In backward their
            gradients are the gradient of the product and the two results of `begin_backward`.
        x_SC: This rank's rows.
        n: Number of TP ranks.
        group_name: Name of the tp group.
    """
    return x_TC @ weight_FC.t()


def _keep_early(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight_FC, _, x_SC, *ctx.where = inputs
    ctx.save_for_backward(x_SC, weight_FC)


def _differentiate_early(ctx: Any, grad_TF: Tensor) -> tuple[Any, ...]:
    begun = begin_backward(grad_TF, *ctx.saved_tensors, *ctx.where)
    return None, None, [grad_TF, *begun], None, None, None


early_product.register_autograd(_differentiate_early, setup_context=_keep_early)


@custom_op(
    "gathered_backward",
    fake=lambda _, x, weights, *__: (x.new_empty(x.shape), contiguous_like(*weights)),
)
def gathered_backward(
    grads_TF: list[Tensor], x_SC: Tensor, weights_FC: list[Tensor], num_ranks: int, group_name: str
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient of x_SC and of each weight, for several layers with the same input.

    Args:
        grads_TF: Gradient of each layer's output. If `begin_backward` was called for the last
            layer, the two tensors that it returned follow.
        x_SC: Input of the layers, 1/tp of the rows.
        weights_FC: Weight of each layer.
        num_ranks: Number of TP ranks.
        group_name: Name of the tp group.
    """
    products, num = Products(num_ranks, group_name), len(weights_FC)
    return products.gathered_backward(grads_TF[:num], x_SC, weights_FC, grads_TF[num:])


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x_SC, weights_FC, ctx.num_ranks, ctx.group_name = inputs
    ctx.save_for_backward(x_SC, *weights_FC)


def _differentiate_gathered(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    x_SC, *weights_FC = ctx.saved_tensors
    dx_SC, dweights = gathered_backward(grads[-1], x_SC, weights_FC, ctx.num_ranks, ctx.group_name)
    return dx_SC, dweights, None, None


gather_rows.register_autograd(_differentiate_gathered, setup_context=_keep_gathered)


def _scattered_like(x_TF: Tensor, weight_CF: Tensor, num_ranks: int, *_: Any) -> Tensor:
    return x_TF.new_empty((x_TF.shape[0] // num_ranks, weight_CF.shape[0]))


@custom_op("product_scatter", fake=_scattered_like)
def product_scatter(x_TF: Tensor, weight_CF: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """Return x_TF times the transposed weight, reduce-scattered over TP ranks: [T / tp, C]."""
    return Products(num_ranks, group_name).scattered(x_TF, weight_CF)


@custom_op("product_scatter_backward", fake=lambda _, x, w, *__: tuple(contiguous_like(x, w)))
def product_scatter_backward(
    grad_SC: Tensor, x_TF: Tensor, weight_CF: Tensor, num_ranks: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x_TF and weight_CF, given that of the result of `product_scatter`."""
    products = Products(num_ranks, group_name)
    grad_TC, dx_TF = products.scattered_backward(grad_SC, weight_CF)
    return dx_TF, grad_TC.t() @ x_TF


def _keep_scattered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TF, weight_CF, *ctx.static = inputs
    ctx.save_for_backward(x_TF, weight_CF)


def _differentiate_scattered(ctx: Any, grad_SC: Tensor) -> tuple[Any, ...]:
    dx, dweight = product_scatter_backward(grad_SC, *ctx.saved_tensors, *ctx.static)
    return dx, dweight, None, None


product_scatter.register_autograd(_differentiate_scattered, setup_context=_keep_scattered)


class TracedTensorParallelOps(TensorParallelOps):
    """`TensorParallelOps` that torch.compile can trace into one graph per layer."""

    def _fan_products(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        weights = [local_tensor(linear.weight) for linear in linears]
        where = self.products
        gathered, slots = gather_rows(x_TC, weights, *where)
        gathered, early = gathered.detach(), _begins_early(weights)
        for weight, slot in zip(weights[: len(weights) - early], slots, strict=False):
            yield slotted_product(gathered, weight.detach(), slot)
        if early:
            yield early_product(gathered, weights[-1].detach(), slots[-3:], x_TC.detach(), *where)

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        """Apply a row-parallel linear layer; its reduce-scatter leaves [T / tp, C] on each rank."""
        return product_scatter(x_TC, local_tensor(linear.weight), *self.products)
