"""Tensor parallelism with sequence parallelism (TP+SP), computed on local tensors.

Between blocks a rank has 1/tp of the rows. The first linear layers of a block gather all rows and
compute 1/tp of the columns. The block's last linear layer reduce-scatters partial sums into rows.
Backward gathers a layer's input a second time, as in Megatron. If forward kept the gathered input,
activations would take 1.5 to 2.4 times the memory at tp 8 to 16.

Shapes: T rows of the CP rank, S = T / tp rows of this rank, C channels, F columns of this rank.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from wlb.model import Ops, VocabularyShard
from wlb.model.elementwise import normalise
from wlb.parallel.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
    wait,
)
from wlb.parallel.deferred import WeightQueue, plain_product, product
from wlb.parallel.mesh import KV_COPY, Mesh

KEYS = ("k_proj", "v_proj")
"""Names of the projections to K and V, of which TP ranks may hold copies."""
COLUMN = ("q_proj", *KEYS, "gate_proj", "up_proj", "lm_head", "embed_tokens")
"""Names of modules whose weights are divided along the output axis (column-parallel)."""
ROW = ("o_proj", "down_proj")
"""Names of modules whose weights are divided along the input axis (row-parallel)."""


class TpPlacement(NamedTuple):
    """How a parameter is placed on TP ranks."""

    mesh: DeviceMesh  # the axis tp, or the axes (kv_head, kv_copy) of copied KV heads
    placements: tuple[Placement, ...]  # one for each axis of `mesh`
    copies: dist.ProcessGroup | None  # ranks that hold the same part; None if all parts differ

    @property
    def is_copy(self) -> bool:
        """Whether this rank's part of the parameter is a copy of another rank's part.

        A sum over all ranks, such as a norm, must leave out copies.
        """
        return self.copies is not None and dist.get_rank(self.copies) > 0

    def part_of(self, value: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter."""
        placed = self.placements[0]
        if not isinstance(placed, Shard):
            return value
        return value.chunk(self.mesh.size(0), placed.dim)[self.mesh.get_local_rank(0)]


def placement(name: str, mesh: Mesh) -> TpPlacement:
    """Return how the parameter with this name is placed on TP ranks.

    If there are more TP ranks than KV heads (`Mesh.kv_heads`), each rank has one whole head of the
    projections to K and V, and the other ranks of its group `kv_copy` have copies of this head.
    """
    module, tp = name.split(".")[-2], mesh.device_mesh["tp"]
    if ".linear_attn." in name:
        # Linear-attention layers are divided by heads: all parameters along axis 0, except the
        # norm, which all heads share, and the output projection, which is divided along axis 1.
        if module == "norm":
            return TpPlacement(tp, (Replicate(),), tp.get_group())
        return TpPlacement(tp, (Shard(int(module in ROW)),), None)
    if module in KEYS and mesh.kv_heads is not None:
        return TpPlacement(mesh.kv_heads, (Shard(0), Replicate()), mesh.kv_heads.get_group(KV_COPY))
    if module in COLUMN:
        return TpPlacement(tp, (Shard(0),), None)
    if module in ROW:
        return TpPlacement(tp, (Shard(1),), None)
    return TpPlacement(tp, (Replicate(),), tp.get_group())


class Products(NamedTuple):
    """Forward and backward of tensor-parallel matrix products, without autograd.

    The methods include the collectives. `gathered` layers gather rows before the product
    (column-parallel). `scattered` layers reduce-scatter rows after the product (row-parallel).
    """

    num_ranks: int  # number of TP ranks
    group_name: str  # name of the TP group

    def size(self) -> int:
        """Return the number of TP ranks, as `wlb.parallel.collectives.Group` requires."""
        return self.num_ranks

    def gathered_backward(
        self,
        grads_TF: Sequence[Tensor],
        x_SC: Tensor,
        weights_FC: Sequence[Tensor],
        begun: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradient of x_SC and of each weight, for several layers with the same input.

        Args:
            grads_TF: Gradient of each layer's output.
            x_SC: Input of the layers, 1/tp of the rows.
            weights_FC: Weight of each layer.
            begun: Results of `begin_backward`, which has computed the last layer's part of the
                gradient of x_SC; empty if it was not called.
        """
        if begun:
            # The last layer's part of the gradient is already in dx_TC; add the others.
            dx_TC, gathering = begun
            for i in reversed(range(len(weights_FC) - 1)):
                dx_TC = torch.addmm(dx_TC, grads_TF[i], weights_FC[i])
            dx_SC = start_reduce_scatter(dx_TC, self)
        else:
            gathering = start_all_gather(x_SC, self)
            dx_SC = self.start_inputs(grads_TF, weights_FC)
        x_TC = wait(gathering)
        dweights = [grad.t() @ x_TC for grad in grads_TF]
        return wait(dx_SC), dweights

    def begin_backward(
        self, grad_TF: Tensor, x_SC: Tensor, weight_FC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Begin backward of several layers that share their input, from the last layer's gradient.

        The gradient of the last layer's output arrives before those of the other layers.

        Args:
            grad_TF: Gradient of the last layer's output.
            x_SC: Input of the layers, 1/tp of the rows.
            weight_FC: Weight of the last layer.

        Returns:
            What the last layer adds to the input's gradient, for all rows [T, C], and the gathered
            rows of x_SC [T, C], which are still in transfer.
        """
        gathering = start_all_gather(x_SC, self)
        return grad_TF @ weight_FC, gathering

    def start_inputs(self, grads_TF: Sequence[Tensor], weights_FC: Sequence[Tensor]) -> Tensor:
        """Compute the gradient of the input that several layers share; start its reduce-scatter.

        Args:
            grads_TF: Gradient of each layer's output, for all rows.
            weights_FC: Weight of each layer.

        Returns:
            The input's gradient for this rank's rows, [rows / tp, hidden]. It is still in transfer,
            so call `wait` on it as late as possible.
        """
        dx_TC = grads_TF[0] @ weights_FC[0]
        for grad, weight in zip(grads_TF[1:], weights_FC[1:], strict=True):
            dx_TC.addmm_(grad, weight)
        return start_reduce_scatter(dx_TC, self)

    def scattered(self, x_TF: Tensor, weight_CF: Tensor) -> Tensor:
        """Return x_TF times the transposed weight, reduce-scattered over TP ranks: [T / tp, C]."""
        return reduce_scatter(x_TF @ weight_CF.t(), self)

    def scattered_backward(self, grad_SC: Tensor, weight_CF: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `scattered`'s product before it is scattered, and of x_TF.

        Args:
            grad_SC: Gradient of the result of `scattered`, for this rank's rows.
            weight_CF: Weight.

        Returns:
            The gradient of the product, for all rows [T, C], and the gradient of x_TF.
        """
        grad_TC = all_gather(grad_SC, self)
        return grad_TC, grad_TC @ weight_CF


class _FanOut:
    """Collects in backward the output gradients of several linear layers with the same input.

    The first gradient that arrives starts the gather of the input x_SC, which the weights'
    gradients need. When a layer's output gradient arrives, the layer's part of the input gradient
    is computed at once. Therefore Q's part is computed while the gradients of K and V still travel
    between CP ranks (`wlb.parallel.context.op`).
    """

    def __init__(self, ops: "TensorParallelOps", parameters: Sequence[Tensor]) -> None:
        self.ops, self.parameters = ops, parameters
        # Gradient of each layer's output, by the layer's index.
        self._grads: dict[int, Tensor] = {}
        self._x_SC: Tensor | None = None
        self._dx_TC: Tensor | None = None
        self._gathering: Tensor | None = None

    def receive(self, i: int, grad_TF: Tensor, x_SC: Tensor, weight_FC: Tensor) -> None:
        """Store the gradient of layer i's output, and add the layer's part to the sum for x_SC.

        The sum of all layers' parts, grad_TF @ weight_FC, is the gradient of their input x_SC.

        Args:
            i: Index of the layer.
            grad_TF: Gradient of the layer's output.
            x_SC: Input of the layers.
            weight_FC: Weight of the layer.
        """
        self._grads[i] = grad_TF
        if self._dx_TC is not None:
            self._dx_TC.addmm_(grad_TF, weight_FC)
            return
        self._x_SC = x_SC
        if self.ops.queue is None:
            begun = self.ops.products.begin_backward(grad_TF, x_SC, weight_FC)
            self._dx_TC, self._gathering = begun
        else:
            self._dx_TC = grad_TF @ weight_FC

    def finish(self) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the gradients of x_SC and of the weights.

        Call this when the gradients of all layers' outputs have arrived.

        The weights' gradients are None if their computation is put into the queue of `ops`.
        """
        assert self._x_SC is not None
        assert self._dx_TC is not None
        dx_SC = start_reduce_scatter(self._dx_TC, self.ops.group)
        grads_TF = [self._grads[i] for i in range(len(self.parameters))]
        x_SC, gathering = self._x_SC, self._gathering
        self._grads, self._x_SC, self._dx_TC, self._gathering = {}, None, None, None
        return self.ops.weight_gradients(self.parameters, grads_TF, x_SC, dx_SC, gathering)


class _GatherRows(torch.autograd.Function):
    """Gathers x_SC once for several linear layers (`_FanProduct`), which run one after the other.

    The argument `fan` collects gradients. Autograd runs the backward of those layers first, and
    each adds its part of the gathered input's gradient to `fan`. Then the backward of this function
    reduce-scatters the complete gradient once, while it computes the gradients of the weights.
    """

    @staticmethod
    def forward(ctx: Any, fan: _FanOut, x_SC: Tensor, *weights_FC: Tensor) -> Tensor:
        ctx.fan = fan
        ctx.set_materialize_grads(False)
        return all_gather(x_SC, fan.ops.group)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        dx_SC, dweights = ctx.fan.finish()
        return None, dx_SC, *dweights


class _FanProduct(torch.autograd.Function):
    """Linear layer `i` of several layers with the same input, which `_GatherRows` has gathered.

    Saves only the weight, and this rank's rows of the input (x_SC), which all layers share.
    Backward passes the gradient of the layer's output to `fan`, and returns no gradients to
    autograd: the backward of `_GatherRows` returns those of the input and of all weights.
    """

    @staticmethod
    def forward(
        ctx: Any, fan: _FanOut, i: int, x_TC: Tensor, x_SC: Tensor, weight_FC: Tensor
    ) -> Tensor:
        ctx.fan, ctx.i = fan, i
        ctx.save_for_backward(x_SC, weight_FC)
        return plain_product(x_TC, weight_FC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.fan.receive(ctx.i, grads[0], *ctx.saved_tensors)
        return None, None, None, None, None


class _Scatter(torch.autograd.Function):
    """Reduce-scatters rows over the group; backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x_TC: Tensor) -> Tensor:
        ctx.group = group
        return reduce_scatter(x_TC, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, all_gather(grads[0], ctx.group)


def vocabulary_shard(group: dist.ProcessGroup, padded_size: int) -> VocabularyShard:
    """Return this rank's contiguous 1/tp of the padded vocabulary.

    Args:
        group: The tp group.
        padded_size: Vocabulary entries, padded to a multiple of tp.
    """
    return VocabularyShard(
        offset=dist.get_rank(group) * (padded_size // group.size()),
        gather=partial(all_gather, group=group),
        scatter=partial(reduce_scatter, group=group),
        all_max=partial(all_reduce, group=group, op="max"),
        all_sum=partial(all_reduce, group=group),
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor as a plain tensor. Return other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TensorParallelOps(Ops):
    """Applies the weights of layers with tensor and sequence parallelism, on at least 2 TP ranks.

    Args:
        group: The tp group.
        padded_vocab_size: Vocabulary entries, padded to a multiple of tp.
        queue: Holds the computation of linear layers' weight gradients until a later pass. With
            None backward computes them.
    """

    def __init__(
        self, group: dist.ProcessGroup, padded_vocab_size: int, queue: WeightQueue | None = None
    ) -> None:
        self.group, self.queue = group, queue
        self.products = Products(group.size(), group.group_name)
        self.vocabulary = vocabulary_shard(group, padded_vocab_size)

    def embed(self, embedding: nn.Embedding, tokens_T: Tensor) -> Tensor:
        """Return the embeddings of this rank's 1/tp of the rows, [rows / tp, hidden].

        Each rank looks up the tokens in its part of the vocabulary, for all rows; a reduce-scatter
        adds up the results.
        """
        weight = local_tensor(embedding.weight)
        index = tokens_T - self.vocabulary.offset
        here = (index >= 0) & (index < weight.shape[0])
        found = nn.functional.embedding(index.clamp(0, weight.shape[0] - 1), weight)
        out: Tensor = _Scatter.apply(self.group, found * here[:, None])  # pyright: ignore[reportAssignmentType]
        return out

    def norm(self, norm: nn.RMSNorm, x_TC: Tensor) -> Tensor:
        """Apply RMSNorm to this rank's rows."""
        assert isinstance(norm.weight, DTensor)
        # A rank's norm sees only 1/tp of the rows, so the gradient of its weight is one term of a
        # sum over TP ranks. `finish_gradients` computes these sums for all norms in one all-reduce.
        # With grad_placements=[Partial()] FSDP would make one all-reduce per norm.
        weight = norm.weight.to_local()
        return normalise(norm, x_TC, weight, fused=self.fused)

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        """Gather the rows once, and yield each column-parallel layer's output, [T, F]."""
        # A rank has all rows of its columns, so a bias's gradient needs no sum over ranks.
        outputs = self._fan_products(x_TC, *linears)
        for linear, out_TF in zip(linears, outputs, strict=True):
            yield out_TF if linear.bias is None else out_TF + local_tensor(linear.bias)

    def _fan_products(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        """Gather the rows once, and yield each column-parallel layer's output without bias."""
        parameters = [linear.weight for linear in linears]
        weights = [local_tensor(parameter) for parameter in parameters]
        fan = _FanOut(self, parameters)
        gathered = _GatherRows.apply(fan, x_TC, *weights)
        for i, weight in enumerate(weights):
            yield _FanProduct.apply(fan, i, gathered, x_TC.detach(), weight.detach())  # pyright: ignore[reportReturnType]

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
        """Apply a row-parallel linear layer; its reduce-scatter leaves [T / tp, C] on each rank."""
        return product(
            x_TC,
            local_tensor(linear.weight),
            multiply=self.products.scattered,
            differentiate=partial(self._scattered_gradients, linear.weight),
        )

    def weight_gradients(
        self,
        parameters: Sequence[Tensor],
        grads_TF: Sequence[Tensor],
        x_SC: Tensor,
        dx_SC: Tensor,
        gathering: Tensor | None,
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Wait for the gradient of x_SC, and compute the weights' gradients or queue that work.

        Args:
            parameters: Weights of the layers, which share the input x_SC.
            grads_TF: Gradient of each layer's output.
            x_SC: Input of the layers.
            dx_SC: Gradient of x_SC, still in a reduce-scatter.
            gathering: All ranks' rows of x_SC, still in an all-gather. Unused if there is a queue.

        Returns:
            The gradient of x_SC, and each weight's gradient, or None for each if there is a queue.
        """
        if self.queue is None:
            assert gathering is not None
            x_TC = wait(gathering)
            dweights = [grad.t() @ x_TC for grad in grads_TF]
            return wait(dx_SC), dweights
        self._defer(parameters, x_SC, lambda x_TC: [grad.t() @ x_TC for grad in grads_TF])
        return wait(dx_SC), [None] * len(grads_TF)

    def _scattered_gradients(
        self, parameter: Tensor, grad_SC: Tensor, x_TF: Tensor, weight_CF: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        grad_TC, dx_TF = self.products.scattered_backward(grad_SC, weight_CF)
        if self.queue is None:
            return dx_TF, grad_TC.t() @ x_TF
        # To save memory, keep only this rank's rows of the gradient in the queue, and gather the
        # rows of all ranks a second time when the weight's gradient is computed.
        self._defer([parameter], grad_SC, lambda grad_TC: [grad_TC.t() @ x_TF])
        return dx_TF, None

    def _defer(
        self, parameters: Sequence[Tensor], rows: Tensor, compute: Callable[[Tensor], list[Tensor]]
    ) -> None:
        """Queue the computation of the gradients of `parameters`.

        Args:
            parameters: The weights.
            rows: This rank's rows of the tensor that `compute` takes. Before `compute` is called,
                the rows of all ranks are gathered.
            compute: Returns the gradient of each weight, given all ranks' rows.
        """

        def weight_gradients(gathering: Tensor | None) -> list[Tensor]:
            assert gathering is not None
            return compute(wait(gathering))

        assert self.queue is not None
        begin = partial(start_all_gather, rows, self.group)
        self.queue.push(parameters, weight_gradients, begin=begin)

    def own(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter as a plain tensor."""
        return local_tensor(parameter)
