"""Sums over the steps of a run, for the summary of training and for the page of a run."""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wlb.plan.exchange import KeyRows
from wlb.plan.expert_load import ExpertLoads
from wlb.plan.metrics import MeasuredStep, StepMetrics, degrees_of
from wlb.plan.ranks import RankTable, Straggler
from wlb.plan.telemetry import Moments, Spread, Telemetry, Work


class BalanceGain(NamedTuple):
    """What balance gains over the usual loader on the same documents, predicted.

    Imbalance is that of forward and backward: the slowest micro-batches of all steps over the mean
    ones. `wlb plan`, `tune`, `simulate`, `train` and `report` have these two figures.
    """

    usual: float  # imbalance with the usual loader, which cuts documents where windows end
    ours: float  # imbalance with the run's settings

    @property
    def saved(self) -> float:
        """Share of the slowest micro-batches' time that is saved; below 0 if it is more."""
        return 1 - self.ours / self.usual

    def to_json(self) -> dict[str, float]:
        """Both figures and what is saved, for `json.dumps`."""
        return {**self._asdict(), "saved": self.saved}

    def __str__(self) -> str:
        less = f"{self.saved:.1%} less" if self.saved >= 0 else f"{-self.saved:.1%} more"
        return (
            f"imbalance {self.ours:.3f}, with the usual loader {self.usual:.3f}: the slowest "
            f"micro-batches take {less} time"
        )


@dataclass(slots=True)
class Share:
    """Predicted sums over the steps of one packing: ours or the usual loader's."""

    ratios: float = 0.0
    slowest_ns: float = 0.0
    mean_ns: float = 0.0
    tokens: int = 0
    steps: int = 0

    def add(self, metrics: StepMetrics) -> None:
        degrees = degrees_of(metrics)
        self.ratios += sum(degrees)
        self.slowest_ns += metrics.max_workload_ns
        self.mean_ns += metrics.mean_workload_ns
        self.tokens += metrics.num_tokens
        self.steps += len(degrees)

    @property
    def mean_imbalance(self) -> float:
        """Mean of the steps' imbalance degrees (Section 7.4)."""
        return self.ratios / self.steps if self.steps else 1.0

    @property
    def weighted_imbalance(self) -> float:
        """Sum of the slowest micro-batches over sum of the means, so that slow steps count more."""
        return self.slowest_ns / self.mean_ns if self.mean_ns else 1.0


@dataclass(slots=True)
class MeasuredShare:
    """Sums over telemetry records, weighted by their steps."""

    steps: int = 0
    degrees: float = 0.0
    slowest_ns: float = 0.0
    mean_ns: float = 0.0
    predicted_slowest_ns: float = 0.0
    predicted_mean_ns: float = 0.0
    loading_s: float = 0.0
    planning_s: float = 0.0
    records_s: float = 0.0
    step_s: float = 0.0
    work: Work = field(default_factory=Work)
    terms: dict[str, Moments] = field(default_factory=dict[str, Moments])
    spreads: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    slowest_ranks: dict[str, Counter[int]] = field(default_factory=dict[str, Counter[int]])

    def add(self, record: Telemetry) -> None:
        num = record.num_steps
        self.steps += num
        self.degrees += record.imbalance * num
        self.slowest_ns += record.slowest_ns
        self.mean_ns += record.mean_ns
        self.predicted_slowest_ns += record.predicted_slowest_ns
        self.predicted_mean_ns += record.predicted_mean_ns
        self.loading_s += record.loading_s * num
        self.planning_s += record.planning_s * num
        self.records_s += record.records_s * num
        self.step_s += record.step_s * num
        self.work += record.work or Work()
        for name, moments in record.terms:
            self.terms[name] = self.terms.get(name, Moments()) + moments
        for name in ("compute", "bubble"):
            spread: Spread = getattr(record, name)
            mean, largest = self.spreads.get(name, (0.0, 0.0))
            self.spreads[name] = (mean + spread.mean_s * num, largest + spread.max_s * num)
            self.slowest_ranks.setdefault(name, Counter())[spread.max_rank] += num

    def spread(self, name: str) -> tuple[float, float, int]:
        """Mean rank's and slowest rank's seconds a step, and which rank that was most often."""
        mean, largest = self.spreads[name]
        rank = self.slowest_ranks[name].most_common(1)[0][0]
        return mean / self.steps, largest / self.steps, rank


class NamedStraggler(NamedTuple):
    """worst: the rank as when it was slowest. num_tables: tables that named it; first, last: the
    steps_done of the first and the last of them.
    """

    worst: Straggler
    num_tables: int
    first: int
    last: int


@dataclass(slots=True)
class Stragglers:
    """Ranks that were named in tables of ranks. num_tables: tables that were seen."""

    num_tables: int = 0
    by_rank: dict[int, NamedStraggler] = field(default_factory=dict[int, NamedStraggler])

    def add(self, table: RankTable) -> None:
        self.num_tables += 1
        for now in table.stragglers:
            at = table.steps_done
            worst, count, first, _ = self.by_rank.get(now.rank, NamedStraggler(now, 0, at, at))
            slowest = now if now.over > worst.over else worst
            self.by_rank[now.rank] = NamedStraggler(slowest, count + 1, first, at)

    @property
    def worst_first(self) -> list[NamedStraggler]:
        return sorted(self.by_rank.values(), key=lambda named: -named.worst.over)


@dataclass(slots=True)
class Saves:
    """Checkpoints of a run, by executed steps. stall_s: how long training waited for each. failed:
    those that could not be written.
    """

    stall_s: dict[int, float] = field(default_factory=dict[int, float])
    failed: set[int] = field(default_factory=set[int])

    def add(self, step: int, stall_s: float, error: str) -> None:
        """A save ended; the same one may be added twice."""
        self.stall_s[step] = stall_s
        if error:
            self.failed.add(step)
        else:
            self.failed.discard(step)


@dataclass(slots=True)
class Tally:
    """Contents of the summary. losses: mean loss of each step, in order. step_tokens: tokens that
    each step trained, in order. heldout: loss after
    executed steps. expert_loads: `MeasuredStep.expert_load` of each step, in order; experts: their
    layers and ranks. overdue: pieces later than packing.max_delay. telemetry: records after the
    warm-up. refused: steps that were not finite, by the action taken;
    skipped_tokens: tokens of skipped ones. rows: of hooks, by name. stopped: at which step and by
    what the run was asked to end early, in words.
    """

    ours: Share = field(default_factory=Share)
    plain: Share = field(default_factory=Share)
    losses: list[float] = field(default_factory=list[float])
    step_tokens: list[int] = field(default_factory=list[int])
    heldout: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    shardings: dict[str, int] = field(default_factory=dict[str, int])
    key_rows: KeyRows = KeyRows()
    expert_loads: list[float] = field(default_factory=list[float])
    experts: ExpertLoads = field(default_factory=ExpertLoads)
    token_delays: float = 0.0
    max_delay: int = 0
    overdue: int = 0
    padding: int = 0
    held: int = 0
    train_time_s: float = 0.0
    telemetry: MeasuredShare = field(default_factory=MeasuredShare)
    stragglers: Stragglers = field(default_factory=Stragglers)
    saves: Saves = field(default_factory=Saves)
    refused: Counter[str] = field(default_factory=Counter[str])
    skipped_tokens: int = 0
    rows: dict[str, str] = field(default_factory=dict[str, str])
    stopped: str = ""

    def add(
        self, measured: MeasuredStep, predicted: StepMetrics, plain: StepMetrics | None
    ) -> None:
        self.ours.add(predicted)
        if plain is not None:
            self.plain.add(plain)
        self.step_tokens.append(measured.num_tokens)
        if measured.loss is not None:
            self.losses.append(measured.loss)
        for name, count in measured.sharding_counts:
            self.shardings[name] = self.shardings.get(name, 0) + count
        self.key_rows += measured.key_rows or KeyRows()
        if measured.expert_load is not None:
            self.expert_loads.append(measured.expert_load)
        if measured.experts is not None:
            self.experts.add(measured.experts, attention=measured.cp_imbalance)
        self.token_delays += measured.mean_delay * measured.num_tokens
        self.max_delay = max(self.max_delay, measured.max_delay)
        self.overdue += predicted.num_overdue
        self.padding += measured.num_padding_tokens
        self.held = measured.num_held_tokens
        self.train_time_s += measured.step_time_s or 0.0

    @property
    def mean_delay(self) -> float:
        return self.token_delays / self.ours.tokens if self.ours.tokens else 0.0

    @property
    def balance(self) -> BalanceGain:
        """Not a ratio of times per token: the usual loader cuts documents at window ends, and so
        computes less attention.
        """
        return BalanceGain(self.plain.weighted_imbalance, self.ours.weighted_imbalance)

    @property
    def padding_share(self) -> float:
        """Padding tokens over the documents' tokens."""
        return self.padding / max(1, self.ours.tokens)

    def rolled_back(self, until: "Tally") -> "Tally":
        """Sums over steps as of `until`, an earlier tally; counters that are not tied to steps stay
        as they are.
        """
        kept = ("saves", "refused", "rows")
        return replace(deepcopy(until), **{name: getattr(self, name) for name in kept})
