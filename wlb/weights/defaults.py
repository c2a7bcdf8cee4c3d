"""What transformers takes for keys that a config.json does not have, by model_type.

Sizes of the model itself have no defaults here: a config.json must say them.
"""

from dataclasses import dataclass

from wlb.plan.read_file import Fields
from wlb.weights.hybrids import ARCHITECTURES as HYBRIDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """head_dim: 0 = hidden_size / num_attention_heads. rope_theta: in layers that see all keys.
    bos_id, eos_id: None where a family has none.
    """

    positions: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    head_dim: int = 0
    is_tied: bool = False
    bos_id: int | None = None
    eos_id: int | None = None


DEFAULTS = {
    "gemma2": Defaults(positions=8192, head_dim=256, is_tied=True, bos_id=2, eos_id=1),
    "gemma3_text": Defaults(
        positions=131_072, head_dim=256, is_tied=True, bos_id=2, eos_id=1, rope_theta=1e6
    ),
    "llama": Defaults(positions=2048, bos_id=1, eos_id=2),
    "mistral": Defaults(positions=131_072, bos_id=1, eos_id=2),
    "mixtral": Defaults(positions=131_072, norm_eps=1e-5, rope_theta=1e6, bos_id=1, eos_id=2),
    "olmoe": Defaults(positions=4096, norm_eps=1e-5, eos_id=50_279),
    "qwen2": Defaults(positions=32_768),
    "qwen3": Defaults(positions=32_768, head_dim=128),
    "qwen3_moe": Defaults(positions=32_768),
    **dict.fromkeys(HYBRIDS, Defaults(positions=32_768, head_dim=256)),
}


def default_ids(keys: Fields, name: str, default: int | None, vocab_size: int) -> tuple[int, ...]:
    """The token of an absent key, unless the vocabulary does not have it; null means none."""
    if name in keys.values or default is None or default >= vocab_size:
        return ()
    return (default,)
