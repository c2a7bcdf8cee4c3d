"""transformers' defaults for keys that a config.json leaves out, by model_type.

The sizes of the model have no defaults here: a config.json must give them.
"""

from dataclasses import dataclass

from wlb.plan.read_file import Fields
from wlb.weights.hybrids import ARCHITECTURES as HYBRIDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Defaults of one model_type."""

    positions: int  # max_position_embeddings
    norm_eps: float = 1e-6  # rms_norm_eps
    rope_theta: float = 10_000.0  # base of RoPE in layers that see all keys
    head_dim: int = 0  # 0 means hidden_size / num_attention_heads
    is_tied: bool = False  # tie_word_embeddings
    bos_id: int | None = None  # None where the family has none
    eos_id: int | None = None  # None where the family has none


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
    """Return the default token of an absent key.

    It is () if the key is present (null means no token) or the vocabulary lacks the token.
    """
    if name in keys.values or default is None or default >= vocab_size:
        return ()
    return (default,)
