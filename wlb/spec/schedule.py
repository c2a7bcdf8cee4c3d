"""Names of learning-rate schedules and of what weight decay is on (`training.*`)."""

from enum import StrEnum


class RateSchedule(StrEnum):
    """What the learning rate does after its warm-up; wsd = warm-up, stable, decay."""

    COSINE = "cosine"
    WSD = "wsd"
    LINEAR = "linear"
    CONSTANT = "constant"


class DecayShape(StrEnum):
    """How wsd's decay falls: sqrt is 1 - sqrt(progress)."""

    LINEAR = "linear"
    SQRT = "sqrt"
    COSINE = "cosine"


class DecayedWeights(StrEnum):
    """matrices: all but norms. linear: neither embedding, output head nor norms."""

    MATRICES = "matrices"
    LINEAR = "linear"
    ALL = "all"
