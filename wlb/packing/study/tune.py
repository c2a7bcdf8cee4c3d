"""Tunes packing on a sample of documents, which automates the procedure of Section 4.2.

It tries the number and values of queue thresholds, S_max and T for Algorithm 1, and S_max, T and
the delay price for `bounded`. It recommends the setting with the least imbalance within a budget of
mean delay (0.5 steps, the paper's figure), or the one with the least delay if all exceed it.

The result also has the Pareto front: the settings for which no other setting is at least as good in
all of OBJECTIVES. These are time-weighted imbalance, the mean, 99th percentile and maximum of the
delay, and how much the tokens of a step vary.
Cost: each setting packs the sample once, in 0.1 s for 160 steps of 240 documents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import sqrt
from typing import Any

from wlb.cost import WorkloadModel
from wlb.packing.bounded import DELAY_PRICE
from wlb.packing.policies import has_room, packer_for
from wlb.packing.study.measure import PackingSummary, measure
from wlb.plan import GlobalBatch, UserError, check_at_least
from wlb.spec import PackingSection, Policy, RunSpec

THRESHOLDS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.63, 0.8)
"""Outlier thresholds L_i of Algorithm 1 that are tried, in context windows."""
S_MAX = (1.1, 1.5, 2.0)
"""Values of S_max that are tried, in context windows."""
STEP_TOKENS = (0.0, 1.1, 1.5)
"""Values of T that are tried, in global batches; 0 = no cap."""
PRICES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Delay prices of the policy `bounded` that are tried, as multiples of its default."""
OBJECTIVES = ("step_time_weighted", "mean_delay", "p99_delay", "max_delay", "tokens_cv")
"""Fields of `PackingSummary` by which settings are compared for the Pareto front. In each of them,
less is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningGrid:
    """The values of [packing] settings that are tried, in all combinations."""

    policies: tuple[Policy, ...] = (Policy.VAR_LEN, Policy.BOUNDED)  # VAR_LEN is Algorithm 1
    thresholds: tuple[float, ...] = THRESHOLDS  # L_i of Algorithm 1, in context windows
    max_queues: int = 2  # most outlier queues of Algorithm 1
    s_max: tuple[float, ...] = S_MAX  # S_max, in context windows
    step_tokens: tuple[float, ...] = STEP_TOKENS  # T, in global batches; 0 = no cap
    prices: tuple[float, ...] = PRICES  # delay prices of `bounded`, as multiples of the default

    def __post_init__(self) -> None:
        for name in ("policies", "s_max", "step_tokens"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; give at least one value to try")
        unknown = [p for p in self.policies if p not in (Policy.VAR_LEN, Policy.BOUNDED)]
        if unknown:
            raise UserError(
                f"policy {unknown[0]} has no settings to tune; use {Policy.VAR_LEN} or "
                f"{Policy.BOUNDED}"
            )
        none = [p for p in self.prices if not 0 < p < float("inf")]
        if none:
            raise UserError(
                f"prices contains {none[0]}, but each value must be finite and above 0; give "
                "factors by which to multiply the default delay price, such as 0.5 or 2"
            )
        bad = [t for t in self.thresholds if not 0 < t <= 1]
        if bad:
            raise UserError(
                f"threshold {bad[0]} must be above 0 and at most 1; thresholds are fractions of "
                "the context window"
            )
        check_at_least("max_queues", self.max_queues, 0)

    def sections(self, spec: RunSpec) -> Iterator[PackingSection]:
        """Yield the [packing] sections to try: the run's with each combination of values."""
        num_micro_batches = spec.num_micro_batches
        base = spec.packing.ungrouped
        for s_max in self.s_max:
            for step_tokens in self.step_tokens:
                if step_tokens and step_tokens >= s_max * num_micro_batches / spec.num_windows:
                    # N micro-batches of S_max tokens stay below this T, so this T has no effect.
                    continue
                capped = replace(base, s_max=s_max, step_tokens=step_tokens, hold=0)
                if Policy.VAR_LEN in self.policies:
                    yield from self._queues(replace(capped, policy=Policy.VAR_LEN))
                if Policy.BOUNDED in self.policies and s_max > 1:
                    for price in self.prices:
                        price_of_n = price * DELAY_PRICE / sqrt(num_micro_batches)
                        yield replace(capped, policy=Policy.BOUNDED, delay_price=price_of_n)

    def _queues(self, section: PackingSection) -> Iterator[PackingSection]:
        values = tuple(sorted(set(self.thresholds)))
        for num in range(self.max_queues + 1):
            for thresholds in combinations(values, num):
                yield replace(section, queue_thresholds=thresholds)

    def size(self, spec: RunSpec) -> int:
        """Return the number of [packing] sections to try, including those that are then skipped.

        `tune_points` skips settings whose steps cannot have as many tokens as a global batch.
        """
        return sum(1 for _ in self.sections(spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePoint:
    """A [packing] section that was tried, and its result on the sample of global batches."""

    section: PackingSection  # the setting
    summary: PackingSummary  # result of the setting on the sample
    # the run's own section; `overrides` are what changes it to `section`
    own: PackingSection = PackingSection()

    @property
    def objectives(self) -> tuple[float, ...]:
        """Values of the fields OBJECTIVES, by which settings are compared; less is better."""
        return tuple(float(getattr(self.summary, name)) for name in OBJECTIVES)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Arguments of the option `--set` that give the run this setting."""
        s = self.section
        out = ["packing.method="] if self.own.method else []
        out += ["packing.packs="] if self.own.packs else []
        out += [f"packing.layout={s.layout}"] if self.own.layout != s.layout else []
        out += [f"packing.policy={s.policy}", f"packing.s_max={s.s_max:g}"]
        out.append(f"packing.step_tokens={s.step_tokens:g}")
        if s.policy == Policy.VAR_LEN:
            listed = ",".join(f"{t:g}" for t in s.queue_thresholds)
            out.append(f"packing.queue_thresholds=[{listed}]")
            out += ["packing.hold=0"] if self.own.hold else []
        else:
            out.append(f"packing.delay_price={s.delay_price:.4g}")
        return tuple(out)

    def to_json(self) -> dict[str, Any]:
        """Return the setting and its result, for `json.dumps`."""
        return {"set": list(self.overrides), **self.summary.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The results of tuning."""

    points: tuple[TunePoint, ...]  # all settings that were tried
    # Pareto front, sorted by imbalance: for each of these settings, no other one is at least as
    # good in all OBJECTIVES.
    front: tuple[TunePoint, ...]
    recommended: TunePoint  # the setting that is recommended
    delay_budget: float  # largest mean delay in steps that a recommendation should have

    @property
    def is_within_budget(self) -> bool:
        """Whether the recommended setting stays within the delay budget."""
        return self.recommended.summary.mean_delay <= self.delay_budget


def tune(
    spec: RunSpec,
    batches: Sequence[GlobalBatch],
    cost: WorkloadModel,
    *,
    grid: TuningGrid | None = None,
    delay_budget: float = 0.5,
) -> Tuning:
    """Try every setting of `grid` on the same `batches`, and recommend one.

    Args:
        spec: The run whose [packing] section is tuned.
        batches: A sample of global batches.
        cost: Workload model that predicts times.
        grid: The values to try. Defaults to `TuningGrid()`.
        delay_budget: Largest mean delay in steps that a recommendation should have.
    """
    points = tune_points(spec, batches, cost, grid=grid or TuningGrid())
    return finish(points, delay_budget=delay_budget)


def tune_points(
    spec: RunSpec, batches: Sequence[GlobalBatch], cost: WorkloadModel, *, grid: TuningGrid
) -> Iterator[TunePoint]:
    """Try every setting of a grid, and yield each result when it is ready.

    Settings whose steps cannot have as many tokens as a global batch are skipped.

    Args:
        spec: The run whose [packing] section is tuned.
        batches: A sample of global batches.
        cost: Workload model that predicts times.
        grid: The values to try.
    """
    for section in grid.sections(spec):
        if not has_room(spec, section):
            continue
        section.check(spec.data.context_window)
        packer = packer_for(replace(spec, packing=section), cost)
        run = measure(packer, batches, cost=cost, label=_label(section))
        yield TunePoint(section=section, summary=run.summary, own=spec.packing)


SAME = 0.002
"""Imbalances that differ by less than this are treated as equal, because such differences may be
noise of the sample. Among such settings the one with least delay is recommended."""


def finish(points: Iterator[TunePoint] | Sequence[TunePoint], *, delay_budget: float) -> Tuning:
    """Return the Pareto front of the settings that were tried, and recommend one of them.

    The recommended setting has the least imbalance among those whose mean delay is within the
    budget. If no setting is within the budget, the one with the least mean delay is recommended.

    Args:
        points: The settings that were tried, with their results.
        delay_budget: Largest mean delay in steps that a recommendation should have.

    Raises:
        UserError: If no setting made a step.
    """
    if not delay_budget >= 0:
        raise UserError(f"delay_budget = {delay_budget} must be at least 0 steps")
    tried = tuple(points)
    trained = [p for p in tried if p.summary.num_steps]
    if tried and not trained:
        raise UserError(
            f"none of the {len(tried)} settings trained a step, because all documents still waited "
            "when the data ended; give more global batches or higher thresholds"
        )
    if not tried:
        raise UserError(
            "no setting can be tried: with each s_max and step_tokens that were given, the "
            "micro-batches of a step are too small to hold a global batch, or too small ever to "
            "reach step_tokens; give a larger s_max, a smaller step_tokens, or step_tokens = 0 (no "
            "limit)"
        )
    good = [p for p in trained if p.summary.mean_delay <= delay_budget]
    if good:
        # Treat imbalances that differ by less than SAME as equal, because the difference may be
        # noise of the sample. Among such settings, the delay decides.
        least = min(p.summary.step_time_weighted for p in good) + SAME
        alike = [p for p in good if p.summary.step_time_weighted <= least]
        best = min(alike, key=lambda p: (p.summary.mean_delay, p.objectives))
    else:
        best = min(trained, key=lambda p: (p.summary.mean_delay, p.objectives))
    front = pareto_front(trained)
    return Tuning(points=tried, front=front, recommended=best, delay_budget=delay_budget)


def pareto_front(points: Sequence[TunePoint]) -> tuple[TunePoint, ...]:
    """Return the points that are not dominated, sorted by imbalance and without duplicates.

    A point is dominated if another one is at least as good in all OBJECTIVES.
    """
    front: list[TunePoint] = []
    for point in sorted(points, key=lambda p: p.objectives):
        mine = point.objectives
        if not any(all(a <= b for a, b in zip(f.objectives, mine, strict=True)) for f in front):
            front.append(point)
    return tuple(front)


def _label(section: PackingSection) -> str:
    caps = f"S {section.s_max:g}" + (f" T {section.step_tokens:g}" if section.step_tokens else "")
    if section.policy == Policy.VAR_LEN:
        queues = " ".join(f"{t:g}" for t in section.queue_thresholds) or "-"
        return f"var_len {caps} L {queues}"
    return f"bounded {caps} price {section.delay_price:.2g}"
