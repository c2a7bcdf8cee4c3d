"""Tensor parallelism with sequence parallelism (TP+SP), computed on local tensors.

Between blocks a rank holds 1/tp of the rows. A block's first linear layers gather rows and compute
1/tp of the columns; its last one reduce-scatters partial sums into rows. Backward gathers a layer's
input again, as in Megatron: keeping it would take 1.5-2.4x the activation memory at tp 8-16.

Shapes: T rows of the CP rank, S = T / tp rows of this rank, C width, F columns of this rank.
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
COLUMN = ("q_proj", *KEYS, "gate_proj", "up_proj", "lm_head", "embed_tokens")
ROW = ("o_proj", "down_proj")


class TpPlacement(NamedTuple):
    """Where TP ranks have the parts of a parameter."""

    mesh: DeviceMesh  # the axis tp, or the axes (kv_head, kv_copy) of copied KV heads
    placements: tuple[Placement, ...]  # on these axes
    copies: dist.ProcessGroup | None  # ranks that hold the same part; None: each has another

    @property
    def is_copy(self) -> bool:
        """Whether another rank's part counts instead of this one, in a sum over all elements."""
        return self.copies is not None and dist.get_rank(self.copies) > 0

    def part_of(self, value: Tensor) -> Tensor:
        """This rank's part of a whole parameter."""
        placed = self.placements[0]
        if not isinstance(placed, Shard):
            return value
        return value.chunk(self.mesh.size(0), placed.dim)[self.mesh.get_local_rank(0)]


def placement(name: str, mesh: Mesh) -> TpPlacement:
    """Placement over TP ranks of the parameter of this name.

    Where there are more TP ranks than KV heads (`Mesh.kv_heads`), a rank has one whole head of the
    projections to K and V, which its neighbours in `kv_copy` have too.
    """
    module, tp = name.split(".")[-2], mesh.device_mesh["tp"]
    if ".linear_attn." in name:
        # Heads are divided: rows of projections, channels of convolutions, gates of heads.
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
    """Matrix products with the collective before or after them, without autograd."""

    num_ranks: int
    group_name: str

    def size(self) -> int:
        """Part of `wlb.parallel.collectives.Group`."""
        return self.num_ranks

    def gathered_backward(
        self,
        grads_TF: Sequence[Tensor],
        x_SC: Tensor,
        weights_FC: Sequence[Tensor],
        begun: Sequence[Tensor] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Gradients of x_SC and of the weights. begun: `begin_backward`'s results, if it ran."""
        if begun:
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
        """The last layer's part of the gradient of all rows, and the started gather of x_SC: work
        that does not need the other layers' gradients.
        """
        gathering = start_all_gather(x_SC, self)
        return grad_TF @ weight_FC, gathering

    def start_inputs(self, grads_TF: Sequence[Tensor], weights_FC: Sequence[Tensor]) -> Tensor:
        """Start computing the gradient of x_SC; `wait` before use, as late as possible."""
        dx_TC = grads_TF[0] @ weights_FC[0]
        for grad, weight in zip(grads_TF[1:], weights_FC[1:], strict=True):
            dx_TC.addmm_(grad, weight)
        return start_reduce_scatter(dx_TC, self)

    def scattered(self, x_TF: Tensor, weight_CF: Tensor) -> Tensor:
        """x_TF times weight_CF, summed over ranks and scattered by rows: [S, C]."""
        return reduce_scatter(x_TF @ weight_CF.t(), self)

    def scattered_backward(self, grad_SC: Tensor, weight_CF: Tensor) -> tuple[Tensor, Tensor]:
        """The gathered gradient, [T, C], and the gradient of x_TF."""
        grad_TC = all_gather(grad_SC, self)
        return grad_TC, grad_TC @ weight_CF


class _FanOut:
    """Gradients of several linear layers of the same rows, as backward brings one after another.

    The first starts the gather of x_SC for the weights' gradients. Each adds its part of the rows'
    gradient at once, so that Q's is computed while gradients of K and V travel between CP ranks
    (`wlb.parallel.context.op`).
    """

    def __init__(self, ops: "TensorParallelOps", parameters: Sequence[Tensor]) -> None:
        self.ops, self.parameters = ops, parameters
        self._grads: dict[int, Tensor] = {}
        self._x_SC: Tensor | None = None
        self._dx_TC: Tensor | None = None
        self._gathering: Tensor | None = None

    def receive(self, i: int, grad_TF: Tensor, x_SC: Tensor, weight_FC: Tensor) -> None:
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
        """Gradients of x_SC and of the weights; the latter None if they are put into the queue."""
        assert self._x_SC is not None
        assert self._dx_TC is not None
        dx_SC = start_reduce_scatter(self._dx_TC, self.ops.group)
        grads_TF = [self._grads[i] for i in range(len(self.parameters))]
        x_SC, gathering = self._x_SC, self._gathering
        self._grads, self._x_SC, self._dx_TC, self._gathering = {}, None, None, None
        return self.ops.weight_gradients(self.parameters, grads_TF, x_SC, dx_SC, gathering)


class _GatherRows(torch.autograd.Function):
    """Gather x_SC once for several linear layers (`_FanProduct`), which run one after the other.

    Its backward, which autograd runs after theirs, reduce-scatters the gradient that they left in
    `fan` once, hidden behind the products that give the weights' gradients.
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
    """One of the linear layers; saves x_SC, of which `_GatherRows` and the others save nothing
    more, and the weight.
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
    """Reduce-scatter of rows; backward gathers."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x_TC: Tensor) -> Tensor:
        ctx.group = group
        return reduce_scatter(x_TC, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, all_gather(grads[0], ctx.group)


def vocabulary_shard(group: dist.ProcessGroup, padded_size: int) -> VocabularyShard:
    """This rank's contiguous 1/tp of the padded vocabulary."""
    return VocabularyShard(
        offset=dist.get_rank(group) * (padded_size // group.size()),
        gather=partial(all_gather, group=group),
        scatter=partial(reduce_scatter, group=group),
        all_max=partial(all_reduce, group=group, op="max"),
        all_sum=partial(all_reduce, group=group),
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's plain tensor of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class TensorParallelOps(Ops):
    """The layers with weights of `wlb.model`, over a tp group of at least 2 ranks. queue: receives
    the weight gradients of linear layers; None computes them in backward.
    """

    def __init__(
        self, group: dist.ProcessGroup, padded_vocab_size: int, queue: WeightQueue | None = None
    ) -> None:
        self.group, self.queue = group, queue
        self.products = Products(group.size(), group.group_name)
        self.vocabulary = vocabulary_shard(group, padded_vocab_size)

    def embed(self, embedding: nn.Embedding, tokens_T: Tensor) -> Tensor:
        weight = local_tensor(embedding.weight)
        index = tokens_T - self.vocabulary.offset
        here = (index >= 0) & (index < weight.shape[0])
        found = nn.functional.embedding(index.clamp(0, weight.shape[0] - 1), weight)
        out: Tensor = _Scatter.apply(self.group, found * here[:, None])  # pyright: ignore[reportAssignmentType]
        return out

    def norm(self, norm: nn.RMSNorm, x_TC: Tensor) -> Tensor:
        assert isinstance(norm.weight, DTensor)
        # A rank's norm sees its own rows only, so its gradient is one term of a sum over the tp
        # axis, which `finish_gradients` computes for all norms at once. With
        # grad_placements=[Partial()] FSDP would make an all-reduce for each norm.
        weight = norm.weight.to_local()
        return normalise(norm, x_TC, weight, fused=self.fused)

    def fan_out(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        # A rank has all rows of its columns, so a bias's gradient is complete without a sum.
        outputs = self._fan_products(x_TC, *linears)
        for linear, out_TF in zip(linears, outputs, strict=True):
            yield out_TF if linear.bias is None else out_TF + local_tensor(linear.bias)

    def _fan_products(self, x_TC: Tensor, *linears: nn.Linear) -> Iterator[Tensor]:
        """`fan_out` without biases."""
        parameters = [linear.weight for linear in linears]
        weights = [local_tensor(parameter) for parameter in parameters]
        fan = _FanOut(self, parameters)
        gathered = _GatherRows.apply(fan, x_TC, *weights)
        for i, weight in enumerate(weights):
            yield _FanProduct.apply(fan, i, gathered, x_TC.detach(), weight.detach())  # pyright: ignore[reportReturnType]

    def fan_in(self, x_TC: Tensor, linear: nn.Linear) -> Tensor:
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
        """Gradients of x_SC and of the weights, the latter None if they are put into the queue.

        Their collectives have started: dx_SC, and `gathering`, all ranks' rows of x_SC, which is
        not read if the weights' gradients are put into the queue.
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
        # To save memory, the queue holds the scattered gradient, which is gathered again later.
        self._defer([parameter], grad_SC, lambda grad_TC: [grad_TC.t() @ x_TF])
        return dx_TF, None

    def _defer(
        self, parameters: Sequence[Tensor], rows: Tensor, compute: Callable[[Tensor], list[Tensor]]
    ) -> None:
        """Queue compute(all ranks' rows), which gives the gradients of `parameters`."""

        def weight_gradients(gathering: Tensor | None) -> list[Tensor]:
            assert gathering is not None
            return compute(wait(gathering))

        assert self.queue is not None
        begin = partial(start_all_gather, rows, self.group)
        self.queue.push(parameters, weight_gradients, begin=begin)

    def own(self, parameter: Tensor) -> Tensor:
        return local_tensor(parameter)
