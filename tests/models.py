"""Defines models that tests of several folders use."""

from dataclasses import replace

from wlb.spec import ExpertsSpec, ModelSpec

LLAMA2_7B = ModelSpec(
    vocab_size=32000,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    ffn_hidden_size=11008,
)

EXPERTS = ModelSpec(
    vocab_size=256,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    experts=ExpertsSpec(num=8, per_token=2, hidden_size=24, shared=1),
)
MIXED_EXPERTS = replace(
    EXPERTS, num_layers=4, ffn_hidden_size=40, experts=replace(EXPERTS.experts, dense_layers=(0,))
)
"""Four layers, the first of which has an MLP instead of experts."""
