"""Holds a planner state that was loaded against what every state of a run has.

A state may be read from a checkpoint that was damaged, edited or mixed with another, and still be
valid JSON of the right shape. Planning would go on from it and train tokens twice or never.
"""

import math
from collections.abc import Collection
from dataclasses import fields

import numpy as np

from wlb.data import MOST_COUNT, AccountedStream
from wlb.packing import PACKERS, CarrySlots, Packer
from wlb.plan import Carry, PackingPlan, Pieces, PlannerState, StepMetrics, UserError
from wlb.plan.arrays import first_true

_MOST_SLOTS = 1024
"""Slots of a carry beyond one for each waiting piece and batch, of a policy that is not wlb's."""


def hold_state(state: PlannerState, source: object, *, own: Collection[Packer] = ()) -> None:
    """UserError for a state that contradicts itself or the data that it goes on from.

    Held: every token that the source gave was trained, is planned or waits, exactly once; pieces
    are of documents that it gave and wait where their policy puts them; steps follow each other;
    all numbers are finite. source: what gives a planner its global batches; one that is no
    `AccountedStream` is taken at its word. own: packers of the planner, known besides wlb's.
    Cost: 30 ns for each document that the state's epoch has given (a hundred million: 3 s).
    """
    try:
        _hold_counts(state)
        _hold_steps(state)
        waiting = Pieces.concat(state.carry.pieces, *(plan.pieces for plan in state.ready))
        _hold_once(waiting)
        _hold_once(state.baseline.pieces)
        packers = {packer.policy: packer for packer in (*own, *PACKERS)}
        _hold_policies(state, packers)
        for carry in (state.carry, state.baseline):
            _hold_carry(state, carry, packers[carry.policy])
        waits = getattr(packers[state.carry.policy], "batches_wait", True)
        ahead = state.num_batches if waits else 0
        _hold_arrival(waiting, state.carry.next_step + ahead)
        _hold_arrival(state.baseline.pieces, state.carry.next_step + state.num_batches)
        if state.exhausted and len(state.carry.pieces):
            raise UserError(
                f"exhausted = true, but {len(state.carry.pieces)} pieces wait for a step"
            )
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


def _hold_policies(state: PlannerState, known: Collection[str]) -> None:
    """What is planned and what waits are of one policy, and one that there is."""
    for policy in (state.carry.policy, state.baseline.policy):
        if policy not in known:
            raise UserError(
                f"pieces wait for the policy {policy!r}, which is not known; go on with the packer "
                f"that made the state, or start a new run"
            )
    for plan in state.ready:
        if plan.policy != state.carry.policy:
            raise UserError(
                f"step {plan.step} was planned by policy {plan.policy!r}, and pieces wait for "
                f"{state.carry.policy!r}"
            )


def _hold_carry(state: PlannerState, carry: Carry, packer: object) -> None:
    """packer: that made the carry, or its class. One of a user's own may say nothing of slots."""
    slot, length = carry.slot, carry.pieces.length
    most = max(len(carry.pieces), state.num_batches) + _MOST_SLOTS
    slots: CarrySlots = getattr(packer, "slots", CarrySlots.ANY)
    if (i := first_true(slots.misplaced(slot, length, most=most))) is not None:
        raise UserError(
            f"{carry.pieces[i]} of policy {carry.policy!r} waits in slot {slot[i]}, where the "
            f"policy puts no such piece"
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
    if state.exhausted and not source.may_have_ended(state.corpus):
        raise UserError("exhausted = true, but the corpus has not ended there")
    tokens = source.num_tokens(state.corpus)
    if tokens != state.num_tokens + waiting.num_tokens:
        raise UserError(
            f"the corpus gave {tokens} tokens, of which {state.num_tokens} were trained and "
            f"{waiting.num_tokens} wait"
        )
    if state.baseline.num_tokens > tokens:
        raise UserError(f"{state.baseline.num_tokens} tokens wait for the baseline, of {tokens}")
