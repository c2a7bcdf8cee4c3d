"""Trains without computing: a planner, and ranks whose passes take the times of a hidden profile.

The planner, the ranks' cells, the votes and the decision are those of training (`Planner`,
`PriceMeter`, `LearnPrices`). Made up are the times alone: a hidden profile's, with noise on every
cell, a few cells that take much longer, and one slow rank. On a "cuda" device linear layers hold
the wait for the CP group's slowest rank, as they do on one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from experiments.configurations import configuration
from wlb.cost import (
    ProfiledWorkload,
    StageLayers,
    StageTimes,
    load_profile,
    price_base,
    repriced,
    stage_times,
    without_collectives,
    workload_of,
)
from wlb.data import GlobalBatches, lengths_of_family
from wlb.parallel.mesh import Coordinates, coordinates, rank_grid
from wlb.parallel.observe import Cell, Part, Pass
from wlb.plan import (
    NO_CHANGES,
    PackingPlan,
    PipelinePlan,
    PlannerState,
    PriceFactors,
    PriceSchedule,
    StepPlan,
    imbalance,
)
from wlb.plan.prices import UNIT
from wlb.planner import Planner
from wlb.spec import RunSpec
from wlb.train.telemetry.clock import StepTimes
from wlb.train.telemetry.prices import LearnPrices, PriceMeter

NOISE, OUTLIERS, OUTLIER_TIMES = 0.04, 0.02, 5.0
"""Standard deviation of a cell's logarithm; share of cells that take much longer, and how much."""
SLOW = 1.2
BOUNDED = ("packing.policy=bounded", "packing.s_max=2.0", "packing.step_tokens=1.5")


def run_spec(*, ranks: int = 16, changes: tuple[str, ...] = ()) -> RunSpec:
    """Returns the 7B run with a window of 64K on CP 2 x PP 4 and as many pipelines as fit."""
    dp = ranks // 8
    layout = ("parallel.tp=1", "parallel.cp=2", "parallel.pp=4", f"parallel.dp={dp}")
    more = ("pp.virtual_stages=1", f"data.num_windows={4 * dp}", "cost.online=true")
    return configuration("7b_64k", *layout, *more, *BOUNDED, *changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Holds what a device really does: factors on the profile that the run was priced with."""

    prices: PriceFactors
    noise: float = NOISE
    outliers: float = OUTLIERS
    slow_rank: int | None = 0
    seed: int = 0


def draw_hidden(seed: int, *, attention: float, ranks: int = 16) -> Hidden:
    """Returns a device on which attention takes about `attention` times its price.

    The terms differ by about 15% more, the whole device by a factor of up to about 3, and calls
    cost up to 20 us a layer more. One rank is 20% slower in everything.
    """
    draw = np.random.default_rng([seed, round(attention * 1000)])
    common = float(np.exp(draw.normal(0, 0.5)))
    terms = np.exp(draw.normal(0, 0.15, 4)) * common * np.array([attention, attention, 1, 1])
    forward, backward, linear, linear_backward = (round(f * UNIT) for f in terms.tolist())
    extra = draw.integers(0, 20_000, 2).tolist()
    prices = PriceFactors(
        attention_forward=forward,
        attention_backward=backward,
        linear_forward=linear,
        linear_backward=linear_backward,
        linear_forward_extra_ns=extra[0],
        linear_backward_extra_ns=extra[1],
    )
    return Hidden(prices=prices, seed=seed, slow_rank=int(draw.integers(0, ranks)))


@dataclass(frozen=True, slots=True)
class _Device:
    type: str


@dataclass(frozen=True, slots=True)
class _RankMesh:
    """Stands in for the mesh of a rank that does not exist."""

    at: Coordinates
    device: _Device
    fsdp_size: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """Holds a run and the device that it runs on. device: "cuda" or "cpu"."""

    spec: RunSpec
    hidden: Hidden
    device: str = "cuda"
    num_documents: int = 60_000

    @cached_property
    def base(self) -> ProfiledWorkload:
        """What the run is priced with at first."""
        return workload_of(self.spec, load_profile("h100"))

    @cached_property
    def true(self) -> ProfiledWorkload:
        """What passes take."""
        return repriced(self.base, self.hidden.prices, device=self.device)

    def planner(self) -> Planner:
        window = self.spec.data.context_window
        source = lengths_of_family(window=window, num_documents=self.num_documents, seed=7)
        batches = GlobalBatches(source, tokens_per_batch=self.spec.tokens_per_step, seed=0)
        spec = replace(self.spec, planner=replace(self.spec.planner, baseline=False))
        return Planner.from_spec(spec, batches, self.base, reprice=partial(_at, self))

    def imbalances(self, plan: StepPlan) -> tuple[float, float]:
        """Returns the true slowest over the mean micro-batch, forward and both passes."""
        return _imbalance(plan.packing, self.true)


def _at(case: Case, prices: PriceFactors) -> ProfiledWorkload:
    return repriced(case.base, prices, device=case.device)


def _imbalance(plan: PackingPlan, cost: ProfiledWorkload) -> tuple[float, float]:
    lengths = plan.attended
    edges = plan.offsets[:-1]
    filled = np.diff(plan.offsets) > 0
    found: list[float] = []
    for work in (cost.forward_latency_ns(lengths), cost.workload_ns(lengths)):
        sums = np.zeros(plan.num_micro_batches, np.int64)
        sums[filled] = np.add.reduceat(work, edges[filled])
        found.append(imbalance(sums))
    return found[0], found[1]


class Ranks:
    """All ranks of a run: each has a meter of its own, as in training."""

    def __init__(self, case: Case) -> None:
        self.case, spec = case, case.spec
        self.draw = np.random.default_rng(case.hidden.seed)
        device = _Device(case.device)
        parallel = spec.parallel
        places = [coordinates(r, parallel) for r in range(parallel.world_size)]
        meshes: list[Any] = [_RankMesh(at, device, parallel.fsdp_size) for at in places]
        self.meters = [PriceMeter(spec, mesh, case.base) for mesh in meshes]

    def execute(self, pipelines: list[PipelinePlan]) -> None:
        """Takes the times of a step on every rank."""
        case, spec, ranks = self.case, self.case.spec, rank_grid(self.case.spec.parallel)
        true = case.true if case.device == "cuda" else without_collectives(case.true)
        for pipeline in pipelines:
            for stage in range(spec.num_stages):
                times = stage_times(pipeline, true, StageLayers.of(spec, stage))
                group = ranks[stage % spec.parallel.pp, pipeline.pipeline, :, 0].tolist()
                for rank, parts in zip(group, self._parts(times, stage, group), strict=True):
                    self.meters[rank].add(pipeline, StepTimes(parts, wall_ns=1))

    def _parts(
        self, times: StageTimes, stage: int, group: list[int]
    ) -> list[dict[tuple[Cell, Part], int]]:
        """Times of a stage on the ranks of a CP group."""
        hidden = self.case.hidden
        slow = np.array([SLOW if rank == hidden.slow_rank else 1.0 for rank in group])
        found: list[dict[tuple[Cell, Part], int]] = [{} for _ in group]
        passes = (
            (Pass.FORWARD, times.attention_forward_ns, times.linear_forward_ns),
            (Pass.BACKWARD, times.attention_backward_ns, times.linear_backward_ns),
        )
        for kind, attention, linear in passes:
            noise = np.exp(self.draw.normal(0, hidden.noise, (2, *attention.shape)))
            is_outlier = self.draw.random(noise.shape) < hidden.outliers
            noise *= np.where(is_outlier, OUTLIER_TIMES, 1) * slow
            took, rest = attention * noise[0], linear[:, None] * noise[1]
            if self.case.device == "cuda":
                rest += took.max(1, keepdims=True) - took
            for (i, cp), attention_ns in np.ndenumerate(took):
                cell = Cell(kind, stage, i)
                found[cp][cell, Part.ATTENTION] = round(attention_ns)
                found[cp][cell, Part.LAYERS] = round(rest[i, cp])
        return found

    def ballots(self) -> np.ndarray[Any, Any]:
        return np.sum([meter.ballot() for meter in self.meters], axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedStep:
    """A step as trained. held: the prices it was planned with. forward, both: imbalances."""

    step: int
    held: PriceFactors
    forward: float
    both: float


class Learning:
    """Runs a case step by step. schedule: of prices, as of the last step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._planner, self._ranks = case.planner(), Ranks(case)
        self._learn = LearnPrices(case.spec, case.base)
        self.schedule: PriceSchedule = NO_CHANGES
        self.state: PlannerState = self._planner.start()

    def steps(self, count: int) -> Iterator[LearnedStep]:
        """Trains `count` steps."""
        spec, planner = self.case.spec, self._planner
        for _ in range(count):
            plan = planner.next(self.state.with_prices(self.schedule))
            assert plan is not None
            pipelines = [planner.shard(plan, d) for d in range(spec.parallel.dp)]
            if plan.step >= spec.telemetry.warmup_steps:
                self._ranks.execute(pipelines)
            self.state = plan.state
            if self._ranks.meters[0].num_steps >= spec.cost.online_interval:
                self._decide(plan.step)
            forward, both = self.case.imbalances(plan)
            yield LearnedStep(step=plan.step, held=plan.prices, forward=forward, both=both)

    def _decide(self, step: int) -> None:
        _, change = self._learn.decide(self._ranks.ballots(), self.schedule, step)
        if change is not None:
            base = price_base(self.case.base)
            self.schedule = self.schedule.changed(change, base=base).from_step(step)


def fixed_steps(
    case: Case, prices: PriceFactors, count: int, *, state: PlannerState | None = None
) -> list[tuple[float, float]]:
    """Returns the true imbalances of `count` steps planned at fixed prices, from `state` on."""
    planner = case.planner().at(prices)
    planner = replace(planner, reprice=lambda _: planner.cost)
    found: list[tuple[float, float]] = []
    at = state.with_prices(NO_CHANGES) if state is not None else planner.start()
    for _ in range(count):
        plan = planner.next(at)
        assert plan is not None
        found.append(case.imbalances(plan))
        at = plan.state
    return found
