"""Sums over the steps of a run, for the summary at the end of training and for `wlb report`."""

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
    """Predicted gain of balanced packing over the usual loader on the same documents.

    Imbalance is taken of forward and backward together: the sum of the slowest micro-batches of all
    steps over the sum of the mean ones. `wlb plan`, `tune`, `simulate`, `train` and `report` all
    show these two figures.
    """

    usual: float  # imbalance with the usual loader
    ours: float  # imbalance with the run's settings

    @property
    def saved(self) -> float:
        """Share of the slowest micro-batches' time that is saved; negative if it grows."""
        return 1 - self.ours / self.usual

    def to_json(self) -> dict[str, float]:
        """Return both figures and the saved share."""
        return {**self._asdict(), "saved": self.saved}

    def __str__(self) -> str:
        less = f"{self.saved:.1%} less" if self.saved >= 0 else f"{-self.saved:.1%} more"
        return (
            f"imbalance {self.ours:.3f}, with the usual loader {self.usual:.3f}: the slowest "
            f"micro-batches take {less} time"
        )


@dataclass(slots=True)
class Share:
    """Sums of predicted metrics over the steps of one packing: ours or the usual loader's."""

    ratios: float = 0.0  # sum of the steps' imbalance
    slowest_ns: float = 0.0  # sum of the slowest micro-batches' times
    mean_ns: float = 0.0  # sum of the mean micro-batches' times
    tokens: int = 0
    steps: int = 0

    def add(self, metrics: StepMetrics) -> None:
        """Add a step, or the several steps that `merge` made into one record."""
        degrees = degrees_of(metrics)
        self.ratios += sum(degrees)
        self.slowest_ns += metrics.max_workload_ns
        self.mean_ns += metrics.mean_workload_ns
        self.tokens += metrics.num_tokens
        self.steps += len(degrees)

    @property
    def mean_imbalance(self) -> float:
        """Mean of the steps' imbalance (Section 7.4)."""
        return self.ratios / self.steps if self.steps else 1.0

    @property
    def weighted_imbalance(self) -> float:
        """Sum of the slowest micro-batches over sum of the mean ones; slow steps count more."""
        return self.slowest_ns / self.mean_ns if self.mean_ns else 1.0


@dataclass(slots=True)
class MeasuredShare:
    """Sums over telemetry records, each weighted by its number of steps."""

    steps: int = 0  # number of steps
    degrees: float = 0.0  # sum of measured imbalance
    slowest_ns: float = 0.0
    mean_ns: float = 0.0
    predicted_slowest_ns: float = 0.0
    predicted_mean_ns: float = 0.0
    loading_s: float = 0.0
    planning_s: float = 0.0
    records_s: float = 0.0
    step_s: float = 0.0
    work: Work = field(default_factory=Work)
    # statistics of each of `TERMS`
    terms: dict[str, Moments] = field(default_factory=dict[str, Moments])
    # by name (compute, bubble): sums of the mean rank's and of the slowest rank's seconds
    spreads: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    # by name: how many steps each rank was the slowest
    slowest_ranks: dict[str, Counter[int]] = field(default_factory=dict[str, Counter[int]])

    def add(self, record: Telemetry) -> None:
        """Add the record of one or more steps."""
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
        """Return the mean and the slowest rank's seconds a step, and the slowest rank's number.

        The slowest rank may change between steps; the one that was slowest in most steps is named.
        """
        mean, largest = self.spreads[name]
        rank = self.slowest_ranks[name].most_common(1)[0][0]
        return mean / self.steps, largest / self.steps, rank


class NamedStraggler(NamedTuple):
    """A straggler and the tables of ranks that named it."""

    worst: Straggler  # the rank's entry in the table in which it was slowest
    num_tables: int  # tables that named it
    first: int  # `steps_done` of the first of these tables
    last: int  # `steps_done` of the last of these tables


@dataclass(slots=True)
class Stragglers:
    """Ranks that tables of ranks named as slow."""

    num_tables: int = 0  # all tables that were added
    by_rank: dict[int, NamedStraggler] = field(default_factory=dict[int, NamedStraggler])

    def add(self, table: RankTable) -> None:
        """Add the stragglers of a table."""
        self.num_tables += 1
        for now in table.stragglers:
            at = table.steps_done
            worst, count, first, _ = self.by_rank.get(now.rank, NamedStraggler(now, 0, at, at))
            slowest = now if now.over > worst.over else worst
            self.by_rank[now.rank] = NamedStraggler(slowest, count + 1, first, at)

    @property
    def worst_first(self) -> list[NamedStraggler]:
        """Named ranks, the slowest first."""
        return sorted(self.by_rank.values(), key=lambda named: -named.worst.over)


@dataclass(slots=True)
class Saves:
    """Checkpoints of a run, by the number of executed steps."""

    # seconds for which training waited for each save
    stall_s: dict[int, float] = field(default_factory=dict[int, float])
    failed: set[int] = field(default_factory=set[int])  # saves that could not be written

    def add(self, step: int, stall_s: float, error: str) -> None:
        """Record the end of a save; the same save may be recorded twice."""
        self.stall_s[step] = stall_s
        if error:
            self.failed.add(step)
        else:
            self.failed.discard(step)


@dataclass(slots=True)
class Tally:
    """Sums over the steps of a run, from which the summary is written."""

    ours: Share = field(default_factory=Share)  # predicted metrics of the run's packing
    plain: Share = field(default_factory=Share)  # predicted metrics of the usual loader
    # mean loss of each step, in order; steps without an update have none
    losses: list[float] = field(default_factory=list[float])
    step_tokens: list[int] = field(default_factory=list[int])  # tokens of each step, in order
    # (executed steps, held-out loss) of each evaluation
    heldout: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    # number of micro-batches by sharding strategy
    shardings: dict[str, int] = field(default_factory=dict[str, int])
    key_rows: KeyRows = KeyRows()  # rows that CP ranks exchanged
    # `MeasuredStep.expert_load` of each step, in order
    expert_loads: list[float] = field(default_factory=list[float])
    # load of experts by layer and EP rank
    experts: ExpertLoads = field(default_factory=ExpertLoads)
    token_delays: float = 0.0  # sum of the delays of all tokens, in steps
    max_delay: int = 0  # longest delay of a piece, in steps
    overdue: int = 0  # pieces trained later than packing.max_delay
    padding: int = 0  # padding tokens
    held: int = 0  # tokens that wait after the last step
    train_time_s: float = 0.0
    # measured times after the warm-up
    telemetry: MeasuredShare = field(default_factory=MeasuredShare)
    stragglers: Stragglers = field(default_factory=Stragglers)  # slow ranks
    saves: Saves = field(default_factory=Saves)  # checkpoints
    # number of steps with a loss or gradient that was not finite, by the action taken
    refused: Counter[str] = field(default_factory=Counter[str])
    skipped_tokens: int = 0  # tokens of such steps that were skipped
    # further lines of the summary, which hooks set by name
    rows: dict[str, str] = field(default_factory=dict[str, str])
    stopped: str = ""  # who or what ended the run early and at which step, in words

    def add(
        self, measured: MeasuredStep, predicted: StepMetrics, plain: StepMetrics | None
    ) -> None:
        """Add an executed step.

        Args:
            measured: Its measurements.
            predicted: Its predicted metrics.
            plain: Predicted metrics of the usual loader for the same documents, if they are due.
        """
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
        """Mean delay over tokens, in steps."""
        return self.token_delays / self.ours.tokens if self.ours.tokens else 0.0

    @property
    def balance(self) -> BalanceGain:
        """Predicted gain of the run's packing over the usual loader.

        It compares imbalance and not times per token: the usual loader cuts documents, and
        therefore computes less attention.
        """
        return BalanceGain(self.plain.weighted_imbalance, self.ours.weighted_imbalance)

    @property
    def padding_share(self) -> float:
        """Padding tokens over document tokens."""
        return self.padding / max(1, self.ours.tokens)

    def rolled_back(self, until: "Tally") -> "Tally":
        """Return a copy of an earlier tally, except for counters that are not tied to steps.

        Saves, refused steps and rows of hooks keep their present values: repeating steps does not
        undo them.
        """
        kept = ("saves", "refused", "rows")
        return replace(deepcopy(until), **{name: getattr(self, name) for name in kept})
