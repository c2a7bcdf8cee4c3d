"""Sections about the records of a run: evaluations, checkpoints, telemetry."""

from dataclasses import dataclass

from wlb.spec.keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    interval: int = key(
        0,
        "steps between evaluations; 0 = only at the start and the end",
        unit="steps",
        at_least=0,
        at_most=10**9,
    )
    interval_tokens: int = key(
        0,
        "document tokens trained between evaluations, instead of interval: compares packing "
        "policies at equal tokens where their steps differ in tokens; 0 = by steps",
        unit="tokens",
        at_least=0,
        at_most=2**62,
    )
    steps: int = key(
        4,
        "held-out global batches per evaluation; 0 = no evaluation",
        unit="steps",
        at_least=0,
        at_most=10**6,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    interval: int = key(
        0, "steps between checkpoints; 0 = only at the end", unit="steps", at_least=0, at_most=10**9
    )
    keep: int = key(
        2,
        "number of checkpoints that are kept; older ones are removed once a new one is complete, "
        "so that the disk needs room for one more",
        at_least=1,
        at_most=10**6,
    )
    init_from: str = key(
        "",
        "folder of a checkpoint, or of a run (its newest), whose weights a new run starts from;"
        " optimiser, steps and data start anew; empty = random weights",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySection:
    ledger: bool = key(
        False,
        "write the tokens that every step trained to ledger.jsonl (about 20 bytes per piece of "
        "a document), from which wlb.train.telemetry.ledger proves that none was lost or "
        "repeated",
    )
    warmup_steps: int = key(
        3,
        "first steps after a start, which the summary and --calibrate leave out",
        unit="steps",
        at_least=0,
        at_most=10**9,
    )
    trace_steps: tuple[int, ...] = key(
        (),
        "steps, as the run's table counts them, that torch.profiler traces: traces/ in the run's "
        "folder gets a file for Perfetto of every operator and kernel; traced steps are slower",
        at_least=1,
        at_most=10**9,
    )
    snapshot_steps: tuple[int, ...] = key(
        (),
        "steps, as the run's table counts them, after which every rank writes a snapshot of its "
        "GPU's memory to memory/ in the run's folder; with any, also where an allocation on a GPU "
        "fails; on CUDA only",
        at_least=1,
        at_most=10**9,
    )
    tensorboard: bool = key(
        False, "also write TensorBoard event files to the run's folder (package tensorboard)"
    )
    wandb: str = key("", "also log to this Weights & Biases project (package wandb); empty = off")
