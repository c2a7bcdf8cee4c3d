"""Sections about devices: what shards parameters over them, what overlaps, what they are like."""

from dataclasses import dataclass

from wlb.spec.keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSection:
    """How parameters are sharded over the dp and cp axes together (FSDP2)."""

    shard_size: int = key(
        0,
        "ranks that share one copy of parameters, gradients and optimizer state, innermost of dp x "
        "cp first; other such groups hold copies (HSDP); 0 = all of dp x cp",
        unit="ranks",
    )
    reshard_after_forward: bool = key(
        False,
        "free a layer's gathered parameters after every pass and gather them again: less memory, "
        "two gathers a micro-batch instead of one a step",
    )
    prefetch: int = key(
        1,
        "layers whose parameters are gathered ahead of the layer at work; 0 = as torch orders them",
        unit="layers",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """What the machines are like, for estimates; nothing that a run executes depends on it."""

    memory_gib: float = key(
        80.0,
        "memory of a device that simulate, tune and --dry-run hold a layout against",
        unit="GiB",
    )
    peak_tflops: float = key(
        989.0, "dense peak of a device in training.dtype, for MFU", unit="TFLOP/s"
    )
    overhead: float = key(
        0.0,
        "what a simulated step takes besides (host, input, jitter), as a share of the mean rank's "
        "time in passes",
    )
    tp_overlap: float = key(
        0.0,
        "share of TP's collectives that hides behind matrix products, for pricing; wlb's own "
        "executor overlaps some in backward",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TpSection:
    overlap: bool = key(
        False,
        "compute the products beside TP's collectives piece by piece while pieces travel; needs "
        "GPUs that reach each other's memory (NVLink); not measured yet",
    )
