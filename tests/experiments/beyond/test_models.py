"""Tests that the models of the page are those that their names say."""

import pytest

from experiments.beyond.models.__main__ import MODELS, models_table
from wlb.cost.config_json import counted_of

pytestmark = pytest.mark.full

SIZES = {
    "Llama 3.1 8B": 8.03,
    "Qwen3-30B-A3B": 30.5,
    "DeepSeek-V3": 671,
    "DeepSeek-V3.2": 671,
    "gpt-oss-120b": 116.8,
    "Llama 4 Scout": 107.8,
    "Gemma 3 27B": 27.0,
    "Qwen3-Next-80B-A3B": 79.7,
    "Kimi Linear 48B-A3B": 49.1,
    "Nemotron-H 8B": 8.1,
}
"""Billions of parameters of the language models, as their authors or the Hugging Face Hub state
them."""


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_size_of_its_name(name: str) -> None:
    model = counted_of(MODELS[name], name)
    assert model.total / 1e9 == pytest.approx(SIZES[name], rel=0.02)


def test_balance_is_better_than_the_usual_loader_for_every_model() -> None:
    table = models_table((32_768,), 24)
    assert [row[0] for row in table.rows] == list(MODELS)
    usual, ours = (table.columns.index(f"{name} 32768") for name in ("usual", "ours"))
    for row in table.rows:
        assert 1 <= row[ours] < row[usual]
