"""Provides tiny random models of each family, documents, and the results of one process.

One process sees the documents unpacked, so its results are what packed, sharded runs must match.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from wlb.adapters.collate import PaddingFreeCollator
from wlb.plan import IGNORE

VOCAB = 64
WINDOW = 7

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma": {"hidden_act": "gelu"},
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 8.0,
        "query_pre_attn_scalar": 5,
    },
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 5},
}


def tiny(family: str, **options: Any) -> Any:
    """Returns a model with float32 weights that are the same on every rank."""
    given = {**SMALL, **FAMILY_OPTIONS.get(family, {}), **options}
    if family == "qwen2":
        del given["head_dim"]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**given)
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def documents(lengths: tuple[int, ...], seed: int = 0) -> list[dict[str, Any]]:
    """Returns random documents; in every third one, only the second half is trained."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for i, n in enumerate(lengths):
        ids = torch.randint(VOCAB, (n,), generator=random).tolist()
        half = n // 2 if i % 3 == 2 else 0
        rows.append({"input_ids": ids, "labels": [IGNORE] * half + ids[half:]})
    return rows


def packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one padding-free batch of all documents."""
    return PaddingFreeCollator()(rows)


def num_labels(rows: list[dict[str, Any]]) -> int:
    return sum(label != IGNORE for row in rows for label in row["labels"][1:])


def unpacked(model: Any, rows: list[dict[str, Any]]) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Runs a model on one document at a time.

    Returns:
        Logits of all tokens, shape [S, vocabulary]; the mean loss over all labels; and its
        gradients by parameter name.
    """
    total, logits = num_labels(rows), []
    loss = 0.0
    for row in rows:
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        out = model(input_ids=ids, labels=labels, num_items_in_batch=total, use_cache=False)
        if out.loss.requires_grad:
            out.loss.backward()
        loss += float(out.loss.detach())
        logits.append(out.logits[0].detach())
    return torch.cat(logits), loss, taken_gradients(model)


def taken_gradients(model: Any) -> dict[str, Tensor]:
    """Returns the gradients of a model (zeros for parameters without one) and clears them."""
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return found
