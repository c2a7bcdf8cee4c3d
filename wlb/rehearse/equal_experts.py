"""Experts in a rehearsal: all are equally loaded, because routers on fake tensors choose none.

Each rank of an EP group receives an equal share of the rows of each member, including padding
rows. While a rank processes micro-batch i, members in other pipelines process their micro-batch i,
so the step's plan says how many rows they have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from wlb.model import ExpertRows
from wlb.model.expert_layer import MixtureMlp
from wlb.parallel import execute, expert_exchange
from wlb.parallel.mesh import Coordinates, Mesh
from wlb.plan import PipelinePlan, StepPlan
from wlb.planner import Planner
from wlb.spec import ParallelSpec, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRows(ExpertRows):
    """`ExpertRows` that also has the number of rows of each member of the EP group."""

    of_members: tuple[int, ...]  # number of rows of each member, including `num` of this rank


class EqualLoads:
    """Decides how many rows the ranks of an EP group exchange. In a real run, routers decide."""

    def __init__(self, spec: RunSpec) -> None:
        self.per_token = spec.model.experts.per_token
        self.now: GroupRows | None = None
        """Rows of the micro-batch that the experts process now."""
        self.steps: dict[int, StepPlan] = {}
        """Digest of a pipeline's plan -> the step that it belongs to."""

    def split(self, stages: int, size: int, rank: int) -> expert_exchange.RowsBetween:
        """Return how many rows this rank sends to and receives from each member of its EP group.

        Each member divides its rows evenly over all members. If r rows are left, the member itself
        and the next r - 1 members in the group get one row more.

        Args:
            stages: Number of parts in which rows travel (`ep.stages`).
            size: Number of members of the group.
            rank: This rank's place in the group.
        """
        assert self.now is not None
        copies = [rows * self.per_token for rows in self.now.of_members]
        assert len(copies) == size

        def share(sender: int, receiver: int) -> int:
            each, remainder = divmod(copies[sender], size)
            return each + ((receiver - sender) % size < remainder)

        def by_stage(rows: list[int]) -> list[list[int]]:
            # Sender and receiver round in the same way, so their numbers of rows agree.
            ends = [[n * s // stages for n in rows] for s in range(stages + 1)]
            return [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(ends)]

        members = range(size)
        received, sent = ([share(m, rank) for m in members], [share(rank, m) for m in members])
        return expert_exchange.RowsBetween(by_stage(received), by_stage(sent))

    def rows_of(self, plan: PipelinePlan, i: int, mesh: Mesh) -> GroupRows:
        """Return how many rows each member of this rank's EP group has in micro-batch `i`.

        Args:
            plan: Plan of this rank's pipeline.
            i: Number of the micro-batch, counted in each member's pipeline.
            mesh: Mesh of this rank.
        """
        step, tp = self.steps[plan.digest()], mesh.parallel.tp
        pipelines = pipelines_of_group(mesh.parallel, mesh.at)
        rows = {d: step.local_tokens(d)[i] // tp for d in set(pipelines)}
        return GroupRows(
            num=plan.local_tokens[i] // tp,
            row_weight=1 / max(1, plan.step_rows),
            of_members=tuple(rows[d] for d in pipelines),
        )


def pipelines_of_group(parallel: ParallelSpec, at: Coordinates) -> list[int]:
    """Return, for each member of a rank's EP group, the number of the member's pipeline.

    The members are consecutive ranks in (dp, cp, tp) order.

    Args:
        parallel: Layout of the run.
        at: Coordinates of the rank.
    """
    own = (at.dp * parallel.cp + at.cp) * parallel.tp + at.tp
    first = own - own % parallel.ep
    return [(first + j) // (parallel.cp * parallel.tp) for j in range(parallel.ep)]


def most_local_tokens(plan: StepPlan, parallel: ParallelSpec, at: Coordinates) -> list[int]:
    """Return, for each micro-batch, the most rows that a rank of an EP group has.

    These numbers serve to estimate the memory of the rank at `at`, because its experts also process
    rows of the other pipelines in its EP group.

    Args:
        plan: Plan of the step.
        parallel: Layout of the run.
        at: Coordinates of the rank.
    """
    pipelines = {at.dp, *pipelines_of_group(parallel, at)}
    each = [plan.local_tokens(pipeline) for pipeline in sorted(pipelines)]
    return [max(rows) for rows in zip(*each, strict=True)]


def load_equally(spec: RunSpec) -> None:
    """Replace parts of wlb so that all experts in this process get equally many rows.

    Call this before plans are sharded.
    """
    if not spec.model.experts.num:
        return
    loads = EqualLoads(spec)
    shard, forward = Planner.shard, MixtureMlp.forward

    def equal_rows(numbers_2SR: Tensor, *, rank: int) -> expert_exchange.RowsBetween:
        _, stages, size = numbers_2SR.shape
        return loads.split(stages, size, rank)

    def shard_and_remember(planner: Planner, plan: StepPlan, pipeline: int) -> PipelinePlan:
        made = shard(planner, plan, pipeline)
        loads.steps[made.digest()] = plan
        return made

    def forward_with_rows(
        mixture: MixtureMlp, x_TC: Tensor, rows: ExpertRows | None = None
    ) -> Tensor:
        assert isinstance(rows, GroupRows)
        loads.now = rows
        return forward(mixture, x_TC, rows)

    def all_rows(executor: execute.Executor, plan: PipelinePlan, i: int) -> ExpertRows:
        return loads.rows_of(plan, i, executor.mesh)

    replaced: Sequence[tuple[Any, str, Any]] = (
        (expert_exchange, "rows_between", equal_rows),
        (Planner, "shard", shard_and_remember),
        (MixtureMlp, "forward", forward_with_rows),
        (execute.Executor, "_expert_rows", all_rows),
    )
    for owner, name, stand_in in replaced:
        setattr(owner, name, stand_in)


def weight_shapes(spec: RunSpec) -> set[tuple[int, ...]]:
    """Return the shapes of a rank's weights of experts and routers before FSDP shards them."""
    model, moe = spec.model, spec.model.experts
    num_local, shared = moe.num // spec.parallel.ep, moe.shared_hidden_size // spec.parallel.tp
    hidden = model.hidden_size
    routed = {
        (num_local, moe.hidden_size, hidden),
        (num_local, hidden, moe.hidden_size),
        (moe.num, hidden),
    }
    return routed | {(shared, hidden), (hidden, shared)}
