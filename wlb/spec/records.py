"""What a run keeps and says of itself: evaluations, checkpoints, telemetry."""

from dataclasses import dataclass

from wlb.spec.keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    interval: int = key(0, "steps between evaluations; 0 = at the start and the end", unit="steps")
    interval_tokens: int = key(
        0,
        "trained document tokens between evaluations, in place of interval: losses of packing "
        "policies whose steps differ in tokens are compared at equal tokens; 0 = by steps",
        unit="tokens",
    )
    steps: int = key(4, "held-out global batches an evaluation; 0 = no evaluation", unit="steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    interval: int = key(0, "steps between checkpoints; 0 = at the end only", unit="steps")
    keep: int = key(2, "checkpoints kept; older ones are removed")
    asynchronous: bool = key(
        True, "write checkpoints behind training, which waits only for a copy in host memory"
    )
    init_from: str = key(
        "",
        "folder of a checkpoint, or of a run (its newest), whose weights a new run begins with; "
        "optimiser, steps and data begin anew; empty = weights are drawn",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySection:
    ledger: bool = key(
        False,
        "write which tokens every step trained to ledger.jsonl, some 20 bytes a piece of a "
        "document: wlb.train.telemetry.ledger proves from it that none was lost or repeated",
    )
    enabled: bool = key(
        True, "time every micro-batch and compare with what the planner's profile predicts"
    )
    interval: int = key(
        1,
        "steps between the all-reduces of what ranks measured; more for short steps on many ranks",
    )
    peak_tflops: float = key(
        0.0,
        "dense peak of a rank's device in training.dtype, for MFU; 0 = of known GPUs in bfloat16, "
        "and no MFU on others",
        unit="TFLOP/s",
    )
    warmup_steps: int = key(
        3, "first steps of a start that the summary and --calibrate leave out", unit="steps"
    )
    drift_threshold: float = key(
        0.15,
        "--calibrate calls a term drifted if its measured / predicted over the median of the "
        "others' is further from 1",
    )
    ranks_interval: int = key(
        10,
        "steps between tables of every rank's times, for the heat map and stragglers; 0 = none",
        unit="steps",
    )
    straggler_threshold: float = key(
        0.15,
        "a rank is called a straggler if measured / predicted time is so much over the median "
        "rank's, as a fraction",
    )
    straggler_records: int = key(3, "in so many tables of ranks in a row")
    timeline_interval: int = key(
        100,
        "steps between timelines of the passes of up to 64 ranks; also of the last step; 0 = none",
        unit="steps",
    )
    tensorboard: bool = key(
        False, "also write TensorBoard's event files, to the run's folder (package tensorboard)"
    )
    wandb: str = key(
        "", "also log to this project of Weights & Biases (package wandb); empty = do not"
    )
