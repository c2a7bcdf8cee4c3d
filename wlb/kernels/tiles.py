"""Tiles that variable-length, causal attention kernels compute, as their public sources have them.

Sources, read in November 2026 in github.com/Dao-AILab/flash-attention, bfloat16 on Hopper:

- FlashAttention-2, which is also torch's kernel: csrc/flash_attn/src/flash_fwd_launch_template.h
  and flash_bwd_launch_template.h.
- FlashAttention-3: hopper/tile_size.h and hopper/flash_bwd_launch_template.h.
"""

from typing import NamedTuple


class Tiles(NamedTuple):
    """Sides of a kernel's tiles; 1 for kernels without tiles."""

    forward_rows: int
    """Query rows of a block of forward."""
    backward_rows: int
    """Query rows of a tile of backward, whose blocks go over rows tile by tile."""
    backward_keys: int
    """Keys of a block of backward."""


_FLASH_2 = {
    64: Tiles(128, 128, 128),
    128: Tiles(128, 64, 128),
    192: Tiles(128, 64, 64),
    256: Tiles(64, 64, 64),
}
_FLASH_3 = {
    64: Tiles(192, 128, 128),
    96: Tiles(192, 64, 128),
    128: Tiles(128, 64, 128),
    192: Tiles(128, 64, 96),
    256: Tiles(128, 64, 80),
}
_TILES = {
    "torch_varlen": _FLASH_2,
    "flash_attention_2": _FLASH_2,
    "flash_attention_3": _FLASH_3,
    # Its tiles were not looked up; 128 is what its prices have assumed so far.
    "flash_attention_4": {256: Tiles(128, 128, 128)},
}
"""By kernel, and by the largest head size that has these tiles."""


def tiles_of(backend: str, head_dim: int) -> Tiles:
    """The tiles of a kernel at a head size.

    Raises:
        ValueError: For a kernel without known tiles, and for heads above 256.
    """
    sizes = [size for size in _TILES.get(backend, {}) if head_dim <= size]
    if not sizes:
        raise ValueError(f"the tiles of {backend} at head size {head_dim} are not known")
    return _TILES[backend][min(sizes)]
