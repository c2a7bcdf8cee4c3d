"""Telemetry: measured and predicted times of one or more steps, summed over all ranks.

The size of a record does not depend on the number of ranks.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from wlb.plan.schema import ANYTHING, OTHERS, Schema, schema_of

TERMS = ("attention_forward", "attention_backward", "linear_forward", "linear_backward")
"""Times that are compared with predictions. `linear` is the paper's W_l (Eq. 2): everything in
decoder layers except attention kernels. Embedding, head and loss are not part of it and are
recorded separately."""

_ROUNDING = 1e-12
"""Variances below this multiple of the squared mean are rounding errors."""
_LEAST_VARIATION = 0.1
"""Smallest ratio of the predictions' standard deviation to their mean that allows to fit a line."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums of one term's predicted and measured times in seconds, from which statistics follow.

    Each summand is one cell: a micro-batch in a stage on a rank. Moments of disjoint cells add up.
    """

    num_cells: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    predicted_squares: float = 0.0  # sum of squared predicted times
    measured_squares: float = 0.0  # sum of squared measured times
    products: float = 0.0  # sum of predicted x measured times
    errors: float = 0.0  # sum of |measured - predicted| / measured

    @classmethod
    def of(cls, predicted_s: float, measured_s: float) -> "Moments":
        """Return the moments of one cell, whose measured time is above 0."""
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
        """Mean of |measured - predicted| / measured over cells; None without cells."""
        return self.errors / self.num_cells if self.num_cells else None

    @property
    def _spread(self) -> tuple[float, float, float, float, float]:
        """Means of predicted and measured time, their variances, and their covariance."""
        n = self.num_cells
        x, y = self.predicted_s / n, self.measured_s / n
        variances = self.predicted_squares / n - x * x, self.measured_squares / n - y * y
        return x, y, *variances, self.products / n - x * y

    @property
    def line(self) -> tuple[float, float] | None:
        """Least-squares line of measured over predicted time: (slope, intercept in seconds).

        None if predictions vary too little to fit a line, or if the line is no possible correction
        of prices (slope not above 0, or intercept below 0).
        """
        if self.num_cells < 2:
            return None
        x, y, variance, _, covariance = self._spread
        if variance < _LEAST_VARIATION**2 * x * x:
            return None
        slope = covariance / variance
        intercept = y - slope * x
        return (slope, intercept) if slope > 0 and intercept >= 0 else None

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation over cells; None if predicted or measured times do not vary."""
        if self.num_cells < 2:
            return None
        x, y, variance_x, variance_y, covariance = self._spread
        # Differences of sums this small are rounding errors.
        if variance_x <= _ROUNDING * x * x or variance_y <= _ROUNDING * y * y:
            return None
        return max(-1.0, min(1.0, covariance / (variance_x * variance_y) ** 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A time over all ranks, averaged over steps."""

    mean_s: float  # mean rank
    max_s: float  # rank with the largest time
    max_rank: int  # number of this rank, the lowest if several have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Model FLOPs of executed steps, which add up."""

    rank_s: float = 0.0  # wall time times number of ranks
    # forward and backward (3 x forward) of document tokens, with attention within documents,
    # without recomputation or padding
    model_flops: float = 0.0
    # the same with attention over whole context windows, as Megatron-LM counts; overstates short
    # documents
    window_flops: float = 0.0
    # FLOPs that the devices could do in this time at their peak; 0 if unknown for any part
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
        """Model FLOPs over the devices' peak FLOPs; None if the peak is unknown."""
        return self.model_flops / self.peak_flops if self.peak_flops else None

    @property
    def window_tflops(self) -> float:
        """TFLOP/s of the mean rank, with attention counted over whole windows."""
        return self.window_flops / self.rank_s * 1e-12 if self.rank_s else 0.0

    @property
    def window_mfu(self) -> float | None:
        """Window FLOPs over the devices' peak FLOPs; None if the peak is unknown."""
        return self.window_flops / self.peak_flops if self.peak_flops else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the rates derived from them."""
        derived = ("tflops", "mfu", "window_tflops", "window_mfu")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Work":
        """Read what `to_json` wrote; the derived rates are ignored."""
        return cls(**{f.name: data[f.name] for f in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Times of `num_steps` steps, written to metrics.jsonl with the last of these steps.

    A micro-batch's latency sums, over pipeline stages, the time in decoder layers of the stage's
    slowest CP and TP rank (Section 7.4). Times in seconds are means over all ranks and steps.
    """

    num_steps: int  # steps since the last record
    slowest_ns: int  # measured forward latency of the slowest micro-batch, summed over steps
    mean_ns: float  # measured forward latency of the mean micro-batch, summed over steps
    predicted_slowest_ns: int  # predicted latency of the slowest micro-batch
    predicted_mean_ns: float  # predicted latency of the mean micro-batch
    whole_slowest_ns: int  # measured slowest micro-batch, with embedding, head and loss
    whole_mean_ns: float  # measured mean micro-batch, with embedding, head and loss
    terms: tuple[tuple[str, Moments], ...]  # statistics of each of `TERMS`, by name
    embedding_s: float  # under FSDP this includes the all-gather of parameters
    head_s: float  # head and loss
    compute: Spread  # time in passes
    bubble: Spread  # the rest of the step
    predicted_embedding_s: float = 0.0
    predicted_head_s: float = 0.0
    loading_s: float = 0.0  # waiting for inputs
    planning_s: float = 0.0  # waiting for plans
    records_s: float = 0.0  # thread time spent on timestamps and records
    step_s: float = 0.0  # wall time of a step
    work: Work | None = None  # None in files of early versions

    @property
    def overhead_s(self) -> float:
        """Time of a step in which a rank neither computes nor waits for other ranks."""
        return self.loading_s + self.planning_s + self.records_s

    @property
    def head_ratio(self) -> float | None:
        """Measured over predicted time of head and loss; None if it was not predicted."""
        return self.head_s / self.predicted_head_s if self.predicted_head_s else None

    @property
    def imbalance(self) -> float:
        """Slowest over mean micro-batch by measured latency, in which slow steps count more."""
        return _degree(self.slowest_ns, self.mean_ns)

    @property
    def predicted_imbalance(self) -> float:
        """Slowest over mean micro-batch by predicted latency."""
        return _degree(self.predicted_slowest_ns, self.predicted_mean_ns)

    @property
    def whole_imbalance(self) -> float:
        """Slowest over mean micro-batch by measured latency with embedding, head and loss."""
        return _degree(self.whole_slowest_ns, self.whole_mean_ns)

    def to_json(self) -> dict[str, Any]:
        """Return the fields and values derived from them."""
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
        """Read what `to_json` of any version wrote; derived values are ignored."""
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
