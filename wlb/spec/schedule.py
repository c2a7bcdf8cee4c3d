"""Learning-rate schedules and sets of decayed weights (`training.*`)."""

from enum import StrEnum


class RateSchedule(StrEnum):
    """Learning rate after warm-up; wsd = warm-up, stable, decay."""

    COSINE = "cosine"
    WSD = "wsd"
    LINEAR = "linear"
    CONSTANT = "constant"


class DecayShape(StrEnum):
    """Shape of the decay of wsd; sqrt = 1 - sqrt(progress)."""

    LINEAR = "linear"
    SQRT = "sqrt"
    COSINE = "cosine"


class DecayedWeights(StrEnum):
    """matrices: all except norms. linear: also without embedding and output head."""

    MATRICES = "matrices"
    LINEAR = "linear"
    ALL = "all"
