"""Tests that packed logits equal those of examples alone, for the paper's model families.

Tiny random models in fp32 on CPU, transformers 5.23, learn the boundaries that the collator gives
in four ways, each with `use_cache=False` and without a 2-D attention_mask. The trap of all
families: `use_cache` is True unless a config or Trainer says no, and with a cache transformers
ignores restarting positions without a warning (last test).
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from wlb.adapters.collate import PaddingFreeCollator, block_mask

transformers = pytest.importorskip("transformers", reason="needs the extra [hf]")

VOCAB = 97
WINDOW = 5
DOCUMENTS = [[3 + (7 * i * n + i) % 90 for i in range(n)] for n in (7, 1, 11, 4, 9)]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DBRX = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}
SLIDING = {"sliding_window": WINDOW}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "mistral": {**SHAPE, "sliding_window": None},
    "mistral sliding": SHAPE | SLIDING,
    "mixtral": SHAPE | EXPERTS,
    "granite": SHAPE,
    "dbrx": DBRX,
    "falcon": SHAPE | {"alibi": False, "multi_query": True, "new_decoder_architecture": False},
    "falcon alibi": SHAPE | {"alibi": True},
    "gemma": SHAPE | {"head_dim": 8},
    "olmo": SHAPE,
    "phi": SHAPE,
    "phi3": SHAPE,
    "phi3 sliding": SHAPE | SLIDING,
    "qwen2": SHAPE,
    "qwen2 sliding": SHAPE | SLIDING | {"use_sliding_window": True, "max_window_layers": 0},
    "qwen2_moe": SHAPE | EXPERTS,
    "stablelm": SHAPE,
    "starcoder2": SHAPE,
    "starcoder2 sliding": SHAPE | SLIDING,
}
"""The boundaries reach a model in four ways:

    sdpa       attn_implementation "sdpa"; boundaries read from position_ids
    eager      the same with "eager"
    varlen     a kernel that looks only at cu_seq_lens_q/k, as flash-attn's varlen call does (here a
               loop over segments, registered as an attention implementation)
    mask       "sdpa" with `block_mask` as attention_mask, for models that look at nothing else

    family                                             sdpa   eager   varlen   mask
    llama, mixtral, granite, dbrx, gemma, olmo, phi    yes    yes     yes      yes
    phi3, qwen2, qwen2_moe                             yes    yes     yes      yes
    stablelm                                           yes    yes     NO       yes
    mistral, starcoder2 (full or sliding window)       yes    yes     yes      yes, with window
    phi3, qwen2 with sliding window                    yes    yes     yes      yes, with window
    falcon (rotary), from transformers 5.24            yes    yes     (1)      yes
    falcon (alibi), from transformers 5.24             yes    yes     (1)      NO

Before 5.24 falcon gave its mask no position_ids, so documents saw each other; with alibi it takes
positions from a 2-D mask and refuses one of 4 axes. stablelm's layers do not pass cu_seq_lens on;
its kernels have to read position_ids. (1) No pluggable attention. CodeQwen is qwen2, phi-2 is
phi, QwenMOE is qwen2_moe. "NO" is an expected failure here, which becomes an error when a version
of transformers mends it.
"""
FALCON = ("falcon", "falcon alibi")
ALIBI = {"falcon alibi": "alibi takes its positions from a 2-D mask"}
STABLELM = {"stablelm": "stablelm's layers do not pass cu_seq_lens on"}


def families(fail: dict[str, str], *, leave_out: Sequence[str] = ()) -> list[Any]:
    """Returns all families but those left out; those in `fail` are expected to fail, for that
    reason.
    """
    return [
        pytest.param(
            name,
            marks=pytest.mark.xfail(reason=fail[name], raises=(AssertionError, ValueError))
            if name in fail
            else (),
        )
        for name in FAMILIES
        if name not in leave_out
    ]


@functools.cache
def model_of(family: str, attention: str) -> Any:
    config = transformers.CONFIG_MAPPING[family.split()[0]](**FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the default 0.02 makes attention too flat to tell mistakes
                parameter.normal_(0, 0.2)
    return model.eval()


@functools.cache
def alone(model: Any) -> torch.Tensor:
    """Returns logits of each document by itself, one after the other, shape [T, vocabulary]."""
    rows = [model(input_ids=torch.tensor([d]), use_cache=False).logits[0] for d in DOCUMENTS]
    return torch.cat(rows).detach()


def assert_packed_equals_alone(model: Any, batch: dict[str, Any]) -> None:
    expected = alone(model)
    assert expected.abs().max() > 1
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        found = model(**inputs, use_cache=False).logits[0, : len(expected)]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def collated(**options: Any) -> dict[str, Any]:
    return PaddingFreeCollator(**options)([{"input_ids": row} for row in DOCUMENTS])


def of_segments(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention with q, k, v of [1, heads, T, d] that knows of nothing but cu_seq_lens."""
    assert attention_mask is None
    offsets = torch.tensor([0, query.shape[2]]) if cu_seq_lens_q is None else cu_seq_lens_q
    assert cu_seq_lens_k is None or torch.equal(offsets, cu_seq_lens_k)
    out: list[torch.Tensor] = []
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        mask = torch.from_numpy(block_mask([0, stop - start], window=sliding_window))
        q, k, v = (x[:, :, start:stop] for x in (query, key, value))
        out.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


@pytest.fixture
def varlen() -> str:
    transformers.AttentionInterface.register("wlb_of_segments", of_segments)
    return "wlb_of_segments"


@pytest.mark.parametrize("family", families({}))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_by_position_ids(family: str, attention: str) -> None:
    assert_packed_equals_alone(model_of(family, attention), collated())


@pytest.mark.parametrize("family", families({}))
def test_filler_changes_no_document(family: str) -> None:
    batch = collated(pad_to_multiple_of=20)
    assert batch["input_ids"].shape[1] == 40 == sum(map(len, DOCUMENTS)) + 8
    assert_packed_equals_alone(model_of(family, "sdpa"), batch)


@pytest.mark.parametrize("family", families(STABLELM, leave_out=FALCON))
def test_by_cu_seq_lens(family: str, varlen: str) -> None:
    batch = collated(return_flash_attn_kwargs=True, pad_to_multiple_of=7)
    assert_packed_equals_alone(model_of(family, varlen), batch)


@pytest.mark.parametrize("family", families(ALIBI))
def test_by_a_mask(family: str) -> None:
    batch = collated(return_flash_attn_kwargs=True)
    window = WINDOW if family.endswith("sliding") else None
    mask = block_mask(batch["cu_seq_lens_q"].numpy(), window=window)
    inputs = {key: batch[key] for key in ("input_ids", "position_ids")}
    inputs["attention_mask"] = torch.from_numpy(mask)[None, None]
    assert_packed_equals_alone(model_of(family, "sdpa"), inputs)


@pytest.mark.parametrize("family", families({}, leave_out=FALCON))
def test_without_position_ids_documents_see_each_other(family: str) -> None:
    """The other tests could not fail if logits did not depend on position_ids."""
    model = model_of(family, "sdpa")
    with pytest.raises(AssertionError):
        assert_packed_equals_alone(model, {"input_ids": collated()["input_ids"]})


@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_is_that_of_all_targets_alone(shifted: bool) -> None:
    model = model_of("llama", "sdpa")
    with torch.no_grad():
        packed = model(**collated(return_shift_labels=shifted), use_cache=False).loss
        sums = [
            torch.nn.functional.cross_entropy(
                logits[:-1], torch.tensor(row)[1:], reduction="sum"
            ).item()
            for logits, row in zip(
                alone(model).split([len(row) for row in DOCUMENTS]), DOCUMENTS, strict=True
            )
        ]
    num_targets = sum(len(row) - 1 for row in DOCUMENTS)
    assert packed.item() == pytest.approx(sum(sums) / num_targets, rel=1e-5)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_cache_makes_transformers_ignore_boundaries(is_training: bool) -> None:
    model = model_of("llama", "sdpa")
    batch = {key: collated()[key] for key in ("input_ids", "position_ids")}
    expected = alone(model)  # without dropout, training or not
    with torch.no_grad():
        error = (model.train(is_training)(**batch).logits[0] - expected).abs().max()
    model.eval()
    assert error > 0.1  # use_cache=False, as in the tests above, is what callers need
