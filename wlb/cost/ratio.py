"""Work by a ratio of FLOPs, which needs no measured device, and the forms in which users say costs.

By name, two frameworks' own formulas: "verl" is 24,576 tokens + tokens^2 (its `calculate_workload`,
a 7B model's ratio); "slime" prices whole samples only (`wlb.balance.sample_costs`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from wlb.cost.flops import BACKWARD_FLOPS_PER_PAIR, FORWARD_FLOPS_PER_PAIR, FloatArray, tile_pairs
from wlb.cost.profile import KernelProfile
from wlb.cost.profile_file import profile_names
from wlb.cost.workload import WorkloadModel, segment_sizes, token_counts, whole_ns, workload_of
from wlb.plan import IntArray, IntLike, UserError, check_at_least
from wlb.spec import load

Prices = Callable[[IntArray], Sequence[float] | FloatArray | IntArray]
Cost = (
    WorkloadModel | KernelProfile | Prices | Sequence[float] | FloatArray | IntArray | str | float
)
"""See `wlb.balance.balance_step`; planners take those that are a workload (`workload_model`)."""
COST_NAMES = ("llama2_7b", "verl", "slime")
TILE_ROWS = 128
"""Query rows of a tile of FlashAttention's kernels on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsWorkload:
    """W(d) = quadratic_ns * d * d + linear_ns_per_token * d, for a stated ratio.

    A segment of q rows over kv keys costs quadratic_ns * q * (2 * kv - q), so segments of a piece
    add up to W_a(d) however it is cut; two sevenths are forward (two products of a flash kernel
    against five). `forward_latency_ns` is the whole W. Launches and CP's collectives are free.
    tile_rows: query rows that a kernel computes at least (128 on GPUs), by which strategies of
    sharding see that many short segments are slow; above 1 segments add up to more than W_a.
    """

    quadratic_ns: float = 1.0
    linear_ns_per_token: float = 0.0
    tile_rows: int = 1

    def __post_init__(self) -> None:
        if not (self.quadratic_ns >= 0 and self.linear_ns_per_token >= 0):
            raise UserError(
                f"quadratic_ns = {self.quadratic_ns} and linear_ns_per_token = "
                f"{self.linear_ns_per_token} must be at least 0"
            )
        check_at_least("tile_rows", self.tile_rows, 1)

    def workload_ns(self, lengths: IntLike) -> IntArray:
        return self.attention_ns(lengths) + self.linear_ns(lengths)

    def attention_ns(self, lengths: IntLike) -> IntArray:
        d = token_counts("lengths", lengths)
        return whole_ns(self.quadratic_ns * d * d)

    def linear_ns(self, lengths: IntLike) -> IntArray:
        return whole_ns(self.linear_ns_per_token * token_counts("lengths", lengths))

    def forward_latency_ns(self, lengths: IntLike) -> IntArray:
        return self.workload_ns(lengths)

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        rows, keys = segment_sizes(q, kv)
        both = self.quadratic_ns * rows * (2 * keys - rows)
        if self.tile_rows > 1:
            both = 2 * self.quadratic_ns * tile_pairs(rows, keys, tile_rows=self.tile_rows)
        share = FORWARD_FLOPS_PER_PAIR / (FORWARD_FLOPS_PER_PAIR + BACKWARD_FLOPS_PER_PAIR)
        forward = whole_ns(both * share)
        return forward, whole_ns(both) - forward

    def attention_call_ns(
        self, q: IntLike, kv: IntLike, offsets: IntArray
    ) -> tuple[IntArray, IntArray]:
        free = np.zeros(offsets.size - 1, np.int64)
        return free, free

    def kv_exchange_ns(self, num_tokens: int, *, cp: int) -> tuple[int, int]:
        return 0, 0

    def needed_exchange_ns(self, moved: IntArray | FloatArray) -> tuple[int, int]:
        """Free, as all collectives (`ExchangePrices`)."""
        return 0, 0


LLAMA2_7B = FlopsWorkload(quadratic_ns=8192.0, linear_ns_per_token=4.0e8, tile_rows=TILE_ROWS)
"""FLOPs of a layer, forward, a nanosecond each: 2 * hidden * d^2 for causal attention and 2 * 202e6
(its parameters) * d for linear layers; only the ratio matters. Segments fill tiles, so that
strategies of sharding do not cut short documents finely."""


def model_of(cost: Cost) -> WorkloadModel | None:
    """The workload model of `cost`, or None for what only prices samples.

    UserError for an unknown name and a ratio that is not positive.
    """
    if isinstance(cost, KernelProfile):
        return workload_of(load("7b_128k"), cost)
    if isinstance(cost, str):
        if cost not in COST_NAMES:
            is_profile = cost in profile_names()
            remedy = f"; a kernel profile is load_profile({cost!r})" if is_profile else ""
            raise UserError(f"unknown cost {cost!r}; known: {', '.join(COST_NAMES)}{remedy}")
        if cost == "slime":
            return None
        verl = FlopsWorkload(linear_ns_per_token=24576.0, tile_rows=TILE_ROWS)
        return LLAMA2_7B if cost == "llama2_7b" else verl
    if isinstance(cost, int | float | np.number):
        ratio = float(cast(float, cost))
        if not 0 < ratio < float("inf"):
            raise UserError(f"cost = {cost} as a FLOPs ratio must be a positive number of tokens")
        return FlopsWorkload(quadratic_ns=1e3, linear_ns_per_token=1e3 * ratio, tile_rows=TILE_ROWS)
    return cast(WorkloadModel, cost) if hasattr(cost, "workload_ns") else None


def workload_model(cost: Cost) -> WorkloadModel:
    """`cost` as a workload model; UserError for what prices no segments, such as a list."""
    model = model_of(cost)
    if model is None:
        said = repr(cost) if isinstance(cost, str) else f"a {type(cost).__name__}"
        raise UserError(
            f"cost is {said}, which prices whole samples only, and a planner prices pieces and "
            f"segments; give a WorkloadModel, load_profile(NAME), 'llama2_7b', 'verl', or the "
            f"tokens at which attention costs what linear layers do"
        )
    return model
