"""The memory of a device that plans may use: all of it less the parts that tensors cannot have.

On a GPU these are the CUDA context, NCCL's buffers and the gaps that torch's caching allocator
leaves between tensors, each with a constant below. They come from NCCL's sources, from a
replay of the allocator's rules and from reports of others; none was measured on a GPU by us.
"""

import math
from dataclasses import dataclass

from wlb.memory.expert_sizes import sharing_ranks
from wlb.spec import RunSpec

GIB = 2**30
ASSUMED_GIB = 80.0
"""Memory of a GPU that estimates assume where cluster.memory_gib does not say: an H100's."""
CHECKPOINT_BYTES = 12
"""Of a parameter: float32 master weight and both AdamW moments."""
CONTEXT_GIB = 1.0
"""What the CUDA context, loaded kernels and cuBLAS hold. A guess, not measured: more of it leaves
less to plans, and less of it may run out of memory."""
COMMUNICATOR_GIB = 0.5625
"""What NCCL holds for each communicator of a rank: two connections (ring; tree or NVLink SHARP) of
24 channels of 12 MiB (4 MiB Simple, 4.7 MiB LL128 and 0.5 MiB LL), in pages of 2 MiB."""
ALLOCATOR_GAPS = 0.06
"""Share of the memory left for tensors that stays unused between them, in torch's caching allocator
with expandable segments. Less of it lets plans be larger, and allocations fail."""
ROUNDING = 1.001
"""Tolerance of comparisons: caps fit to the byte, while estimates round rows up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """gib: memory of a rank's device. source: key or device that `gib` comes from. gaps: share of
    the memory that the other terms leave.
    """

    gib: float
    source: str
    context_bytes: int = 0
    nccl_bytes: int = 0
    gaps: float = 0.0

    def __str__(self) -> str:
        return f"{size_text(int(self.gib * GIB))} ({self.source})"

    @property
    def gaps_bytes(self) -> int:
        left = int(self.gib * GIB) - self.context_bytes - self.nccl_bytes
        return math.ceil(max(0, left) * self.gaps)

    @property
    def terms(self) -> dict[str, int]:
        """Memory that is set aside, in bytes, by name."""
        return {
            "CUDA context": self.context_bytes,
            "NCCL buffers": self.nccl_bytes,
            "allocator's gaps": self.gaps_bytes,
        }

    @property
    def planned_bytes(self) -> int:
        """Upper limit of a rank's memory estimate; 0 if nothing is left."""
        return max(0, int(self.gib * GIB) - sum(self.terms.values()))

    @property
    def reservable_bytes(self) -> int:
        """Memory that the caching allocator may reserve for tensors and gaps between them."""
        return self.planned_bytes + self.gaps_bytes

    @property
    def planned_gib(self) -> float:
        """`planned_bytes` in GiB, from 1 GiB on rounded down to 3 decimals, as TOML writes it."""
        gib = self.planned_bytes / GIB
        return math.floor(gib * 1000) / 1000 if gib >= 1 else gib

    @property
    def explanation(self) -> str:
        """As in "71.6 GiB that plans may use of 80 GiB (cluster.memory_gib; NCCL buffers ...)"."""
        aside = ", ".join(f"{name} {size_text(size)}" for name, size in self.terms.items() if size)
        of = f"{size_text(int(self.gib * GIB))} ({self.source}{'; ' if aside else ''}{aside})"
        return f"{size_text(self.planned_bytes)} that plans may use of {of}"


def cluster_gib(spec: RunSpec) -> float:
    """GiB of a GPU that estimates assume: cluster.memory_gib, else `ASSUMED_GIB`."""
    return spec.cluster.memory_gib or ASSUMED_GIB


def gpu_budget(spec: RunSpec, *, gib: float | None = None, source: str = "") -> Budget:
    """The budget of a GPU with `gib` of memory, or with that of the cluster."""
    key = "cluster.memory_gib"
    told = key if spec.cluster.memory_gib else f"assumed; {key} sets it"
    return Budget(
        gib=cluster_gib(spec) if gib is None else gib,
        source=source or told,
        context_bytes=int(CONTEXT_GIB * GIB),
        nccl_bytes=int(num_communicators(spec) * COMMUNICATOR_GIB * GIB),
        gaps=ALLOCATOR_GAPS,
    )


def cpu_budget(spec: RunSpec, *, gib: float, source: str) -> Budget:
    """The budget of a CPU rank, which has neither a CUDA context nor NCCL."""
    return Budget(gib=gib, source=source, gaps=ALLOCATOR_GAPS)


def planned_gib(spec: RunSpec) -> float:
    """GiB that plans may use of a GPU of the cluster."""
    return gpu_budget(spec).planned_gib


def num_communicators(spec: RunSpec) -> int:
    """NCCL communicators of a rank: of the world, of each axis, of dp and cp together, of the
    groups of HSDP, of experts, and of copies of KV heads. Groups of one rank have none.

    The two links of a pipeline rank count as one. `COMMUNICATOR_GIB` is two connections of
    every channel, for ring and tree, and a link has one, for transfers. The group of the axis pp
    carries nothing, and NCCL connects ranks at their first call.
    """
    p = spec.parallel
    sizes = [p.world_size, p.tp, p.cp, p.pp, max(1, p.dp), p.fsdp_size]
    if spec.shard_size < p.fsdp_size:
        sizes += [spec.shard_size, p.fsdp_size // spec.shard_size]
    if spec.model.experts.num:
        sizes += [p.ep, sharing_ranks(spec)]
        sizes += [p.fsdp_size // spec.shard_size] if spec.shard_size < p.fsdp_size else []
    if (copies := spec.model.kv_copies(p.tp)) > 1:
        sizes += [copies, p.tp // copies]
    return sum(size > 1 for size in sizes)


def size_text(size_bytes: int) -> str:
    """ "79.2 GiB" or "3.5 MiB", with three digits."""
    return f"{size_bytes / GIB:.3g} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:.3g} MiB"
