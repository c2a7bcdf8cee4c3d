"""Tests FLOP counts against literal numbers and brute force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import LLAMA2_7B
from wlb.cost import (
    attention_backward_flops,
    attention_forward_flops,
    causal_pairs,
    document_flops,
    head_flops,
    layer_linear_flops,
    linear_flops_per_token,
    tile_pairs,
)
from wlb.spec import ModelSpec

TINY = ModelSpec(
    vocab_size=10, hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_size=12
)


def brute_tile_pairs(q: int, kv: int, tile: int, sliding: int = 0) -> int:
    """Counts pairs by brute force: rows of a tile all run over the keys from the first that its
    first row sees to the last that its last one does.
    """
    total = 0
    for first in range(0, q, tile):
        last_row = min(first + tile, q) - 1
        begin = max(0, kv - q + first + 1 - sliding) if sliding else 0
        total += tile * (kv - q + last_row + 1 - begin)
    return total


def test_causal_pairs_literal():
    # q = 2 rows that end at key 3: keys 0-1 and 0-2.
    q, kv = np.array([0, 1, 2, 3, 4]), np.array([0, 7, 3, 3, 4])
    assert causal_pairs(q, kv).tolist() == [0, 7, 5, 6, 10]


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 70))
def test_causal_pairs_count_the_mask(q, more, sliding):
    kv = q + more
    mask = np.tril(np.ones((q, kv)), k=kv - q)
    if sliding:
        mask = np.triu(mask, k=kv - q - sliding + 1)
    got = causal_pairs(np.array([q]), np.array([kv]), sliding=sliding)
    assert got.tolist() == [int(mask.sum())]


def test_segments_with_more_rows_than_keys_are_refused():
    with pytest.raises(ValueError, match=r"segment 1 has q = 5 query rows and kv = 4 keys"):
        causal_pairs(np.array([1, 5]), np.array([4, 4]))


@given(
    st.integers(0, 300),
    st.integers(0, 300),
    st.sampled_from([1, 4, 16, 128]),
    st.one_of(st.just(0), st.integers(1, 400)),
)
def test_tile_pairs_count_whole_tiles(q, more, tile, sliding):
    kv = q + more
    some = (np.array([float(q)]), np.array([float(kv)]))
    got = tile_pairs(*some, tile_rows=tile, sliding=sliding)
    assert got.tolist() == [brute_tile_pairs(q, kv, tile, sliding)]
    if tile == 1:
        pairs = causal_pairs(np.array([q]), np.array([kv]), sliding=sliding)
        assert got.tolist() == pairs.tolist()


def test_attention_flops_literal():
    q, kv = np.array([2]), np.array([3])  # 5 pairs
    assert attention_forward_flops(q, kv, num_heads=4, head_dim=16).tolist() == [5 * 4 * 16 * 4]
    assert attention_backward_flops(q, kv, num_heads=4, head_dim=16).tolist() == [5 * 10 * 16 * 4]


def test_linear_flops_literal():
    # Q 8x8, K and V 8x4, O 8x8, gate, up and down 8x12: 480 values, a multiply-add each.
    assert layer_linear_flops(TINY) == 2 * 480
    assert head_flops(TINY) == 160
    assert linear_flops_per_token(TINY) == 3 * (2 * 960 + 160)


def test_document_flops_literal():
    # 3 tokens: 6 pairs x 2 layers x 8 wide x 12 (4 forward, 8 backward), and the linear part.
    expected = 6 * 2 * 8 * 12 + 3 * 6240
    assert document_flops(TINY, np.array([3, 0])).tolist() == [expected, 0]


def test_seven_billion_parameters_are_six_flops_each():
    matrices = LLAMA2_7B.num_layers * 202_375_168 + 32000 * 4096
    assert linear_flops_per_token(LLAMA2_7B) == 6 * matrices


def test_a_million_tokens_do_not_overflow():
    model = ModelSpec(hidden_size=16384, num_layers=126, num_heads=128, ffn_hidden_size=53248)
    assert document_flops(model, np.array([1 << 20]))[0] > 1e19


def test_sliding_layers_have_the_flops_of_their_windows():
    """One of two layers slides over 3 keys: 12 pairs of 5 tokens instead of 15."""
    slides = replace(TINY, sliding_window=3, full_every=2)
    both = [document_flops(model, np.array([5]))[0] for model in (TINY, slides)]
    # 4 FLOPs a pair and channel of Q, three times for backward.
    assert both[0] - both[1] == 3 * 4 * 8 * (15 - 12)
