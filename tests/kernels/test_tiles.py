"""Tests which tiles are known of kernels, and that others are refused."""

import pytest

from wlb.kernels.tiles import tiles_of


@pytest.mark.parametrize(
    ("backend", "head_dim", "tiles"),
    [
        ("torch_varlen", 64, (128, 128, 128)),
        ("flash_attention_2", 96, (128, 64, 128)),
        ("torch_varlen", 128, (128, 64, 128)),
        ("torch_varlen", 256, (64, 64, 64)),
        ("flash_attention_3", 80, (192, 64, 128)),
        ("flash_attention_3", 128, (128, 64, 128)),
        ("flash_attention_3", 160, (128, 64, 96)),
    ],
)
def test_tiles_are_those_of_the_next_compiled_head_size(backend, head_dim, tiles):
    assert tiles_of(backend, head_dim) == tiles


@pytest.mark.parametrize(("backend", "head_dim"), [("torch_varlen", 257), ("mine", 64)])
def test_unknown_tiles_are_refused(backend, head_dim):
    with pytest.raises(ValueError, match=f"{backend} with heads of {head_dim} are not known"):
        tiles_of(backend, head_dim)
