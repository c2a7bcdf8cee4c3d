"""Sections [eval], [checkpoint] and [telemetry]: what a run measures and saves."""

from dataclasses import dataclass

from wlb.spec.keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    """Section [eval]: evaluation on held-out documents."""

    interval: int = key(
        0,
        "steps between evaluations; 0 = only at the start and the end",
        unit="steps",
        at_least=0,
        at_most=10**9,
    )
    interval_tokens: int = key(
        0,
        "number of document tokens that are trained between two evaluations; use this key instead "
        "of eval.interval to compare packing policies whose steps differ in tokens; 0 = use "
        "eval.interval",
        unit="tokens",
        at_least=0,
        at_most=2**62,
    )
    steps: int = key(
        4,
        "number of held-out global batches that each evaluation uses; 0 = no evaluation",
        unit="global batches",
        at_least=0,
        at_most=10**6,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Section [checkpoint]: when checkpoints are written and which are kept."""

    interval: int = key(
        0, "steps between checkpoints; 0 = only at the end", unit="steps", at_least=0, at_most=10**9
    )
    keep: int = key(
        2,
        "number of checkpoints to keep; the oldest is removed only when a new one is complete, so "
        "the disk needs space for one more",
        at_least=1,
        at_most=10**6,
    )
    init_from: str = key(
        "",
        "folder of a checkpoint, or of a run (its newest checkpoint is used), from which a new run "
        "takes only its initial weights; optimiser state, step number and position in the data "
        "start anew; empty = random weights",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySection:
    """Section [telemetry]: what a run records in addition to its metrics."""

    ledger: bool = key(
        False,
        "write to ledger.jsonl which tokens every step trained (about 20 bytes per piece of a "
        "document), so that wlb.train.telemetry.ledger can prove that no token was lost or trained "
        "twice",
    )
    warmup_steps: int = key(
        3,
        "number of first steps after each start of a run that are left out of the run's summary "
        "and of --calibrate, because a run warms up in them",
        unit="steps",
        at_least=0,
        at_most=10**9,
    )
    trace_steps: tuple[int, ...] = key(
        (),
        "steps that torch.profiler traces, by the numbers that the run prints; rank 0 writes a "
        "file for Perfetto, with every operator and kernel, into traces/ in the run's folder; "
        "traced steps are slower",
        at_least=1,
        at_most=10**9,
    )
    snapshot_steps: tuple[int, ...] = key(
        (),
        "numbers of the steps (as in the run's table) after which every rank writes a snapshot of "
        "its GPU's memory to the folder memory/ of the run (CUDA only); if this list is not empty, "
        "a rank also writes a snapshot when an allocation fails",
        at_least=1,
        at_most=10**9,
    )
    tensorboard: bool = key(
        False, "also write TensorBoard event files to the run's folder (package tensorboard)"
    )
    wandb: str = key("", "also log to this Weights & Biases project (package wandb); empty = off")
