"""Dimensions of published models that tests of several folders price."""

from wlb.spec import ModelSpec

LLAMA2_7B = ModelSpec(
    vocab_size=32000,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    ffn_hidden_size=11008,
)
