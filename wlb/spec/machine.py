"""Sections about devices: parameter sharding, TP overlap, and the cluster assumed by estimates."""

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
    """The hardware that `wlb simulate`, `wlb tune` and dry runs assume. A run measures the memory
    of its own GPUs, and reads of these keys only tp_overlap, for its prices."""

    memory_gib: float = key(
        80.0,
        "memory of a device, which the layouts of simulate, tune and --dry-run must fit",
        unit="GiB",
        above=0,
        at_most=1e6,
    )
    peak_tflops: float = key(
        989.0,
        "most that a device computes in training.dtype without sparsity, for MFU",
        unit="TFLOP/s",
        above=0,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TpSection:
    overlap: bool = key(
        False,
        "overlap TP's collectives with the products beside them, piece by piece; needs GPUs "
        "that reach each other's memory (NVLink); not measured yet",
    )
