"""Telemetry: measured and predicted times of one or more steps, as sums over all ranks.

A record's size does not depend on the number of ranks.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from wlb.plan.schema import ANYTHING, OTHERS, Schema, schema_of

TERMS = ("attention_forward", "attention_backward", "linear_forward", "linear_backward")
"""Times that are compared with predictions. linear: everything in decoder layers except attention
kernels, W_l of Eq. 2. Embedding, head and loss do not belong to W and are recorded apart."""

_NOTHING_VARIES = 1e-12
_TELLS_A_LINE = 0.1
"""Least ratio of the predictions' standard deviation to their mean for a meaningful slope."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over cells (a micro-batch on a stage on a rank) of one term's times, in seconds.

    errors: of |measured - predicted| / measured.
    """

    num_cells: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    predicted_squares: float = 0.0
    measured_squares: float = 0.0
    products: float = 0.0
    errors: float = 0.0

    @classmethod
    def of(cls, predicted_s: float, measured_s: float) -> "Moments":
        """The moments of one cell; measured_s > 0."""
        return cls(
            num_cells=1,
            predicted_s=predicted_s,
            measured_s=measured_s,
            predicted_squares=predicted_s * predicted_s,
            measured_squares=measured_s * measured_s,
            products=predicted_s * measured_s,
            errors=abs(measured_s - predicted_s) / measured_s,
        )

    def __add__(self, other: "Moments") -> "Moments":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Moments(**sums)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time of all cells; None if nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else None

    @property
    def mape(self) -> float | None:
        """Mean absolute error of the prediction relative to the measured time, a fraction."""
        return self.errors / self.num_cells if self.num_cells else None

    @property
    def _spread(self) -> tuple[float, float, float, float, float]:
        """Means of predicted and measured time, their variances and covariance."""
        n = self.num_cells
        x, y = self.predicted_s / n, self.measured_s / n
        variances = self.predicted_squares / n - x * x, self.measured_squares / n - y * y
        return x, y, *variances, self.products / n - x * y

    @property
    def line(self) -> tuple[float, float] | None:
        """Least-squares (slope, intercept in seconds) of measured over predicted time.

        None if predictions vary too little to separate the two, or the line is no price (slope or
        intercept below 0).
        """
        if self.num_cells < 2:
            return None
        x, y, variance, _, covariance = self._spread
        if variance < _TELLS_A_LINE**2 * x * x:
            return None
        slope = covariance / variance
        intercept = y - slope * x
        return (slope, intercept) if slope > 0 and intercept >= 0 else None

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation over cells; None if either side does not vary."""
        if self.num_cells < 2:
            return None
        x, y, variance_x, variance_y, covariance = self._spread
        # A smaller difference of sums is a rounding error.
        if variance_x <= _NOTHING_VARIES * x * x or variance_y <= _NOTHING_VARIES * y * y:
            return None
        return max(-1.0, min(1.0, covariance / (variance_x * variance_y) ** 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A time over all ranks, averaged over steps. max_rank: the lowest rank with the largest."""

    mean_s: float
    max_s: float
    max_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Model FLOPs of executed steps, which add up.

    model_flops: forward and backward (3 x forward) of real tokens with their documents' attention,
    without recomputation or padding. rank_s: wall time times ranks. window_flops: the same tokens
    counted as full windows, as Megatron-LM does without lengths, which overstates short documents.
    peak_flops: FLOPs of the ranks' devices at their peak in that time; 0 if unknown for any part.
    """

    rank_s: float = 0.0
    model_flops: float = 0.0
    window_flops: float = 0.0
    peak_flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        parts = [work for work in (self, other) if work.rank_s]
        is_known = all(work.peak_flops for work in parts)
        return Work(
            rank_s=self.rank_s + other.rank_s,
            model_flops=self.model_flops + other.model_flops,
            window_flops=self.window_flops + other.window_flops,
            peak_flops=self.peak_flops + other.peak_flops if is_known else 0.0,
        )

    @property
    def tflops(self) -> float:
        """TFLOP/s of the mean rank."""
        return self.model_flops / self.rank_s * 1e-12 if self.rank_s else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, a fraction of the peak; None where that is not known."""
        return self.model_flops / self.peak_flops if self.peak_flops else None

    @property
    def window_tflops(self) -> float:
        return self.window_flops / self.rank_s * 1e-12 if self.rank_s else 0.0

    @property
    def window_mfu(self) -> float | None:
        return self.window_flops / self.peak_flops if self.peak_flops else None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, with derived values for readers of the file."""
        derived = ("tflops", "mfu", "window_tflops", "window_mfu")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Work":
        return cls(**{f.name: data[f.name] for f in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Times of `num_steps` steps, the last of which is the one whose line holds this record.

    slowest_ns, mean_ns: forward latency of the slowest and of the mean micro-batch, summed over
    steps. A micro-batch's latency is the sum over stages of its slowest CP and TP rank's time in
    decoder layers (Section 7.4). predicted_*: the same of predictions; whole_*: measured, with
    embedding, head and loss. terms: by name (`TERMS`).

    Means over all ranks and steps, in seconds: embedding_s and head_s (under FSDP the embedding's
    holds the gathering of parameters); compute: time in passes; bubble: the rest of the step;
    loading_s: waits for inputs; planning_s: waits for plans; records_s: thread time of clock marks
    and records; step_s: wall time. work: None in old records.
    """

    num_steps: int
    slowest_ns: int
    mean_ns: float
    predicted_slowest_ns: int
    predicted_mean_ns: float
    whole_slowest_ns: int
    whole_mean_ns: float
    terms: tuple[tuple[str, Moments], ...]
    embedding_s: float
    head_s: float
    compute: Spread
    bubble: Spread
    predicted_embedding_s: float = 0.0
    predicted_head_s: float = 0.0
    loading_s: float = 0.0
    planning_s: float = 0.0
    records_s: float = 0.0
    step_s: float = 0.0
    work: Work | None = None

    @property
    def overhead_s(self) -> float:
        """Time of a step that is neither computing nor waiting for other ranks."""
        return self.loading_s + self.planning_s + self.records_s

    @property
    def head_ratio(self) -> float | None:
        """Measured over predicted time of head and loss; None if none was predicted."""
        return self.head_s / self.predicted_head_s if self.predicted_head_s else None

    @property
    def imbalance(self) -> float:
        """Section 7.4's degree of measured latencies, time-weighted over steps."""
        return _degree(self.slowest_ns, self.mean_ns)

    @property
    def predicted_imbalance(self) -> float:
        return _degree(self.predicted_slowest_ns, self.predicted_mean_ns)

    @property
    def whole_imbalance(self) -> float:
        return _degree(self.whole_slowest_ns, self.whole_mean_ns)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, with derived values for readers of the file."""
        data = asdict(self)
        derived = ("imbalance", "predicted_imbalance", "whole_imbalance", "overhead_s")
        data |= {name: getattr(self, name) for name in derived}
        data["work"] = self.work and self.work.to_json()
        data["terms"] = {
            name: {"correlation": m.correlation, "mape": m.mape, "ratio": m.ratio, **asdict(m)}
            for name, m in self.terms
        }
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Telemetry":
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        sums = [f.name for f in fields(Moments)]
        values["terms"] = tuple(
            (name, Moments(**{key: term[key] for key in sums}))
            for name, term in data["terms"].items()
        )
        for name in ("compute", "bubble"):
            values[name] = Spread(**data[name])
        if values.get("work") is not None:
            values["work"] = Work.from_json(values["work"])
        return cls(**values)


_TERM = schema_of(Moments, **dict.fromkeys(("correlation?", "mape?", "ratio?"), (float, None)))
_RATES = ("tflops?", "mfu?", "window_tflops?", "window_mfu?")
_WORK = schema_of(Work, **dict.fromkeys(_RATES, ANYTHING))
_DERIVED = ("imbalance?", "predicted_imbalance?", "whole_imbalance?", "overhead_s?")
TELEMETRY: Schema = schema_of(
    Telemetry,
    terms={OTHERS: _TERM},
    compute=schema_of(Spread),
    bubble=schema_of(Spread),
    work=(_WORK, None),
    **dict.fromkeys(_DERIVED, ANYTHING),
)


def _degree(slowest: float, mean: float) -> float:
    return slowest / mean if mean else 1.0
