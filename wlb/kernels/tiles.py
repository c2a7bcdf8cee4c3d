"""Tile sizes of variable-length, causal attention kernels, from their public sources.

The sizes for bfloat16 on Hopper were read in November 2026, in these files of
github.com/Dao-AILab/flash-attention:

- FlashAttention-2, which is also torch's kernel: csrc/flash_attn/src/flash_fwd_launch_template.h
  and flash_bwd_launch_template.h.
- FlashAttention-3: hopper/tile_size.h and hopper/flash_bwd_launch_template.h.
"""

from typing import NamedTuple


class Tiles(NamedTuple):
    """Sizes of an attention kernel's tiles, in query rows and keys; 1 for kernels without tiles."""

    forward_rows: int
    """Query rows that a thread block computes in forward."""
    backward_rows: int
    """Query rows that a thread block in backward reads at a time; it loops over all query rows."""
    backward_keys: int
    """Keys that a thread block computes in backward."""


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
    # These sizes are assumed. They were not read from the package's sources.
    "flash_attention_4": {256: Tiles(128, 128, 128)},
}
"""Tiles of each kernel, by the largest head size to which they apply."""


def tiles_of(backend: str, head_dim: int) -> Tiles:
    """Return the tile sizes of an attention kernel for heads of this size.

    Args:
        backend: Name of the kernel, without "_deterministic".
        head_dim: Size of a head.

    Raises:
        ValueError: The kernel's tiles are not known, or heads are larger than 256.
    """
    sizes = [size for size in _TILES.get(backend, {}) if head_dim <= size]
    if not sizes:
        raise ValueError(
            f"the tile sizes of attention kernel {backend} with heads of {head_dim} are not known; "
            f"known are those of {', '.join(_TILES)} with heads of at most 256"
        )
    return _TILES[backend][min(sizes)]
