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
    """A checkpoint that was loaded, and the state from which its run continues."""

    saved_in: Path  # the checkpoint's folder
    steps_done: int  # number of updates that the weights have had
    state: PlannerState  # the planner's state, from which planning continues


@dataclass(slots=True, kw_only=True)
class RunContext:
    """State that the loop and its hooks share on one rank."""

    job: Job  # the arguments of the run
    mesh: Mesh  # this rank's place in the layout, with its process groups
    position: Position  # notes what the rank is doing, for reports of failures
    report: RunReport  # writes records and messages; silent except on rank 0
    feed: PlanFeed  # gives the plans of the coming steps
    inputs: InputPrefetcher  # loads the tensors of the coming steps
    # Planner's state after the last executed step; None before a new run's first step.
    progress: PlanProgress | None = None
    steps_done: int = 0  # number of updates of the weights so far
    # Planner's state in the newest checkpoint, which may still be being written. None if there is
    # no checkpoint, or if the last save failed.
    saved: PlanProgress | None = None
    tally: Tally = field(default_factory=Tally)  # sums over the trained steps, for the summary
    stop: Stop = Stop.NO  # what asks the run to end early, the same on all ranks
    # CPU time (ns) that hooks have spent in `record` and that no step's telemetry includes yet.
    records_ns: int = 0
    wall: WallTimes = field(init=False)  # wall time of this rank by phase

    def __post_init__(self) -> None:
        self.wall = WallTimes(started_s=self.job.started_s, ready_s=self.job.ready_s)

    def resume_from(self, loaded: LoadedRun) -> None:
        """Set the number of updates and the planner's state to those of a loaded checkpoint."""
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

        The event is due if the number of updates is a multiple of `interval`. It is never due after
        the run's last update, because `Hook.end` follows and does the same work.

        Args:
            interval: Number of updates between two events; 0 means that the event never happens.
        """
        is_end = self.steps_done == self.spec.training.steps
        return bool(interval) and self.steps_done % interval == 0 and not is_end


@dataclass(slots=True, kw_only=True)
class ExecutedStep:
    """A step that was executed and was not rolled back."""

    plan: StepPlan  # the plan of all pipelines
    pipeline: PipelinePlan  # the plan of this rank's pipeline
    sums: StepSums  # the step's sums over all ranks
    loss: float  # mean over targets, in nats
    # Whether the step updated the weights. A step without targets does not, nor does a step that
    # was skipped because its loss or gradient norm was not finite.
    updated: bool
    began_s: float  # time.perf_counter when the step began
    waited_ns: int  # time (ns) that this rank waited for plans before the step began
    # Times of all ranks. `MeasureSteps` sets them if the step had targets.
    telemetry: Telemetry | None = None
    # This rank's times (`TelemetryMeter.own_ns`); None in the first telemetry.warmup_steps steps,
    # and in steps without targets.
    own_ns: np.ndarray | None = None


class RefusedStep(NamedTuple):
    """A step whose loss or gradient norm is not finite."""

    plan: StepPlan  # the plan of all pipelines
    sums: StepSums  # the step's sums over all ranks
    action: OnNonfinite  # what the run does about the step: SKIP or ROLLBACK
    saved_in: Path | None = None  # newest checkpoint, to which a rollback returns; None without one


class Hook:
    """Watches a run on one rank. Subclasses override the events that they need.

    All ranks call the same event at the same time, so a hook that all ranks have may communicate.
    Hooks print and write records through `RunReport`, which does nothing except on rank 0.
    """

    # The phase to which the wall time of this hook's methods is added. `record` is an exception:
    # its time is added to `Phase.STEPS`. With None, the time of `begin` is added to `Phase.START`,
    # and the time of the other methods to `Phase.REST`.
    phase: ClassVar[Phase | None] = None

    def begin(self, run: RunContext) -> None:
        """Called before the first step, after all ranks have agreed on the first plans."""

    def refused(self, run: RunContext, step: RefusedStep) -> None:
        """Called for a step that updates nothing because its loss or gradient is not finite.

        If the step is skipped, `record` is called next. If the run returns to a checkpoint,
        `rolled_back` is called next.
        """

    def rolled_back(self, run: RunContext, saved_in: Path) -> None:
        """Called after a rollback has loaded the weights and the other state from `saved_in`."""

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Called after each executed step, to record the step.

        The time of this method is reported as overhead of telemetry, so the method must be fast.
        """

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        """Called after all hooks have recorded a step, for slow work such as evaluation."""

    def end(self, run: RunContext) -> None:
        """Called after the last step. `run.stop` says whether the run was asked to end."""

    def close(self) -> None:
        """Called at the end of the run, also after an error, to release files and threads."""

    def finished(self, run: RunContext) -> None:
        """Called at the very end, after files and the live table are closed; not after an error."""
