"""Experts in a rehearsal: tensors without values choose none, so that all are equally loaded.

Every rank of an EP group then gets an equal share of each member's rows, padding included. How many
rows members of other pipelines have follows from the step's plan: they run the micro-batch at the
same place of their pipelines.
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
    """of_members: rows of each member of the EP group, as `num` is this rank's."""

    of_members: tuple[int, ...]


class EqualLoads:
    """Stands in for what depends on values: rows that ranks choose to send each other."""

    def __init__(self, spec: RunSpec) -> None:
        self.per_token = spec.model.experts.per_token
        self.now: GroupRows | None = None
        """Rows of the micro-batch whose experts are at work."""
        self.steps: dict[int, StepPlan] = {}
        """The step of each pipeline's plan, by its digest."""

    def split(self, stages: int, size: int, rank: int) -> expert_exchange.RowsBetween:
        """Rows from and to each of `size` members in each stage; what is left of a member's equal
        shares goes to those that follow it.
        """
        assert self.now is not None
        copies = [rows * self.per_token for rows in self.now.of_members]
        assert len(copies) == size

        def share(of: int, to: int) -> int:
            each, more = divmod(copies[of], size)
            return each + ((to - of) % size < more)

        def by_stage(rows: list[int]) -> list[list[int]]:
            # Sender and receiver round alike, so that their numbers of rows agree.
            ends = [[n * s // stages for n in rows] for s in range(stages + 1)]
            return [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(ends)]

        members = range(size)
        received, sent = ([share(m, rank) for m in members], [share(rank, m) for m in members])
        return expert_exchange.RowsBetween(by_stage(received), by_stage(sent))

    def rows_of(self, plan: PipelinePlan, i: int, mesh: Mesh) -> GroupRows:
        """Rows of the members of this rank's group in micro-batch `i`."""
        step, tp = self.steps[plan.digest()], mesh.parallel.tp
        pipelines = pipelines_of_group(mesh.parallel, mesh.at)
        rows = {d: step.local_tokens(d)[i] // tp for d in set(pipelines)}
        return GroupRows(
            num=plan.local_tokens[i] // tp,
            row_weight=1 / max(1, plan.step_rows),
            of_members=tuple(rows[d] for d in pipelines),
        )


def pipelines_of_group(parallel: ParallelSpec, at: Coordinates) -> list[int]:
    """The pipeline of each member of a rank's EP group: neighbours in (dp, cp, tp) order."""
    own = (at.dp * parallel.cp + at.cp) * parallel.tp + at.tp
    first = own - own % parallel.ep
    return [(first + j) // (parallel.cp * parallel.tp) for j in range(parallel.ep)]


def most_local_tokens(plan: StepPlan, parallel: ParallelSpec, at: Coordinates) -> list[int]:
    """Rows of each micro-batch on a CP rank, or of a longer one whose rows this rank's experts
    compute in part: the most of the pipelines that its EP group spans.
    """
    pipelines = {at.dp, *pipelines_of_group(parallel, at)}
    each = [plan.local_tokens(pipeline) for pipeline in sorted(pipelines)]
    return [max(rows) for rows in zip(*each, strict=True)]


def load_equally(spec: RunSpec) -> None:
    """Have this process's ranks load all experts equally, for good; before plans are sharded."""
    if not spec.model.experts.num:
        return
    loads = EqualLoads(spec)
    shard, forward = Planner.shard, MixtureMlp.forward

    def equal_rows(numbers_2SR: Tensor, *, rank: int) -> expert_exchange.RowsBetween:
        _, stages, size = numbers_2SR.shape
        return loads.split(stages, size, rank)

    def remembered(planner: Planner, plan: StepPlan, pipeline: int) -> PipelinePlan:
        made = shard(planner, plan, pipeline)
        loads.steps[made.digest()] = plan
        return made

    def told(mixture: MixtureMlp, x_TC: Tensor, rows: ExpertRows | None = None) -> Tensor:
        assert isinstance(rows, GroupRows)
        loads.now = rows
        return forward(mixture, x_TC, rows)

    def all_rows(executor: execute.Executor, plan: PipelinePlan, i: int) -> ExpertRows:
        return loads.rows_of(plan, i, executor.mesh)

    replaced: Sequence[tuple[Any, str, Any]] = (
        (expert_exchange, "rows_between", equal_rows),
        (Planner, "shard", remembered),
        (MixtureMlp, "forward", told),
        (execute.Executor, "_expert_rows", all_rows),
    )
    for owner, name, stand_in in replaced:
        setattr(owner, name, stand_in)


def weight_shapes(spec: RunSpec) -> set[tuple[int, ...]]:
    """Shapes of whole weights of experts and their router on this rank."""
    model, moe = spec.model, spec.model.experts
    held, shared = moe.num // spec.parallel.ep, moe.shared_hidden_size // spec.parallel.tp
    hidden = model.hidden_size
    routed = {(held, moe.hidden_size, hidden), (held, hidden, moe.hidden_size), (moe.num, hidden)}
    return routed | {(shared, hidden), (hidden, shared)}
