"""Experts in a rehearsal: tensors without values choose none, so that all are equally loaded.

Every rank of an EP group then sends and receives as many rows as the others, padding included. This
holds where the group's ranks have micro-batches of one length: those of one pipeline.
"""

from torch import Tensor

from wlb.model import ExpertRows
from wlb.parallel import execute, experts
from wlb.plan import PipelinePlan
from wlb.spec import RunSpec


def load_equally(spec: RunSpec) -> None:
    """Have this process's ranks load all experts equally, for good."""
    if not spec.model.experts.num:
        return
    read = experts.rows_between

    def equal_rows(
        arriving_RH: Tensor, leaving_RH: Tensor, *, num_rows: int, rank: int
    ) -> tuple[list[int], list[int]]:
        read(arriving_RH, leaving_RH, num_rows=num_rows, rank=rank)  # the host's wait is counted
        size = leaving_RH.shape[0]
        each, more = divmod(num_rows, size)
        sent = [each + ((to - rank) % size < more) for to in range(size)]
        received = [each + ((rank - of) % size < more) for of in range(size)]
        return received, sent

    def all_rows(
        executor: execute.Executor, plan: PipelinePlan, i: int, loss_scale: float
    ) -> ExpertRows:
        rows = plan.local_tokens[i] // executor.mesh.parallel.tp
        return ExpertRows(num=rows, loss_scale=loss_scale)

    setattr(experts, "rows_between", equal_rows)  # noqa: B010
    setattr(execute.Executor, "_expert_rows", all_rows)  # noqa: B010


def weight_shapes(spec: RunSpec) -> set[tuple[int, ...]]:
    """Shapes of whole weights of experts and their router on this rank."""
    model, moe = spec.model, spec.model.experts
    held, shared = moe.num // spec.parallel.ep, moe.shared_hidden_size // spec.parallel.tp
    hidden = model.hidden_size
    routed = {(held, moe.hidden_size, hidden), (held, hidden, moe.hidden_size), (moe.num, hidden)}
    return routed | {(shared, hidden), (hidden, shared)}
