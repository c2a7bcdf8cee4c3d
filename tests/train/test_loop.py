"""Whole runs through `wlb.train.start.train`: one rank and several, resuming, the end of data."""

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.train.case import Run, relaid, small_spec, train, write_corpus
from wlb.corpus import TokenStore, TokenStoreWriter
from wlb.parallel import mesh
from wlb.parallel.launch import RankFailure, run_local
from wlb.parallel.mesh import World, build_mesh
from wlb.spec import RunSpec
from wlb.train.loop import Job, Trainer

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A single rank runs in this process; two threads on busy cores would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("loop") / "corpus")


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """6 steps without a break, by layout, with checkpoints after 3 and 6."""
    folder = tmp_path_factory.mktemp("straight")
    runs: dict[str, Run] = {}
    for layout in ("one", "tp2-pp2-v2", "cp2-pp2"):
        spec = small_spec(folder, corpus, run={"name": layout}, checkpoint={"interval": 3})
        runs[layout] = train(relaid(spec, layout))[0]
    return runs


def test_a_run_learns_and_leaves_metrics_and_a_checkpoint(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small_spec(tmp_path, corpus)
    run, said = train(spec)
    assert "1 rank in this process (not started by torchrun or Slurm) for TP 1 x CP 1" in said
    assert "corpus: 52 documents, " in said
    assert [line["steps_done"] for line in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [line["kind"] for line in run.lines] == ["evaluation", *["step"] * 6, "evaluation"]
    # An untrained model is as good as a guess among the 320 tokens; then it learns.
    assert run.losses[0] == pytest.approx(math.log(320), abs=0.1)
    assert run.losses[-1] < run.losses[0] - 1.0
    (_, before), (_, after) = run.evaluations
    assert after < before - 1.0
    assert run.checkpoints == ["step-00000006"]
    assert not dist.is_initialized()
    shown = capsys.readouterr().out
    assert "6/6" in shown
    assert "imbalance, Plain-4D" in shown
    assert f"metrics: {run.folder / 'metrics.jsonl'}\n" in shown
    assert f"checkpoint: {run.folder / 'checkpoints' / 'step-00000006'}\n" in shown


def test_a_metrics_line_is_complete(straight: dict[str, Run]) -> None:
    for line in straight["cp2-pp2"].steps:
        measured, predicted, plain = line["measured"], line["predicted"], line["plain_4d"]
        assert measured["origin"] == "measured"
        assert predicted["origin"] == plain["origin"] == "predicted"
        assert measured["step"] == predicted["step"] == plain["step"] == line["steps_done"] - 1
        assert 0 < measured["num_targets"] < measured["num_tokens"]
        assert sum(measured["sharding_counts"].values()) == 4
        assert 1.0 <= measured["imbalance"] == predicted["imbalance"]
        assert measured["grad_norm"] > 0
        assert measured["step_time_s"] > 0
        assert predicted["loss"] is None
    rates = [line["learning_rate"] for line in straight["cp2-pp2"].steps]
    assert rates[:3] == pytest.approx([0.01, 0.02, 0.02])
    assert rates[3:] == sorted(rates[3:], reverse=True)


@pytest.mark.parametrize("layout", ["tp2-pp2-v2", "cp2-pp2"])
def test_losses_do_not_depend_on_the_layout(straight: dict[str, Run], layout: str) -> None:
    one, other = straight["one"], straight[layout]
    assert other.losses == pytest.approx(one.losses, rel=1e-4)
    for mine, theirs in zip(other.evaluations, one.evaluations, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    norms = [[line["measured"]["grad_norm"] for line in run.steps] for run in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def resume_from(run: Run, folder: Path, corpus: Path, layout: str) -> Run:
    """The run went on from a copy of its checkpoint after step 3, on `layout`."""
    spec = small_spec(folder, corpus, run={"name": "again"}, checkpoint={"interval": 3})
    target = folder / "runs" / "again" / "checkpoints" / "step-00000003"
    shutil.copytree(run.folder / "checkpoints" / "step-00000003", target)
    again, said = train(relaid(spec, layout), resume=True)
    assert f"going on from {target}" in said
    assert [line["steps_done"] for line in again.steps] == [4, 5, 6]
    return again


@pytest.mark.parametrize("layout", ["one", "cp2-pp2"])
def test_resuming_on_the_same_layout_is_bit_equal(
    straight: dict[str, Run], tmp_path: Path, corpus: Path, layout: str
) -> None:
    before = straight[layout]
    assert before.state(3).carry.num_tokens > 0  # something waits in a queue across the break
    again = resume_from(before, tmp_path, corpus, layout)
    assert again.losses == before.losses[3:]
    assert again.evaluations == before.evaluations[1:]
    assert again.state(6).to_json() == before.state(6).to_json()


@pytest.mark.parametrize(
    ("first", "then"),
    [("one", "tp2-pp2-v2"), ("tp2-pp2-v2", "cp2-pp2"), ("cp2-pp2", "one"), ("cp2-pp2", "dp2-tp2")],
)
def test_resuming_on_another_layout_goes_on_the_same_way(
    straight: dict[str, Run], tmp_path: Path, corpus: Path, first: str, then: str
) -> None:
    before = straight[first]
    again = resume_from(before, tmp_path, corpus, then)
    assert again.losses == pytest.approx(before.losses[3:], rel=1e-4)
    tokens = [line["measured"]["num_tokens"] for line in again.steps]
    assert tokens == [line["measured"]["num_tokens"] for line in before.steps[3:]]


def write_store(prefix: Path, lengths: list[int]) -> str:
    """A token store of documents of these lengths, and none held out."""
    draw = np.random.default_rng(0)
    with TokenStoreWriter(prefix, vocab_size=320) as writer:
        for length in lengths:
            writer.add(draw.integers(0, 320, length))
    return str(prefix)


def store_spec(folder: Path, lengths: list[int], *, window: int, **sections: Any) -> RunSpec:
    """A run over such a store: once, to its end."""
    store = write_store(folder / "store", lengths)
    spec = small_spec(folder, folder / "no-corpus", **sections)
    return replace(spec, data=replace(spec.data, store=store, context_window=window, epochs=1))


def test_the_end_of_data_flushes_every_token(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small_spec(tmp_path, corpus, data={"epochs": 1}, training={"steps": 100})
    run, _ = train(spec)
    store = TokenStore(str(corpus.parent / "stores" / "corpus-bpe320-train"))
    measured = [line["measured"] for line in run.steps]
    assert len(measured) < 20
    assert sum(m["num_tokens"] for m in measured) == store.num_tokens
    assert sum(m["num_targets"] for m in measured) == store.num_tokens - store.num_documents
    assert measured[-1]["num_held_tokens"] == 0
    last = len(measured)
    state = run.state(last)
    assert state.exhausted
    assert state.carry.num_tokens == 0
    assert run.evaluations[-1][0] == last
    # There is nothing to go on with; the run says so by ending with its summary.
    capsys.readouterr()
    again, _ = train(spec, resume=True)
    assert len(again.steps) == last
    assert again.evaluations[-1] == again.evaluations[-2]
    assert "0 trained" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["one", "cp2-pp2", "tp2-pp2-v2"])
def test_fewer_documents_than_micro_batches(tmp_path: Path, layout: str) -> None:
    """Three documents in four micro-batches: one stays empty, and every layout agrees."""
    spec = store_spec(tmp_path, [30, 20, 7], window=32, eval={"steps": 0})
    run, _ = train(relaid(spec, layout))
    assert [line["measured"]["num_documents"] for line in run.steps] == [3]
    assert [line["measured"]["num_targets"] for line in run.steps] == [57 - 3]
    assert run.losses[0] == pytest.approx(math.log(320), abs=0.1)


@pytest.mark.parametrize("layout", ["one", "cp2-pp2"])
def test_a_step_without_a_label_moves_nothing_and_the_run_goes_on(
    tmp_path: Path, layout: str
) -> None:
    """Documents of one token have no label; those of a whole window wait for three others.

    So the steps before the fourth of these have nothing to learn from.
    """
    spec = store_spec(
        tmp_path,
        [1] * 40 + [4] * 4,
        window=4,
        packing={"queue_thresholds": [1.0]},
        checkpoint={"interval": 1, "keep": 9},
        eval={"steps": 0},
    )
    run, _ = train(relaid(spec, layout))
    targets = [line["measured"]["num_targets"] for line in run.steps]
    assert 0 in targets
    assert sum(targets) == 4 * 3
    assert sum(line["measured"]["num_tokens"] for line in run.steps) == 40 + 16
    done = 0
    for line, count in zip(run.steps, targets, strict=True):
        done += count > 0
        assert line["steps_done"] == done
        assert (line["measured"]["loss"] is None) == (count == 0)
        assert (line["measured"]["grad_norm"] is None) == (count == 0)
    # The last checkpoint knows that everything was executed, with or without a label.
    assert run.checkpoints[-1] == f"step-{done:08d}"
    assert run.state(done).exhausted
    assert not run.state(done).ready
    assert run.state(done).next_step == len(targets)
