"""Tests the convergence study: its corpus, its bookkeeping, its page, and a quick form of it."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from experiments.paper.fig16 import __main__ as command
from experiments.paper.fig16.arms import (
    ARMS,
    QUICK,
    SMALL,
    Scale,
    arm_of,
    deciding_profile,
    settings,
    spec_of,
)
from experiments.paper.fig16.bookkeeping import CLASS_NAMES, bookkeeping, check_covered, class_of
from experiments.paper.fig16.corpus import definitions, open_stores, small_sources, split_store
from experiments.paper.fig16.outcome import Result, result_from_json, train_curve
from experiments.paper.fig16.page import (
    classes_table,
    curves_table,
    order_table,
    pictures,
    quality_table,
    runs_table,
)
from experiments.paper.fig16.study import Case, Study, cases_of
from experiments.paper.fig16.summary import groups_of
from experiments.paper.fig16.words import against_rows, words
from tests.experiments.paper.fig16_runs import all_books, books, found, result
from tests.train.case import write_store
from wlb.cost import workload_of
from wlb.data import TokenStore
from wlb.report.run.records import read_run
from wlb.spec import load

pytestmark = pytest.mark.full

SOURCE = b'''
import os
x = 1

@decorated
def first(a):
    """A form feed \x0c inside."""
    return a

class Second(Base):
    """Doc."""
    y = 2

    @property
    def third(self):
        return 3

    z = 4

    async def fourth(self):
        return 4
'''


def test_a_document_is_a_function_a_method_or_the_rest_of_a_class() -> None:
    found = sorted(definitions(SOURCE))
    assert found == [
        "    @property\n    def third(self):\n        return 3\n",
        "    async def fourth(self):\n        return 4\n",
        '@decorated\ndef first(a):\n    """A form feed \x0c inside."""\n    return a\n',
        'class Second(Base):\n    """Doc."""\n    y = 2\n\n\n    z = 4\n\n',
    ]
    assert list(definitions(b"def broken(:")) == []
    assert list(definitions("# é\ndef f(): pass".encode("latin-1"))) == []


def test_held_out_documents_are_split_by_length(tmp_path: Path) -> None:
    stores = open_stores(tmp_path, small_sources(), vocabulary=320, heldout_fraction=0.1)
    made = split_store(stores.heldout, str(tmp_path / "class"), window=512)
    whole = TokenStore(stores.heldout)
    assert len(made) == len(CLASS_NAMES)
    lengths = [TokenStore(prefix).lengths for prefix in made if prefix]
    assert sorted(np.concatenate(lengths)) == sorted(whole.lengths)
    for i, prefix in enumerate(made):
        if prefix:
            store = TokenStore(prefix)
            assert set(class_of(store.lengths, 512)) == {i}
            row = int(np.flatnonzero(class_of(whole.lengths, 512) == i)[0])
            assert np.array_equal(store.read(0), whole.read(row))
    assert split_store(stores.heldout, str(tmp_path / "class"), window=512) == made


@pytest.mark.parametrize("scale", [SMALL, QUICK], ids=lambda scale: scale.name)
def test_every_arm_is_a_run_that_is_accepted_and_differs(scale: Scale) -> None:
    vocabulary = scale.vocabulary
    specs = [spec_of(scale, arm.keys | {"model.vocab_size": vocabulary}) for arm in ARMS]
    assert len({str(settings(arm.keys)) for arm in ARMS}) == len({arm.name for arm in ARMS})
    assert len(set(specs)) == len(ARMS)
    if scale is SMALL:
        assert specs[0].model.num_parameters >= 2_000_000


def test_policies_decide_at_the_large_models_ratio() -> None:
    spec = spec_of(SMALL, {"model.vocab_size": 1024})
    cost = workload_of(spec, deciding_profile(SMALL, 1024))
    window = [spec.data.context_window]
    assert cost.attention_ns(window)[0] / cost.linear_ns(window)[0] == pytest.approx(1.67, rel=1e-3)


def test_tokens_have_to_be_covered_once() -> None:
    lengths = np.array([5, 3])
    document, start, stop = np.array([1, 0, 0]), np.array([0, 2, 0]), np.array([3, 5, 2])
    check_covered(document, start, stop, lengths)
    for i, column in enumerate((document, start, stop)):
        for row in range(3):
            changed = [document, start, stop]
            changed[i] = column.copy()
            changed[i][row] += 1
            with pytest.raises(ValueError, match="exactly once"):
                check_covered(*changed, lengths)
    with pytest.raises(ValueError, match="exactly once"):
        check_covered(document[1:], start[1:], stop[1:], lengths)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return Study.open(QUICK, tmp_path_factory.mktemp("convergence"))


def test_every_policy_trains_the_same_and_delays_as_planned(study: Study) -> None:
    """The plans of all arms are checked; none is trained."""
    books = {case.arm.name: study.books(case) for case in cases_of([0])}
    lengths = TokenStore(study.stores.train).lengths
    labels = {book.num_labels for book in books.values()}
    assert labels == {int(lengths.sum()) - lengths.size}  # all but each document's first token
    assert {book.summary.num_tokens for book in books.values()} == {int(lengths.sum())}
    assert len({book.class_labels for book in books.values()}) == 1
    for book in books.values():  # whatever the packing, weights are shares of one loss
        shares = np.array(book.class_weights) * np.array(book.class_labels)
        assert shares.sum() == pytest.approx(book.num_labels)
    long = lengths >= 0.2 * 512
    share = lengths[long].sum() / lengths.sum()
    for steps in (1, 8, 32):
        summary = books[f"hold-{steps}"].summary
        # What does not fit a step waits longer; what is flushed had not waited as long.
        assert summary.mean_delay == pytest.approx(share * steps, rel=0.15, abs=0.6)
        assert summary.max_delay >= steps
    assert books["hold-0"].summary.mean_delay < 0.3
    assert books["bounded"].summary.max_delay <= 10
    assert books["original"].summary.tokens_cv < 0.01 < books["bounded"].summary.tokens_cv
    assert books["even"].summary.tokens_cv < books["bounded"].summary.tokens_cv
    control, ours = books["best-fit"].summary, books["var_len"].summary
    assert control.cut_documents == ours.cut_documents < books["original"].summary.cut_documents
    assert control.imbalance_time_weighted > ours.imbalance_time_weighted


def test_books_are_kept(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(arm=arm_of("bounded"), seed=0)
    made = study.books(case)
    monkeypatch.setattr(
        "experiments.paper.fig16.study.bookkeeping", lambda *_: pytest.fail("made again")
    )
    assert study.books(replace(case, arm=arm_of("bounded-constant"))) == made
    other = replace(study, scale=replace(QUICK, keys=QUICK.keys | {"packing.max_delay": 3}))
    with pytest.raises(pytest.fail.Exception, match="made again"):
        other.books(case)


def test_books_that_lack_what_is_counted_now_are_planned_again(study: Study) -> None:
    case = Case(arm=arm_of("bounded"), seed=0)
    made = study.books(case)
    (path,) = (study.folder / "books").glob("bounded-seed0-*")
    data = json.loads(path.read_text("utf-8"))
    for inside in (data, data["summary"]):
        name = next(n for n, value in inside.items() if isinstance(value, float | list))
        value = inside.pop(name)
        path.write_text(json.dumps(data), "utf-8")
        assert study.books(case).class_weights == made.class_weights
        assert name in path.read_text("utf-8")
        inside[name] = value


def test_a_run_has_the_steps_that_this_code_plans(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Books of an older state of the code once ended a run one step before its data."""
    case = Case(arm=arm_of("hold-8"), seed=0)
    made = study.books(case)
    with monkeypatch.context() as older:
        stale = replace(made, num_steps=made.num_steps - 1)
        older.setattr("experiments.paper.fig16.study.bookkeeping", lambda *_: stale)
        assert study.books(case, anew=True) == study.books(case) == stale
    assert f"training.steps={made.num_steps}" in study.command(case)
    assert study.books(case).num_steps == made.num_steps


def test_weights_by_hand(tmp_path: Path) -> None:
    """There is one step of a window and one of a shorter one: labels of the full one count less."""
    store = write_store(tmp_path / "s", [64, 64, 64, 64, 100, 28])
    spec = load(
        "demo_single",
        ["data.context_window=128", "data.num_windows=2", "packing.policy=original",
         "data.epochs=1", "cost.profile=cpu", "model.vocab_size=320"],
    )  # fmt: skip
    book = bookkeeping(spec, store)
    assert book.num_steps == 2
    assert book.num_labels == 384 - 6
    # By class: 28 is 1/8 to 1/2, 64 and 100 are 1/2 to 1.
    assert book.class_labels == (0, 27, 4 * 63 + 99, 0)
    assert sum(w * n for w, n in zip(book.class_weights, book.class_labels, strict=True)) == (
        pytest.approx(378)
    )
    assert book.class_weights[1] != pytest.approx(1.0, abs=0.01)


def test_policies_come_before_delays_and_whole_seeds_first() -> None:
    names = [case.name for case in cases_of([0, 1])]
    assert len(set(names)) == len(names) == 2 * len(ARMS)
    groups = [arm_of(name.split("-seed")[0]).group for name in names]
    assert list(dict.fromkeys(groups)) == ["policy", "normaliser", "delay"]
    assert groups == sorted(groups, key=["policy", "normaliser", "delay"].index)
    assert names[:8] == [*(f"{a.name}-seed0" for a in ARMS[:7]), "original-seed1"]


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_page(study: Study, seeds: int, tmp_path: Path) -> None:
    late = books(class_weights=(1.1, 1.0, 0.9, 0.7))
    waiting = {("hold-128", seed): late for seed in range(seeds)}
    groups = groups_of(found(seeds), all_books(seeds) | waiting)
    grid = range(0, 2_500_001, 500_000)
    quality = quality_table(groups, 2_500_000)
    assert len(quality.rows) == len(ARMS)
    column = quality.columns.index("difference")
    verdicts = [row[column] for row in quality.rows]
    assert verdicts[0] is None
    assert set(verdicts[1:9]) == ({"worse"} if seeds == 3 else {"one seed"})
    assert len(order_table(groups).rows) == len({arm.packing for arm in ARMS})
    assert len(classes_table(groups).rows) == (len(ARMS) - 2) * 3  # no document of the last class
    assert len(runs_table(groups).rows) == len(ARMS) * seeds
    assert len(curves_table(groups).rows) == len(ARMS) * seeds * (4 + 2)
    text = words(study, groups, grid)
    assert "100.0% with original (Plain-4D), fixed greedy, W = 1" in text  # a cut of one document
    # The normaliser's arm is number 8, `bounded` number 4.
    pair = "the constant's less the mean's +0.04"
    for said in ("bounded, T 1.5 +0.04", "0.90", "8 steps +0.02", "checksum", pair):
        assert said in text
    assert "weighs 0.90 at once, and 0.90, 0.90, 0.90, 0.70 late." in text
    assert ("(one seed)" in text) == (seeds == 1)
    assert ("**Chance.**" in text) == (seeds > 1)
    rows = against_rows(groups)
    # fixed-8 is 0.02 above original's 3.3 in training; more by seed.
    expected = "+0.61%" if seeds == 1 else "+0.65% ± "
    assert str(rows[0].ours).startswith(expected)
    for picture in pictures(groups, grid):
        picture.figure.savefig(tmp_path / f"{picture.name}.png")


def test_a_result_is_read_again() -> None:
    assert result_from_json(json.loads(json.dumps(asdict(result(3.0))))) == result(3.0)


def test_runs_of_another_machine_are_taken_over(study: Study, tmp_path: Path) -> None:
    cases = cases_of([0, 1])
    theirs = replace(study, folder=tmp_path / "theirs")
    for case in cases[:3]:
        path = theirs.folder / case.name / "result.json"
        path.parent.mkdir(parents=True)
        made = result(3.0 + case.seed, made_by=theirs.digest(case))
        path.write_text(json.dumps(asdict(made)), "utf-8")
    theirs.keep(tmp_path / "kept", cases)
    kept = {path.stem for path in (tmp_path / "kept").iterdir()}
    assert kept == {case.name for case in cases[:3]}
    mine = replace(study, folder=tmp_path / "mine")
    assert mine.take(tmp_path / "kept", cases[1:]) == cases[1:3]
    assert mine.result(cases[0]) is None
    assert mine.result(cases[1]) == theirs.result(cases[1])
    assert mine.take(tmp_path / "kept", cases) == cases[:1]  # what is there stays
    other = replace(mine, folder=tmp_path / "other", scale=replace(QUICK, eval_tokens=60_000))
    with pytest.raises(ValueError, match=r"original-seed0\.json is of other settings"):
        other.take(tmp_path / "kept", cases)
    with pytest.raises(ValueError, match=r"--take .*nowhere: there is no such folder"):
        mine.take(tmp_path / "nowhere", cases)


def test_arms_are_chosen_by_name() -> None:
    assert command.chosen("") == ARMS
    assert [arm.name for arm in command.chosen("bounded,original")] == ["original", "bounded"]
    with pytest.raises(ValueError, match="--arms 'bound' is not known; known: original"):
        command.chosen("bound")


def test_the_page_is_of_all_runs_whichever_are_trained(
    study: Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page of some arms would otherwise take the others' place in the committed results."""
    mine = replace(study, folder=tmp_path)
    trained: list[str] = []

    def run(of: Study, case: Case) -> Result:
        trained.append(case.name)
        made = result(3.0, made_by=of.digest(case))
        path = of.folder / case.name / "result.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(asdict(made)), "utf-8")
        return made

    monkeypatch.setattr(Study, "run", run)
    monkeypatch.setattr(Study, "books", lambda *_: books())
    monkeypatch.setattr(Study, "open", lambda *_, **__: mine)

    def train(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["convergence", "--quick", "--jobs", "1", *options])
        command.main()
        return capsys.readouterr().out

    with pytest.raises(SystemExit, match=r"1 runs have ended in .*none of them beside the run"):
        train("--arms", "hold-8")
    assert "8 steps late" not in train("--arms", "original")
    out = train("--arms", "hold-0,bounded")
    assert trained == ["hold-8-seed0", "original-seed0", "bounded-seed0", "hold-0-seed0"]
    for name in ("original (Plain-4D)", "bounded, T 1.5", "long documents 8 steps late"):
        assert name in out
    assert "best-fit" not in out


@pytest.mark.process
@pytest.mark.nightly
def test_the_quick_form(study: Study) -> None:
    """It really trains; the ledger of each run is checked to hold every token once."""
    names = ("original", "var_len", "bounded-constant", "hold-8")
    cases = [Case(arm=arm_of(name), seed=0) for name in names]
    command.train_all(study, cases, jobs=2)
    made = {case.arm.name: study.result(case) for case in cases}
    lengths = TokenStore(study.stores.train).lengths
    for case in cases:
        result = made[case.arm.name]
        assert result is not None
        assert result.num_tokens == int(lengths.sum())
        assert result.num_labels == int(lengths.sum()) - lengths.size
        assert result.num_steps == study.books(case).num_steps
        assert result.final < result.curve[0][1] - 1  # it learned
        tokens = [n for n, _ in result.curve]
        due = range(50_000, result.num_tokens, 50_000)
        assert [n // 50_000 for n in tokens[1:-1]] == [n // 50_000 for n in due]
        assert all(loss is None or 0 < loss < 6 for loss in result.class_losses)
        run = read_run(study.folder / case.name)
        whole = sum(s.measured.loss * s.measured.num_targets for s in run.steps if s.measured.loss)
        assert result.train_loss == pytest.approx(whole / result.num_labels)
        assert train_curve(run) == result.trained
        assert result.trained[-1][0] == result.num_tokens
    # All begin with the same weights.
    assert len({result.curve[0] for result in made.values() if result}) == 1
    changed = replace(study, scale=replace(QUICK, eval_tokens=60_000))
    with pytest.raises(ValueError, match="of other settings or another corpus than original-seed0"):
        changed.result(cases[0])
