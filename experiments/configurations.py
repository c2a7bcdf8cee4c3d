"""The configurations of the paper's Table 1, in its order, as specs that can be priced."""

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
"""LLaMA2's; presets leave it to the token store, which experiments on lengths have not."""


def configuration(name: str, *overrides: str) -> RunSpec:
    """A preset of Table 1 with LLaMA2's vocabulary; overrides as for `--set`."""
    return load(name, [f"model.vocab_size={VOCABULARY}", *overrides])


def title(name: str) -> str:
    """As the paper writes it: "7B-128K"."""
    return name.upper().replace("_", "-")
