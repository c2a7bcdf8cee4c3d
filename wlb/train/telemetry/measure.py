"""The hook that measures steps: a record of all ranks' times every telemetry.interval steps."""

import time
from dataclasses import replace

from wlb.parallel.mesh import Mesh
from wlb.plan import Telemetry
from wlb.spec import RunSpec
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.clock import StepClock
from wlb.train.telemetry.meter import Exposed, TelemetryMeter
from wlb.train.telemetry.work import WorkMeter


class MeasureSteps(Hook):
    """Puts the record of the steps since the last one into `ExecutedStep.telemetry`."""

    def __init__(self, spec: RunSpec, mesh: Mesh, clock: StepClock) -> None:
        self.clock = clock
        self.meter = TelemetryMeter(spec, mesh)
        self.work = WorkMeter(spec, mesh)
        self.warm_up = WarmUp(spec.telemetry.warmup_steps)
        self._num_measured = 0

    def begin(self, run: RunContext) -> None:
        if self.work.note:
            run.report.say(self.work.note)

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        meter, has_targets = self.meter, bool(step.plan.num_targets)
        if has_targets:
            meter.add(step.pipeline, self.clock.take(), self._exposed(run, step))
        self._num_measured += has_targets
        is_due = self._is_due(run)
        own_ns = meter.own_ns
        reduced = meter.reduce() if is_due and meter.num_steps else None
        if has_targets:
            self.work.add(step.plan.packing, time.perf_counter() - step.began_s)
        if reduced is None:
            return
        step.telemetry = replace(reduced, work=self.work.take())
        if self.warm_up.is_over_in(step.telemetry):
            step.own_ns = own_ns
            run.tally.telemetry.add(step.telemetry)

    def _is_due(self, run: RunContext) -> bool:
        telemetry = run.spec.telemetry
        # A record ends with the warm-up, so that none holds steps of both.
        ends_warm_up = self._num_measured == telemetry.warmup_steps
        return self.meter.num_steps == telemetry.interval or run.is_last_step or ends_warm_up

    def _exposed(self, run: RunContext, step: ExecutedStep) -> Exposed:
        """What the step waited for, with the waits for plans since the last record. The time of
        records is counted with the next step. Waits inside of the step are part of its time, those
        before it are added."""
        step_ns = round((time.perf_counter() - step.began_s) * 1e9) + step.waited_ns
        exposed = Exposed(
            loading_ns=run.inputs.exposed_ns,
            planning_ns=run.feed.waited_ns,
            records_ns=run.records_ns + self.clock.marks_ns,
            step_ns=step_ns,
        )
        run.feed.waited_ns = run.records_ns = 0
        return exposed


class WarmUp:
    """Tells records of the first `num_steps` steps, which are slower, from those that count."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._num_seen = 0

    def is_over_in(self, record: Telemetry) -> bool:
        """Whether `record`, the next one in order, has no step of the warm-up."""
        is_over = self._num_seen >= self.num_steps
        self._num_seen += record.num_steps
        return is_over
