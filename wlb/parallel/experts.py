"""Expert parallelism: experts over dp x cp x tp, rows brought to them by all-to-alls.

Groups of `parallel.ep` ranks, neighbours in (dp, cp, tp) order, hold equal parts of a layer's
experts; FSDP shards these over what is left, and adds up their gradients there. A layer exchanges
numbers of rows, which the host reads, then rows and scores. Ranks of a group run the same schedule,
so that they make the same calls in the same order; a rank without rows calls as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from wlb.model import Llama, Rows
from wlb.model.experts import GroupedMlp, MixtureMlp, RoutedRows, inverse_of
from wlb.parallel.collectives import all_reduce, all_to_all
from wlb.parallel.deferred import WeightQueue
from wlb.parallel.mesh import EP, EXPERT_SHARD, Mesh
from wlb.parallel.tensor import local_tensor

_HOLDER = ".experts."


def is_expert(name: str) -> bool:
    """Whether the parameter of this name is a stack of experts."""
    return _HOLDER in name


class _RowsToRanks(torch.autograd.Function):
    """Rows and scores to the ranks of a group; gradients of both go back the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        scores_N: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        ctx.back = partial(all_to_all, received=sent, sent=received, group=group)
        there = partial(all_to_all, received=received, sent=sent, group=group)
        return there(x_NC), there(scores_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0]), ctx.back(grads[1]), None, None, None


class _RowsBack(torch.autograd.Function):
    """What experts made of rows, to the ranks that the rows came from."""

    @staticmethod
    def forward(
        ctx: Any,
        y_NC: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.back = partial(all_to_all, received=sent, sent=received, group=group)
        return all_to_all(y_NC, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0]), None, None, None


class _Reorder(torch.autograd.Function):
    """Rows in another order; the gradient is taken apart by the inverse, without additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.inverse_N = inverse_N
        return x.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.inverse_N), None, None


def rows_between(
    arriving_RH: Tensor, leaving_RH: Tensor, *, num_rows: int, rank: int
) -> tuple[list[int], list[int]]:
    """Rows from and to each rank of a group: what the host must read of a layer, once a pass.

    arriving_RH, leaving_RH: rows for each expert of a rank, by ranks they come from and go to.
    num_rows: that leave. rank: this rank in the group. `wlb.rehearse` has no values and its own
    numbers.
    """
    received, sent = torch.stack([arriving_RH.sum(-1), leaving_RH.sum(-1)]).tolist()
    return received, sent


class ExpertAllToAll:
    """The `ExpertExchange` of a group of ranks, each of which holds equally many experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def there(self, x_NC: Tensor, scores_N: Tensor, ends_E: Tensor) -> RoutedRows:
        size = self.group.size()
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        ones = [counts_E.shape[0] // size] * size
        arriving_E = all_to_all(counts_E, ones, ones, self.group)
        received, sent = rows_between(
            arriving_E.view(size, -1),
            counts_E.view(size, -1),
            num_rows=x_NC.shape[0],
            rank=dist.get_rank(self.group),
        )
        there = _RowsToRanks.apply(x_NC, scores_N, received, sent, self.group)
        x_MC, scores_M = there  # pyright: ignore[reportGeneralTypeIssues]
        # Ranks send rows expert by expert; here they go together by expert, then by rank.
        held = torch.arange(ones[0], device=ends_E.device).repeat(size)
        expert_M = held.repeat_interleave(arriving_E, output_size=sum(received))
        order_M = expert_M.argsort(stable=True)
        inverse_M = inverse_of(order_M)
        ends_H = arriving_E.view(size, -1).sum(0).cumsum(0).to(torch.int32)
        return RoutedRows(
            x_MC=_Reorder.apply(x_MC, order_M, inverse_M),  # pyright: ignore[reportArgumentType]
            scores_M=_Reorder.apply(scores_M, order_M, inverse_M),  # pyright: ignore[reportArgumentType]
            ends_E=ends_H,
            way=(received, sent, order_M, inverse_M),
        )

    def back(self, y_MC: Tensor, routed: RoutedRows) -> Tensor:
        received, sent, order_M, inverse_M = routed.way
        y_MC = _Reorder.apply(y_MC, inverse_M, order_M)  # pyright: ignore[reportAssignmentType]
        out: Tensor = _RowsBack.apply(y_MC, sent, received, self.group)  # pyright: ignore[reportAssignmentType]
        return out


def mixtures_of(stage: nn.Module) -> list[MixtureMlp]:
    """The layers with experts of a stage, in order."""
    return [module for module in stage.modules() if isinstance(module, MixtureMlp)]


def experts_of(stage: Llama) -> dict[str, GroupedMlp]:
    """The modules of a stage that FSDP shards over `EXPERT_SHARD`, by layer."""
    layers = stage.model.layers.items()
    return {i: layer.mlp.experts for i, layer in layers if isinstance(layer.mlp, MixtureMlp)}


def divide_experts(stage: Llama, mesh: Mesh, queue: WeightQueue | None) -> None:
    """Give each layer its exchange, and each stack this rank's experts, without storage yet."""
    for mixture in mixtures_of(stage):
        if queue is not None:
            mixture.experts.defer = partial(_defer, queue)
        if mesh.parallel.ep == 1:
            continue
        assert mesh.experts is not None
        mixture.exchange = ExpertAllToAll(mesh.experts.get_group(EP))
        mixture.experts.local = local_tensor
        for stack in (
            mixture.experts.gate_proj,
            mixture.experts.up_proj,
            mixture.experts.down_proj,
        ):
            held = held_experts(stack.weight.shape[0], mesh)
            local = stack.weight.detach()[held.start : held.stop].contiguous()
            value = DTensor.from_local(local, mesh.experts[EP], [Shard(0)], run_check=False)
            stack.weight = nn.Parameter(value)


def _defer(queue: WeightQueue, parameters: Sequence[Tensor], compute: Any) -> None:
    queue.push(parameters, lambda _: compute())


def held_experts(num: int, mesh: Mesh) -> range:
    """The experts of `num` that this rank's group member holds, before FSDP shards them."""
    each = num // mesh.parallel.ep
    assert mesh.experts is not None
    first = each * mesh.experts.get_local_rank(EP)
    return range(first, first + each)


def own_experts(num: int, mesh: Mesh, *, is_sharded: bool) -> range:
    """The experts whose weights this rank stores; FSDP2 splits axis 0, the last ones get less."""
    held = held_experts(num, mesh)
    if not is_sharded:
        return held
    assert mesh.experts is not None
    size, rank = mesh.experts[EXPERT_SHARD].size(), mesh.experts.get_local_rank(EXPERT_SHARD)
    each = -(-len(held) // size)
    return held[min(len(held), rank * each) : (rank + 1) * each]


def sharding_of_experts(mesh: Mesh) -> DeviceMesh:
    """The mesh that FSDP2 shards experts over."""
    assert mesh.experts is not None
    return mesh.experts[EXPERT_SHARD]


def add_up_loads(stages: Iterable[Llama], rows: Iterable[Rows], mesh: Mesh) -> None:
    """Give each layer the rows of its experts in a step, of all ranks that share its experts;
    once after a step's last backward pass, on all of these ranks."""
    mixtures = [mixture for stage in stages for mixture in mixtures_of(stage)]
    if not mixtures:
        return
    told = [r.experts.counts for r in rows if r.experts is not None]
    own = torch.stack([_sum(told, mixture) for mixture in mixtures]).long()
    assert mesh.experts is not None
    for axis in (EXPERT_SHARD, EP):
        group = mesh.experts.get_group(axis)
        own = all_reduce(own, group) if group.size() > 1 else own
    for mixture, load in zip(mixtures, own, strict=True):
        mixture.load = load


def _sum(told: Sequence[Mapping[nn.Module, Tensor]], mixture: MixtureMlp) -> Tensor:
    return torch.stack([counts[mixture] for counts in told]).sum(0)


def load_sums(stages: Iterable[nn.Module]) -> Tensor | None:
    """Of the last step: the sum over this rank's layers of the most loaded expert's rows over the
    mean expert's, and the number of layers, float64 [2]; None without experts."""
    loads = [m.load for stage in stages for m in mixtures_of(stage) if m.load is not None]
    if not loads:
        return None
    load_LE = torch.stack(loads).double()
    ratios = load_LE.amax(-1) / load_LE.mean(-1).clamp(min=1e-9)
    return torch.stack([ratios.sum(), torch.full_like(ratios[0], len(loads))])


def rebalance(stages: Iterable[nn.Module]) -> None:
    """Move the biases or shares of all layers by the last step's load; after its update."""
    for stage in stages:
        for mixture in mixtures_of(stage):
            mixture.rebalance()
