"""The memory of a device that plans may use, which is what remains for tensors.

On a GPU some memory is lost to the CUDA context, to NCCL's buffers and to the gaps that torch's
caching allocator leaves between tensors. A constant in this file says how much memory each of these
three takes. The values come from NCCL's sources, from a simulation of the allocator's rules and
from reports by others; wlb has not measured them.
"""

import math
from dataclasses import dataclass

from wlb.memory.expert_sizes import sharing_ranks
from wlb.spec import RunSpec

GIB = 2**30
ASSUMED_GIB = 80.0
"""Assumed memory of a GPU if cluster.memory_gib is not set; an H100 has this much."""
CHECKPOINT_BYTES = 12
"""Bytes of one parameter in a checkpoint: float32 master weight and two AdamW moments."""
CONTEXT_GIB = 1.0
"""Memory of the CUDA context, loaded kernels and cuBLAS workspaces.

This is a guess, not a measurement. If it is too large, plans are smaller than they could be; if it
is too small, a run may run out of memory.
"""
COMMUNICATOR_GIB = 0.5625
"""Memory of one NCCL communicator on a rank.

A communicator has two connections (a ring, and a tree or NVLink SHARP) with 24 channels of 12 MiB
each (4 MiB Simple, 4.7 MiB LL128 and 0.5 MiB LL, in pages of 2 MiB; NCCL's src/init.cc).
"""
ALLOCATOR_GAPS = 0.06
"""Fraction of the memory left for tensors that torch's caching allocator loses to gaps.

The value holds for expandable segments. With a smaller value plans may be larger, but their
allocations may fail.
"""
ROUNDING = 1.001
"""An estimate fits if it is at most this factor times the budget.

Estimates round numbers of rows up, and S_max is computed from them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory of a rank's device, and the parts of it that tensors cannot use."""

    gib: float  # memory of the device in GiB
    source: str  # configuration key or device that `gib` comes from
    context_bytes: int = 0  # memory of the CUDA context
    nccl_bytes: int = 0  # memory of NCCL's buffers
    gaps: float = 0.0  # fraction of the remaining memory that the allocator loses to gaps

    def __str__(self) -> str:
        return f"{size_text(int(self.gib * GIB))} ({self.source})"

    @property
    def gaps_bytes(self) -> int:
        """Memory that the allocator loses to gaps between tensors, in bytes."""
        left = int(self.gib * GIB) - self.context_bytes - self.nccl_bytes
        return math.ceil(max(0, left) * self.gaps)

    @property
    def terms(self) -> dict[str, int]:
        """The parts of the memory that plans may not use: bytes by name of the part."""
        return {
            "CUDA context": self.context_bytes,
            "NCCL buffers": self.nccl_bytes,
            "allocator's gaps": self.gaps_bytes,
        }

    @property
    def planned_bytes(self) -> int:
        """Memory that plans may use, in bytes: the upper limit of a rank's memory estimate."""
        return max(0, int(self.gib * GIB) - sum(self.terms.values()))

    @property
    def reservable_bytes(self) -> int:
        """Bytes that the caching allocator may reserve, for tensors and the gaps between them."""
        return self.planned_bytes + self.gaps_bytes

    @property
    def planned_gib(self) -> float:
        """`planned_bytes` in GiB; values of at least 1 are rounded down to 3 decimals."""
        gib = self.planned_bytes / GIB
        return math.floor(gib * 1000) / 1000 if gib >= 1 else gib

    @property
    def explanation(self) -> str:
        """The budget as part of a sentence: "71.6 GiB that plans may use of 80 GiB (...)"."""
        aside = ", ".join(f"{name} {size_text(size)}" for name, size in self.terms.items() if size)
        of = f"{size_text(int(self.gib * GIB))} ({self.source}{'; rest: ' if aside else ''}{aside})"
        return f"{size_text(self.planned_bytes)} that plans may use of {of}"


def cluster_gib(spec: RunSpec) -> float:
    """Return the memory of a GPU in GiB: cluster.memory_gib, or `ASSUMED_GIB` if it is not set."""
    return spec.cluster.memory_gib or ASSUMED_GIB


def gpu_budget(spec: RunSpec, *, gib: float | None = None, source: str = "") -> Budget:
    """Return the budget of a GPU.

    Args:
        spec: The run, which decides how many communicators a rank has.
        gib: Memory of the GPU in GiB; None means cluster.memory_gib, or `ASSUMED_GIB` without it.
        source: Configuration key or device that `gib` comes from, for messages; "" stands for
            cluster.memory_gib.
    """
    key = "cluster.memory_gib"
    default = key if spec.cluster.memory_gib else f"assumed, because {key} is not set"
    return Budget(
        gib=cluster_gib(spec) if gib is None else gib,
        source=source or default,
        context_bytes=int(CONTEXT_GIB * GIB),
        nccl_bytes=int(num_communicators(spec) * COMMUNICATOR_GIB * GIB),
        gaps=ALLOCATOR_GAPS,
    )


def cpu_budget(spec: RunSpec, *, gib: float, source: str) -> Budget:
    """Return the budget of a CPU rank, which has neither a CUDA context nor NCCL.

    Args:
        spec: The run.
        gib: Memory of the rank in GiB.
        source: Configuration key or device that `gib` comes from, for messages.
    """
    return Budget(gib=gib, source=source, gaps=ALLOCATOR_GAPS)


def planned_gib(spec: RunSpec) -> float:
    """Return how much memory of one of the cluster's GPUs plans may use, in GiB."""
    return gpu_budget(spec).planned_gib


def num_communicators(spec: RunSpec) -> int:
    """Count the NCCL communicators of a rank.

    There is one for the world, one for each axis (tp, cp, pp, dp), one for dp and cp together, and
    further ones with HSDP, with experts and with copied KV heads. Groups of one rank have none. The
    two communicators of a pipeline rank with its neighbours count as one.
    """
    # A communicator with a neighbour has only one connection for each channel, and
    # `COMMUNICATOR_GIB` assumes two (ring and tree). So two of them need as much memory as one
    # other communicator. The NCCL group of all pipeline ranks transfers nothing, so NCCL allocates
    # no memory for it.
    p = spec.parallel
    sizes = [p.world_size, p.tp, p.cp, p.pp, max(1, p.dp), p.fsdp_size]
    if spec.shard_size < p.fsdp_size:
        sizes += [spec.shard_size, p.fsdp_size // spec.shard_size]
    if spec.model.experts.num:
        sizes += [p.ep, sharing_ranks(spec)]
        sizes += [p.fsdp_size // spec.shard_size] if spec.shard_size < p.fsdp_size else []
    if (copies := spec.model.kv_copies(p.tp)) > 1:
        # One group consists of the ranks with copies of the same KV head, the other of ranks with
        # different KV heads.
        sizes += [copies, p.tp // copies]
    return sum(size > 1 for size in sizes)


def size_text(size_bytes: int) -> str:
    """Return a number of bytes as text with three digits, such as "79.2 GiB" or "3.5 MiB"."""
    return f"{size_bytes / GIB:.3g} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:.3g} MiB"
