"""Tests that ranks of presets run under every system, and take the memory that was planned.

The full set takes the paper's first preset and the largest, the nightly one all; with all their
layers every preset and system passed in experiments/beyond/rehearsals/results, which
tests/experiments holds.
"""

from dataclasses import replace

import pytest

from experiments.beyond.rehearsals.__main__ import FORCED, LARGE, TABLE_1, corners, spec_of
from tests.sets import nightly
from wlb.plan import UserError
from wlb.rehearse.run import ONE_PER_STAGE, Rehearsed, rehearse_each
from wlb.rehearse.show import verdict
from wlb.spec import SYSTEMS, ExchangeChoice, RunSpec, load

pytestmark = [pytest.mark.process, pytest.mark.full]

LEAST = 0.87
"""Tensors' peak over its estimate: plans that leave more unused waste memory. The lowest is 0.877,
of `paper` on the last rank, whose estimate adds logits and a layer's workspace, of which the most
keys that left-over tokens may read are a part; they never live at once."""


def passed(specs: list[RunSpec], *, ranks: str | list[str]) -> list[Rehearsed]:
    """Two steps of each run, without a fault and with one wait a step."""
    results: list[Rehearsed] = []
    for found in rehearse_each(specs, ranks=ranks, steps=2, jobs=2):
        assert not isinstance(found, UserError), found
        assert found.passed, verdict(found)
        for rank in found.ranks:
            for step in rank.steps:
                assert [wait.what for wait in step.host_waits] == ["tolist()"]
        results.append(found)
    return results


def expect_planned_memory(found: Rehearsed, *, least: float = 0.0) -> None:
    for rank in found.ranks:
        (_, step) = rank.steps  # the first has no state of the optimiser at its peak
        assert least * step.estimate_bytes <= step.peak_bytes <= step.estimate_bytes


PRESET = "7b_128k"
"""In the full set; `experiments/beyond/rehearsals/results` has all presets with all layers."""


@pytest.mark.parametrize(
    ("preset", "systems"),
    [
        (PRESET, ("wlb",)),
        *nightly((PRESET, tuple(s for s in SYSTEMS if s != "wlb"))),
        *nightly(*((preset, tuple(SYSTEMS)) for preset in TABLE_1 if preset != PRESET)),
    ],
)
def test_each_pipeline_position_runs_under_each_system(
    preset: str, systems: tuple[str, ...]
) -> None:
    """With one layer a stage, where a step's largest layer is more of the estimate than of the
    peak; `python -m experiments.beyond.rehearsals` takes all layers.
    """
    for found in passed([spec_of(preset, name, layers=1) for name in systems], ranks=ONE_PER_STAGE):
        expect_planned_memory(found)


@pytest.mark.nightly
def test_the_largest_preset_runs() -> None:
    """On the first and the last rank of the first, a middle and the last pipeline position."""
    spec = spec_of(LARGE, "wlb", layers=1)
    for found in passed([spec], ranks=corners(spec.parallel)):
        expect_planned_memory(found)


@pytest.mark.nightly
def test_the_largest_preset_runs_under_each_system() -> None:
    specs = [spec_of(LARGE, name, layers=1) for name in SYSTEMS]
    ranks = [corners(spec.parallel) for spec in specs]
    ranks[list(SYSTEMS).index("wlb")] = ONE_PER_STAGE
    for found in passed(specs, ranks=ranks):
        expect_planned_memory(found)


@pytest.mark.nightly
def test_presets_of_other_families_run() -> None:
    """All ranks of a model whose ends exchange gradients, with biases, so that every part of them
    is rehearsed with all layers.
    """
    for name, ranks in (("llama32_1b_64k", "all"), ("qwen3_8b_128k", ONE_PER_STAGE)):
        spec = spec_of(name, "wlb", layers=0)
        spec = replace(spec, model=replace(spec.model, qkv_bias=ranks == "all"))
        for found in passed([spec], ranks=ranks):
            expect_planned_memory(found, least=LEAST)
            assert ranks != "all" or found.proof.num_communicators == found.proof.num_seen


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mistral_7b_32k", "gemma3_4b_128k"])
def test_presets_with_windows_run(name: str) -> None:
    """With all layers, of both kinds, and the rows of windows by need."""
    spec = spec_of(name, "wlb", layers=0)
    sharding = replace(spec.sharding, exchange=ExchangeChoice.NEEDED)
    for found in passed([replace(spec, sharding=sharding)], ranks=ONE_PER_STAGE):
        expect_planned_memory(found, least=0.8)


@pytest.mark.nightly
def test_a_hybrid_with_experts_takes_the_memory_that_was_planned() -> None:
    """One layer with attention and three linear ones a stage, with a window of 32K, because linear
    layers in plain PyTorch take a step for each 64 tokens of a document.
    """
    spec = load(
        "qwen3_next_80b_a3b_256k",
        [
            *("model.num_layers=16", "pp.schedule=1f1b", "pp.virtual_stages=1", "ep.stages=1"),
            "data.context_window=32768",
        ],
    )
    (found,) = rehearse_each([spec], ranks="0", steps=2, jobs=1)
    assert not isinstance(found, UserError), found
    assert found.passed, verdict(found)
    expect_planned_memory(found, least=0.7)


@pytest.mark.nightly  # a small model's are in test_run_layouts.py
def test_other_alternatives_of_systems_run() -> None:
    for found in passed([spec_of("7b_128k", name, layers=1) for name in FORCED], ranks="0,48"):
        expect_planned_memory(found)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["7b_128k", "70b_128k"])
def test_keys_by_need_run_at_each_pipeline_position(preset: str) -> None:
    spec = spec_of(preset, "wlb", layers=1)
    specs = [
        replace(spec, sharding=replace(spec.sharding, exchange=choice))
        for choice in (ExchangeChoice.NEEDED, ExchangeChoice.AUTO)
    ]
    for found in passed(specs, ranks=ONE_PER_STAGE):
        expect_planned_memory(found)


@pytest.mark.nightly
def test_a_preset_with_all_its_layers_takes_the_memory_that_was_planned() -> None:
    specs = [spec_of("550m_64k", name, layers=0) for name in SYSTEMS]
    for found in passed(specs, ranks="0,12"):  # the first and the last position
        expect_planned_memory(found, least=LEAST)
        kinds = {"weights", "activations", "gathered parameters", "boundaries", "inputs"}
        assert all(kinds <= set(rank.at_peak) for rank in found.ranks)


@pytest.mark.nightly
def test_demos_run_on_gpus() -> None:
    """Their models are too small for the estimate to be near."""
    passed(
        [
            spec_of(name, "wlb", layers=0)
            for name in ("demo", "demo_single", "sft_demo", "hybrid_demo")
        ],
        ranks="0",
    )
