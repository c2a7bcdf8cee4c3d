"""Tensor parallelism with sequence parallelism (TP+SP), on local tensors.

Between blocks a rank holds 1/tp of the rows. A block's first linear layers gather the rows and
compute 1/tp of the columns; its last one computes partial sums that a reduce-scatter turns into
rows again. Parameters are DTensors on the tp axis (so FSDP2, checkpoints and clipping understand
them); computation is on their local parts.

Only the sharded input of a gathered linear is kept for backward, which gathers it again, as
Megatron does: keeping gathered inputs costs 1.5-2.4x the activation memory at tp 8-16.
`parallelize_module` is the reference in the parity test.

Shapes: T rows of the CP rank, S = T / tp rows of this rank, C width, F columns of this rank.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from wlb.model import Ops, Vocabulary
from wlb.parallel.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    wait,
)
from wlb.parallel.deferred import Product, WeightQueue
from wlb.parallel.products import Products

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
ROW = ("o_proj", "down_proj")


def placement(name: str) -> Placement:
    """How the parameter of this name lies on the tp axis."""
    module = name.split(".")[-2]
    if module in COLUMN:
        return Shard(0)
    return Shard(1) if module in ROW else Replicate()


class _GatherRows(torch.autograd.Function):
    """x_SC -> gathered rows for linear layers of weight_FC each; backward gathers x_SC again.

    The layers (`Product`) run one after the other, with other work in between, but their backward
    passes are one: each leaves its output's gradient in `grads`, and this node, which autograd runs
    after all of them, has one gather, one reduce-scatter of the summed dx, and the collectives hide
    behind matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ops: "TensorParallelOps",
        parameters: Sequence[nn.Parameter],
        grads: dict[int, Tensor],
        x_SC: Tensor,
        *weights_FC: Tensor,
    ) -> Tensor:
        ctx.ops, ctx.parameters, ctx.grads = ops, parameters, grads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_SC, *weights_FC)
        return all_gather(x_SC, ops.group)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        x_SC, *weights = ctx.saved_tensors
        grads_TF = [ctx.grads.pop(i) for i in range(len(weights))]
        dx_SC, dweights = _gathered_gradients(ctx.ops, ctx.parameters, x_SC, weights, grads_TF)
        return None, None, None, dx_SC, *dweights


class _GatherProducts(torch.autograd.Function):
    """What `_GatherRows` and the layers after it compute, all at once, where that overlaps."""

    @staticmethod
    def forward(
        ctx: Any,
        ops: "TensorParallelOps",
        parameters: Sequence[nn.Parameter],
        x_SC: Tensor,
        *weights_FC: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.ops, ctx.parameters = ops, parameters
        ctx.save_for_backward(x_SC, *weights_FC)
        return tuple(ops.products.gathered(x_SC, weights_FC))

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Tensor | None, ...]:
        x_SC, *weights = ctx.saved_tensors
        dx_SC, dweights = _gathered_gradients(ctx.ops, ctx.parameters, x_SC, weights, grads_TF)
        return None, None, dx_SC, *dweights


def _gathered_gradients(
    ops: "TensorParallelOps",
    parameters: Sequence[nn.Parameter],
    x_SC: Tensor,
    weights: Sequence[Tensor],
    grads_TF: Sequence[Tensor],
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Of x_SC and the weights; None for weights whose gradients the queue has."""
    if ops.queue is None:
        return ops.products.gathered_backward(grads_TF, x_SC, weights)

    def later(gathering: Tensor | None) -> list[Tensor]:
        assert gathering is not None
        x_TC = wait(gathering)
        return [grad.t() @ x_TC for grad in grads_TF]

    dx_SC = ops.products.start_inputs(grads_TF, weights)
    ops.queue.push(parameters, later, begin=lambda: start_all_gather(x_SC, ops.group))
    return wait(dx_SC), [None] * len(weights)


class _RowInput(torch.autograd.Function):
    """x_TF itself, kept for the `_ProductScatter` that follows, whose backward pass this node has.

    Apart for the reason that `Product` gives: the last product and its reduce-scatter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ops: "TensorParallelOps",
        parameter: nn.Parameter,
        grads: list[Tensor],
        x_TF: Tensor,
        weight_CF: Tensor,
    ) -> Tensor:
        ctx.ops, ctx.parameter, ctx.grads = ops, parameter, grads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TF, weight_CF)
        return x_TF.view_as(x_TF)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        x_TF, weight = ctx.saved_tensors
        grad_SC, group, queue = ctx.grads.pop(), ctx.ops.group, ctx.ops.queue
        grad_TC, dx_TF = ctx.ops.products.scattered_backward(grad_SC, weight)
        if queue is None:
            return None, None, None, dx_TF, grad_TC.t() @ x_TF

        def later(gathering: Tensor | None) -> list[Tensor]:
            assert gathering is not None
            return [wait(gathering).t() @ x_TF]

        # Gathered once more then, so that what waits stays small.
        queue.push([ctx.parameter], later, begin=lambda: start_all_gather(grad_SC, group))
        return None, None, None, dx_TF, None


class _ProductScatter(torch.autograd.Function):
    """x_TF times weight_CF, summed over ranks, each keeping its rows; backward only leaves its
    gradient to `_RowInput`."""

    @staticmethod
    def forward(
        ctx: Any, products: Products, grads: list[Tensor], x_TF: Tensor, weight_CF: Tensor
    ) -> Tensor:
        ctx.grads = grads
        return products.scattered(x_TF, weight_CF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.grads.append(grads[0])
        return None, None, None, None


class _Scatter(torch.autograd.Function):
    """Sum over ranks, each keeping its rows; backward gathers."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x_TC: Tensor) -> Tensor:
        ctx.group = group
        return reduce_scatter(x_TC, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, all_gather(grads[0], ctx.group)


class VocabularyShard(Vocabulary):
    """This rank's contiguous 1/tp of the padded vocabulary."""

    def __init__(self, group: dist.ProcessGroup, padded_size: int) -> None:
        self.group = group
        self.offset = dist.get_rank(group) * (padded_size // group.size())

    def gather(self, x_TC: Tensor) -> Tensor:
        return all_gather(x_TC, self.group)

    def scatter(self, dx_TC: Tensor) -> Tensor:
        return reduce_scatter(dx_TC, self.group)

    def all_max(self, x_T: Tensor) -> Tensor:
        return all_reduce(x_T, self.group, "max")

    def all_sum(self, x_2T: Tensor) -> Tensor:
        return all_reduce(x_2T, self.group)


def local_weight(module: nn.Linear) -> Tensor:
    return _local(module.weight)


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


class TensorParallelOps(Ops):
    """The weighted layers of `wlb.model` over a tp group of at least 2 ranks.

    queue: where linear layers leave their weights' gradients, or None to compute them in backward.
    overlaps: `Products`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        padded_vocab_size: int,
        queue: WeightQueue | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        self.group, self.queue = group, queue
        self.products = Products(group.size(), group.group_name, overlaps)
        self.vocabulary = VocabularyShard(group, padded_vocab_size)

    def embed(self, embedding: nn.Embedding, tokens_T: Tensor) -> Tensor:
        weight = _local(embedding.weight)
        index = tokens_T - self.vocabulary.offset
        here = (index >= 0) & (index < weight.shape[0])
        found = nn.functional.embedding(index.clamp(0, weight.shape[0] - 1), weight)
        out: Tensor = _Scatter.apply(self.group, found * here[:, None])  # pyright: ignore[reportAssignmentType]
        return out

    def norm(self, norm: nn.RMSNorm, x_TC: Tensor) -> Tensor:
        assert isinstance(norm.weight, DTensor)
        # Every rank sees only its rows, so its gradient is one term of a sum over the axis.
        weight = norm.weight.to_local(grad_placements=[Partial()])
        return nn.functional.rms_norm(x_TC, norm.normalized_shape, weight, norm.eps)

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        parameters = [linear.weight for linear in linears]
        weights = [_local(parameter) for parameter in parameters]
        if self.products.overlaps:
            yield from _GatherProducts.apply(self, parameters, x_TC, *weights)  # pyright: ignore[reportGeneralTypeIssues]
            return
        grads: dict[int, Tensor] = {}
        gathered = _GatherRows.apply(self, parameters, grads, x_TC, *weights)
        for i, weight in enumerate(weights):
            yield Product.apply(grads, i, gathered, weight.detach())  # pyright: ignore[reportReturnType]

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        weight, grads = _local(linear.weight), list[Tensor]()
        kept = _RowInput.apply(self, linear.weight, grads, x_TC, weight)
        out: Tensor = _ProductScatter.apply(self.products, grads, kept, weight.detach())  # pyright: ignore[reportAssignmentType]
        return out

    def weight(self, module: nn.Linear) -> Tensor:
        return _local(module.weight)
