"""Fuzzes states and plans of planners: what goes on from one trains every token once, or nothing.

A state that names other documents, pieces or steps than its corpus gave is refused. Arrays and JSON
of carries, packings, shardings and whole steps give a record or a UserError.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import Refused, damaged, fuzzed, misshapen, outcome
from tests.planner.test_compose import planner
from tests.planner.test_resume import blended, packed, states
from wlb.plan import Carry, PackingPlan, Pieces, PlannerState, ShardingPlan, StepPlan
from wlb.plan.read_file import malformed
from wlb.planner import Planner, check_planner_state
from wlb.train.checkpoint import folder as checkpoint

MAKERS: dict[str, Callable[[], Planner]] = {
    "corpus": lambda: planner(policy="fixed"),
    "blend": blended,
    "packs": packed,
}


@cache
def middle(kind: str = "corpus") -> tuple[Planner, str]:
    """A planner, and a state of it with pieces that wait, as JSON."""
    made = MAKERS[kind]()
    found = states(made)
    state = next((s for s in found[3:] if len(s.carry.pieces) or s.ready), found[3])
    return made, json.dumps(state.to_json())


Pair = tuple[int, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def trained_from(made: Planner, state: PlannerState) -> dict[Pair, list[Pair]]:
    """By corpus and document, the pieces [start, stop) that are trained from a state on, in order;
    neighbours are one.
    """
    found: dict[Pair, list[Pair]] = {}
    for plan in made.steps(state):
        for piece in plan.packing.pieces:
            found.setdefault((piece.source, piece.document), []).append((piece.start, piece.stop))
    return {document: _joined(sorted(pieces)) for document, pieces in found.items()}


def _joined(pieces: list[Pair]) -> list[Pair]:
    out = pieces[:1]
    for start, stop in pieces[1:]:
        if start == out[-1][1]:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


@cache
def expected(kind: str) -> dict[Pair, list[Pair]]:
    made, text = middle(kind)
    return trained_from(made, PlannerState.from_json(json.loads(text)).reopened())


def read_state(folder: Path, kind: str, text: bytes) -> PlannerState:
    """As a run that resumes does."""
    (folder / checkpoint.PLANNER).write_bytes(text)
    state = checkpoint.planner_state(folder)
    check_planner_state(state, middle(kind)[0].source)
    return state


@pytest.mark.parametrize("kind", MAKERS)
@fuzzed(0.5, nightly=4000)
@given(st.data())
def test_a_misshapen_state_is_held_or_refused(folder: Path, kind: str, data: st.DataObject) -> None:
    text = data.draw(misshapen(json.loads(middle(kind)[1])))
    outcome(lambda: read_state(folder, kind, text.encode("utf-8", "surrogatepass")))


@fuzzed(0.3)
@given(st.data())
def test_a_damaged_state_is_held_or_refused(folder: Path, data: st.DataObject) -> None:
    text = data.draw(damaged(middle()[1].encode()))
    outcome(lambda: read_state(folder, "corpus", text))


@pytest.mark.parametrize("kind", MAKERS)
@fuzzed(0.1, nightly=300)
@given(st.data())
def test_what_goes_on_from_a_state_trains_every_token_that_is_left_once(
    folder: Path, kind: str, data: st.DataObject
) -> None:
    """Nightly 300 of each, as the steps of one are planned to the end of its corpus."""
    made, text = middle(kind)
    value = data.draw(misshapen(json.loads(text)))
    state = outcome(lambda: read_state(folder, kind, value.encode("utf-8", "surrogatepass")))
    if isinstance(state, Refused):
        return
    found = outcome(lambda: trained_from(made, state))
    assert isinstance(found, Refused) or found == expected(kind)


def carried() -> Carry:
    return PlannerState.from_json(json.loads(middle()[1])).carry


def used(carry: Carry) -> list[Any]:
    return [carry.policy, carry.next_step, carry.slot.tolist(), carry.pieces.to_json()]


@fuzzed()
@given(st.data())
def test_a_damaged_carry_is_the_same_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "carry.npz"
    carried().save(path)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    made = outcome(lambda: used(Carry.load(path)))
    assert isinstance(made, Refused) or made == used(carried())


@fuzzed()
@given(st.data())
def test_a_carry_of_other_arrays_is_a_carry_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "arrays.npz"
    carried().save(path)
    with np.load(path) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    number = st.sampled_from([-1, 0, 1, 5, 2**31, 2**62, -(2**63)])
    other = st.one_of(
        st.lists(number, max_size=6).map(lambda v: np.array(v, np.int64)),
        number.map(np.int64),
        st.sampled_from([np.array("x"), np.array(1e300), np.array([[0, 1]]), np.array([0.5])]),
        st.sampled_from([np.array([np.nan]), np.array([True]), np.array([2**63], np.uint64)]),
    )
    for name in data.draw(st.lists(st.sampled_from(sorted(arrays)), min_size=1, max_size=2)):
        if data.draw(st.booleans()):
            arrays[name] = data.draw(other)
        else:
            arrays.pop(name, None)
    np.savez(path, **arrays)
    made = outcome(lambda: Carry.load(path))
    if not isinstance(made, Refused):
        assert made.slot.size == len(made.pieces)
        assert made.next_step >= 0
        assert (made.pieces.start >= 0).all()
        assert (made.pieces.stop > made.pieces.start).all()


@fuzzed(0.3)
@given(st.data())
def test_carries_read_back_as_they_were_saved(folder: Path, data: st.DataObject) -> None:
    path = folder / "again.npz"
    edges = data.draw(st.lists(st.integers(1, 2**40), min_size=1, max_size=6, unique=True))
    whole = [0, *sorted(edges)]
    num = len(edges)
    pieces = Pieces(
        document=np.arange(num),
        start=np.array(whole[:-1]),
        stop=np.array(whole[1:]),
        num_targets=np.zeros(num, np.int64),
        source=np.zeros(num, np.int64),
        arrival_step=np.array(data.draw(st.lists(st.integers(0, 9), min_size=num, max_size=num))),
    )
    slot = np.array(data.draw(st.lists(st.integers(0, 9), min_size=num, max_size=num)))
    made = Carry(policy=data.draw(st.text(max_size=9)), pieces=pieces, slot=slot, next_step=num)
    made.save(path)
    # numpy's text arrays cannot hold zeros at their end.
    assert used(Carry.load(path))[1:] == used(made)[1:]
    assert Carry.load(path).policy == made.policy.rstrip("\0")


@cache
def step() -> StepPlan:
    return next(planner().steps())


def _sharding() -> dict[str, Any]:
    return planner().shard(step(), 0).shardings[0].to_json()


RECORDS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any], Any]]] = {
    "carry": (lambda: carried().to_json(), Carry.from_json),
    "packing plan": (lambda: step().packing.to_json(), PackingPlan.from_json),
    "sharding plan": (_sharding, ShardingPlan.from_json),
    "step plan": (lambda: step().to_json(), StepPlan.from_json),
}


@pytest.mark.parametrize("what", RECORDS)
@fuzzed(0.3, nightly=3000)
@given(st.data())
def test_misshapen_plans_are_plans_or_refused(what: str, data: st.DataObject) -> None:
    """As a file of plans is read; a plan that is accepted is written and read back the same."""
    whole, read = RECORDS[what]
    text = data.draw(misshapen(json.loads(json.dumps(whole()))))

    def parsed() -> Any:
        with malformed("plans.json", "write it again"):
            return read(json.loads(text))

    try:
        made = outcome(parsed)
    except json.JSONDecodeError:
        return
    if not isinstance(made, Refused):
        again = json.loads(json.dumps(made.to_json()))
        assert read(again).to_json() == made.to_json()
