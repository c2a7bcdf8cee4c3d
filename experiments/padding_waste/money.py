"""What positions cost: FLOPs, tokens a second, dollars. The article's assumptions, and ours.

Its model is LLaMA2-7B, its GPU an H100 at 2 USD an hour; it says nothing of throughput. Assumed
here: a device's dense BF16 peak of 989 TFLOP/s (`cluster.peak_tflops`) at 40% model FLOPs
utilisation, whatever the strategy, on any number of GPUs. Model FLOPs of a position: three times
the forward pass of matrices and head, and of attention for the pairs that it computes (`Filled`).
"""

from dataclasses import dataclass

from experiments.configurations import configuration
from experiments.padding_waste.strategies import Filled
from wlb.cost import linear_flops_per_token
from wlb.cost.flops import FORWARD_FLOPS_PER_PAIR
from wlb.spec import RunSpec

MFU = 0.40
USD_PER_GPU_HOUR = 2.0
THROUGHPUT_GPUS = 8
COST_GPUS = 1024
WASTE_GPUS = 2048
TRILLION = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """LLaMA2-7B on H100s. Tokens are useful ones: padding costs, and does not count."""

    spec: RunSpec

    @property
    def flops_per_s(self) -> float:
        """Of a GPU."""
        return self.spec.cluster.peak_tflops * 1e12 * MFU

    def flops_per_token(self, filled: Filled) -> float:
        """Model FLOPs, forward and backward, of all positions and pairs, for one useful token."""
        model = self.spec.model
        linear = linear_flops_per_token(model) * filled.positions
        attention = 3 * FORWARD_FLOPS_PER_PAIR * model.q_dim * model.num_layers * filled.pairs
        return (linear + attention) / filled.tokens

    def tokens_per_s(self, filled: Filled, *, num_gpus: int = THROUGHPUT_GPUS) -> float:
        return num_gpus * self.flops_per_s / self.flops_per_token(filled)

    def gpu_hours(self, filled: Filled, *, tokens: float = TRILLION) -> float:
        return tokens * self.flops_per_token(filled) / self.flops_per_s / 3600

    def usd(self, filled: Filled, *, tokens: float = TRILLION) -> float:
        return self.gpu_hours(filled, tokens=tokens) * USD_PER_GPU_HOUR

    def days(self, filled: Filled, *, num_gpus: int = COST_GPUS) -> float:
        return self.gpu_hours(filled) / num_gpus / 24

    def mfu_of(self, filled: Filled, usd: float) -> float:
        """The MFU at which a trillion useful tokens would cost `usd`."""
        return MFU * self.usd(filled) / usd


def job() -> Job:
    return Job(spec=configuration("7b_128k"))


def usd_a_day(num_gpus: int = WASTE_GPUS) -> float:
    """What the GPUs cost, whatever they compute."""
    return num_gpus * 24 * USD_PER_GPU_HOUR


def mask_bytes(tokens: int, *, bytes_per_entry: int = 1) -> int:
    """A dense mask of tokens x tokens."""
    return tokens * tokens * bytes_per_entry


def cu_seqlens_bytes(num_documents: int) -> int:
    """int32 boundaries of documents: one more than there are."""
    return 4 * (num_documents + 1)
