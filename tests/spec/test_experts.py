"""Tests the checks of experts: sizes, degrees, and what is not built for them."""

from typing import Any

import pytest

from wlb.spec import load

BASE = [
    "model.experts.num=8",
    "model.experts.hidden_size=32",
    "model.hidden_size=64",
    "parallel.dp=2",
    "parallel.cp=2",
]

HEADS = ["model.num_heads=6", "model.num_kv_heads=6", "model.head_dim=8"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["parallel.ep=4"], ""),
        (["parallel.tp=2", "parallel.ep=8"], ""),
        (["model.experts.per_token=9"], "per_token = 9 is more than model.experts.num = 8"),
        (["model.experts.per_token=1", "model.experts.normalised=false"], ""),
        (
            ["model.experts.per_token=1"],
            "per_token = 1 .* never learns; set model.experts.normalised = false",
        ),
        (["model.experts.hidden_size=20"], "hidden_size = 20 is not a multiple of 8.* = 24"),
        (["model.hidden_size=68", "model.head_dim=8"], "model.hidden_size = 68 is not a multiple"),
        (["parallel.ep=3"], "parallel.ep = 3 does not divide model.experts.num = 8"),
        (["model.experts.num=4096", "parallel.ep=2"], "2048 experts per rank is above 1023"),
        (["parallel.ep=8"], r"parallel.ep = 8 does not divide dp 2 x cp 2 x tp 1 = 4 ranks"),
        (["model.experts.num=0", "parallel.ep=2"], "the model has no experts to divide"),
        (["parallel.ep=4", "ep.stages=2"], ""),
        (
            ["parallel.ep=4", "ep.stages=3"],
            r"ep.stages = 3 does not divide the 2 experts.*\[1, 2\]",
        ),
        (["ep.stages=2"], "ep.stages = 2 with parallel.ep = 1: no rows travel between ranks"),
        (["model.experts.num=0", "ep.stages=2"], "ep.stages = 2 with parallel.ep = 1"),
        (["fsdp.shard_size=2", "parallel.ep=2"], ""),
        (["fsdp.shard_size=2", "parallel.ep=4"], "ep = 4 does not divide the 2 ranks of one copy"),
        (["training.compile=true"], ""),
        (["parallel.ep=4", "cost.expert_load=4"], ""),
        (["parallel.ep=2", "cost.expert_load=2.5"], "expert_load = 2.5 with parallel.ep = 2 and"),
        (["model.experts.num=0", "cost.expert_load=2"], "expert_load = 2.0 with parallel.ep = 1"),
        (
            ["model.experts.shared=1", "parallel.tp=3", *HEADS],
            "experts.shared x hidden_size = 32 is not a multiple of parallel.tp = 3",
        ),
        (["model.experts.every=2", "model.experts.dense_layers=[1]"], ""),
        (["model.experts.every=9"], "model.experts.every = 9 and .* leave no layer"),
        (["model.experts.dense_layers=[8]"], "names layer 8, but model.num_layers = 8"),
        (["model.experts.num=0", "model.experts.every=2"], "which layers have experts, but"),
        (
            ["model.experts.every=2", "parallel.tp=3", "model.ffn_hidden_size=64", *HEADS],
            "model.ffn_hidden_size = 64 is not a multiple of parallel.tp = 3",
        ),
        (["model.qk_norm_rows=true", "parallel.tp=2"], "parallel.tp = 2 with model.qk_norm_rows"),
        (["model.qk_norm_rows=true", "model.qk_norm=true"], "exclude each other"),
    ],
)
def test_what_is_refused(keys: list[str], message: str, tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text("", "utf-8")
    if not message:
        assert load(str(tmp_path / "run.toml"), BASE + keys).model.experts.num == 8
        return
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / "run.toml"), BASE + keys)


def test_one_expert_alone_needs_no_router_that_learns(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text("", "utf-8")
    keys = ["model.experts.num=1", "model.experts.per_token=1", "parallel.ep=1"]
    assert load(str(tmp_path / "run.toml"), [*BASE, *keys]).model.experts.normalised


def test_the_ffn_of_a_model_with_experts_is_unused(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text("", "utf-8")
    spec = load(str(tmp_path / "run.toml"), [*BASE, "model.ffn_hidden_size=7", "parallel.tp=2"])
    assert spec.model.active_ffn_size == 2 * 32
