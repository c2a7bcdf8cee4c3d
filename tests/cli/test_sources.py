"""Tests the documents of `wlb plan`, `tune` and `simulate`: the run's store or blend, others."""

import json
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb.cli import main, sources
from wlb.data import TokenStoreWriter, open_batches
from wlb.spec import RunSpec, load

OTHERS: dict[str, Any] = {"lengths": None, "corpus": None, "synthetic": None, "in_order": False}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Returns stores of short documents and of long ones, with vocabularies of 90."""
    folder = tmp_path_factory.mktemp("stores")
    for name, lengths in (("short", [60, 70, 80] * 40), ("long", [300, 400] * 30)):
        with TokenStoreWriter(folder / name, vocab_size=90) as writer:
            for length in lengths:
                writer.add(np.ones(length, np.int64))
    return str(folder / "short"), str(folder / "long")


def options(**values: Any) -> Namespace:
    return Namespace(**{**OTHERS, "name": "demo", "steps": 12, **values})


def spec_of(*overrides: str) -> RunSpec:
    return load("demo", ["data.context_window=512", *overrides])


def blend_of(stores: tuple[str, str], weights: tuple[float, float]) -> tuple[str, ...]:
    return tuple(f"{prefix}:{weight}" for prefix, weight in zip(stores, weights, strict=True))


def test_a_blend_comes_as_the_run_would_read_it(stores: tuple[str, str]) -> None:
    blend = blend_of(stores, (3, 1))
    spec = spec_of(f"data.blend={json.dumps(blend)}", "run.seed=5")
    source = sources.open_source(options(), spec)
    got = sources.batches_of(options(), spec, source)
    asked = open_batches(blend, tokens_per_batch=spec.tokens_per_step, seed=5)
    for batch, (expected, _) in zip(got, islice(asked.iterate(), 12), strict=True):
        assert batch.index == expected.index
        np.testing.assert_array_equal(batch.documents.id, expected.documents.id)
        np.testing.assert_array_equal(batch.documents.source, expected.documents.source)
        np.testing.assert_array_equal(batch.documents.length, expected.documents.length)
    lengths = sources.lengths_shown(source, got)
    assert lengths[lengths >= 300].sum() / lengths.sum() == pytest.approx(1 / 4, abs=0.03)
    passes = sources.passes_of(source, got)
    read = {
        prefix: passes[prefix] * tokens
        for prefix, tokens in zip(stores, (8400, 21000), strict=True)
    }
    assert sum(read.values()) == pytest.approx(lengths.sum())
    assert read[stores[0]] == pytest.approx(lengths[lengths < 300].sum())


@pytest.mark.parametrize("command", [["plan"], ["tune", "packing"], ["simulate"]])
def test_commands_take_the_runs_own_blend(
    command: list[str], stores: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    blend = f"data.blend={json.dumps(blend_of(stores, (3, 1)))}"
    words = ["demo", "--steps", "6", "--set", "data.context_window=512", blend]
    assert main([*command, *words]) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert "short:3 + long:1" in out
    if command == ["plan"]:
        assert "stores were read: " in out
        assert f", {stores[1]} " in out


@pytest.mark.parametrize("command", [["plan", "--all"], ["tune", "packing"], ["simulate"]])
@pytest.mark.parametrize("blended", [False, True])
def test_stores_that_say_what_is_trained(
    command: list[str], blended: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lengths do not tell the weight of their labels."""
    names = (str(tmp_path / "a"), str(tmp_path / "b"))
    for name, length in zip(names, (700, 90), strict=True):
        with TokenStoreWriter(name, vocab_size=90) as writer:
            for _ in range(60):
                writer.add(np.ones(length, np.int64), trained=[(length - 20, length)])
    own = f"data.store={names[0]}"
    if blended:
        own = f"data.blend={json.dumps(blend_of(names, (1, 1)))}"
    packing = ["packing.policy=bounded", "packing.s_max=2", "packing.step_tokens=1.5"]
    words = ["demo", "--steps", "4", "--set", "data.context_window=512", own, *packing]
    more = ["--all"] if command[0] == "tune" else []
    assert main([*command, *words, *more]) == 0
    told = " ".join(capsys.readouterr().out.split())
    said = "the column long wt assumes that all tokens are trained" in told
    assert said == (command != ["simulate"])
    assert "times the mean weight" not in told


def test_the_runs_own_store_and_another(stores: tuple[str, str]) -> None:
    spec = spec_of(f"data.store={stores[0]}")
    assert sources.open_source(options(), spec).num_tokens == 8400
    assert sources.open_source(options(corpus=stores[1]), spec).num_tokens == 21000
    blend = spec_of(f"data.blend={json.dumps(blend_of(stores, (1, 1)))}")
    assert sources.open_source(options(corpus=stores[1]), blend).num_tokens == 21000


def test_a_model_without_vocabulary_has_the_stores(stores: tuple[str, str]) -> None:
    def size(spec: RunSpec, **values: Any) -> int:
        return sources.with_vocabulary(spec, options(**values)).model.vocab_size

    assert size(spec_of(f"data.store={stores[0]}")) == 90
    assert size(spec_of("data.store=nowhere"), corpus=stores[1]) == 90
    assert size(spec_of(f"data.blend={json.dumps(blend_of(stores, (1, 1)))}")) == 90
    assert size(spec_of("data.store=nowhere"), synthetic="wlb_paper") == 4096  # no store is read
    assert size(spec_of(f"data.store={stores[0]}", "model.vocab_size=5000")) == 5000


@pytest.mark.parametrize("command", [["plan"], ["tune", "packing"], ["simulate"]])
def test_lengths_like_the_papers_are_drawn_where_no_documents_are_given(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "demo", "--steps", "8", "--json"]) == 0
    drawn = capsys.readouterr()
    said = "No documents were given, so random lengths with the paper's distribution (wlb_paper)"
    assert drawn.err.startswith(said)
    assert drawn.err.count(said) == 1
    assert main([*command, "demo", "--steps", "8", "--json", "--synthetic", "wlb_paper"]) == 0
    asked = capsys.readouterr()
    assert not asked.err
    found = [json.loads(text.out)["balance"] for text in (drawn, asked)]
    assert found[0] == found[1]


def test_a_blend_has_no_order_of_its_own(
    stores: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    blend = f"data.blend={json.dumps(blend_of(stores, (1, 1)))}"
    assert main(["plan", "demo", "--in-order", "--set", "data.context_window=512", blend]) == 2
    assert "--in-order cannot be used with data.blend" in capsys.readouterr().err


def test_a_small_store_of_a_blend_is_not_repeated_without_end(
    stores: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """4 windows of 2 M tokens per step would come a thousand times from the store of 8,400
    tokens.
    """
    blend = f"data.blend={json.dumps(blend_of(stores, (999, 1)))}"
    words = ["--set", "data.context_window=2097152", "data.num_windows=4", blend]
    assert main(["plan", "demo", "--steps", "2", *words]) == 2
    assert "would repeat its documents 1,99" in capsys.readouterr().err
