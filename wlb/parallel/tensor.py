"""Tensor parallelism with sequence parallelism (TP+SP), computed on local tensors.

Between blocks a rank holds 1/tp of the rows. A block's first linear layers gather rows and compute
1/tp of the columns; its last one reduce-scatters partial sums into rows. Parameters are DTensors on
the tp axis, for FSDP2, checkpoints and clipping. Backward gathers a layer's input again, as in
Megatron: keeping it would take 1.5-2.4x the activation memory at tp 8-16.

Shapes: T rows of the CP rank, S = T / tp rows of this rank, C width, F columns of this rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from wlb.model import Ops, VocabularyShard
from wlb.parallel.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
    wait,
)
from wlb.parallel.deferred import Product, WeightQueue
from wlb.plan import UserError

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
ROW = ("o_proj", "down_proj")


def placement(name: str) -> Placement:
    """Placement on the tp axis of the parameter of this name."""
    module = name.split(".")[-2]
    if module in COLUMN:
        return Shard(0)
    return Shard(1) if module in ROW else Replicate()


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products with the collective before or after them, without autograd.

    overlaps: compute a product piece by piece while pieces travel ("async TP": torch's
    `symm_mem::fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, which write into other
    ranks' memory over NVLink). It has run with torch's CPU fallbacks only, **never on GPUs**
    (tests/parity/test_tp_overlap.py). torch keeps a symmetric buffer of the largest message and
    reallocates it, collectively, when a larger one comes.

    Fields have types that custom ops take.
    """

    num_ranks: int
    group_name: str
    overlaps: bool = False

    def size(self) -> int:
        """Part of `wlb.parallel.collectives.Group`."""
        return self.num_ranks

    def gathered(self, x_SC: Tensor, weights_FC: Sequence[Tensor]) -> list[Tensor]:
        """Products of all ranks' rows with each weight, [T, F] each, overlapped with the gather."""
        return self._gather_and_multiply(x_SC, [w.t() for w in weights_FC], keep=False)[1]

    def gathered_backward(
        self, grads_TF: Sequence[Tensor], x_SC: Tensor, weights_FC: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Gradients of x_SC and of the weights; gathers x_SC again."""
        gathering = start_all_gather(x_SC, self)
        dx_SC = self.start_inputs(grads_TF, weights_FC)
        x_TC = wait(gathering)
        dweights = [grad.t() @ x_TC for grad in grads_TF]
        return wait(dx_SC), dweights

    def start_inputs(self, grads_TF: Sequence[Tensor], weights_FC: Sequence[Tensor]) -> Tensor:
        """Start computing the gradient of x_SC; `wait` before use.

        What the caller computes next hides the reduce-scatter, unless it overlaps the product.
        """
        if self.overlaps:
            # Concatenating costs a copy of grads and weights, but needs one reduce-scatter only.
            one = len(grads_TF) == 1
            grad_TF = grads_TF[0] if one else torch.cat(list(grads_TF), 1)
            weight_FC = weights_FC[0] if one else torch.cat(list(weights_FC))
            return self._multiply_and_scatter(grad_TF, weight_FC)
        dx_TC = grads_TF[0] @ weights_FC[0]
        for grad, weight in zip(grads_TF[1:], weights_FC[1:], strict=True):
            dx_TC.addmm_(grad, weight)
        return start_reduce_scatter(dx_TC, self)

    def scattered(self, x_TF: Tensor, weight_CF: Tensor) -> Tensor:
        """x_TF times weight_CF, summed over ranks and scattered by rows: [S, C]."""
        if self.overlaps:
            return self._multiply_and_scatter(x_TF, weight_CF.t())
        return reduce_scatter(x_TF @ weight_CF.t(), self)

    def scattered_backward(self, grad_SC: Tensor, weight_CF: Tensor) -> tuple[Tensor, Tensor]:
        """The gathered gradient, [T, C], and the gradient of x_TF."""
        if self.overlaps:
            grad_TC, (dx_TF,) = self._gather_and_multiply(grad_SC, [weight_CF], keep=True)
            assert grad_TC is not None
            return grad_TC, dx_TF
        grad_TC = all_gather(grad_SC, self)
        return grad_TC, grad_TC @ weight_CF

    def _gather_and_multiply(
        self, x_SC: Tensor, right: list[Tensor], *, keep: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        return torch.ops.symm_mem.fused_all_gather_matmul(
            x_SC.contiguous(), right, 0, self.group_name, return_A=keep
        )

    def _multiply_and_scatter(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            left.contiguous(), right, "sum", 0, self.group_name
        )


class _GatherRows(torch.autograd.Function):
    """Gather x_SC once for several linear layers; backward gathers it again.

    The layers (`Product`) run one after the other, with other work in between. In backward each
    only leaves its output's gradient in `grads`. This node, which autograd runs after all of them,
    then does one gather and one reduce-scatter, hidden behind the matrix products.
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
    """`_GatherRows` and the linear layers after it in one, for overlapping products."""

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
    """Gradients of x_SC and of the weights, the latter None if they were put into the queue."""
    if ops.queue is None:
        return ops.products.gathered_backward(grads_TF, x_SC, weights)

    def weight_gradients(gathering: Tensor | None) -> list[Tensor]:
        assert gathering is not None
        x_TC = wait(gathering)
        return [grad.t() @ x_TC for grad in grads_TF]

    dx_SC = ops.products.start_inputs(grads_TF, weights)
    ops.queue.push(parameters, weight_gradients, begin=lambda: start_all_gather(x_SC, ops.group))
    return wait(dx_SC), [None] * len(weights)


class _RowInput(torch.autograd.Function):
    """Save x_TF for the `_ProductScatter` that follows, and run its backward pass.

    Two nodes, so that activation recompute need not repeat the last product and its reduce-scatter
    (see `wlb.parallel.deferred.Product`).
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

        def weight_gradient(gathering: Tensor | None) -> list[Tensor]:
            assert gathering is not None
            return [wait(gathering).t() @ x_TF]

        # The queue holds the scattered gradient and gathers it again, which saves memory.
        queue.push([ctx.parameter], weight_gradient, begin=lambda: start_all_gather(grad_SC, group))
        return None, None, None, dx_TF, None


class _ProductScatter(torch.autograd.Function):
    """x_TF times weight_CF, reduce-scattered; backward only hands its gradient to `_RowInput`."""

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
    """Reduce-scatter of rows; backward gathers."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x_TC: Tensor) -> Tensor:
        ctx.group = group
        return reduce_scatter(x_TC, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, all_gather(grads[0], ctx.group)


class TensorParallelVocabulary(VocabularyShard):
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


def tp_shard(parameter: Tensor) -> Tensor:
    """This rank's plain tensor of a tensor-parallel parameter."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


class TensorParallelOps(Ops):
    """The layers with weights of `wlb.model`, over a tp group of at least 2 ranks.

    queue: receives the weight gradients of linear layers; None computes them in backward.
    overlaps: see `Products`.
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
        self.vocabulary = TensorParallelVocabulary(group, padded_vocab_size)

    def embed(self, embedding: nn.Embedding, tokens_T: Tensor) -> Tensor:
        weight = tp_shard(embedding.weight)
        index = tokens_T - self.vocabulary.offset
        here = (index >= 0) & (index < weight.shape[0])
        found = nn.functional.embedding(index.clamp(0, weight.shape[0] - 1), weight)
        out: Tensor = _Scatter.apply(self.group, found * here[:, None])  # pyright: ignore[reportAssignmentType]
        return out

    def norm(self, norm: nn.RMSNorm, x_TC: Tensor) -> Tensor:
        assert isinstance(norm.weight, DTensor)
        # A rank sees its own rows only, so its gradient is one term of a sum over the tp axis.
        weight = norm.weight.to_local(grad_placements=[Partial()])
        return nn.functional.rms_norm(x_TC, norm.normalized_shape, weight, norm.eps)

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        parameters = [linear.weight for linear in linears]
        weights = [tp_shard(parameter) for parameter in parameters]
        if self.products.overlaps:
            yield from _GatherProducts.apply(self, parameters, x_TC, *weights)  # pyright: ignore[reportGeneralTypeIssues]
            return
        grads: dict[int, Tensor] = {}
        gathered = _GatherRows.apply(self, parameters, grads, x_TC, *weights)
        for i, weight in enumerate(weights):
            yield Product.apply(grads, i, gathered, weight.detach())  # pyright: ignore[reportReturnType]

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        weight, grads = tp_shard(linear.weight), list[Tensor]()
        kept = _RowInput.apply(self, linear.weight, grads, x_TC, weight)
        out: Tensor = _ProductScatter.apply(self.products, grads, kept, weight.detach())  # pyright: ignore[reportAssignmentType]
        return out

    def weight(self, module: nn.Linear) -> Tensor:
        return tp_shard(module.weight)


def refuse_overlap(device: torch.device, num_ranks: int) -> None:
    """UserError if products of `num_ranks` ranks cannot overlap on `device`.

    Not checked: whether ranks of different hosts can reach each other's memory.
    """
    if why := _why_no_overlap(device, num_ranks):
        raise UserError(
            f"tp.overlap = true needs torch's symmetric memory, but {why}; set tp.overlap = false"
        )


def _why_no_overlap(device: torch.device, num_ranks: int) -> str:
    if device.type != "cuda":
        return f"ranks compute on {device.type}, which has none"
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    missing = [name for name in names if not hasattr(torch.ops.symm_mem, name)]
    if missing:
        return f"torch {torch.__version__} has no symm_mem::{missing[0]}"
    gpus = range(min(num_ranks, torch.cuda.device_count()))  # empty in a dry run without GPUs
    for a, b in permutations(gpus, 2):
        if not torch.cuda.can_device_access_peer(a, b):
            return f"GPU {a} cannot reach the memory of GPU {b}"
    return ""
