"""Holds a planner state that was loaded against what every state of a run has.

A state may be read from a checkpoint that was damaged, edited or mixed with another, and still be
valid JSON of the right shape. Planning would go on from it and train tokens twice or never.
"""

import math
from dataclasses import fields

import numpy as np

from wlb.data import MOST_COUNT, AccountedStream
from wlb.plan import Carry, PackingPlan, Pieces, PlannerState, StepMetrics, UserError
from wlb.plan.arrays import first_true

_MOST_SLOTS = 1024
"""Slots of a carry beyond one for each waiting piece and batch: queues of Algorithm 1."""


def hold_state(state: PlannerState, source: object) -> None:
    """UserError for a state that contradicts itself or the data that it goes on from.

    Held: every token that the source gave was trained, is planned or waits, exactly once; pieces
    are of documents that it gave; steps follow each other; all numbers are finite. source: what
    gives a planner its global batches; one that is no `AccountedStream` is taken at its word.
    Cost: 30 ns for each document that the state's epoch has given (a hundred million: 3 s).
    """
    try:
        _hold_counts(state)
        _hold_steps(state)
        _hold_carry(state, state.carry)
        _hold_carry(state, state.baseline)
        waiting = Pieces.concat(state.carry.pieces, *(plan.pieces for plan in state.ready))
        _hold_once(waiting)
        _hold_once(state.baseline.pieces)
        for pieces in (waiting, state.baseline.pieces):
            _hold_arrival(pieces, state.carry.next_step + state.num_batches)
        if isinstance(source, AccountedStream):
            _hold_source(state, source, waiting)
    except UserError as error:
        raise UserError(
            f"the planner state contradicts itself: {error}; it is damaged or was edited, so "
            f"resume from another checkpoint"
        ) from error


def _hold_counts(state: PlannerState) -> None:
    counts: dict[str, object] = {
        "num_batches": state.num_batches,
        "num_tokens": state.num_tokens,
        "carry.next_step": state.carry.next_step,
        "baseline.next_step": state.baseline.next_step,
    }
    counts |= {f"ready[{i}].step": plan.step for i, plan in enumerate(state.ready)}
    counts |= {f"changes[{i}].step": c.step for i, c in enumerate(state.prices.changes)}
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value <= MOST_COUNT:
            raise UserError(f"{name} = {value!r} is no count")
    if type(state.exhausted) is not bool:
        raise UserError(f"exhausted = {state.exhausted!r} is neither true nor false")
    for metrics in state.baseline_made:
        _hold_metrics(metrics)
    for plan in state.ready:
        _hold_plan(plan)


def _hold_metrics(metrics: StepMetrics) -> None:
    for field in fields(metrics):
        value = getattr(metrics, field.name)
        numbers = value if field.name == "degrees" else (value,)
        if field.name == "sharding_counts":
            numbers = [count for _, count in value]
        if value is None and field.default is None:
            continue
        for number in numbers:
            valid = type(number) in (int, float) and math.isfinite(number) and number >= 0
            if not valid or number > 2.0**63:
                raise UserError(f"baseline_made has {field.name} = {value!r}")


def _hold_plan(plan: PackingPlan) -> None:
    for name in ("num_held_tokens", "num_overdue", "num_joined_targets"):
        value = getattr(plan, name)
        if type(value) is not int or not 0 <= value <= MOST_COUNT:
            raise UserError(f"the plan of step {plan.step} has {name} = {value!r}")


def _hold_steps(state: PlannerState) -> None:
    """Planned steps follow each other, and what the packers carry comes after them."""
    planned = [plan.step for plan in state.ready]
    after = state.carry.next_step
    if planned != list(range(after - len(planned), after)):
        raise UserError(
            f"steps {planned} are planned, and the step after them is said to be {after}"
        )
    made = [metrics.step for metrics in state.baseline_made]
    if made != sorted(set(made)) or (made and made[-1] >= state.baseline.next_step):
        raise UserError(
            f"the baseline made steps {made}, and its next one is {state.baseline.next_step}"
        )


def _hold_carry(state: PlannerState, carry: Carry) -> None:
    most = max(len(carry.pieces), state.num_batches) + _MOST_SLOTS
    if (i := first_true((carry.slot < 0) | (carry.slot > most))) is not None:
        raise UserError(
            f"{carry.pieces[i]} of policy {carry.policy!r} waits in slot {carry.slot[i]}, which no "
            f"policy has"
        )


def _hold_once(pieces: Pieces) -> None:
    order = np.lexsort((pieces.start, pieces.document))
    document, start, stop = (c[order] for c in (pieces.document, pieces.start, pieces.stop))
    twice = (document[1:] == document[:-1]) & (start[1:] < stop[:-1])
    if (i := first_true(twice)) is not None:
        raise UserError(
            f"tokens from {start[i + 1]} on of document {document[i]} wait twice, in pieces "
            f"[{start[i]}, {stop[i]}) and [{start[i + 1]}, {stop[i + 1]})"
        )


def _hold_arrival(pieces: Pieces, last: int) -> None:
    if (i := first_true((pieces.arrival_step < 0) | (pieces.arrival_step > last))) is not None:
        raise UserError(f"{pieces[i]} came at a step that has not been")


def _hold_source(state: PlannerState, source: AccountedStream, waiting: Pieces) -> None:
    if (given := source.num_batches(state.corpus)) != state.num_batches:
        raise UserError(
            f"{state.num_batches} global batches were packed, of {given} that the corpus gave"
        )
    for pieces in (waiting, state.baseline.pieces):
        source.hold_pieces(state.corpus, pieces)
    tokens = source.num_tokens(state.corpus)
    if tokens != state.num_tokens + waiting.num_tokens:
        raise UserError(
            f"the corpus gave {tokens} tokens, of which {state.num_tokens} were trained and "
            f"{waiting.num_tokens} wait"
        )
    if state.baseline.num_tokens > tokens:
        raise UserError(f"{state.baseline.num_tokens} tokens wait for the baseline, of {tokens}")
