"""What a step costs once, whatever is in it: sharded parameters, the gradient norm, AdamW.

Parameters are gathered in the compute dtype and gradients reduced in float32 over dp x cp ranks
(FSDP2), a stage at a time. The norm is one all-reduce of a few bytes over all ranks, after reading
the gradients. AdamW reads weight, two moments and gradient and writes the first three, in float32,
of this rank's shard: bound by memory, priced as the residual addition is.
"""

from dataclasses import dataclass

from wlb.cost import Collective, Elementwise, ProfiledWorkload
from wlb.cost.memory import stage_parameters
from wlb.cost.profile import DTYPE_BYTES
from wlb.simulate.graph import Node, NodeKind
from wlb.spec import RunSpec

GRADIENT_BYTES = 4
ADAMW_VALUES, NORM_VALUES = 7, 1
"""float32 values moved for one parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCosts:
    """ns of each; gather_ns, reduce_ns: by stage. optimizer_ns: by pipeline rank."""

    gather_ns: tuple[int, ...]
    reduce_ns: tuple[int, ...]
    norm_ns: int
    optimizer_ns: tuple[int, ...]
    layers_per_stage: int

    def of(self, node: Node) -> int:
        """Duration of a node that is neither a pass nor a message."""
        match node.kind:
            case NodeKind.GATHER:
                # With one stage a rank only its first layer's gather has nothing to hide behind.
                return self.gather_ns[node.stage] // self._parts
            case NodeKind.PREFETCH:
                return self.gather_ns[node.stage] * (self._parts - 1) // self._parts
            case NodeKind.REDUCE:
                return self.reduce_ns[node.stage]
            case NodeKind.NORM:
                return self.norm_ns
            case _:
                return self.optimizer_ns[node.rank]

    @property
    def _parts(self) -> int:
        is_one_stage_a_rank = len(self.gather_ns) == len(self.optimizer_ns)
        return self.layers_per_stage if is_one_stage_a_rank else 1


def has_fsdp(spec: RunSpec) -> bool:
    """Whether parameters are sharded over other ranks."""
    return spec.parallel.cp * max(1, spec.parallel.dp) > 1


def shard_costs(spec: RunSpec, cost: ProfiledWorkload) -> ShardCosts:
    """Prices for a layout."""
    parallel, profile = spec.parallel, cost.profile
    ranks = parallel.cp * max(1, parallel.dp)
    # dp neighbours are a whole pipeline apart; cp neighbours a tp group.
    spread = parallel.world_size if parallel.dp > 1 else parallel.tp * parallel.cp
    gather = profile.collective(Collective.ALL_GATHER, span_ranks=spread, num_ranks=ranks)
    scatter = profile.collective(Collective.REDUCE_SCATTER, span_ranks=spread, num_ranks=ranks)
    counts = [stage_parameters(spec, stage=s) for s in range(spec.num_stages)]
    of_rank = [sum(counts[r :: parallel.pp]) / ranks for r in range(parallel.pp)]
    copy = profile.elementwise_of(Elementwise.RESIDUAL).forward_bytes_per_s
    reduce = profile.collective(Collective.ALL_REDUCE, span_ranks=parallel.world_size)
    dtype = DTYPE_BYTES[profile.dtype]
    return ShardCosts(
        gather_ns=tuple(round(gather.time_ns(c * dtype, num_ranks=ranks)) for c in counts),
        reduce_ns=tuple(
            round(scatter.time_ns(c * GRADIENT_BYTES, num_ranks=ranks)) for c in counts
        ),
        norm_ns=round(
            max(of_rank) * NORM_VALUES * GRADIENT_BYTES / copy * 1e9
            + reduce.time_ns(GRADIENT_BYTES, num_ranks=parallel.world_size)
        ),
        optimizer_ns=tuple(round(c * ADAMW_VALUES * GRADIENT_BYTES / copy * 1e9) for c in of_rank),
        layers_per_stage=spec.model.num_layers // spec.num_stages,
    )
