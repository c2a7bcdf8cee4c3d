"""Tests that a planner state which contradicts itself or its data is refused, and no other."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.test_compose import POLICIES, planner
from tests.sets import full
from wlb.cost import FlopsWorkload
from wlb.data import GlobalBatches, LengthSource, TokenStore, TokenStoreWriter
from wlb.data.blend import BlendedBatches
from wlb.packing import OriginalPacker, PackerOptions, Packs, VarLenPacker
from wlb.packing.saved_packs import PackedBatches, SavedPacker
from wlb.plan import PlannerState, UserError
from wlb.planner import Planner, check_planner_state
from wlb.spec import WindowCut

COST = FlopsWorkload(quadratic_ns=1, linear_ns_per_token=50)
OPTIONS = PackerOptions(num_micro_batches=2, context_window=128, cost=COST)


def states(made: Planner, most: int = 200) -> list[PlannerState]:
    """The states after each step, as a checkpoint holds them."""
    plans = [plan for plan, _ in zip(made.steps(), range(most), strict=False)]
    return [PlannerState.from_json(json.loads(json.dumps(p.state.to_json()))) for p in plans]


def states_from(made: Planner, state: PlannerState) -> list[PlannerState]:
    return [plan.state for plan in made.steps(state)]


def blended(shuffled: int = 5) -> Planner:
    rng = np.random.default_rng(1)
    sources = [
        LengthSource(name=str(n), lengths=rng.integers(1, 300, 40 + n), source_id=n)
        for n in range(3)
    ]
    source = BlendedBatches(sources, [1, 2, 0.5], tokens_per_batch=256, seed=shuffled, epochs=3)
    packer = VarLenPacker(options=OPTIONS, s_max=256, queue_thresholds=(100,))
    return Planner(source=source, packer=packer, baseline=None, cost=COST)


def packed() -> Planner:
    source = LengthSource(name="packed", lengths=np.arange(1, 100))
    batches = GlobalBatches(source, tokens_per_batch=256, seed=0, epochs=1)
    packer = VarLenPacker(options=OPTIONS, s_max=256, queue_thresholds=())
    whole = Planner(source=batches, packer=packer, baseline=None, cost=COST)
    packs = Packs.of((plan.packing for plan in whole.steps()), source, window=128)
    return Planner(
        source=PackedBatches(packs, source, epochs=3),
        packer=SavedPacker(options=OPTIONS, packs=packs),
        baseline=None,
        cost=COST,
    )


def masked(folder: Path) -> Planner:
    """A planner on a store that trains only some tokens."""
    prefix = folder / "masked"
    with TokenStoreWriter(prefix, vocab_size=10) as writer:
        for n in range(2, 80):
            writer.add(np.arange(n) % 10, [(n // 2, n)])
    source = GlobalBatches(TokenStore(prefix), tokens_per_batch=256, seed=3, epochs=2)
    return Planner(
        source=source,
        packer=VarLenPacker(options=OPTIONS, s_max=256, queue_thresholds=(60,)),
        baseline=OriginalPacker(options=OPTIONS),
        cost=COST,
    )


@pytest.mark.parametrize("policy", ["bounded", "var_len", *full("original", "fixed", "capacity")])
def test_states_of_every_policy_pass(policy: str) -> None:
    for longest in (900, 9000):
        made = planner(policy=policy, longest=longest)
        for state in states(made):
            check_planner_state(state, made.source)


def test_states_of_every_source_pass(tmp_path: Path) -> None:
    for made in (blended(), packed(), masked(tmp_path)):
        held = states(made)
        assert len(held) > 10
        for state in held:
            check_planner_state(state, made.source)


def test_a_state_goes_on_with_another_policy_and_layout() -> None:
    """Carries of one policy are another's, so slots are held against no single policy."""
    for before, after in zip(POLICIES, [*POLICIES[1:], POLICIES[0]], strict=True):
        for state in states(planner(policy=before, longest=9000), 8):
            again = planner(n=6, dp=3, policy=after, longest=9000)
            later = next(again.steps(state), None)
            if later is not None:
                check_planner_state(later.state, again.source)


@cache
def _found() -> tuple[str, Planner]:
    made = planner(policy="fixed", longest=9000)
    for state in states(made):
        if state.ready and len(state.carry.pieces) > 3 and len(state.baseline.pieces) > 1:
            return json.dumps(state.to_json()), made
    raise AssertionError("no state has planned steps and waiting pieces")


def _middle() -> tuple[dict[str, Any], Planner]:
    """A state with planned steps and waiting pieces, as JSON of its own, and its planner."""
    text, made = _found()
    return json.loads(text), made


# Earlier versions, which learned prices, wrote this where there were none.
NO_PRICES: dict[str, Any] = {"base": "", "changes": []}
CONTRADICTIONS: dict[str, Any] = {
    "a piece is dropped": lambda s: _pop(s["carry"], 0),
    "a piece is there twice": lambda s: _repeat(s["carry"], 0),
    "a planned piece waits too": lambda s: _copy_ready(s),
    "a piece is longer than its document": lambda s: _set(s["carry"], "stop", 0, 10**6),
    "a document that was not read": lambda s: _set(s["carry"], "document", 0, 10**9),
    "a document below 0": lambda s: _set(s["carry"], "document", 0, -1),
    "another corpus": lambda s: _set(s["carry"], "source", 0, 7),
    "other labels": lambda s: _set(s["carry"], "num_targets", 0, 1),
    "a slot that no policy has": lambda s: s["carry"]["slot"].__setitem__(0, 10**12),
    "a slot below 0": lambda s: s["carry"]["slot"].__setitem__(0, -1),
    "a piece of the future": lambda s: _set(s["carry"], "arrival", 0, 10**6),
    "tokens trained": lambda s: s.__setitem__("num_tokens", s["num_tokens"] + 1),
    "no whole number": lambda s: s.__setitem__("num_tokens", float("nan")),
    "a count as text": lambda s: s.__setitem__("num_batches", "3"),
    "batches": lambda s: s.__setitem__("num_batches", s["num_batches"] + 1),
    "the next step goes back": lambda s: s["carry"].__setitem__("next_step", 0),
    "the next step skips": lambda s: s["carry"].__setitem__("next_step", 10**6),
    "planned steps do not follow": lambda s: s["ready"][0].__setitem__("step", 10**6),
    "the corpus goes back": lambda s: s["corpus"].__setitem__("position", 0),
    "the corpus skips": lambda s: s["corpus"].__setitem__("position", 299),
    "the corpus skips an epoch": lambda s: s["corpus"].__setitem__("epoch", 2**61),
    "the corpus's position as a truth": lambda s: s["corpus"].__setitem__("position", True),
    "exhausted": lambda s: s.__setitem__("exhausted", 0),
    "the baseline's step": lambda s: s["baseline"].__setitem__("next_step", -1),
    "the baseline's piece": lambda s: _set(s["baseline"], "document", 0, 10**9),
    "a slot that only other policies have": lambda s: s["carry"]["slot"].__setitem__(0, 2),
    "a slot of a policy with one": lambda s: s["baseline"]["slot"].__setitem__(0, 1),
    "another policy than that of planned steps": lambda s: s["carry"].update(policy="bounded"),
    "a policy that there is not": lambda s: _rename(s, "fastest"),
    "a baseline that there is not": lambda s: s["baseline"].update(policy="fastest"),
    "an arrival to come": lambda s: _set(s["carry"], "arrival", 0, 10**3),
    "one more of surplus": lambda s: s["corpus"].update(surplus=s["corpus"]["surplus"] + 1),
    "no token fills batches": lambda s: s["corpus"].update(filled=0),
    "exhausted before the end": lambda s: s.update(exhausted=True),
    "prices in a list": lambda s: s.update(prices=[]),
    "changes of prices in an object": lambda s: s.update(prices={"base": "", "changes": {}}),
    "prices of a number": lambda s: s.update(prices={"base": 5, "changes": []}),
    "a change of prices that is a number": lambda s: s.update(prices=NO_PRICES | {"changes": [1]}),
    "an unknown key of prices": lambda s: s.update(prices=NO_PRICES | {"more": 1}),
    "an unknown key": lambda s: s.update(more=1),
    "an unknown key of what waits": lambda s: s["carry"].update(more=1),
    "an unknown column": lambda s: s["carry"]["pieces"].update(more=[]),
    "an unknown key of the corpus": lambda s: s["corpus"].update(more=1),
    "a slot that is a truth": lambda s: s["carry"]["slot"].__setitem__(0, True),
    "a plan that holds NaN": lambda s: s["ready"][0].__setitem__("num_held_tokens", float("nan")),
}


def _rename(state: dict[str, Any], policy: str) -> None:
    for part in (state["carry"], *state["ready"]):
        part["policy"] = policy


def _pop(carry: dict[str, Any], at: int) -> None:
    for column in (carry["slot"], *carry["pieces"].values()):
        column.pop(at)


def _repeat(carry: dict[str, Any], at: int) -> None:
    for column in (carry["slot"], *carry["pieces"].values()):
        column.append(column[at])


def _copy_ready(state: dict[str, Any]) -> None:
    for name, column in state["carry"]["pieces"].items():
        column.append(state["ready"][0]["pieces"][name][0])
    state["carry"]["slot"].append(0)


def _set(carry: dict[str, Any], column: str, at: int, value: int) -> None:
    carry["pieces"][column][at] = value


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_state_that_contradicts_itself_is_refused(what: str) -> None:
    data, made = _middle()
    check_planner_state(PlannerState.from_json(data), made.source)
    CONTRADICTIONS[what](data)
    with pytest.raises(UserError):
        next(made.steps(PlannerState.from_json(data)))


@given(data=st.data())
def test_no_changed_number_of_a_state_is_planned_from(data: st.DataObject) -> None:
    """Each number that decides what is trained, changed by itself; the two that only metrics show
    are refused where they are no counts.
    """
    state, made = _middle()
    group = data.draw(st.sampled_from(["carry", "ready", "corpus", "num_tokens", "num_batches"]))
    delta = data.draw(st.sampled_from([-1000, -1, 1, 1000, 2**40]))
    if group in ("num_tokens", "num_batches"):
        state[group] += delta
    elif group == "corpus":
        name = data.draw(st.sampled_from(["epoch", "position", "batch", "surplus"]))
        state["corpus"][name] += delta
    else:
        record = state["carry"] if group == "carry" else data.draw(st.sampled_from(state["ready"]))
        name = data.draw(st.sampled_from(["document", "start", "stop", "num_targets", "source"]))
        column = record["pieces"][name]
        column[data.draw(st.integers(0, len(column) - 1))] += delta
    with pytest.raises(UserError):
        check_planner_state(PlannerState.from_json(state), made.source)


def test_a_source_of_ones_own_is_taken_at_its_word() -> None:
    """Without an account of what it gave, the state is still held against itself."""
    data, _ = _middle()
    check_planner_state(PlannerState.from_json(data), object())
    _repeat(data["carry"], 0)
    with pytest.raises(UserError, match="is in both"):
        check_planner_state(PlannerState.from_json(data), object())


def test_a_blend_whose_counts_disagree_is_refused() -> None:
    made = blended()
    state = states(made)[5]
    corpus = {**state.corpus, "tokens_read": [n + 1 for n in state.corpus["tokens_read"]]}
    with pytest.raises(UserError, match=r"store 0 of data\.blend has"):
        check_planner_state(replace(state, corpus=corpus), made.source)


def test_a_state_without_what_later_versions_keep_goes_on() -> None:
    """Corpora of earlier versions do not say how many tokens fill their batches."""
    data, made = _middle()
    del data["corpus"]["filled"]
    plans = list(made.steps(PlannerState.from_json(data)))
    assert "filled" not in plans[-1].state.corpus
    assert plans[-1].state.num_tokens == made.source.num_tokens(plans[-1].state.corpus)


@pytest.mark.full
def test_a_state_of_another_policy_waits_in_no_slot_and_for_no_later_step() -> None:
    """Slots and steps ahead are those of the policy that chose them; the next one begins anew."""
    for before in ("capacity", "fixed", "var_len", "original"):
        for state in states(planner(policy=before, longest=9000), 8):
            again = planner(policy="bounded", longest=9000)
            for later in states_from(again, state):
                check_planner_state(later, again.source)


@pytest.mark.parametrize("cut", WindowCut)
def test_open_windows_are_held_to_their_numbers(cut: WindowCut) -> None:
    made = planner(policy="original", longest=256)
    made = replace(made, packer=OriginalPacker(options=made.packer.options, cut=cut))
    held = states(made)
    for state in held:
        check_planner_state(state, made.source)
    state = next(s for s in held if len(s.carry.pieces) > 2)
    slot = state.carry.slot.copy()
    slot[-1] += len(slot)
    with pytest.raises(UserError, match="this policy never places a piece of this length"):
        check_planner_state(replace(state, carry=replace(state.carry, slot=slot)), made.source)


def test_an_ended_blend_may_have_ended_and_no_other_state() -> None:
    made = blended()
    held = states(made, 1000)
    ended = [made.source.may_have_ended(state.corpus) for state in held]
    assert held[-1].exhausted
    assert ended[-1]
    assert sum(ended) < 10 < len(held)
