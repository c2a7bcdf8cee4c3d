"""Compares a run's estimated memory with its devices' before any rank computes.

The estimate bounds what must be resident (`wlb.cost.memory`), with packing's S_max and T. It may
take `PLANNED_MEMORY` of a device, since context, libraries and fragmentation come on top. The
device's memory is `run.memory_gib` if set; on CPU it is unknown otherwise, and nothing is refused.
"""

import math
from dataclasses import dataclass, replace

from wlb.cost import MemoryEstimate, TokenCaps, memory_estimate, token_caps
from wlb.packing import caps_of
from wlb.parallel import world as worlds
from wlb.plan import UserError
from wlb.spec import PLANNED_MEMORY, OverMemory, RunSpec

GIB = 1 << 30
ROUNDING = 1.001
"""Tolerance: caps fit to the byte, while the estimate rounds rows up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Memory of a rank's device in GiB, and the key or device that says so."""

    gib: float
    source: str

    def __str__(self) -> str:
        return f"{_gib(int(self.gib * GIB))} ({self.source})"

    @property
    def planned_bytes(self) -> int:
        return int(self.gib * PLANNED_MEMORY * GIB)


def budget_of(spec: RunSpec, device: str) -> Budget | None:
    """Memory of ranks on `device` ("cpu" or "cuda"); None if it is unknown."""
    if spec.run.memory_gib:
        return Budget(gib=spec.run.memory_gib, source="run.memory_gib")
    size = worlds.device_memory_bytes() if device == "cuda" else None
    return None if size is None else Budget(gib=size / GIB, source="the smallest GPU here")


def estimate_of(spec: RunSpec) -> MemoryEstimate:
    """The estimate for the fullest rank, with packing's caps."""
    if not spec.packing.varies_lengths:
        return memory_estimate(spec)
    s_max, step_tokens = caps_of(spec)
    return memory_estimate(spec, micro_batch_tokens=s_max, step_tokens=step_tokens)


def within(spec: RunSpec, budget: Budget | None) -> tuple[RunSpec, list[str]]:
    """`spec` with packing.memory_gib lowered to what the device has, and a line if it was lowered.

    A device sold with 80 GB may show a GiB less, and systems and `wlb tune layout` compute
    packing.memory_gib from cluster.memory_gib.
    """
    if budget is None or spec.run.over_memory != OverMemory.REFUSE:
        return spec, []
    planned, given = math.floor(budget.gib * PLANNED_MEMORY * 1000) / 1000, spec.packing.memory_gib
    if given <= budget.gib * PLANNED_MEMORY or not planned:
        return spec, []
    lowered = replace(spec, packing=replace(spec.packing, memory_gib=planned))
    why = f"{PLANNED_MEMORY:.0%} of {budget}"
    return lowered, [f"packing.memory_gib = {given:g} is lowered to {planned:g}, {why}"]


def hold_against(spec: RunSpec, budget: Budget | None) -> list[str]:
    """Lines for the log; none without a budget. UserError if the estimate exceeds the planned share
    of it, unless run.over_memory = warn."""
    if budget is None:
        return []
    estimate = estimate_of(spec)
    need = _gib(estimate.total_bytes)
    line = f"memory: pipeline rank {estimate.pp_rank} needs most, about {need} of {budget}"
    if estimate.total_bytes <= budget.planned_bytes * ROUNDING:
        return [line]
    message = too_much(estimate, budget)
    if spec.run.over_memory == OverMemory.REFUSE:
        raise UserError(message)
    return [line, f"warning: {message}"]


def too_much(estimate: MemoryEstimate, budget: Budget) -> str:
    """Which rank needs how much for what, and what would help."""
    terms = sorted(estimate.terms.items(), key=lambda term: -term[1])
    listed = ", ".join(f"{n.removesuffix('_bytes')} {_gib(size)}" for n, size in terms if size)
    return (
        f"pipeline rank {estimate.pp_rank} needs about {estimate.total_bytes:,} bytes "
        f"({_gib(estimate.total_bytes)}), more than {PLANNED_MEMORY:.0%} of {budget}: "
        f"{listed}. Use training.recompute, a lower packing.s_max (0 = what "
        f"fits) or data.context_window, fsdp.reshard_after_forward, or more ranks (parallel.tp, "
        f"cp, pp, dp); run.over_memory = warn starts anyway"
    )


def caps_line(spec: RunSpec, budget: Budget) -> str:
    """A line that says which micro-batches and steps fit the planned memory."""
    window = spec.data.context_window
    try:
        caps = token_caps(spec, memory_bytes=budget.planned_bytes)
    except UserError as error:
        return f"nothing fits: {error}"
    return f"fits {PLANNED_MEMORY:.0%} of {budget}: {_caps(caps, window, spec.tokens_per_step)}"


def _caps(caps: TokenCaps, window: int, tokens_per_step: int) -> str:
    s_max = f"micro-batches of {caps.s_max:,} tokens (S_max {caps.s_max / window:.2f} windows)"
    if caps.step_tokens is None:
        return f"{s_max}, any number of them in a step"
    share = caps.step_tokens / tokens_per_step
    return f"{s_max}, steps of {caps.step_tokens:,} tokens (T {share:.2f} global batches)"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.3g} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:.3g} MiB"
