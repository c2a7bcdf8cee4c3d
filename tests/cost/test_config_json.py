"""Tests the counts of a Hugging Face config.json, and the workload that is made of them."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb import Planner, balance_step, shard
from wlb.cost import counted, workload_model
from wlb.cost.config_json import KIND_NAMES, counted_of, workload_of_model
from wlb.cost.families import COUNTED, LAYER_TYPES, Pairs
from wlb.plan import UserError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
SMALL = LLAMA | {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 10,
}
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Llama 3.1 8B": (LLAMA, 8.03e9, 8.03e9),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "vocab_size": 151936,
        },
        3.3e9,
        30.5e9,
    ),
    # transformers' defaults are these models.
    "DeepSeek-V3": ({"model_type": "deepseek_v3"}, 37.6e9, 671e9),
    "gpt-oss-120b": ({"model_type": "gpt_oss"}, 5.7e9, 116.8e9),
    "Qwen3-Next-80B-A3B": ({"model_type": "qwen3_next"}, 3.9e9, 79.7e9),
}
"""Active and all parameters as their authors state them, where active ones count embeddings."""


def write(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values), "utf-8")
    return str(path)


def test_counts_by_hand(tmp_path: Path) -> None:
    """A layer has projections 8 x (8 + 4 + 4 + 8) = 192 and an MLP of 3 x 8 x 16 = 384."""
    model = counted(write(tmp_path, SMALL))
    assert model.kinds == {"full": 2}
    assert model.pairs == (Pairs(2 * 4 * 2 * 4),)
    assert model.token_flops == 2 * (2 * (192 + 384) + 80)
    assert model.active == model.total == 2 * (192 + 384) + 160
    # Two layers' attention, 64 FLOPs a pair and half of d^2 pairs, is 2,464 a token at d = 77.
    assert model.crossover == 77
    assert str(model) == (
        "llama: 2 layers (2 full attention); 0.0M parameters; attention costs as much as "
        "everything else in a document of 77 tokens"
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    config, active, total = PUBLISHED[name]
    model = counted_of(config, name)
    assert model.active == pytest.approx(active, rel=0.02)
    assert model.total == pytest.approx(total, rel=0.02)


def test_the_line_says_kinds_and_active_parameters() -> None:
    model = counted_of({"model_type": "qwen3_next"}, "file")
    assert str(model) == (
        "qwen3_next: 48 layers (12 full attention, 36 linear or recurrent); 3.9B active of 79.7B "
        "parameters; attention costs as much as everything else in a document of 74,613 tokens"
    )
    never = counted_of({"model_type": "mamba"}, "file")
    assert str(never).endswith("attention never costs as much as everything else")


@pytest.mark.parametrize("model_type", COUNTED)
def test_crossover_is_where_the_workload_has_as_much_of_both(model_type: str) -> None:
    small = {**SMALL, "num_experts_per_tok": 1, "layer_types": None}
    if model_type == "lfm2_moe":
        small["layer_types"] = ["conv", "full_attention"]
    model = counted_of({**small, "model_type": model_type}, "file")
    assert set(model.kinds) <= set(KIND_NAMES)
    if model.crossover is None:
        return
    # Neither is known better than to a token.
    work = workload_of_model(model)
    at = [model.crossover - 1, model.crossover]
    less, more = (work.attention_ns(at) - work.linear_ns(at)).tolist()
    assert less <= 1
    assert more >= -1


def test_a_cost_is_a_path_or_its_folder(tmp_path: Path) -> None:
    write(tmp_path, SMALL)
    model = workload_model(str(tmp_path))
    assert model.attention_ns([100]).tolist() == [16 * 100 * 100]
    assert model.linear_ns([100]).tolist() == [(2 * (192 + 384) + 80) * 100]


def seen_pairs(d: int, pairs: Pairs) -> int:
    """Pairs of a document, one query after the other."""
    if pairs.chunked:
        return sum(i % pairs.window + 1 for i in range(d))
    return sum(min(i + 1, pairs.window) for i in range(d))


@given(
    window=st.integers(1, 40),
    chunked=st.booleans(),
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=6),
)
def test_segments_of_a_document_add_up_to_the_pairs_that_are_seen(
    window: int, chunked: bool, cuts: list[int]
) -> None:
    """In windows and chunks, however the document is cut."""
    model = counted_of(SMALL, "file")
    one = Pairs(1000.0, window, chunked)
    work = workload_of_model(model)
    work = type(work)(quadratic_ns=0.0, windows=(one,))  # tiles of one row: no rounding up
    ends = np.cumsum(cuts)
    forward, backward = work.segment_times_ns(np.array(cuts), ends)
    seen = 1000 * seen_pairs(int(ends[-1]), one)
    assert int((forward + backward).sum()) == seen
    assert work.attention_ns(ends[-1:]).tolist() == [seen]


def test_sliding_layers_are_linear_in_long_documents(tmp_path: Path) -> None:
    sliding = SMALL | {"model_type": "mistral", "sliding_window": 256}
    model = workload_model(write(tmp_path, sliding))
    one, two = model.attention_ns([8192, 16384]).tolist()
    assert two == pytest.approx(2 * one, rel=0.02)
    assert "mistral: 2 layers (2 sliding window)" in str(counted(str(tmp_path)))


def test_a_model_of_images_is_counted_by_its_text_config() -> None:
    text = SMALL | {"model_type": "gemma3_text"}
    wrapped = {"model_type": "gemma3", "text_config": text, "tie_word_embeddings": True}
    assert counted_of(wrapped, "file") == counted_of(text, "file")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "t5"}, "'t5' is a family whose FLOPs wlb cannot count.*cost=24576"),
        ({"model_type": 3}, "model_type = 3 must be text"),
        ({"hidden_size": "8"}, "hidden_size = '8' must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": 2**40}, "vocab_size = .* must be at most"),
        ({"model_type": "olmo3", "layer_types": ["full_attention"]}, "one entry for each of 2"),
        ({"model_type": "olmo3", "layer_types": ["lightning"] * 2}, "'lightning', .* cannot count"),
        ({"model_type": "lfm2_moe"}, "layer_types = .* must list the kind of each layer"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "must be at most num_local_experts"),
        ({"tie_word_embeddings": []}, "tie_word_embeddings"),
    ],
)
def test_refusals(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        counted(write(tmp_path, SMALL | change))


@pytest.mark.parametrize("name", ["nowhere/config.json", "bad\0/config.json", "x" * 5000 + ".json"])
def test_a_file_that_cannot_be_read_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="cannot read"):
        workload_model(name)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"cost = 'nothing' is unknown.*config\.json"):
        workload_model("nothing")


def test_every_class_of_transformers_is_counted_or_refused() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    seen: set[str] = set()
    for model_type in CONFIG_MAPPING_NAMES:
        try:
            values = transformers.CONFIG_MAPPING[model_type]().to_dict()
        except Exception:
            values = {}  # a class that has no defaults
        with suppress(UserError):  # anything else is an error of this test
            counted_of({**values, "model_type": model_type}, model_type)
            seen.add(model_type)
    no_defaults = {"deepseek_v2", "lfm2_moe"}  # without experts of a token, without kinds
    assert set(COUNTED) - no_defaults <= seen
    assert len(CONFIG_MAPPING_NAMES) > 500


def test_names_of_kinds_are_those_of_layers() -> None:
    assert set(LAYER_TYPES.values()) <= set(KIND_NAMES)


def test_planner_sharding_and_steps_take_a_path(tmp_path: Path) -> None:
    """All three price a document alike."""
    path = write(tmp_path, SMALL)
    lengths = [400, 90, 60, 30, 20]
    work = workload_model(path)
    options: dict[str, Any] = {"context_window": 512, "num_micro_batches": 2}
    by_path, by_work = (
        [str(step) for step in Planner.for_lengths(lengths, cost=cost, **options).steps()]
        for cost in (path, work)
    )
    assert by_path == by_work
    sharded = shard(lengths, cp=2, strategy="balanced", cost=path)
    same = shard(lengths, cp=2, strategy="balanced", cost=work)
    assert sharded.stop.tolist() == same.stop.tolist()
    assert sharded.slowest_kernels_ns == same.slowest_kernels_ns > 0
    step = balance_step(lengths, num_ranks=2, max_tokens=512, cost=path)
    assert str(step) == str(balance_step(lengths, num_ranks=2, max_tokens=512, cost=work))
