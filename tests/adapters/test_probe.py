"""Tests the probe that asks a model whether it keeps the documents of a packed row apart."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="needs the extra [hf]")
pytest.importorskip("trl", reason="needs the extra [hf]")

from datasets import Dataset
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Trainer

from tests.adapters.context_models import SMALL
from tests.adapters.probe_ranks import asked
from tests.adapters.trainer_worker import arguments, tiny_model
from wlb.adapters import probe
from wlb.adapters.boundary_keys import FLASH_KEYS, boundary_keys
from wlb.adapters.collate import PaddedCollator, PaddingFreeCollator
from wlb.adapters.hugging_face import Balance, balanced
from wlb.adapters.probe import check_documents_apart
from wlb.adapters.trainers import BalancedCollator
from wlb.adapters.trl import balanced_steps
from wlb.launch.local import run_local
from wlb.plan import UserError

LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "mamba": {"state_size": 8},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "gemma3_text": {"sliding_window": 7},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
HYBRIDS = ("qwen3_5_text", "qwen3_next", "lfm2", "bamba", "granitemoehybrid")
WITHOUT_MASK = ("gpt_oss", "opt", "bloom", "mpt", "mamba")
"""They take position_ids or any keyword, and read none of the boundaries."""
APART = ("llama", "qwen3", "gemma3_text", "gpt_neox", "phi", "olmo2", "qwen3_moe")


def model_of(family: str, attention: str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SMALL, **OPTIONS.get(family, {}), **options})
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def batch_of(collator: Any) -> dict[str, Any]:
    return collator([{"input_ids": [3, 7, 9, 21]}, {"input_ids": [5, 4]}])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", APART)
def test_models_that_keep_documents_apart(family: str, attention: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(family, attention).to(dtype)
        check_documents_apart(model, batch_of(BalancedCollator.of_model(model)))


@pytest.mark.parametrize("family", WITHOUT_MASK)
def test_models_that_read_no_boundaries_are_refused(family: str) -> None:
    model = model_of(family)
    name, attention = type(model).__name__, model.config._attn_implementation
    says = rf"^{name} \(attn_implementation = '{attention}'\) does not keep .* the model unpacked"
    with pytest.raises(UserError, match=says):
        check_documents_apart(model, batch_of(BalancedCollator.of_model(model)))


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_models_are_told_of_boundaries_or_refused(family: str) -> None:
    """Transformers keeps documents apart with kernels alone, and says so if none is installed."""
    model = model_of(family)
    says = r"pass cu_seq_lens_q, .*, seq_idx to its forward by PaddingFree"
    with pytest.raises(UserError, match=says):
        check_documents_apart(model, batch_of(PaddingFreeCollator()))
    batch = batch_of(BalancedCollator.of_model(model))
    assert {*FLASH_KEYS, "seq_idx"} <= set(batch)
    try:
        import causal_conv1d  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(UserError, match=r"failed in wlb's test .*causal_conv1d"):
            check_documents_apart(model, batch)


@pytest.mark.parametrize("scale", [0.15, 0.02])
def test_a_leak_of_a_convolution_alone_is_found(scale: float) -> None:
    """At a usual scale of first weights it is less than a thousandth of what attention carries."""
    model = model_of("lfm2", initializer_range=scale)
    with pytest.raises(UserError, match="Lfm2ForCausalLM"):
        check_documents_apart(model, batch_of(PaddingFreeCollator()))


def test_a_cache_that_hides_boundaries_is_named() -> None:
    model = model_of("llama")
    check_documents_apart(model, batch_of(PaddingFreeCollator()))
    model.config.use_cache = True
    with pytest.raises(UserError, match=r"set model\.config\.use_cache = False"):
        check_documents_apart(model, batch_of(PaddingFreeCollator()))
    model.activation_checkpointing_enable()  # leaves the cache out in training
    check_documents_apart(model, batch_of(PaddingFreeCollator()))


class RunningSum(nn.Module):
    """Logits of each document's running sum; counts its calls, draws and knows its mode."""

    def __init__(self, *, noise: float = 0.0, leak: float = 0.0, weight: float = 1.0) -> None:
        super().__init__()
        self.noise, self.leak, self.weight = noise, leak, weight
        self.embedding = nn.Embedding(64, 8)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.inner = nn.Dropout(0.5)
        self.keys: list[set[str]] = []

    def forward(self, input_ids: Tensor, position_ids: Tensor, **given: Any) -> Any:
        self.keys.append({"input_ids", "position_ids", *given})
        assert not torch.is_grad_enabled()
        self.calls += 1
        self.table = torch.zeros(2)
        x = self.inner(self.embedding(input_ids))[0]
        starts = torch.arange(x.shape[0]) - position_ids[0]
        running = x.cumsum(0)
        own = running - torch.where(starts[:, None] > 0, running[starts - 1], 0 * running)
        torch.manual_seed(int(input_ids.sum()))  # rounding by what else is in the row
        other = self.noise * torch.randn_like(x) + self.leak * running
        return SimpleNamespace(logits=(self.weight * own + other)[None])


def test_nothing_is_left_behind() -> None:
    model = RunningSum()
    model.train()
    model.inner.eval()
    table = model.table
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_documents_apart(model, batch_of(PaddingFreeCollator()))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model.inner.training
    assert model.calls.item() == 0
    assert model.table is table
    assert table.tolist() == [1, 1]
    assert model.keys
    assert torch.is_grad_enabled()


def test_rounding_by_the_rest_of_a_row_is_no_leak() -> None:
    check_documents_apart(RunningSum(noise=0.05), batch_of(PaddingFreeCollator()))
    with pytest.raises(UserError, match="RunningSum"):
        check_documents_apart(RunningSum(leak=0.01), batch_of(PaddingFreeCollator()))


def test_a_model_that_shows_nothing_is_told() -> None:
    with pytest.warns(
        UserWarning, match="RunningSum: a token's logits do not depend on the tokens"
    ):
        check_documents_apart(RunningSum(weight=0.0), batch_of(PaddingFreeCollator()))


def test_the_probe_has_the_keys_of_the_batch() -> None:
    model = RunningSum()
    told = PaddingFreeCollator(return_flash_attn_kwargs=True, return_seq_idx=True)
    check_documents_apart(model, batch_of(told))
    assert model.keys[0] == {"input_ids", "position_ids", *FLASH_KEYS, "seq_idx"}
    model.keys.clear()
    check_documents_apart(model, batch_of(PaddedCollator(pad_token_id=0)))
    assert not model.keys, "padded rows hold a document each"


def test_a_forward_without_logits_names_the_way_out() -> None:
    class Loss(RunningSum):
        def forward(self, **given: Any) -> Any:
            return SimpleNamespace(loss=super().forward(**given).logits.sum())

    with pytest.raises(UserError, match=r"Loss .* without logits .*check_documents=False"):
        check_documents_apart(Loss(), batch_of(PaddingFreeCollator()))


def test_keys_that_a_forward_takes() -> None:
    def flash(
        input_ids: Any, cu_seq_lens_q: Any, cu_seq_lens_k: Any, max_length_q: Any, max_length_k: Any
    ) -> None: ...

    def convolution(input_ids: Any, seq_idx: Any) -> None: ...

    assert boundary_keys(SimpleNamespace(forward=flash)) == FLASH_KEYS
    assert boundary_keys(SimpleNamespace(forward=convolution)) == ("seq_idx",)
    assert boundary_keys(SimpleNamespace(forward=lambda input_ids: None)) == ()
    assert boundary_keys(model_of("llama")) == (*FLASH_KEYS, "seq_idx")


def trainer_of(path: Path, model: Any, make: Any = balanced, **options: Any) -> Any:
    rows = Dataset.from_dict({"input_ids": [[3, 7, 9, 21, 5 + i] for i in range(8)]})
    given = {"balance": Balance(context_window=16)} if make is balanced else {"max_tokens": 64}
    args = arguments(
        str(path), remove_unused_columns=True, max_steps=2, per_device_train_batch_size=2
    )
    return make(Trainer)(model=model, args=args, train_dataset=rows, **given, **options)


@pytest.mark.full
@pytest.mark.parametrize("make", [balanced, balanced_steps])
def test_trainers_ask_before_their_first_step(tmp_path: Path, make: Any) -> None:
    model = model_of("opt")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        UserError, match=r"OPTForCausalLM .* does not keep the documents of a packed row"
    ):
        trainer_of(tmp_path, model, make).train()
    assert all(map(torch.equal, before, model.parameters()))
    trainer = trainer_of(tmp_path, model, make, check_documents=False)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_trainer_sends_hybrids_what_keeps_documents_apart(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of("lfm2"))
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["seq_idx"].max() == len(batch["cu_seq_lens_q"]) - 2
    assert batch["seq_idx"].max() > 0


@pytest.mark.full
def test_losses_are_those_without_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws the same numbers."""
    calls: list[int] = []
    share = probe._leaked_share
    monkeypatch.setattr(probe, "_leaked_share", lambda *given: calls.append(1) or share(*given))
    losses = []
    for check in (True, False):
        model: Any = tiny_model()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        trainer = trainer_of(tmp_path, model, check_documents=check)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == losses[1]
    assert len(calls) == 1


@pytest.mark.full
@pytest.mark.dist
def test_ranks_are_told_alike_and_train_on_as_without() -> None:
    """This holds under DDP and FSDP2, and for ranks of which one alone has a packed row."""
    preload = ("tests.adapters.probe_ranks",)
    for said, same in run_local(asked, 2, start_group=True, timeout_s=300, preload=preload):
        assert [bool(text) for text in said] == [False, True, False, True]
        assert all("does not keep the documents" in text for text in said[1::2])
        assert "GptOssForCausalLM" in said[1]
        assert same
