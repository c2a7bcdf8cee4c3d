"""Telemetry: measured and predicted times of one or more steps, summed over all ranks.

The size of a record does not depend on the number of ranks.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from wlb.plan.schema import ANYTHING, OTHERS, Schema, schema_of

TERMS = ("attention_forward", "attention_backward", "linear_forward", "linear_backward")
"""Names of the times that are both measured and predicted. "linear" is the paper's W_l (Eq. 2):
everything in decoder layers except attention kernels. The embedding, the head and the loss are not
part of W_l, and their times are recorded separately."""

_ROUNDING = 1e-12
"""A variance below this multiple of the squared mean counts as 0: it is a rounding error."""
_LEAST_VARIATION = 0.1
"""`Moments.line` fits no line if the standard deviation of the predictions is below this fraction
of their mean, because nearly equal predictions do not determine a slope."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over samples of predicted and measured times, from which statistics are computed.

    A sample is the time of one micro-batch in one pipeline stage on one rank, for one of `TERMS`.
    Times are in seconds. Adding two `Moments` unites their samples.
    """

    num_cells: int = 0  # number of samples
    predicted_s: float = 0.0  # sum of predicted times
    measured_s: float = 0.0  # sum of measured times
    predicted_squares: float = 0.0  # sum of squared predicted times
    measured_squares: float = 0.0  # sum of squared measured times
    products: float = 0.0  # sum of (predicted time x measured time)
    errors: float = 0.0  # sum of |measured - predicted| / measured

    @classmethod
    def of(cls, predicted_s: float, measured_s: float) -> "Moments":
        """Return the moments of one sample; `measured_s` must be above 0."""
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
        """Sum of measured times over sum of predicted times; None if nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else None

    @property
    def mape(self) -> float | None:
        """Mean of |measured - predicted| / measured over all times; None if there are none."""
        return self.errors / self.num_cells if self.num_cells else None

    @property
    def _spread(self) -> tuple[float, float, float, float, float]:
        """Mean predicted and mean measured time, their variances, and their covariance."""
        n = self.num_cells
        x, y = self.predicted_s / n, self.measured_s / n
        variances = self.predicted_squares / n - x * x, self.measured_squares / n - y * y
        return x, y, *variances, self.products / n - x * y

    @property
    def line(self) -> tuple[float, float] | None:
        """Least-squares fit of measured = slope * predicted + intercept: (slope, intercept in s).

        None if the predicted times vary too little to fit a line, or if the slope is not above 0 or
        the intercept is below 0. Such a line cannot correct prices.
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
        """Pearson correlation of predicted and measured times; None if either does not vary."""
        if self.num_cells < 2:
            return None
        x, y, variance_x, variance_y, covariance = self._spread
        # Treat variances this small as 0: they are rounding errors.
        if variance_x <= _ROUNDING * x * x or variance_y <= _ROUNDING * y * y:
            return None
        return max(-1.0, min(1.0, covariance / (variance_x * variance_y) ** 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and maximum over ranks of a measured time. Both are averaged over steps."""

    mean_s: float  # mean over ranks
    max_s: float  # maximum over ranks
    max_rank: int  # number of the rank that has the maximum; the lowest if there are several


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Model FLOPs and wall time of executed steps. Adding two `Work` records sums their steps."""

    rank_s: float = 0.0  # wall time of the steps times number of ranks
    # FLOPs of forward and backward (3 x forward) for document tokens, with attention only within
    # documents. Recomputation and padding are not counted.
    model_flops: float = 0.0
    # like `model_flops`, but with attention over whole context windows. Megatron-LM counts in this
    # way, which overstates the attention of documents shorter than the window.
    window_flops: float = 0.0
    # FLOPs that all devices could have done in this time at their peak speed; 0 if unknown
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
        """Model TFLOP/s of a rank, with attention only within documents; mean over ranks."""
        return self.model_flops / self.rank_s * 1e-12 if self.rank_s else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs / peak FLOPs, with attention only within documents; None if unknown."""
        return self.model_flops / self.peak_flops if self.peak_flops else None

    @property
    def window_tflops(self) -> float:
        """Like `tflops`, but counts attention over whole context windows, as Megatron-LM does."""
        return self.window_flops / self.rank_s * 1e-12 if self.rank_s else 0.0

    @property
    def window_mfu(self) -> float | None:
        """Like `mfu`, but counts attention over whole context windows, as Megatron-LM does."""
        return self.window_flops / self.peak_flops if self.peak_flops else None

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of the fields and of the rates derived from them, such as `mfu`."""
        derived = ("tflops", "mfu", "window_tflops", "window_mfu")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Work":
        """Make the record from what `to_json` returned. The rates in it are not read."""
        return cls(**{f.name: data[f.name] for f in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Measured and predicted times of `num_steps` consecutive steps.

    The forward latency of a micro-batch is the time in decoder layers of the slowest CP and TP rank
    of each pipeline stage, summed over the stages (Section 7.4). Times in nanoseconds are summed
    over the steps. Times in seconds are means over ranks and steps.
    """

    num_steps: int  # number of steps since the previous record, the present step included
    slowest_ns: int  # measured forward latency of each step's slowest micro-batch
    mean_ns: float  # measured forward latency, mean over each step's micro-batches
    predicted_slowest_ns: int  # predicted forward latency of each step's slowest micro-batch
    predicted_mean_ns: float  # predicted forward latency, mean over each step's micro-batches
    whole_slowest_ns: int  # like `slowest_ns`, but including embedding, head and loss
    whole_mean_ns: float  # like `mean_ns`, but including embedding, head and loss
    # for each name in `TERMS`, statistics of predicted and measured times
    terms: tuple[tuple[str, Moments], ...]
    embedding_s: float  # measured time of the embedding; with FSDP, also its parameters' all-gather
    head_s: float  # measured time of head and loss
    compute: Spread  # time that ranks spend in passes
    bubble: Spread  # time of the step that ranks do not spend in passes
    predicted_embedding_s: float = 0.0  # predicted time of the embedding
    predicted_head_s: float = 0.0  # predicted time of head and loss
    loading_s: float = 0.0  # time that a rank waits for inputs
    planning_s: float = 0.0  # time that a rank waits for plans
    # time that a rank's training thread spends on timestamps and on writing records
    records_s: float = 0.0
    step_s: float = 0.0  # wall time of a step
    work: Work | None = None  # model FLOPs of the steps; None in files of early versions

    @property
    def overhead_s(self) -> float:
        """Sum of `loading_s`, `planning_s` and `records_s`: seconds per step, mean over ranks."""
        return self.loading_s + self.planning_s + self.records_s

    @property
    def head_ratio(self) -> float | None:
        """Measured time of head and loss divided by predicted time; None without prediction."""
        return self.head_s / self.predicted_head_s if self.predicted_head_s else None

    @property
    def imbalance(self) -> float:
        """Measured forward imbalance, in which each step is weighted by its time."""
        return _degree(self.slowest_ns, self.mean_ns)

    @property
    def predicted_imbalance(self) -> float:
        """Predicted forward imbalance, in which each step is weighted by its time."""
        return _degree(self.predicted_slowest_ns, self.predicted_mean_ns)

    @property
    def whole_imbalance(self) -> float:
        """Measured forward imbalance like `imbalance`, but including embedding, head and loss."""
        return _degree(self.whole_slowest_ns, self.whole_mean_ns)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of the fields and of values derived from them, for metrics.jsonl."""
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
        """Make the record from what `to_json` of any version of wlb returned.

        Values that `to_json` computes from other fields, such as `imbalance`, are not read.
        """
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
