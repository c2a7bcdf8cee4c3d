"""Tests that every layout computes what one process computes (fp32, CPU, Gloo)."""

from dataclasses import replace

import pytest

from tests.parity.body import expect_equal_to_one_process
from tests.parity.case import Case
from tests.sets import full, nightly
from wlb.plan import KeyExchange
from wlb.spec import Activation, Recompute, RopeKind, Schedule

pytestmark = pytest.mark.dist

F1B = Schedule.ONE_F_ONE_B
I1F1B = Schedule.INTERLEAVED_1F1B
IZB = Schedule.INTERLEAVED_ZERO_BUBBLE
NEEDED = KeyExchange.NEEDED
FULL = Recompute.FULL

MISTRAL = (("sliding_window", 5),)
GEMMA2 = (
    *(("sliding_window", 5), ("full_every", 2)),
    *(("attention_softcap", 1.5), ("logit_softcap", 2.0)),
)
GEMMA = ("branch_norms", "zero_centred_norms", "scaled_embeddings", "tied_embeddings")
GEMMA3 = (
    *(("sliding_window", 5), ("full_every", 3), ("sliding_rope_theta", 300.0)),
    *(("query_scale_size", 5), ("activation", Activation.GELU_TANH)),
)
# More TP ranks than KV heads: two or four ranks have copies of one.
TWO_KV, ONE_KV = (("num_kv_heads", 2),), (("num_kv_heads", 1),)
QWEN2, QWEN3 = ("qkv_bias", "tied_embeddings"), ("qk_norm", "tied_embeddings")

# One axis each, on four ranks.
QUICK = [
    Case(tp=4, strategy="per_sequence", rope_factor=4.0),
    Case(cp=4, row_multiple=4, head_dim=16, rope_factor=4.0, rope_kind=RopeKind.YARN),
    Case(cp=4, exchange=NEEDED, own_first=True),
    Case(dp=4, num_micro_batches=8),
    Case(pp=4, v=1, schedule=F1B, num_micro_batches=8),
    Case(tp=2, pp=2, schedule=F1B, head_dim=8, parts=(*GEMMA, "qk_norm"), keys=GEMMA3),
]
CASES = [
    # On four ranks, beside those of the quick set.
    Case(tp=2, cp=2, exchange=NEEDED, keys=GEMMA2),
    Case(tp=2, pp=2, schedule=F1B, head_dim=8, parts=("qkv_bias", *QWEN3)),
    Case(tp=4, keys=ONE_KV, recompute=Recompute.FULL),
    Case(tp=2, dp=2, keys=ONE_KV, num_micro_batches=8, recompute=Recompute.SELECTIVE),
    # On eight.
    Case(tp=4, cp=2, exchange=NEEDED, own_first=True, head_dim=8, parts=QWEN2, keys=TWO_KV),
    Case(tp=4, pp=2, v=2, schedule=IZB, head_dim=8, parts=QWEN3, keys=TWO_KV),
    # One axis alone.
    Case(tp=2),
    Case(cp=2),
    Case(cp=3, strategy="per_sequence"),
    Case(dp=2),
    Case(pp=2, schedule=F1B),
    Case(pp=2, v=2),
    Case(pp=2, v=2, schedule=IZB),
    Case(tp=2, pp=2, v=2, schedule=IZB, weight_delay=3),
    Case(pp=4, v=2, layers=8, num_micro_batches=6),
    # Stages with as many layers as they are told; embedding and head alone.
    Case(pp=2, v=2, layers=4, stage_layers=(1, 2, 1, 0)),
    Case(pp=2, v=2, dp=2, layers=3, stage_layers=(0, 1, 2, 0), schedule=IZB, num_micro_batches=8),
    # Others' keys in stages, while own ones are computed.
    Case(cp=4, exchange=NEEDED, own_first=True, stages=3, recompute=Recompute.FULL),
    Case(
        tp=2,
        cp=2,
        pp=2,
        v=2,
        schedule=IZB,
        own_first=True,
        exchange=NEEDED,
        stages=3,
        num_micro_batches=8,
    ),
    # Biases, norms of heads (of eight channels: four round too much), tied embeddings.
    Case(tp=2, cp=2, pp=2, schedule=F1B, head_dim=8, parts=QWEN2, recompute=Recompute.SELECTIVE),
    # Windows that slide, in all layers or every other; capped scores and logits.
    Case(pp=2, schedule=F1B, layers=5, stage_layers=(3, 2), keys=(*MISTRAL, ("full_every", 3))),
    # Three and four.
    Case(tp=2, cp=2, pp=2, v=2, row_multiple=3),
    Case(tp=2, cp=2, pp=2, dp=2, v=2, schedule=IZB, num_micro_batches=8, strategy="per_sequence"),
]
# Axes in pairs and triples that cases above have with more besides, or on fewer ranks.
NIGHTLY = [
    # Parts that cases above have on other layouts.
    Case(cp=4, exchange=NEEDED, row_multiple=4),
    Case(cp=2, exchange=NEEDED),
    Case(pp=2, schedule=F1B, layers=5, stage_layers=(3, 2)),
    Case(cp=3, own_first=True, row_multiple=4),
    Case(cp=2, exchange=NEEDED, head_dim=8, parts=QWEN2),
    Case(dp=2, num_micro_batches=8, head_dim=8, parts=QWEN3),
    Case(pp=4, v=2, layers=8, num_micro_batches=6, head_dim=8, parts=QWEN2),
    Case(pp=2, v=2, schedule=IZB, head_dim=8, parts=QWEN3),
    Case(cp=4, exchange=NEEDED, own_first=True, stages=3, keys=GEMMA2),
    Case(pp=2, v=2, schedule=IZB, head_dim=8, parts=(*GEMMA, "qk_norm"), keys=GEMMA3),
    Case(tp=2, cp=2, pp=2, head_dim=8, parts=GEMMA, keys=GEMMA3, recompute=Recompute.SELECTIVE),
    # Keys by need.
    Case(tp=2, cp=2, pp=2, own_first=True, schedule=F1B),
    Case(tp=2, cp=2, exchange=NEEDED, strategy="per_sequence"),
    Case(tp=2, cp=2, pp=2, v=2, row_multiple=3, exchange=NEEDED),
    Case(cp=2, pp=2, v=2, schedule=IZB, num_micro_batches=8, exchange=NEEDED),
    Case(tp=2, cp=2, pp=2, v=2, schedule=IZB, own_first=True, exchange=NEEDED, num_micro_batches=8),
    # Copies of KV heads.
    Case(tp=4, keys=TWO_KV),
    Case(tp=4, cp=2, keys=ONE_KV, strategy="per_sequence"),
    Case(tp=4, pp=2, v=2, keys=ONE_KV),
    Case(tp=2, cp=2, pp=2, v=2, schedule=IZB, exchange=NEEDED, num_micro_batches=8, keys=ONE_KV),
    # Families.
    Case(tp=4, head_dim=8, parts=QWEN3),
    Case(tp=2, cp=2, pp=2, dp=2, v=2, schedule=IZB, num_micro_batches=8, head_dim=8, parts=QWEN3),
    Case(tp=2, cp=2, pp=2, v=2, head_dim=8, parts=QWEN3, recompute=Recompute.FULL),
    Case(cp=4, exchange=NEEDED, row_multiple=4, keys=MISTRAL),
    Case(tp=2, cp=2, pp=2, v=2, schedule=IZB, exchange=NEEDED, num_micro_batches=8, keys=GEMMA2),
    Case(tp=4, head_dim=8, parts=GEMMA, keys=GEMMA3),
    Case(tp=2, cp=2, pp=2, schedule=F1B),
    # Two axes.
    Case(tp=2, cp=2, strategy="per_sequence"),
    Case(tp=2, dp=2, num_micro_batches=8),
    Case(cp=2, dp=2, num_micro_batches=8),
    Case(tp=2, pp=2, v=2),
    Case(cp=2, pp=2, v=2, schedule=IZB, num_micro_batches=8),
    Case(pp=2, dp=2, v=2, num_micro_batches=8, strategy="per_sequence"),
    # Three and four.
    Case(tp=2, cp=2, pp=2, v=2, schedule=IZB, strategy="per_sequence"),
    Case(tp=2, cp=2, pp=2, dp=2, v=2, num_micro_batches=8),
    # Windows, caps, Gemma.
    Case(tp=4, keys=GEMMA2),
    Case(cp=4, strategy="per_sequence", exchange=NEEDED, keys=MISTRAL),
    Case(cp=3, own_first=True, strategy="per_sequence", keys=GEMMA2),
    Case(dp=2, num_micro_batches=8, keys=GEMMA2),
    Case(pp=4, v=2, layers=8, num_micro_batches=6, keys=GEMMA2),
    Case(tp=2, cp=2, pp=2, v=2, keys=GEMMA2, recompute=Recompute.FULL),
    Case(cp=4, exchange=NEEDED, head_dim=8, parts=GEMMA, keys=GEMMA3),
    Case(dp=2, num_micro_batches=8, head_dim=8, parts=GEMMA, keys=GEMMA3),
    Case(pp=4, v=2, layers=8, num_micro_batches=6, head_dim=8, parts=GEMMA, keys=GEMMA3),
    Case(tp=2, cp=2, pp=2, v=2, head_dim=8, parts=GEMMA, keys=GEMMA3, recompute=Recompute.FULL),
]


MORE = [
    replace(case, parts=QWEN2 if case.parts == QWEN3 else QWEN3)
    for case in [*CASES, *NIGHTLY]
    if case.parts in (QWEN2, QWEN3) and case.recompute == Recompute.NONE
]
"""The other family in the same layouts."""


@pytest.mark.parametrize("case", [*QUICK, *full(*CASES), *nightly(*NIGHTLY, *MORE)], ids=str)
def test_layout_equals_one_process(case: Case) -> None:
    expect_equal_to_one_process(case)
