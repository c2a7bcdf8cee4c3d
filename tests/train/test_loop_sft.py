"""Tests fine-tuning on packed conversations by the trainer: every method, trained tokens only."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sets import full, nightly
from tests.train.case import Run, relaid, small_spec, train
from wlb.cli import main
from wlb.data import TokenStore, TokenStoreWriter
from wlb.prepare import load_tokenizer, prepare_docstrings
from wlb.spec import METHODS, RunSpec, apply, check, load
from wlb.spec.methods import keys_of
from wlb.train.stores import train_store

pytestmark = pytest.mark.process

POSITIONS = ("fixed_length", "multipack_bfd_posid")


def write_chats(prefix: Path, num: int = 40, seed: int = 0) -> TokenStore:
    """Writes conversations of one or two answers; a third of their tokens is trained."""
    draw = np.random.default_rng(seed)
    with TokenStoreWriter(prefix, vocab_size=320) as writer:
        for _ in range(num):
            length = int(np.clip(draw.lognormal(3.0, 0.6), 6, 60))
            begin = int(draw.integers(1, length - 4))
            spans = [(begin, min(length, begin + max(2, length // 3)))]
            writer.add(draw.integers(0, 300, length), np.array(spans, np.int64))
    return TokenStore(prefix)


def spec_of(folder: Path, method: str, *, store: Path, heldout: Path, **sections: Any) -> RunSpec:
    spec = small_spec(folder, folder / "none", run={"name": method}, **sections)
    packing = {"packing": {**keys_of(method), "method": method, "examples": 3}}
    spec = apply(spec, packing, source="test")
    data = replace(
        spec.data, store=str(store), heldout_store=str(heldout), context_window=64, epochs=1
    )
    training = replace(spec.training, steps=40)
    return replace(
        spec, data=data, training=training, planner=replace(spec.planner, baseline=False)
    )


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder / "train")
    write_chats(folder / "heldout", num=8, seed=1)
    return folder / "train", folder / "heldout"


@pytest.mark.parametrize("method", [*list(METHODS)[:1], *full(*list(METHODS)[1:])])
def test_an_epoch_of_every_method(method: str, stores: tuple[Path, Path], tmp_path: Path) -> None:
    store = TokenStore(stores[0])
    run, _ = train(spec_of(tmp_path, method, store=stores[0], heldout=stores[1]))
    measured = [line["measured"] for line in run.steps]
    assert sum(m["num_tokens"] for m in measured) == store.num_tokens
    assert sum(m["num_targets"] for m in measured) == store.num_targets.sum()
    padding = sum(m["num_filler_tokens"] for m in measured)
    # An empty micro-batch of the flush is a row.
    assert (padding > 4) == method.endswith("padding")
    assert all(np.isfinite(run.losses))
    # The held-out loss of the same weights is the same, whatever trains.
    first, _ = run.evaluations[0], run.evaluations[-1]
    assert first == heldout_before(stores, tmp_path)


_BEFORE: dict[Path, tuple[int, float]] = {}


def heldout_before(stores: tuple[Path, Path], folder: Path) -> tuple[int, float]:
    if stores[1] not in _BEFORE:
        spec = spec_of(folder / "before", "random_posid", store=stores[0], heldout=stores[1])
        _BEFORE[stores[1]] = train(spec)[0].evaluations[0]
    return _BEFORE[stores[1]]


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize("method", ["random_padding", *nightly(*POSITIONS)])
def test_the_layout_changes_nothing(method: str, stores: tuple[Path, Path], tmp_path: Path) -> None:
    runs: list[Run] = []
    for layout in ("one", "cp2-pp2"):
        spec = spec_of(tmp_path / layout, method, store=stores[0], heldout=stores[1])
        spec = replace(spec, training=replace(spec.training, steps=3))
        runs.append(train(relaid(spec, layout))[0])
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-4)


@pytest.mark.nightly
def test_the_demo_trains_conversations_about_docstrings(tmp_path: Path) -> None:
    spec = load("sft_demo", [f"run.output_dir={tmp_path}", "data.bpe_vocab_size=600"])
    assert check(spec) is spec
    made = prepare_docstrings(
        tmp_path / "stores", vocab_size=600, limit=2048, heldout_fraction=0.05, seed=0
    )
    store = TokenStore(made.prefix)
    assert store.vocab_size == 600
    assert made.num_documents == store.num_documents > 1500
    assert int(store.lengths.max()) <= 2048
    assert 0.4 < made.num_targets / made.num_tokens < 0.9
    again = prepare_docstrings(
        tmp_path / "stores", vocab_size=600, limit=2048, heldout_fraction=0.05, seed=0
    )
    assert again == replace(made, reused=True, time_s=again.time_s)
    assert not made.reused
    assert train_store(spec) == made.prefix  # found again by who has only the spec


def test_a_store_of_wlb_prepare_trains_what_assistants_say_and_nothing_else(tmp_path: Path) -> None:
    """Questions are noise, answers always the same, so the loss can vanish only on answers."""
    draw, answer = random.Random(0), "I do not know, and nobody does."
    with open(tmp_path / "chats.jsonl", "w", encoding="utf-8") as file:
        for _ in range(90):
            question = "".join(draw.choices("abcdefghijklmnop", k=draw.randrange(4, 16)))
            file.write(json.dumps({"prompt": question, "completion": answer}) + "\n")
    out = tmp_path / "chats"
    command = ["prepare", tmp_path / "chats.jsonl", "--out", out, "--chat", "chatml", "--verify"]
    command += ["--tokenizer", "bpe", "--vocab-size", 320, "--limit", 64, "--heldout-fraction", 0.1]
    assert main([str(word) for word in command]) == 0
    store, heldout = TokenStore(out), TokenStore(f"{out}-heldout")
    tokenizer = load_tokenizer(f"{out}-tokenizer.json")
    targets = len(tokenizer.encode(answer).ids) + 1  # and the end of the turn
    assert set(store.num_targets) | set(heldout.num_targets) == {targets}
    assert store.num_tokens > 3 * targets * store.num_documents // 2
    spec = spec_of(tmp_path, "random_posid", store=out, heldout=Path(f"{out}-heldout"))
    run, _ = train(spec)
    trained = sum(line["measured"]["num_targets"] for line in run.steps)
    assert trained == targets * store.num_documents
    assert run.losses[0] > 5
    assert run.losses[-1] < 0.5
    assert run.evaluations[-1][1] < 0.5
