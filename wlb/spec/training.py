"""Section [training]: steps, learning rate, precision, loss, and what is done about failures."""

from dataclasses import dataclass
from enum import StrEnum

from wlb.spec.keys import key


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class OnNonfinite(StrEnum):
    """Reaction to a loss or gradient that is not finite."""

    STOP = "stop"
    SKIP = "skip"
    ROLLBACK = "rollback"


class Recompute(StrEnum):
    """Part of a decoder layer that backward recomputes instead of keeping its activations."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class LossNormalizer(StrEnum):
    VALID_TOKENS = "valid_tokens"
    CONSTANT = "constant"


class RateSchedule(StrEnum):
    """Learning rate after warm-up; wsd = warm-up, stable, decay."""

    COSINE = "cosine"
    WSD = "wsd"
    LINEAR = "linear"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection:
    steps: int = key(1000, "optimiser steps", unit="steps", at_least=1, at_most=10**9)
    learning_rate: float = key(3e-4, "peak learning rate of AdamW", above=0, at_most=1e30)
    min_learning_rate: float = key(
        3e-5,
        "learning rate at training.steps; not used by schedule = constant",
        at_least=0,
        at_most=1000,
    )
    warmup_steps: int = key(
        100, "linear warm-up of the learning rate", unit="steps", at_least=0, at_most=10**9
    )
    schedule: RateSchedule = key(
        RateSchedule.COSINE,
        "learning rate after warm-up: cosine or linear = decay to min_learning_rate at "
        "training.steps; wsd = stable, then linear over the last decay_steps; constant",
    )
    decay_steps: int = key(
        0,
        "wsd: length of the final decay; 10% to 20% of training.steps is usual",
        unit="steps",
        at_least=0,
        at_most=10**9,
    )
    beta1: float = key(0.9, "AdamW beta1", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW beta2", at_least=0, below=1)
    adam_eps: float = key(
        1e-8,
        "AdamW epsilon; a larger one damps updates of weights whose gradients are tiny",
        above=0,
        at_most=1,
    )
    weight_decay: float = key(
        0.1, "AdamW weight decay of all weights except norms and biases", at_least=0, at_most=1000
    )
    clip_norm: float = key(
        1.0, "gradients are clipped to this norm; 0 = off", at_least=0, at_most=1e12
    )
    dtype: Dtype = key(
        Dtype.FLOAT32,
        "compute dtype of parameters; gradients are reduced in float32, except those of norms "
        "over TP, which use this dtype where a pipeline has one micro-batch",
    )
    loss_normalizer: LossNormalizer = key(
        LossNormalizer.VALID_TOKENS,
        "divisor of the loss: valid_tokens = number of labels in the step; constant = always N "
        "* context_window, which weighs labels equally where steps differ in tokens",
    )
    recompute: Recompute = key(
        Recompute.NONE,
        "activations that backward recomputes to save memory: selective = the second norm and "
        "the MLP of a layer, except the last product; full = the whole layer with attention and"
        " its collectives",
    )
    compile: bool = key(
        False,
        "compile decoder layers with torch.compile, of layers with experts attention's half: one "
        "graph for all lengths; takes about a minute at the start, and pays where norms, RoPE and "
        "SiLU are a large part of a layer",
    )
    compile_backend: str = key("inductor", "torch.compile backend, used with training.compile")
    on_nonfinite: OnNonfinite = key(
        OnNonfinite.STOP,
        "on a loss or gradient that is not finite: stop; skip the update of the step; or "
        "rollback = train again from the last checkpoint, and skip the step if it fails again",
    )
    loss_chunk: int = key(
        8192, "rows of logits in memory at a time", unit="rows", at_least=1, at_most=8192
    )
    timeout_s: float = key(
        600.0, "a collective that takes longer stops the run", unit="s", above=0, at_most=1e7
    )
