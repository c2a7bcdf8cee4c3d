"""Tests the presets: layouts, and how many parameters our dimensions make.

They are Table 1's eight, and the 405B job that its Figures 1 and 4 trace.
"""

import pytest

from wlb.memory import memory_estimate
from wlb.spec import Policy, Recompute, RunSpec, Schedule, check, load, presets

# name: (tp, cp, pp, dp), GPUs, billions of parameters the name means, parameters exactly.
TABLE_1 = {
    "550m_64k": ((2, 2, 4, 2), 32, 0.55, 551_339_520),
    "550m_128k": ((2, 4, 4, 1), 32, 0.55, 551_339_520),
    "7b_64k": ((4, 2, 4, 1), 32, 6.74, 6_738_415_616),  # LLaMA2-7B's, as published
    "7b_128k": ((8, 2, 4, 1), 64, 6.74, 6_738_415_616),
    "30b_64k": ((8, 2, 4, 1), 64, 29.4, 29_385_037_824),
    "30b_128k": ((8, 4, 4, 1), 128, 29.4, 29_385_037_824),
    "70b_64k": ((16, 4, 4, 1), 256, 70.3, 70_318_825_472),
    "70b_128k": ((16, 4, 4, 1), 256, 70.3, 70_318_825_472),
}
FAMILIES = {
    "qwen3_8b_128k": (64, 8_191_783_936),
    "qwen3_30b_a3b_128k": (64, 30_532_646_912),
    "llama32_1b_64k": (16, 1_235_814_400),
    "mistral_7b_32k": (16, 7_241_732_096),
    "gemma3_4b_128k": (16, 3_880_263_168 + 192 * 2560),
    "qwen3_next_80b_a3b_256k": (64, 79_674_391_296 + 2 * 128 * 2048),
}
"""GPUs, and parameters as published, with the vocabulary's padding to a multiple of 256."""


def test_the_presets_are_the_demos_table_1_and_the_405b_job() -> None:
    demos = ["demo", "demo_single", "sft_demo", "qwen3_demo", "qwen3_moe_demo", "gemma3_demo"]
    demos.append("hybrid_demo")
    assert presets() == sorted([*demos, *TABLE_1, "405b_128k", *FAMILIES])


@pytest.mark.parametrize("name", TABLE_1)
def test_layouts_and_gpus_are_table_1s(name: str) -> None:
    spec = preset(name)
    layout, gpus, _, _ = TABLE_1[name]
    p = spec.parallel
    assert (p.tp, p.cp, p.pp, p.dp) == layout
    assert p.world_size == gpus
    assert spec.data.context_window == int(name.split("_")[1].removesuffix("k")) * 1024
    assert spec.num_micro_batches == p.pp * p.dp  # Section 7.1


@pytest.mark.parametrize("name", TABLE_1)
def test_parameters_are_what_the_name_says(name: str) -> None:
    model = preset(name).model
    _, _, billions, exactly = TABLE_1[name]
    assert model.num_parameters == exactly
    assert model.num_parameters == pytest.approx(billions * 1e9, rel=0.02)
    assert model.num_heads == model.num_kv_heads
    assert model.head_size == 128


@pytest.mark.parametrize("name", TABLE_1)
def test_each_can_run_and_differs_only_in_model_and_layout(name: str) -> None:
    spec = preset(name)
    assert check(spec) is spec
    assert (spec.pp.schedule, spec.pp.virtual_stages) == (Schedule.INTERLEAVED_1F1B, 4)
    assert spec.packing.policy is Policy.VAR_LEN
    other = preset("7b_128k")
    for section in ("cp", "packing", "sharding", "cost", "kernels", "training", "eval", "pp"):
        assert getattr(spec, section) == getattr(other, section), section


def test_the_405b_job_has_llama_3s_dimensions_on_8192_gpus() -> None:
    spec = load("405b_128k")
    p, model = spec.parallel, spec.model
    assert (p.tp, p.cp, p.pp, p.dp) == (8, 16, 16, 4)
    assert p.world_size == 8192
    assert spec.num_micro_batches == p.pp * p.dp
    assert model.num_parameters == pytest.approx(405.85e9, rel=1e-4)
    assert (model.num_layers, spec.stage_layers) == (126, (1, *[2] * 62, 1))
    assert model.head_size == 128


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_have_their_published_parameters(name: str) -> None:
    spec = load(name)
    num_gpus, num_parameters = FAMILIES[name]
    assert spec.parallel.world_size == num_gpus
    assert spec.model.num_parameters == num_parameters
    assert check(spec) is spec
    assert memory_estimate(spec).total_bytes < 70 * 2**30


def test_the_405b_job_fits_80_gib_with_mlps_recomputed() -> None:
    needed = {
        how: memory_estimate(load("405b_128k", [f"training.recompute={how}"])).total_bytes / 2**30
        for how in (Recompute.NONE, Recompute.SELECTIVE)
    }
    assert load("405b_128k").training.recompute is Recompute.SELECTIVE
    assert needed[Recompute.SELECTIVE] < 50 < 80 < needed[Recompute.NONE]


def preset(name: str) -> RunSpec:
    return load(name, ["model.vocab_size=32000"])
