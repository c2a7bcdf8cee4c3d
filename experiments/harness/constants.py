"""Defines the documents, configurations and prices that the paper's figures are reproduced with.

All figures have the same ones. Prices are those of profile `h100_runs`, which is measured on an
H100 and agrees with training runs that others published; no number of the paper is in them. The
paper does not name its attention kernel: results are at FlashAttention-2's prices, and those that
depend on it most stand at FlashAttention-3's too. Two things that the paper does not give were
chosen by its numbers: lengths are a family of `wlb.data.lengths`, fitted to the imbalances of
Table 2 and the averages of Figure 12, and S_max and the queues' thresholds of Algorithm 1 were
chosen with it.
"""

from wlb.cost import KernelProfile, load_profile
from wlb.data import LengthFamily
from wlb.simulate.published import ERRORS
from wlb.spec import RunSpec, load

FAMILY = LengthFamily(
    body_median=750 / 131072,
    body_sigma=1.478,
    tail_start=0.273,
    tail_exponent=1.0,
    tail_token_share=0.08,
    window_token_share=0.19,
)

S_MAX = 1.1
QUEUES = {1: (0.2,), 2: (0.2, 0.63), 3: (0.2, 0.4, 0.63)}
"""Thresholds of Algorithm 1, by its number of queues. Like S_MAX they are in windows."""


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


PROFILE = "h100_runs"
FLASH_2, FLASH_3 = "torch_varlen", "flash_attention_3"
KERNELS = {FLASH_2: "FlashAttention-2", FLASH_3: "FlashAttention-3"}
"""Attention kernels whose prices results stand at, and their names in tables."""


def settings(kernel: str = FLASH_2) -> tuple[str, ...]:
    """Returns the settings that every run of the evaluation has, as those of `--set`."""
    return (f"kernels.attention={kernel}", "planner.baseline=false")


def profile() -> KernelProfile:
    """Returns the profile that prices the evaluation."""
    return load_profile(PROFILE)


def worth_of_prices() -> str:
    """Says how well the prices predicted runs of others, for the note of simulated speed-ups."""
    error = ERRORS[PROFILE, True]
    return (
        f"Profile `{PROFILE}`, which no number of the paper is in, predicted tokens/s of "
        f"{error.runs} published runs with TP, CP or PP within {error.largest:.0%}."
    )
