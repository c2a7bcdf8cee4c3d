"""Hooks: everything that watches training, called at named events of the loop.

`wlb.train.loop` trains; everything that measures, records, shows, evaluates or saves is a `Hook`.
`wlb.train.watchers` lists a run's hooks in the order of their calls, which is the same on all ranks
because some of them communicate. Modelled on OLMo-core's callbacks
(https://github.com/allenai/OLMo-core, olmo_core/train/callbacks).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from wlb.launch.position import Position
from wlb.parallel.mesh import Mesh
from wlb.plan import PipelinePlan, PlannerState, PlanProgress, StepPlan, Telemetry
from wlb.plan.tally import Tally
from wlb.spec import OnNonfinite, RunSpec
from wlb.train.faults.stop import Stop
from wlb.train.feed import PlanFeed
from wlb.train.job import Job
from wlb.train.prefetch import InputPrefetcher
from wlb.train.reduce import StepSums
from wlb.train.telemetry.report import RunReport
from wlb.train.telemetry.wall import Phase, WallTimes


class LoadedRun(NamedTuple):
    """A run as of the checkpoint that was loaded. steps_done: updates of its weights."""

    saved_in: Path
    steps_done: int
    state: PlannerState


@dataclass(slots=True, kw_only=True)
class RunContext:
    """State that the loop and its hooks share on a rank.

    progress: after the last executed step, None before the first. steps_done: updates of the
    weights. saved: the state that the newest checkpoint holds, if any. tally: sums for the
    summary. stop: source of a request to end early, the same on all ranks. records_ns: thread time
    that hooks took in `record` and telemetry has not counted yet. wall: where this rank's time
    goes.
    """

    job: Job
    mesh: Mesh
    position: Position
    report: RunReport
    feed: PlanFeed
    inputs: InputPrefetcher
    progress: PlanProgress | None = None
    steps_done: int = 0
    saved: PlanProgress | None = None
    tally: Tally = field(default_factory=Tally)
    stop: Stop = Stop.NO
    records_ns: int = 0
    wall: WallTimes = field(init=False)

    def __post_init__(self) -> None:
        self.wall = WallTimes(started_s=self.job.started_s, ready_s=self.job.ready_s)

    def go_on(self, loaded: LoadedRun) -> None:
        """Take over what a loaded checkpoint says of the run."""
        self.steps_done = loaded.steps_done
        self.progress = self.saved = PlanProgress.of(loaded.state)

    @property
    def spec(self) -> RunSpec:
        return self.job.spec

    @property
    def is_last_step(self) -> bool:
        """Whether training ends with the step that was just executed."""
        return self.steps_done == self.spec.training.steps or not self.feed.peek(1)

    def is_due(self, interval: int) -> bool:
        """Whether the number of updates is a multiple of `interval` (0: never); False after the
        last one, which `Hook.end` follows.
        """
        is_end = self.steps_done == self.spec.training.steps
        return bool(interval) and self.steps_done % interval == 0 and not is_end


@dataclass(slots=True, kw_only=True)
class ExecutedStep:
    """A step that was executed and counts."""

    plan: StepPlan
    pipeline: PipelinePlan
    sums: StepSums
    loss: float  # mean over valid labels, in nats
    updated: bool  # False where the step had no label, or was skipped as not finite
    began_s: float  # by time.perf_counter
    waited_ns: int  # for plans, before it began
    telemetry: Telemetry | None = None  # set by `MeasureSteps` in steps that compute something
    own_ns: np.ndarray | None = None
    """This rank's times in it (`TelemetryMeter.own_ns`), None in the warm-up."""


class RefusedStep(NamedTuple):
    """A step whose sums are not finite. action: skip it, or go back to `saved_in`, a checkpoint."""

    plan: StepPlan
    sums: StepSums
    action: OnNonfinite
    saved_in: Path | None = None


class Hook:
    """Watches a run on one rank. All ranks call each event together, so a hook may communicate; it
    prints and writes on rank 0 only (`RunReport` is silent elsewhere). phase: what the time of its
    events counts as, but for `record`, which is part of a step.
    """

    phase: ClassVar[Phase | None] = None

    def begin(self, run: RunContext) -> None:
        """Before the first step, once all ranks hold the same plans."""

    def refused(self, run: RunContext, step: RefusedStep) -> None:
        """A step updates nothing. If it is skipped, `record` follows, else `rolled_back`."""

    def rolled_back(self, run: RunContext, saved_in: Path) -> None:
        """Weights, optimiser and `run.progress` are those of the checkpoint `saved_in` again."""

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """After each executed step. The time of these calls is reported as telemetry's own."""

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        """After all records of a step, for work that takes long: evaluating, saving."""

    def end(self, run: RunContext) -> None:
        """After the last step; `run.stop` says whether the run was asked to end."""

    def close(self) -> None:
        """Releases files, also after an error."""

    def finished(self, run: RunContext) -> None:
        """After a run that raised nothing, when records and the live display are closed."""
