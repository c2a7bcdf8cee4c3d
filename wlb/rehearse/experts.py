"""Experts in a rehearsal: tensors without values choose none, so that all are equally loaded.

Every rank of an EP group then sends and receives as many rows as the others, padding included. This
holds where the group's ranks have micro-batches of one length: those of one pipeline.
"""

from itertools import pairwise

from torch import Tensor

from wlb.model import ExpertRows
from wlb.parallel import execute, expert_exchange
from wlb.plan import PipelinePlan
from wlb.spec import RunSpec


def load_equally(spec: RunSpec) -> None:
    """Have this process's ranks load all experts equally, for good."""
    if not spec.model.experts.num:
        return

    def equal_rows(numbers_2SR: Tensor, *, num_rows: int, rank: int) -> expert_exchange.RowsBetween:
        _, stages, size = numbers_2SR.shape
        each, more = divmod(num_rows, size)
        to = [each + ((other - rank) % size < more) for other in range(size)]
        of = [each + ((rank - other) % size < more) for other in range(size)]

        def by_stage(rows: list[int]) -> list[list[int]]:
            # Both sides divide a number alike.
            ends = [[n * s // stages for n in rows] for s in range(stages + 1)]
            return [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(ends)]

        return expert_exchange.RowsBetween(by_stage(of), by_stage(to))

    def all_rows(
        executor: execute.Executor, plan: PipelinePlan, i: int, loss_scale: float
    ) -> ExpertRows:
        rows = plan.local_tokens[i] // executor.mesh.parallel.tp
        return ExpertRows(num=rows, loss_scale=loss_scale)

    setattr(expert_exchange, "rows_between", equal_rows)  # noqa: B010
    setattr(execute.Executor, "_expert_rows", all_rows)  # noqa: B010


def weight_shapes(spec: RunSpec) -> set[tuple[int, ...]]:
    """Shapes of whole weights of experts and their router on this rank."""
    model, moe = spec.model, spec.model.experts
    held, shared = moe.num // spec.parallel.ep, moe.shared_hidden_size // spec.parallel.tp
    hidden = model.hidden_size
    routed = {(held, moe.hidden_size, hidden), (held, hidden, moe.hidden_size), (moe.num, hidden)}
    return routed | {(shared, hidden), (hidden, shared)}
