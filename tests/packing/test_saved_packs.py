"""Tests packs made offline: the same micro-batches from a file, epochs, resuming, refusals."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.train.case import write_store
from wlb.cli import main
from wlb.cost import workload_for
from wlb.data import TokenStore
from wlb.packing import Packs
from wlb.plan import Layout, PlannerState, StepPlan
from wlb.planner import Planner, open_planner, packs_of
from wlb.spec import RunSpec, load

LENGTHS = np.clip(np.random.default_rng(2).lognormal(3.5, 0.8, 400).astype(int) + 1, 1, 256)


def spec_of(store: str, *overrides: str) -> RunSpec:
    return load(
        "demo",
        [
            f"data.store={store}",
            "packing.method=multipack_bfd_posid",
            "model.vocab_size=320",
            "parallel.tp=1",
            "parallel.cp=1",
            "parallel.pp=1",
            "pp.virtual_stages=1",
            "parallel.dp=2",
            "data.context_window=256",
            "data.num_windows=4",
            "data.epochs=1",
            "planner.baseline=false",
            *overrides,
        ],
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_store(tmp_path_factory.mktemp("saved") / "store", LENGTHS.tolist())


@pytest.fixture(scope="module")
def packs(store: str) -> str:
    path = Path(store).parent / "packs.npz"
    words = [f"data.store={store}", "packing.method=multipack_bfd_posid", "model.vocab_size=320"]
    words += ["parallel.tp=1", "parallel.cp=1", "parallel.pp=1", "pp.virtual_stages=1"]
    words += ["data.context_window=256", "data.num_windows=4", "parallel.dp=2"]
    assert main(["pack", "demo", "--set", *words, "--out", str(path)]) == 0
    return str(path)


def planner(spec: RunSpec) -> Planner:
    return open_planner(spec, spec.data.store, "cpu")


def micro_batches(plan: StepPlan) -> list[list[int]]:
    return [batch.pieces.document.tolist() for batch in plan.packing.micro_batches]


def test_a_run_trains_what_packing_would_give_it(store: str, packs: str) -> None:
    direct = list(planner(spec_of(store)).steps())
    saved = list(planner(spec_of(store, f"packing.packs={packs}")).steps())
    assert [micro_batches(plan) for plan in saved] == [micro_batches(plan) for plan in direct]
    for ours, theirs in zip(saved, direct, strict=True):
        assert ours.num_targets == theirs.num_targets
        assert ours.packing.workload_ns.tolist() == theirs.packing.workload_ns.tolist()
        assert ours.pipelines.tolist() == theirs.pipelines.tolist()


def test_epochs_repeat_and_any_step_can_be_resumed(store: str, packs: str) -> None:
    made = planner(spec_of(store, f"packing.packs={packs}", "data.epochs=2"))
    plans = list(made.steps())
    half = len(plans) // 2
    for first, second in zip(plans[:half], plans[half:], strict=True):
        again = [[d - LENGTHS.size for d in batch] for batch in micro_batches(second)]
        assert again == micro_batches(first)
    for plan in plans[:: max(1, len(plans) // 5)]:
        state = PlannerState.from_json(json.loads(json.dumps(plan.state.to_json())))
        rest = [micro_batches(p) for p in made.steps(state)]
        assert rest == [micro_batches(p) for p in plans[plan.step + 1 :]]


def test_padding_is_kept_too(store: str, tmp_path: Path) -> None:
    spec = spec_of(store, "packing.method=group_by_length_padding")
    made = packs_of(spec, TokenStore(store), workload_for(spec, "cpu"))
    made.save(tmp_path / "padded.npz")
    again = Packs.load(tmp_path / "padded.npz")
    assert again.layout == Layout.PADDED
    assert np.array_equal(again.rows, made.rows)
    spec = spec_of(
        store, "packing.method=group_by_length_padding", f"packing.packs={tmp_path}/padded.npz"
    )
    assert all(plan.packing.layout == Layout.PADDED for plan in planner(spec).steps())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.num_windows=8",
            "packing.packs was made with num_micro_batches = 4, but the run has 8; make",
        ),
        (
            "data.context_window=512",
            "packing.packs was made with context_window = 256, but the run has",
        ),
        (
            "packing.method=random_padding",
            "packing.packs was made with layout = separate, but the run has padded",
        ),
    ],
)
def test_packs_of_other_settings_are_refused(
    store: str, packs: str, override: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        planner(spec_of(store, f"packing.packs={packs}", override))


def test_packs_of_another_store_or_of_no_kind_are_refused(
    store: str, packs: str, tmp_path: Path
) -> None:
    other = write_store(tmp_path / "other", [*LENGTHS[:-1].tolist(), 7])
    with pytest.raises(ValueError, match="was made for another token store"):
        planner(spec_of(other, f"packing.packs={packs}"))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "array.npy", np.arange(3))
    np.savez(tmp_path / "axes.npz", format=np.arange(3))
    for name in ("text.npz", "missing.npz", "empty.npz", "array.npy", "axes.npz"):
        with pytest.raises(ValueError, match=f"{name} holds no packs"):
            planner(spec_of(store, f"packing.packs={tmp_path / name}"))


def test_cut_documents_and_waiting_ones_have_no_place(store: str, packs: str) -> None:
    cut = spec_of(store, "packing.method=fixed_length_posid")
    with pytest.raises(
        ValueError, match=r"document \d+ was cut: .* Packs must have whole documents"
    ):
        packs_of(cut, TokenStore(store), workload_for(cut, "cpu"))
    plan = next(planner(spec_of(store)).steps())
    assert plan.state.carry.num_tokens
    made = planner(spec_of(store, f"packing.packs={packs}"))
    state = replace(plan.state, corpus=made.start().corpus, ready=())
    with pytest.raises(
        ValueError, match=r"documents still wait from a run with packing\.policy = capacity"
    ):
        made.next(state)
    with pytest.raises(ValueError, match="the state of packs must have"):
        made.next(replace(plan.state, ready=()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--out", "packs.npz"], "data.store is empty"),
        (["demo", "--set", "data.store=x", "--out", "packs.txt"], "packs.txt must end in .npz"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", *words]) == 2
    assert message in capsys.readouterr().err
