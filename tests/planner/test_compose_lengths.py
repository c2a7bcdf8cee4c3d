"""Tests `Planner.for_lengths` by its arguments: sources, costs, numbers, and states that go on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb import Planner, PlannerState, TokenStore, load_profile, shard, workload_of
from wlb.data import GlobalBatches, LengthSource, TokenStoreWriter
from wlb.packing import PackerOptions
from wlb.plan import UserError
from wlb.planner import LLAMA2_7B
from wlb.spec import load

LENGTHS = [100, 50, 30, 20, 10, 90, 80] * 3
BASE: dict[str, Any] = {"context_window": 128, "num_micro_batches": 4}


def digests(lengths: Any = LENGTHS, **options: Any) -> list[int]:
    planner = Planner.for_lengths(lengths, **{**BASE, **options})
    return [step.digest() for step in planner.steps()]


def masked_store(folder: Path, *, tokens: int = 3) -> TokenStore:
    """Returns a store of 20 documents of 40 tokens of which the last ten are trained."""
    with TokenStoreWriter(folder / "store", vocab_size=64) as writer:
        for _ in range(20):
            writer.add([tokens] * 40, trained=[[30, 40]])
    return TokenStore(folder / "store")


def test_a_store_is_planned_with_its_labels_and_its_tokens_are_known(tmp_path: Path) -> None:
    store = masked_store(tmp_path)
    of_store = Planner.for_lengths(store, **BASE)
    of_lengths = Planner.for_lengths(store.lengths, **BASE)
    assert sum(step.num_targets for step in of_store.steps()) == 20 * 10
    assert sum(step.num_targets for step in of_lengths.steps()) == 20 * 39
    state = next(of_store.steps()).state
    other = masked_store(tmp_path / "other", tokens=4)
    assert len(list(of_store.steps(state))) > 0
    with pytest.raises(
        UserError, match="token store or its tokenizer is not the one of the checkpoint"
    ):
        next(Planner.for_lengths(other, **BASE).steps(state))


NUMBERS = {
    "context_window": 120,
    "num_micro_batches": 2,
    "cp": 2,
    "dp": 2,
    "row_multiple": 2,
    "s_max": 200,
    "step_tokens": 600,
    "max_delay": 3,
    "epochs": 2,
    "seed": 3,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numpy_integers_plan_as_ints_and_floats_are_refused(name: str) -> None:
    value, shuffled = NUMBERS[name], {"shuffle": name in ("seed", "epochs")}
    expected = digests(**{name: value}, **shuffled)
    for kind in (np.int64, np.uint64, np.int32):
        assert digests(**{name: kind(value)}, **shuffled) == expected
    planner = Planner.for_lengths(LENGTHS, **{**BASE, name: np.int64(value)}, **shuffled)
    json.dumps(next(planner.steps()).state.to_json())
    with pytest.raises(UserError, match=rf"{name} = {value}\.0 must be a whole number; give"):
        digests(**{name: float(value)})


def test_packers_and_global_batches_take_whole_numbers_alone() -> None:
    given: dict[str, Any] = {"num_micro_batches": np.uint64(2), "context_window": np.int32(8)}
    options = PackerOptions(**given, cost=LLAMA2_7B)
    assert type(options.num_micro_batches) is type(options.tokens_per_step) is int
    with pytest.raises(UserError, match=r"seed = 1\.5 must be a whole number"):
        PackerOptions(**given, cost=LLAMA2_7B, seed=1.5)
    source = LengthSource(name="given", lengths=np.array([3, 4]))
    for name in ("tokens_per_batch", "seed", "epochs"):
        given = {"tokens_per_batch": 8, "seed": 1, "epochs": 1}
        json.dumps(GlobalBatches(source, **{**given, name: np.int64(1)}).start())
        with pytest.raises(UserError, match=rf"{name} = '1' must be a whole number"):
            GlobalBatches(source, **{**given, name: "1"})


def test_costs_are_those_of_balance_step() -> None:
    profile = load_profile("h100")
    assert digests(cost=profile) == digests(cost=workload_of(load("7b_128k"), profile))
    assert digests(cost="llama2_7b") == digests()
    assert digests(cost=np.int64(24576)) == digests(cost=24576.0)
    for cost, said in (
        ("h100", r"cost = 'h100' is unknown.*load_profile\('h100'\)"),
        ("slime", "cost is 'slime', which can price only whole samples"),
        ([1.0] * len(LENGTHS), "cost is a list, which can price only whole samples"),
        (-1, "must be above 0 and finite"),
    ):
        with pytest.raises(UserError, match=said):
            digests(cost=cost)


def test_lengths_without_an_order_of_their_own_are_refused() -> None:
    for bad, said in (
        ((n for n in LENGTHS), r"lengths is a generator.*list\(lengths\)"),
        ({3: 4}.values(), "lengths is a dict_values"),
        ([[3, 4], [5]], "lengths is a list of lists of unequal lengths"),
    ):
        with pytest.raises(UserError, match=said):
            digests(bad)


def test_states_are_equal_by_value() -> None:
    first, second = [step.state for step in Planner.for_lengths(LENGTHS, **BASE).steps()][:2]
    again = PlannerState.from_json(json.loads(json.dumps(first.to_json())))
    assert again == first
    assert hash(again) == hash(first)
    assert first != second
    assert first != "a state"


@pytest.mark.parametrize("thresholds", [None, (64,)])
@pytest.mark.parametrize("epochs", [2, 3])
def test_a_finished_run_goes_on_with_more_epochs(thresholds: Any, epochs: int) -> None:
    options = {**BASE, "shuffle": True, "queue_thresholds": thresholds, "s_max": 130}
    done = list(Planner.for_lengths(LENGTHS, **options).steps())
    more = Planner.for_lengths(LENGTHS, **options, epochs=epochs)
    for at in {0, len(done) - 2, len(done) - 1}:
        rest = list(more.steps(done[at].state))
        assert [step.step for step in rest] == list(range(at + 1, at + 1 + len(rest)))
        trained = sum(step.packing.num_tokens for step in (*done[: at + 1], *rest))
        assert trained == epochs * sum(LENGTHS)
    assert not list(Planner.for_lengths(LENGTHS, **options).steps(done[-1].state))


def test_short_documents_are_sharded_per_sequence_by_default() -> None:
    """Chunks of a short document fill a tile each, so that cutting it finely costs attention."""
    short, long = [40] * 800, [16000, 9000, 7000]
    assert shard(short, cp=8, strategy="adaptive", cost=LLAMA2_7B).strategy == "per_sequence"
    assert shard(long, cp=8, strategy="adaptive", cost=LLAMA2_7B).strategy == "per_document"
    for lengths in (short, long):
        given = Planner.for_lengths(lengths, context_window=16384, num_micro_batches=2, cp=8)
        step = next(given.steps())
        of_profile = workload_of(load("7b_128k"), load_profile("h100"))
        for made in given.shard(step, 0).shardings:
            best = shard(made.lengths, cp=8, strategy="adaptive", cost=of_profile)
            assert made.strategy == best.strategy
