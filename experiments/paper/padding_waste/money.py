"""Computes what positions cost: FLOPs, tokens per second and dollars.

The article's model is LLaMA2-7B, and its GPU an H100 at 2 USD an hour. It does not say how fast the
GPU trains. Here a dense BF16 peak of 989 TFLOP/s (`cluster.peak_tflops`) and 40% model FLOPs
utilisation (MFU) are assumed, for every strategy and any number of GPUs. The model FLOPs of a
position are three times its forward FLOPs: matrix products, the output head, and attention over the
pairs that are computed (`Filled`).
"""

from dataclasses import dataclass

from experiments.harness.constants import configuration
from experiments.paper.padding_waste.strategies import Filled
from wlb.cost import cluster_peak_tflops, linear_flops_per_token
from wlb.cost.protocol import FORWARD_FLOPS_PER_PAIR
from wlb.spec import RunSpec

MFU = 0.40
USD_PER_GPU_HOUR = 2.0
THROUGHPUT_GPUS = 8
COST_GPUS = 1024
WASTE_GPUS = 2048
TRILLION = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Training of LLaMA2-7B on H100s, priced per useful token. Padding costs, but is not useful."""

    spec: RunSpec

    @property
    def flops_per_s(self) -> float:
        """Returns the model FLOP/s of one GPU."""
        return cluster_peak_tflops(self.spec) * 1e12 * MFU

    def flops_per_token(self, filled: Filled) -> float:
        """Returns the model FLOPs of both passes, including padding, per useful token."""
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
        """Returns the MFU at which a trillion useful tokens would cost `usd`."""
        return MFU * self.usd(filled) / usd


def job() -> Job:
    return Job(spec=configuration("7b_128k"))


def usd_a_day(num_gpus: int = WASTE_GPUS) -> float:
    """Returns the price of the GPUs for a day."""
    return num_gpus * 24 * USD_PER_GPU_HOUR


def mask_bytes(tokens: int, *, bytes_per_entry: int = 1) -> int:
    """Returns the bytes of a dense attention mask of tokens x tokens."""
    return tokens * tokens * bytes_per_entry


def cu_seqlens_bytes(num_documents: int) -> int:
    """Returns the bytes of cu_seqlens: an int32 per document and one more."""
    return 4 * (num_documents + 1)
