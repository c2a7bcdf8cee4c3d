"""Section [training]: steps, learning rate, precision, loss and reactions to failures."""

from dataclasses import dataclass
from enum import StrEnum

from wlb.spec.keys import key


class Dtype(StrEnum):
    """Data type that layers compute in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class OnNonfinite(StrEnum):
    """Reaction of a run to a loss or gradient that is NaN or infinite."""

    STOP = "stop"  # end the run
    SKIP = "skip"  # do not update the weights in this step
    # Repeat from the last checkpoint, and skip the update if the same step fails a second time.
    ROLLBACK = "rollback"


class Recompute(StrEnum):
    """Part of a decoder layer that backward recomputes instead of storing its activations."""

    NONE = "none"
    SELECTIVE = "selective"  # the second norm and the MLP, except the MLP's last matrix product
    FULL = "full"  # the whole layer with attention and collectives


class LossNormalizer(StrEnum):
    """Number by which the summed loss of a step is divided."""

    VALID_TOKENS = "valid_tokens"  # the number of targets in the step
    CONSTANT = "constant"  # always N * context_window


class RateSchedule(StrEnum):
    """Shape of the learning rate after warm-up. WSD means warm-up, stable (constant), decay."""

    COSINE = "cosine"
    WSD = "wsd"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection:
    """Section [training]: steps, optimiser, precision, loss, recomputation and compilation."""

    steps: int = key(1000, "number of optimiser steps", unit="steps", at_least=1, at_most=10**9)
    learning_rate: float = key(3e-4, "peak learning rate of AdamW", above=0, at_most=1e30)
    min_learning_rate: float = key(
        3e-5,
        "learning rate at the last step; has no effect with schedule = constant",
        at_least=0,
        at_most=1000,
    )
    warmup_steps: int = key(
        100,
        "number of steps in which the learning rate rises linearly to its peak",
        unit="steps",
        at_least=0,
        at_most=10**9,
    )
    schedule: RateSchedule = key(
        RateSchedule.COSINE,
        "learning rate after warm-up: cosine or linear = decay to min_learning_rate over the "
        "remaining steps; wsd = constant, then linear decay to min_learning_rate in the last "
        "decay_steps; constant = no decay",
    )
    decay_steps: int = key(
        0,
        "with schedule = wsd: number of steps of the final decay, usually 10% to 20% of "
        "training.steps",
        unit="steps",
        at_least=0,
        at_most=10**9,
    )
    beta1: float = key(0.9, "AdamW beta1", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW beta2", at_least=0, below=1)
    adam_eps: float = key(
        1e-8,
        "AdamW epsilon; a larger value damps updates of weights with tiny gradients",
        above=0,
        at_most=1,
    )
    weight_decay: float = key(
        0.1, "AdamW weight decay of all weights except norms and biases", at_least=0, at_most=1000
    )
    clip_norm: float = key(
        1.0, "norm to which gradients are clipped; 0 = off", at_least=0, at_most=1e12
    )
    dtype: Dtype = key(
        Dtype.FLOAT32,
        "data type in which layers compute; gradients are reduced in float32, with one exception: "
        "if a pipeline has a single micro-batch, TP ranks reduce gradients of norms in this data "
        "type",
    )
    loss_normalizer: LossNormalizer = key(
        LossNormalizer.VALID_TOKENS,
        "number by which a step's summed loss is divided: valid_tokens = the number of targets "
        "(tokens that count in the loss) in the step; constant = always data.num_windows * "
        "data.context_window, so that all targets have equal weight even if steps differ in tokens",
    )
    recompute: Recompute = key(
        Recompute.NONE,
        "part of each layer that backward recomputes to save memory: none = nothing; selective = "
        "the second norm and the MLP, except the MLP's last matrix product; full = the whole layer "
        "with attention and collectives",
    )
    compile: bool = key(
        False,
        "compile decoder layers with torch.compile into one graph for all lengths (in layers with "
        "experts, only the attention part); compiling takes about a minute at the start, and "
        "shortens steps if norms, RoPE and SiLU take a large part of a layer's time",
    )
    compile_backend: str = key(
        "inductor",
        "backend of torch.compile if training.compile = true: inductor, aot_eager, eager or "
        "another backend of torch",
    )
    on_nonfinite: OnNonfinite = key(
        OnNonfinite.STOP,
        "reaction to a loss or gradient that is NaN or infinite: stop = end the run; skip = do not "
        "update the weights in this step; rollback = repeat from the last checkpoint, and skip the "
        "update if the same step fails a second time",
    )
    loss_chunk: int = key(
        8192,
        "number of rows whose logits are computed at a time; fewer rows need less memory",
        unit="rows",
        at_least=1,
        at_most=8192,
    )
    timeout_s: float = key(
        600.0,
        "a collective that takes longer than this time stops the run with an error",
        unit="s",
        above=0,
        at_most=1e7,
    )
