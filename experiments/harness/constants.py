"""Defines the documents, configurations and prices that the paper's figures are reproduced with.

All figures of the evaluation use the same.

- Prices come from the kernel profile `h100_runs`. It was measured on an H100 and agrees with
  training runs that others published. No number of the paper went into it.
- The paper does not name its attention kernel. Results use the prices of FlashAttention-2; results
  that depend much on the kernel are also given for FlashAttention-3.
- The paper does not publish its document lengths. `FAMILY` is a distribution that was fitted to the
  imbalances of Table 2 and the averages of Figure 12.
- The paper does not give S_max and the queue thresholds of Algorithm 1 either. They were chosen
  together with the distribution.
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
"""Most tokens of a micro-batch, as a multiple of the context window."""
QUEUES = {1: (0.2,), 2: (0.2, 0.63), 3: (0.2, 0.4, 0.63)}
"""Outlier thresholds of Algorithm 1 by its number of queues, as multiples of the window."""

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
"""LLaMA2's vocabulary. A preset takes its vocabulary from the token store, and here is none."""


def configuration(name: str, *overrides: str) -> RunSpec:
    """Loads a preset of Table 1 with LLaMA2's vocabulary and overrides as for `--set`."""
    return load(name, [f"model.vocab_size={VOCABULARY}", *overrides])


def title(name: str) -> str:
    """Returns a configuration's name as the paper writes it, such as 7B-128K."""
    return name.upper().replace("_", "-")


PROFILE = "h100_runs"
# torch's variable-length attention runs FlashAttention-2.
FLASH_2, FLASH_3 = "torch_varlen", "flash_attention_3"
KERNELS = {FLASH_2: "FlashAttention-2", FLASH_3: "FlashAttention-3"}
"""Attention kernels that results are priced with, and their names in tables."""


def settings(kernel: str = FLASH_2) -> tuple[str, ...]:
    """Returns the settings of every run of the evaluation, as for `--set`."""
    return (f"kernels.attention={kernel}", "planner.baseline=false")


def profile() -> KernelProfile:
    """Returns the profile that prices the evaluation."""
    return load_profile(PROFILE)


def worth_of_prices() -> str:
    """Returns a sentence on how well the profile predicts published runs, for notes on pages."""
    error = ERRORS[PROFILE, True]
    return (
        f"Profile `{PROFILE}`, which no number of the paper is in, predicted tokens/s of "
        f"{error.runs} published runs with TP, CP or PP within {error.largest:.0%}."
    )
