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
    SKIP = "skip"  # skip the update of the step
    ROLLBACK = "rollback"  # repeat from the last checkpoint; skip a step that fails twice


class Recompute(StrEnum):
    """Part of a decoder layer that backward recomputes instead of storing its activations."""

    NONE = "none"
    SELECTIVE = "selective"  # the second norm and the MLP, except its last matrix product
    FULL = "full"  # the whole layer with attention and collectives


class LossNormalizer(StrEnum):
    """Divisor of the summed loss of a step."""

    VALID_TOKENS = "valid_tokens"  # the number of targets in the step
    CONSTANT = "constant"  # always N * context_window


class RateSchedule(StrEnum):
    """Shape of the learning rate after warm-up. WSD is warm-up, stable (constant), decay."""

    COSINE = "cosine"
    WSD = "wsd"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection:
    """Section [training]: steps, optimiser, precision, loss, recomputation and compilation."""

    steps: int = key(1000, "optimiser steps", unit="steps", at_least=1, at_most=10**9)
    learning_rate: float = key(3e-4, "peak learning rate of AdamW", above=0, at_most=1e30)
    min_learning_rate: float = key(
        3e-5,
        "learning rate at the last step; not used by schedule = constant",
        at_least=0,
        at_most=1000,
    )
    warmup_steps: int = key(
        100,
        "length of the linear warm-up of the learning rate",
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
        "with schedule = wsd: length of the final decay; 10% to 20% of training.steps is usual",
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
        "data type that layers compute in; gradients are reduced in float32, with one exception: "
        "if a pipeline has a single micro-batch, gradients of norms are reduced over TP in this "
        "type",
    )
    loss_normalizer: LossNormalizer = key(
        LossNormalizer.VALID_TOKENS,
        "divisor of a step's summed loss: valid_tokens = number of targets (tokens that count in "
        "the loss) in the step; constant = always N * context_window, which weighs all targets "
        "equally if steps differ in tokens",
    )
    recompute: Recompute = key(
        Recompute.NONE,
        "activations that backward recomputes to save memory: selective = the second norm and the "
        "MLP of a layer, except its last matrix product; full = the whole layer with attention and "
        "collectives",
    )
    compile: bool = key(
        False,
        "compile decoder layers with torch.compile into one graph for all lengths (of layers with "
        "experts, only the attention part); this takes about a minute at the start, and it helps "
        "if norms, RoPE and SiLU are a large part of a layer",
    )
    compile_backend: str = key("inductor", "torch.compile backend, used with training.compile")
    on_nonfinite: OnNonfinite = key(
        OnNonfinite.STOP,
        "reaction to a loss or gradient that is NaN or infinite: stop = end the run; skip = skip "
        "the update of the step; rollback = repeat from the last checkpoint, and skip the step if "
        "it fails a second time",
    )
    loss_chunk: int = key(
        8192,
        "number of rows whose logits are computed, and kept in memory, at a time",
        unit="rows",
        at_least=1,
        at_most=8192,
    )
    timeout_s: float = key(
        600.0,
        "longest time that a collective may take; after it, the run stops with an error",
        unit="s",
        above=0,
        at_most=1e7,
    )
