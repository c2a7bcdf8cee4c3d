"""Loads the configurations of the paper's Table 1, in its order, as specs that can be priced."""

from wlb.spec import RunSpec, load

TABLE_1 = (
    "550m_64k",
    "550m_128k",
    "7b_64k",
    "7b_128k",
    "30b_64k",
    "30b_128k",
    "70b_64k",
    "70b_128k",
)
VOCABULARY = 32000
"""LLaMA2 has this vocabulary. Presets take theirs from a token store, which bare lengths lack."""


def configuration(name: str, *overrides: str) -> RunSpec:
    """Loads a preset of Table 1 with LLaMA2's vocabulary; overrides are those of `--set`."""
    return load(name, [f"model.vocab_size={VOCABULARY}", *overrides])


def title(name: str) -> str:
    """Returns a configuration's name as the paper writes it, such as 7B-128K."""
    return name.upper().replace("_", "-")
