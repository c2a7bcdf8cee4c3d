"""Sections about devices: parameter sharding, and the cluster assumed by estimates."""

from dataclasses import dataclass

from wlb.spec.keys import key

LAYERS_AHEAD = 1
"""Layers whose parameters FSDP gathers before they are needed. More of them hide longer gathers,
and with fsdp.reshard_after_forward hold more layers at once. `wlb.parallel` executes it, and
`wlb.cost` counts its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSection:
    """How parameters are sharded over the dp and cp axes together (FSDP2)."""

    shard_size: int = key(
        0,
        "ranks that share one copy of parameters, gradients and optimiser state, taken from the"
        " innermost ranks of dp x cp; other groups hold replicas (HSDP); 0 = all of dp x cp",
        unit="ranks",
        at_least=0,
        at_most=2**20,
    )
    reshard_after_forward: bool = key(
        False,
        "free the gathered parameters of a layer after every pass and gather them again: less "
        "memory, two gathers per micro-batch instead of one per step",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpSection:
    """Expert parallelism; its degree is parallel.ep."""

    stages: int = key(
        1,
        "parts into which each rank's experts are divided, so that one part's rows travel while "
        "another's are computed; divides model.experts.num / parallel.ep",
        at_least=1,
        at_most=64,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """The hardware that `wlb simulate`, `wlb tune` and dry runs assume. A run reads tp_overlap for
    its prices, and memory_gib and peak_tflops where they are set.
    """

    memory_gib: float = key(
        0.0,
        "memory of a device, which layouts and runs must fit; 0 = in a run that of the smallest "
        "GPU, without a limit on the CPU, and 80 in simulate, tune and --dry-run",
        unit="GiB",
        at_least=0,
        at_most=1e6,
    )
    peak_tflops: float = key(
        0.0,
        "most that a device computes in training.dtype without sparsity, for MFU; 0 = of known "
        "GPUs in bfloat16 in runs, which report no MFU on others, and 989 (H100) in estimates",
        unit="TFLOP/s",
        at_least=0,
        at_most=1e9,
    )
    overhead: float = key(
        0.0,
        "time that a simulated step takes besides its passes (host, input, jitter), as a share "
        "of the mean rank's time in passes",
        at_least=0,
        at_most=1000,
    )
    tp_overlap: float = key(
        0.0,
        "share of the time of TP's collectives that prices take as hidden behind matrix products; "
        "wlb itself hides some of it in backward",
        at_least=0,
        at_most=1,
    )
