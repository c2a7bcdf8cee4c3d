"""The hook that measures each step and adds the times of all ranks to the step's record."""

import time
from dataclasses import replace

from wlb.parallel.mesh import EP, Mesh
from wlb.plan import FloatArray
from wlb.spec import RunSpec
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.clock import StepClock
from wlb.train.telemetry.meter import Exposed, TelemetryMeter
from wlb.train.telemetry.work import WorkMeter


class MeasureSteps(Hook):
    """Measures each step, and stores the result in `ExecutedStep.telemetry` for later hooks.

    Args:
        spec: The run. Its kernels.attention names the kernel that computes, never `auto`.
        mesh: This rank's place in the layout.
        clock: The clock that times the passes of each step.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh, clock: StepClock) -> None:
        self.clock, self.mesh = clock, mesh
        self.meter = TelemetryMeter(spec, mesh)
        self.work = WorkMeter(spec, mesh)
        self._num_recorded = 0

    def begin(self, run: RunContext) -> None:
        """Print a line if MFU cannot be computed, because the device's peak TFLOP/s are unknown."""
        if self.work.note:
            run.report.say(self.work.note)

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Measure the step, unless it had no targets. All ranks sum their times together."""
        if not step.plan.num_targets:
            return  # Nothing was computed.
        times, experts = self.clock.take(), expert_tokens(step, self.mesh)
        self.meter.add(step.pipeline, times, self._exposed(run, step), experts)
        own_ns = self.meter.own_ns
        reduced = self.meter.reduce()
        self.work.add(step.plan.packing, time.perf_counter() - step.began_s)
        step.telemetry = replace(reduced, work=self.work.take())
        is_warm = self._num_recorded >= run.spec.telemetry.warmup_steps
        self._num_recorded += reduced.num_steps
        # The first telemetry.warmup_steps steps are slower, so the run's totals leave them out.
        if is_warm:
            step.own_ns = own_ns
            run.tally.telemetry.add(step.telemetry)

    def _exposed(self, run: RunContext, step: ExecutedStep) -> Exposed:
        """Return how long this rank waited for a step's plan and inputs, and worked on records.

        The time that hooks spend on the records of a step is known only after the step. Therefore
        it is added to the next step.
        """
        step_ns = round((time.perf_counter() - step.began_s) * 1e9) + step.waited_ns
        exposed = Exposed(
            loading_ns=run.inputs.exposed_ns,
            planning_ns=run.feed.waited_ns,
            records_ns=run.records_ns + self.clock.marks_ns,
            step_ns=step_ns,
        )
        run.feed.waited_ns = run.records_ns = 0
        return exposed


def expert_tokens(step: ExecutedStep, mesh: Mesh) -> FloatArray | None:
    """Return how many tokens' expert work this rank's measured times include, by micro-batch.

    Pipelines that share an EP group also share the work of experts. So the number is the mean
    number of rows of these pipelines' micro-batches, times the load of this rank. The load is the
    number of rows that the rank's experts compute, divided by the mean over EP ranks. On CUDA the
    load of the most loaded EP rank is taken instead, because the measured times include waits for
    that rank.

    Args:
        step: The executed step.
        mesh: This rank's place in the layout.

    Returns:
        Tokens of each micro-batch, shape [n]; None for a model without experts.
    """
    load = step.sums.experts
    if load is None:
        return None
    assert mesh.experts is not None
    num_sharing = mesh.parallel.pipelines_per_ep_group
    first = mesh.at.dp // num_sharing * num_sharing
    tokens = step.plan.packing.rows[step.plan.pipelines[first : first + num_sharing]].mean(0)
    is_cuda = mesh.device.type == "cuda"
    return tokens * (load.mean_rank if is_cuda else load.ranks[mesh.experts.get_local_rank(EP)])
