"""The order of each pipeline rank's passes: 1F1B, interleaved 1F1B and interleaved zero-bubble.

A pipeline has n micro-batches, pp ranks and v virtual stages ("chunks") on each rank. Interleaved
schedules run micro-batches in groups of m = n / max(1, n // pp). The k-th forward pass of a rank is

    micro-batch  (k // (m v)) m + k % m
    chunk        (k // m) % v              (in the k-th backward pass: v - 1 - (k // m) % v)

Interleaved 1F1B (Narayanan et al., 2021) starts with (v - 1) m + 2 (pp - 1 - rank) forward passes.
Zero-bubble (ZB1P, Qi et al., 2023) starts with (v - 1) m + pp - 1 - rank, and it runs each
weight-gradient pass `rank * weight_delay` passes later than the input-gradient pass. Tests compare
the orders with torch's `pipeline_order` without its idle slots.
"""

from enum import StrEnum
from typing import NamedTuple

from wlb.plan import UserError, check_at_least
from wlb.spec import PipelineSection, Schedule


class PassKind(StrEnum):
    """Kinds of passes of a micro-batch through a stage; torch's schedules use the same letters."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @property
    def sends_gradient(self) -> bool:
        """Whether the pass sends the gradient of its input to the previous stage."""
        return self in (PassKind.BACKWARD, PassKind.BACKWARD_INPUT)


class Action(NamedTuple):
    """One pass. Its text form is as in torch: `2F0` is the forward of micro-batch 0 on stage 2."""

    stage: int  # stage of the model, virtual stages included
    kind: PassKind
    micro_batch: int  # number of the micro-batch in its pipeline

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[tuple[Action, ...], ...]
"""The passes of each pipeline rank, in the order in which the rank runs them."""


def pipeline_order(pipeline: PipelineSection, *, pp: int, num_micro_batches: int) -> Order:
    """Return the passes of every pipeline rank, in order.

    Args:
        pipeline: Schedule, number of virtual stages, and delay of weight-gradient passes.
        pp: Number of pipeline ranks.
        num_micro_batches: Number of micro-batches of the pipeline.

    Raises:
        UserError: The schedule does not allow these numbers of ranks, stages and micro-batches.
    """
    schedule, n, v = pipeline.schedule, num_micro_batches, pipeline.virtual_stages
    numbers = {"pp": pp, "virtual_stages": v, "num_micro_batches": n}
    for name, value in (numbers | {"weight_delay": pipeline.weight_delay}).items():
        check_at_least(name, value, 1)
    if pp == 1:
        # Without a pipeline, each micro-batch runs forward and then backward.
        kinds = (PassKind.FORWARD, PassKind.BACKWARD)
        return (tuple(Action(0, kind, i) for i in range(n) for kind in kinds),)
    if schedule == Schedule.ONE_F_ONE_B and v != 1:
        raise UserError(
            f"pp.virtual_stages = {v} must be 1 with the schedule 1f1b; set pp.virtual_stages = 1, "
            "or choose an interleaved schedule"
        )
    if not schedule.takes(n, pp):
        if schedule == Schedule.ONE_F_ONE_B:
            raise UserError(
                f"the schedule 1f1b needs at least parallel.pp = {pp} micro-batches per pipeline, "
                f"but there are {n}; use more micro-batches, or lower parallel.pp"
            )
        raise UserError(
            f"an interleaved schedule with parallel.pp = {pp} processes the {n} micro-batches of a "
            f"pipeline in {n // pp} rounds, which must have equal numbers of micro-batches; make "
            f"the number of micro-batches per pipeline a multiple of {pp}"
        )
    return tuple(_rank_order(pipeline, rank, pp, n) for rank in range(pp))


def _rank_order(pipeline: PipelineSection, rank: int, pp: int, n: int) -> tuple[Action, ...]:
    v, group = pipeline.virtual_stages, n // max(1, n // pp)
    is_split = pipeline.schedule == Schedule.INTERLEAVED_ZERO_BUBBLE
    # A rank has this many more warm-up passes than the next rank of the pipeline.
    hops = 2 if pipeline.schedule == Schedule.INTERLEAVED_1F1B else 1
    warmup = min((v - 1) * group + hops * (pp - 1 - rank), n * v)
    backward = PassKind.BACKWARD_INPUT if is_split else PassKind.BACKWARD

    def action(kind: PassKind, k: int) -> Action:
        chunk = (k // group) % v
        if kind != PassKind.FORWARD:
            chunk = v - 1 - chunk
        return Action(rank + chunk * pp, kind, k // (group * v) * group + k % group)

    out = [action(PassKind.FORWARD, k) for k in range(warmup)]
    num_weights = 0
    for k in range(n * v):
        if warmup + k < n * v:
            out.append(action(PassKind.FORWARD, warmup + k))
        out.append(action(backward, k))
        # Weight-gradient passes run later than their input-gradient passes. The remaining ones run
        # at the end.
        if is_split and k >= rank * pipeline.weight_delay:
            out.append(action(PassKind.BACKWARD_WEIGHT, num_weights))
            num_weights += 1
    if is_split:
        out += [action(PassKind.BACKWARD_WEIGHT, k) for k in range(num_weights, n * v)]
    return tuple(out)
