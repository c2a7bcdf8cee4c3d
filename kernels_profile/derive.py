"""Derive profiles of H100s in long training runs from `h100_sxm`, which was measured on one card.

`python -m kernels_profile.derive` writes `h100_runs.json` and `h100_runs_500w.json` into this
folder. They differ from the measured profile in two ways:

- Matrix products run at PRODUCT_SPEED times the measured throughput. Published training runs show
  this factor (`experiments/beyond/published_runs` fits it).
- A board may have another power limit and other memory (`GpuVariant`). Its products run at the
clock
  that the power limit allows. Dynamic power is proportional to clock * voltage^2, and the voltage
  is about proportional to the clock, so the clock is proportional to the cube root of the dynamic
  power. Operators that are bound by memory run at the ratio of the memories' peak bandwidths.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from wlb.cost.profile import (
    AttentionTable,
    ElementwiseCost,
    GemmCost,
    HeadCost,
    KernelProfile,
    Provenance,
    ProvenanceKind,
)
from wlb.cost.profile_file import load_profile, save_profile
from wlb.cost.surface import Curve, Surface
from wlb.plan import UserError

Scalable = TypeVar("Scalable", Surface, Curve)
MEASURED = "h100_sxm"
PRODUCT_SPEED = 0.77
"""Throughput of matrix products in published training runs, divided by that of `h100_sxm`.

The profile was measured in short bursts on one GPU with today's libraries. A long run is as fast as
the slowest of many GPUs, their power limit lowers the clocks, and its libraries were older.
"""

FIXED_W = 200.0
"""Power in watts that does not depend on the clock: memory, links and leakage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuVariant:
    """A board with the same chip, but perhaps with another power limit and other memory."""

    name: str
    power_w: float  # power limit
    memory_bytes_per_s: float  # peak bandwidth of the memory

    def __post_init__(self) -> None:
        if not self.power_w > FIXED_W:
            raise UserError(
                f"{self.name}: power_w = {self.power_w:g} must be above {FIXED_W:g}, which memory "
                f"and leakage need at any clock"
            )
        if not self.memory_bytes_per_s > 0:
            raise UserError(
                f"{self.name}: memory_bytes_per_s = {self.memory_bytes_per_s:g} must be above 0"
            )


H100_SXM = GpuVariant(name="h100_sxm", power_w=700.0, memory_bytes_per_s=3.35e12)
H100_500W = GpuVariant(name="h100_500w", power_w=500.0, memory_bytes_per_s=2.4e12)


def clock_ratio(variant: GpuVariant, *, measured: GpuVariant) -> float:
    """Return the clock of a GPU at its power limit, divided by the clock of the measured GPU."""
    return _cube_root((variant.power_w - FIXED_W) / (measured.power_w - FIXED_W))


def _cube_root(x: float) -> float:
    """Return the cube root by Newton's method, which is bit-equal on all CPUs, unlike `x ** y`."""
    root = max(x, 1.0)
    for _ in range(64):
        root = (2 * root + x / (root * root)) / 3
    return root


def profile_of_variant(
    profile: KernelProfile, variant: GpuVariant, *, measured: GpuVariant = H100_SXM
) -> KernelProfile:
    """Derive the profile of a board from the profile of a measured board.

    Prices of collectives are not changed.

    Args:
        profile: The profile of the measured board.
        variant: The board to derive a profile for.
        measured: The measured board.
    """
    if variant == measured:
        return profile
    clock = clock_ratio(variant, measured=measured)
    memory = variant.memory_bytes_per_s / measured.memory_bytes_per_s
    provenance = Provenance(
        kind=ProvenanceKind.ASSUMED,
        source=f"profile {profile.name}: products x {clock:.3f}, the cube root of "
        f"({variant.power_w:g} - {FIXED_W:g}) / ({measured.power_w:g} - {FIXED_W:g}) W; operators "
        f"bound by memory x {memory:.3f}",
    )
    return replace(
        profile,
        name=variant.name,
        power_limit_w=variant.power_w,
        provenance=provenance,
        attention=tuple(with_speed(table, clock, provenance) for table in profile.attention),
        gemm=GemmCost(
            forward=scaled(profile.gemm.forward, clock),
            backward=scaled(profile.gemm.backward, clock),
            provenance=provenance,
        ),
        elementwise=tuple(with_bandwidth(cost, memory, provenance) for cost in profile.elementwise),
        head=HeadCost(
            tflops=profile.head.tflops * clock,
            backward_bytes_per_s=profile.head.backward_bytes_per_s * memory,
            provenance=provenance,
        ),
    )


def with_product_speed(profile: KernelProfile, factor: float) -> KernelProfile:
    """Multiply the throughput of matrix products, also of the output head, by `factor`."""
    return replace(
        profile,
        gemm=replace(
            profile.gemm,
            forward=scaled(profile.gemm.forward, factor),
            backward=scaled(profile.gemm.backward, factor),
        ),
        head=replace(profile.head, tflops=profile.head.tflops * factor),
    )


def profile_of_runs(variant: GpuVariant, *, name: str) -> KernelProfile:
    """Return the profile of a board in long training runs, under the given name."""
    measured = load_profile(MEASURED)
    what = f"products x {PRODUCT_SPEED:g}, fitted to published training runs"
    provenance = Provenance(
        kind=ProvenanceKind.PUBLISHED,
        source=f"profile {MEASURED}: {what} (python -m experiments.beyond.published_runs)",
    )
    derived = with_product_speed(profile_of_variant(measured, variant), PRODUCT_SPEED)
    source = f"{derived.gemm.provenance.source}; {what}"
    return replace(
        derived,
        name=name,
        provenance=provenance,
        gemm=replace(derived.gemm, provenance=replace(provenance, source=source)),
        head=replace(derived.head, provenance=replace(provenance, source=source)),
    )


def with_speed(table: AttentionTable, factor: float, provenance: Provenance) -> AttentionTable:
    """Multiply the throughput of an attention kernel by `factor`."""
    forward, backward = table.square_forward, table.square_backward
    return replace(
        table,
        forward=scaled(table.forward, factor),
        backward=scaled(table.backward, factor),
        square_forward=None if forward is None else scaled(forward, factor),
        square_backward=None if backward is None else scaled(backward, factor),
        blocks=None if table.blocks is None else table.blocks.times(1 / factor, 1 / factor),
        provenance=provenance,
    )


def with_bandwidth(cost: ElementwiseCost, factor: float, provenance: Provenance) -> ElementwiseCost:
    """Multiply the bandwidth of an element-wise operator by `factor`."""
    return replace(
        cost,
        forward_bytes_per_s=cost.forward_bytes_per_s * factor,
        backward_bytes_per_s=cost.backward_bytes_per_s * factor,
        provenance=provenance,
    )


def scaled(table: Scalable, factor: float) -> Scalable:
    """Multiply the values of a surface or curve by `factor`."""
    return replace(table, values=table.values * factor)


def main() -> None:
    folder = Path(__file__).parent
    for name, variant in (("h100_runs", H100_SXM), ("h100_runs_500w", H100_500W)):
        save_profile(folder / f"{name}.json", profile_of_runs(variant, name=name))


if __name__ == "__main__":
    main()
