"""transformers' defaults for keys that are missing in a config.json, by model_type.

Keys for the sizes of the model have no default here, so a config.json must contain them.
"""

from dataclasses import dataclass

from wlb.plan.read_file import Fields
from wlb.weights.hybrids import ARCHITECTURES as HYBRIDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """transformers' defaults for config.json keys of one model_type."""

    positions: int  # max_position_embeddings
    norm_eps: float = 1e-6  # rms_norm_eps
    rope_theta: float = 10_000.0  # RoPE's base in layers without a sliding window
    head_dim: int = 0  # 0 means hidden_size / num_attention_heads
    is_tied: bool = False  # tie_word_embeddings
    bos_id: int | None = None  # bos_token_id; None if there is no default
    eos_id: int | None = None  # eos_token_id; None if there is no default


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
    """Return the default token id of a key that is missing in config.json, as a tuple.

    The result is () if there is no default.

    Args:
        keys: Keys of config.json.
        name: bos_token_id or eos_token_id. If the key is present, even as null, the result is ().
        default: transformers' default; None gives ().
        vocab_size: Size of the vocabulary. A default outside of it gives ().
    """
    if name in keys.values or default is None or default >= vocab_size:
        return ()
    return (default,)
