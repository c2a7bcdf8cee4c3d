"""Sections [fsdp], [ep] and [cluster].

They set how parameters are sharded, how sending rows to and from experts overlaps with computation,
and which hardware predictions assume.
"""

from dataclasses import dataclass

from wlb.spec.keys import key

LAYERS_AHEAD = 1
"""Number of layers whose parameters FSDP gathers ahead of the layer that computes.

A larger number hides longer gathers, but with fsdp.reshard_after_forward it keeps more gathered
layers in memory. `wlb.parallel` passes it to FSDP, and `wlb.memory` counts its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSection:
    """Section [fsdp]: how FSDP2 shards parameters over the dp and cp axes together."""

    shard_size: int = key(
        0,
        "number of ranks over which one copy of parameters, gradients and optimiser state is "
        "sharded; the ranks of a copy are consecutive in dp x cp order; with fewer than all ranks "
        "of dp x cp there are several copies (HSDP); 0 = all ranks of dp x cp",
        unit="ranks",
        at_least=0,
        at_most=2**20,
    )
    reshard_after_forward: bool = key(
        False,
        "free the gathered parameters of a layer after every pass, and gather them again for the "
        "next pass; this saves memory, but costs two all-gathers per micro-batch instead of one "
        "per step",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpSection:
    """Section [ep]: how sending rows to and from experts overlaps with computation.

    Another key, parallel.ep, sets the degree of expert parallelism.
    """

    stages: int = key(
        1,
        "number of parts into which the experts of each rank are divided; rows for one part travel "
        "between ranks while another part computes; must divide model.experts.num / parallel.ep; "
        "1 = off",
        at_least=1,
        at_most=64,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """Section [cluster]: the hardware that `wlb simulate`, `wlb tune` and dry runs assume.

    Training runs use tp_overlap for their prices, too. They use memory_gib and peak_tflops only if
    these keys are set.
    """

    memory_gib: float = key(
        0.0,
        "memory of a device; layouts and runs whose memory estimate exceeds this value are "
        "refused; 0 = 80 GiB in simulate, tune and --dry-run; in a run, 0 = the memory of its "
        "smallest GPU, and no limit on CPUs",
        unit="GiB",
        at_least=0,
        at_most=1e6,
    )
    peak_tflops: float = key(
        0.0,
        "peak throughput of a device in training.dtype, without sparsity, from which MFU is "
        "computed; 0 = 989 TFLOP/s (H100) in estimates; in a run, 0 = the bfloat16 peak of its "
        "GPU, and no MFU if this peak is unknown",
        unit="TFLOP/s",
        at_least=0,
        at_most=1e9,
    )
    overhead: float = key(
        0.0,
        "time that a simulated step spends outside forward and backward passes (host, input, "
        "jitter), as a fraction of the mean time that its ranks spend in passes, such as 0.05",
        at_least=0,
        at_most=1000,
    )
    tp_overlap: float = key(
        0.0,
        "share of the time of TP's collectives, from 0 to 1, that is predicted to overlap with "
        "matrix products; 0 = none (in a run, some collectives do overlap in backward)",
        at_least=0,
        at_most=1,
    )
