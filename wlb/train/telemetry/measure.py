"""The hook that measures steps: a record of all ranks' times every telemetry.interval steps."""

import time
from dataclasses import replace
from pathlib import Path

from wlb.parallel.mesh import Mesh
from wlb.plan import FloatArray
from wlb.spec import RunSpec
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.clock import StepClock
from wlb.train.telemetry.meter import Exposed, TelemetryMeter
from wlb.train.telemetry.prices import PriceMeter, expert_tokens
from wlb.train.telemetry.work import WorkMeter


class MeasureSteps(Hook):
    """Puts the record of the steps since the last one into `ExecutedStep.telemetry`, and with
    cost.online, where they are due, all ranks' votes on prices into `ExecutedStep.votes`."""

    def __init__(self, spec: RunSpec, mesh: Mesh, clock: StepClock) -> None:
        self.clock, self.mesh = clock, mesh
        self.meter = TelemetryMeter(spec, mesh)
        self.prices = PriceMeter(spec, mesh, self.meter.base) if spec.cost.online else None
        self.work = WorkMeter(spec, mesh)
        self._num_measured = self._num_recorded = 0

    def begin(self, run: RunContext) -> None:
        if self.work.note:
            run.report.say(self.work.note)

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        meter, has_targets = self.meter, bool(step.plan.num_targets)
        if has_targets:
            if step.plan.prices != meter.prices:
                meter.price(step.plan.prices)
            times = self.clock.take()
            experts = expert_tokens(step, self.mesh)
            meter.add(step.pipeline, times, self._exposed(run, step), experts)
            if self.prices is not None and self._num_measured >= run.spec.telemetry.warmup_steps:
                self.prices.add(step.pipeline, times, experts)
        self._num_measured += has_targets
        # A record ends with the warm-up, so that none holds steps of both.
        ends_warm_up = self._num_measured == run.spec.telemetry.warmup_steps
        is_full = meter.num_steps == run.spec.telemetry.interval
        is_due = is_full or run.is_last_step or ends_warm_up
        own_ns, reduced = meter.own_ns, None
        if is_due and meter.num_steps:
            reduced, step.votes = meter.reduce(self._votes(run))
        if has_targets:
            self.work.add(step.plan.packing, time.perf_counter() - step.began_s)
        if reduced is None:
            return
        step.telemetry = replace(reduced, work=self.work.take())
        is_warm = self._num_recorded >= run.spec.telemetry.warmup_steps
        self._num_recorded += reduced.num_steps
        # Steps of the warm-up are slower and are not recorded.
        if is_warm:
            step.own_ns = own_ns
            run.tally.telemetry.add(step.telemetry)

    def rolled_back(self, run: RunContext, saved_in: Path) -> None:
        # Its times are of steps that no longer count.
        if self.prices is not None:
            self.prices.clear()

    def _votes(self, run: RunContext) -> FloatArray | None:
        """This rank's ballot where one is due, which is in the same records on all ranks."""
        prices = self.prices
        if prices is None or prices.num_steps < run.spec.cost.online_interval:
            return None
        return prices.ballot()

    def _exposed(self, run: RunContext, step: ExecutedStep) -> Exposed:
        """Waits of the step, also for its plan; the time of records counts with the next step."""
        step_ns = round((time.perf_counter() - step.began_s) * 1e9) + step.waited_ns
        exposed = Exposed(
            loading_ns=run.inputs.exposed_ns,
            planning_ns=run.feed.waited_ns,
            records_ns=run.records_ns + self.clock.marks_ns,
            step_ns=step_ns,
        )
        run.feed.waited_ns = run.records_ns = 0
        return exposed
