"""Hooks: objects that the training loop calls at named events, such as the end of a step.

`wlb.train.loop` trains. Everything that measures, records, shows, evaluates or saves is a `Hook`.
`wlb.train.watchers` lists a run's hooks in the order of their calls. The order is the same on all
ranks, because some hooks communicate.

Modelled on OLMo-core's callbacks (https://github.com/allenai/OLMo-core, olmo_core/train/callbacks).
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
    """A checkpoint that was loaded, and where its run continues."""

    saved_in: Path  # the checkpoint's folder
    steps_done: int  # optimizer updates that its weights have had
    state: PlannerState  # the planner's state, from which planning continues


@dataclass(slots=True, kw_only=True)
class RunContext:
    """State that the loop and its hooks share on one rank."""

    job: Job  # what the run was started with
    mesh: Mesh  # this rank's place in the layout, with its process groups
    position: Position  # notes what the rank is doing, for reports of failures
    report: RunReport  # writes records and messages; silent except on rank 0
    feed: PlanFeed  # gives the plans of the coming steps
    inputs: InputPrefetcher  # loads the tensors of the coming steps
    # Planner's state after the last executed step; None before the first.
    progress: PlanProgress | None = None
    steps_done: int = 0  # updates of the weights so far
    saved: PlanProgress | None = None  # planner's state in the newest checkpoint; None without one
    tally: Tally = field(default_factory=Tally)  # sums over steps, for the summary
    stop: Stop = Stop.NO  # what asks the run to end early, the same on all ranks
    # CPU time that hooks have spent in `record` and that is not yet part of a step's telemetry.
    records_ns: int = 0
    wall: WallTimes = field(init=False)  # wall time of this rank by phase

    def __post_init__(self) -> None:
        self.wall = WallTimes(started_s=self.job.started_s, ready_s=self.job.ready_s)

    def resume_from(self, loaded: LoadedRun) -> None:
        """Continue from the steps and the planner's state of a loaded checkpoint."""
        self.steps_done = loaded.steps_done
        self.progress = self.saved = PlanProgress.of(loaded.state)

    @property
    def spec(self) -> RunSpec:
        """The configuration of the run."""
        return self.job.spec

    @property
    def is_last_step(self) -> bool:
        """Whether training ends with the step that was just executed."""
        return self.steps_done == self.spec.training.steps or not self.feed.peek(1)

    def is_due(self, interval: int) -> bool:
        """Return whether a periodic event, such as a save, is due after the step that just ended.

        It is due if the number of updates is a multiple of `interval`. After the run's last update
        it is never due, because `Hook.end` follows and does the same work.

        Args:
            interval: Updates between two events; 0 means never.
        """
        is_end = self.steps_done == self.spec.training.steps
        return bool(interval) and self.steps_done % interval == 0 and not is_end


@dataclass(slots=True, kw_only=True)
class ExecutedStep:
    """A step that was executed and was not rolled back."""

    plan: StepPlan  # what all pipelines trained
    pipeline: PipelinePlan  # what the pipeline of this rank trained
    sums: StepSums  # the step's sums over all ranks
    loss: float  # mean over targets, in nats
    # Whether the step updated the weights. It did not if it had no target, or if it was skipped
    # because its loss or gradient norm was not finite.
    updated: bool
    began_s: float  # time.perf_counter when the step began
    waited_ns: int  # time that this rank waited for plans before the step began
    # Times of all ranks, set by `MeasureSteps` if the step computed something.
    telemetry: Telemetry | None = None
    # This rank's times (`TelemetryMeter.own_ns`); None in the first telemetry.warmup_steps steps.
    own_ns: np.ndarray | None = None


class RefusedStep(NamedTuple):
    """A step whose loss or gradient norm is not finite."""

    plan: StepPlan  # what all pipelines should have trained
    sums: StepSums  # the step's sums over all ranks
    action: OnNonfinite  # what the run does about it: SKIP or ROLLBACK
    saved_in: Path | None = None  # newest checkpoint, to which a rollback returns; None without one


class Hook:
    """Watches a run on one rank. Subclasses override the events that they need.

    All ranks call each event together, so a hook may communicate. It prints and writes through
    `RunReport`, which is silent except on rank 0.
    """

    # The phase to which the wall time of this hook's methods is added. `record` is an exception:
    # its time is added to `Phase.STEPS`. With None, the time of `begin` is added to `Phase.START`,
    # and the time of the other methods to `Phase.REST`.
    phase: ClassVar[Phase | None] = None

    def begin(self, run: RunContext) -> None:
        """Called before the first step, once all ranks agree on the first plans."""

    def refused(self, run: RunContext, step: RefusedStep) -> None:
        """Called for a step that updates nothing because its loss or gradient is not finite.

        If the step is skipped, `record` is called next. If the run returns to a checkpoint,
        `rolled_back` is called next.
        """

    def rolled_back(self, run: RunContext, saved_in: Path) -> None:
        """Called after weights, optimiser and `run.progress` were loaded from `saved_in`."""

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Called after each executed step, to record it.

        The time of this method is reported as overhead of telemetry, so it must be short.
        """

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        """Called after all records of a step, for slow work such as evaluating or saving."""

    def end(self, run: RunContext) -> None:
        """Called after the last step. `run.stop` says whether the run was asked to end."""

    def close(self) -> None:
        """Called at the end of the run, also after an error, to release files and threads."""

    def finished(self, run: RunContext) -> None:
        """Called at the very end if there was no error, after files and live table were closed."""
