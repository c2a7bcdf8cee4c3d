"""Totals over the steps of a run, for the summary at the end of training and for `wlb report`."""

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
    """Predicted imbalance with the run's packing and with the usual loader, on the same documents.

    Imbalance is the time of the slowest micro-batch of each step, summed over steps, divided by the
    mean time of a micro-batch, also summed over steps. Times are forward and backward together.
    `wlb plan`, `tune`, `simulate`, `train` and `report` all show these figures.
    """

    usual: float  # imbalance with the usual loader
    ours: float  # imbalance with the run's settings

    @property
    def saved(self) -> float:
        """Fraction by which the run's imbalance is below the usual loader's; may be negative."""
        return 1 - self.ours / self.usual

    def to_json(self) -> dict[str, float]:
        """Return `usual`, `ours` and `saved` under these names."""
        return {**self._asdict(), "saved": self.saved}

    def __str__(self) -> str:
        less = f"{self.saved:.1%} less" if self.saved >= 0 else f"{-self.saved:.1%} more"
        return (
            f"imbalance {self.ours:.3f}, with the usual loader {self.usual:.3f}: the slowest "
            f"micro-batches take {less} time"
        )


@dataclass(slots=True)
class Share:
    """Predicted metrics summed over steps, for the run's packing or for the usual loader."""

    ratios: float = 0.0  # imbalance, summed over steps
    slowest_ns: float = 0.0  # predicted time of the slowest micro-batch, summed over steps
    mean_ns: float = 0.0  # predicted time, mean over a step's micro-batches, summed over steps
    tokens: int = 0  # document tokens
    steps: int = 0  # number of steps

    def add(self, metrics: StepMetrics) -> None:
        """Add the metrics of a step, or of several steps that were merged into one record."""
        degrees = degrees_of(metrics)
        self.ratios += sum(degrees)
        self.slowest_ns += metrics.max_workload_ns
        self.mean_ns += metrics.mean_workload_ns
        self.tokens += metrics.num_tokens
        self.steps += len(degrees)

    @property
    def mean_imbalance(self) -> float:
        """Mean over steps of the imbalance (Section 7.4); every step counts equally."""
        return self.ratios / self.steps if self.steps else 1.0

    @property
    def weighted_imbalance(self) -> float:
        """Mean over steps of the imbalance, in which each step is weighted by its time."""
        return self.slowest_ns / self.mean_ns if self.mean_ns else 1.0


@dataclass(slots=True)
class MeasuredShare:
    """Measured and predicted times (`Telemetry`). Each field is a sum over the steps of a run."""

    steps: int = 0  # number of steps
    degrees: float = 0.0  # measured imbalance, summed over steps
    slowest_ns: float = 0.0  # measured forward time of each step's slowest micro-batch
    mean_ns: float = 0.0  # measured forward time, mean over each step's micro-batches
    predicted_slowest_ns: float = 0.0  # predicted forward time of each step's slowest micro-batch
    predicted_mean_ns: float = 0.0  # predicted forward time, mean over each step's micro-batches
    loading_s: float = 0.0  # time that a rank waits for inputs, mean over ranks
    planning_s: float = 0.0  # time that a rank waits for plans, mean over ranks
    # time that a rank spends on timestamps and records, mean over ranks
    records_s: float = 0.0
    step_s: float = 0.0  # wall time of the steps
    work: Work = field(default_factory=Work)  # model FLOPs and wall time, summed over the steps
    # for each name in `wlb.plan.telemetry.TERMS`, statistics of predicted and measured times
    terms: dict[str, Moments] = field(default_factory=dict[str, Moments])
    # for "compute" and "bubble": the mean over ranks and the maximum over ranks, each in seconds
    # and summed over steps
    spreads: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    # for "compute" and "bubble": in how many steps each rank had the maximum
    slowest_ranks: dict[str, Counter[int]] = field(default_factory=dict[str, Counter[int]])

    def add(self, record: Telemetry) -> None:
        """Add a telemetry record, which covers one or more steps."""
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
        """Return the compute or bubble time of a step as mean and maximum over ranks.

        Both are averaged over steps.

        Args:
            name: "compute" (time in passes) or "bubble" (the rest of the step).

        Returns:
            The mean over ranks in seconds, the maximum over ranks in seconds, and the number of the
            rank that had the maximum in most steps.
        """
        mean, largest = self.spreads[name]
        rank = self.slowest_ranks[name].most_common(1)[0][0]
        return mean / self.steps, largest / self.steps, rank


class NamedStraggler(NamedTuple):
    """A slow rank, and the tables of all ranks' times (`RankTable`) that list it as slow."""

    worst: Straggler  # the rank's entry in the table in which it was slowest
    num_tables: int  # number of tables that list the rank as slow
    first: int  # steps that the run had executed at the first of these tables
    last: int  # steps that the run had executed at the last of these tables


@dataclass(slots=True)
class Stragglers:
    """The slow ranks of a run, collected from its tables of all ranks' times (`RankTable`)."""

    num_tables: int = 0  # number of all tables, with or without slow ranks
    # the slow ranks, by rank number
    by_rank: dict[int, NamedStraggler] = field(default_factory=dict[int, NamedStraggler])

    def add(self, table: RankTable) -> None:
        """Add the ranks that a table lists as slow."""
        self.num_tables += 1
        for now in table.stragglers:
            at = table.steps_done
            worst, count, first, _ = self.by_rank.get(now.rank, NamedStraggler(now, 0, at, at))
            slowest = now if now.over > worst.over else worst
            self.by_rank[now.rank] = NamedStraggler(slowest, count + 1, first, at)

    @property
    def worst_first(self) -> list[NamedStraggler]:
        """The slow ranks, in order from the slowest to the least slow."""
        return sorted(self.by_rank.values(), key=lambda named: -named.worst.over)


@dataclass(slots=True)
class Saves:
    """The checkpoints of a run. Each is identified by the number of steps executed before it."""

    # seconds for which training waited while each checkpoint was saved
    stall_s: dict[int, float] = field(default_factory=dict[int, float])
    failed: set[int] = field(default_factory=set[int])  # checkpoints that could not be written

    def add(self, step: int, stall_s: float, error: str) -> None:
        """Record that a save has ended. A repeated save replaces the record of the first one.

        Args:
            step: Number of steps executed before the checkpoint.
            stall_s: Seconds for which training waited.
            error: Message of the error that prevented the save; "" if it succeeded.
        """
        self.stall_s[step] = stall_s
        if error:
            self.failed.add(step)
        else:
            self.failed.discard(step)


@dataclass(slots=True)
class Tally:
    """Totals over the steps of a run, from which the summary at its end is written."""

    ours: Share = field(default_factory=Share)  # predicted metrics of the run's packing
    plain: Share = field(default_factory=Share)  # predicted metrics of the usual loader
    # mean loss of each step that updated the weights, in order
    losses: list[float] = field(default_factory=list[float])
    step_tokens: list[int] = field(default_factory=list[int])  # tokens of each step, in order
    # for each evaluation: how many steps had been executed, and the held-out loss
    heldout: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    # for each sharding strategy: number of micro-batches that it divided
    shardings: dict[str, int] = field(default_factory=dict[str, int])
    key_rows: KeyRows = KeyRows()  # rows of keys that CP ranks sent each other
    # `MeasuredStep.expert_load` of each step, in order
    expert_loads: list[float] = field(default_factory=list[float])
    # load of experts for each layer and EP rank
    experts: ExpertLoads = field(default_factory=ExpertLoads)
    token_delays: float = 0.0  # delay of each token in steps, summed over tokens
    max_delay: int = 0  # longest delay of a token, in steps
    overdue: int = 0  # pieces trained more than packing.max_delay steps after they were read
    padding: int = 0  # tokens of padding
    held: int = 0  # tokens of documents that still wait after the last step
    train_time_s: float = 0.0  # wall time of all steps
    # measured times, without the first steps, which warm up
    telemetry: MeasuredShare = field(default_factory=MeasuredShare)
    stragglers: Stragglers = field(default_factory=Stragglers)  # slow ranks
    saves: Saves = field(default_factory=Saves)  # checkpoints
    # number of steps whose loss or gradient was not finite, by what the run did after such a step
    refused: Counter[str] = field(default_factory=Counter[str])
    skipped_tokens: int = 0  # tokens of steps that were skipped for this reason
    # further lines of the summary, which hooks add: the text of each line by its name
    rows: dict[str, str] = field(default_factory=dict[str, str])
    stopped: str = ""  # why the run ended early and at which step, as text; "" if it did not

    def add(
        self, measured: MeasuredStep, predicted: StepMetrics, plain: StepMetrics | None
    ) -> None:
        """Add an executed step.

        Args:
            measured: Measurements of the step.
            predicted: Predicted metrics of the step.
            plain: `StepPlan.baseline`: predicted metrics of the usual loader, or None.
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
        """Delay of a token (steps between reading and training it), mean over tokens."""
        return self.token_delays / self.ours.tokens if self.ours.tokens else 0.0

    @property
    def balance(self) -> BalanceGain:
        """Predicted imbalance with the run's packing and with the usual loader.

        Times per token would not be a fair comparison: the usual loader cuts documents and
        therefore computes less attention.
        """
        return BalanceGain(self.plain.weighted_imbalance, self.ours.weighted_imbalance)

    @property
    def padding_share(self) -> float:
        """Number of padding tokens divided by the number of document tokens."""
        return self.padding / max(1, self.ours.tokens)

    def rolled_back(self, until: "Tally") -> "Tally":
        """Return the tally of a run that goes back to an earlier step and repeats later steps.

        Args:
            until: Tally at the earlier step.

        Returns:
            A copy of `until`, but with this tally's counts of checkpoints (`saves`) and of steps
            with a non-finite loss or gradient (`refused`), and its further lines of the summary
            (`rows`). These events have happened, even if their steps are repeated.
        """
        kept = ("saves", "refused", "rows")
        return replace(deepcopy(until), **{name: getattr(self, name) for name in kept})
