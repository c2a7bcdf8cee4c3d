"""The training loop of one rank."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from wlb.corpus import StoreName
from wlb.cost import workload_for
from wlb.parallel.agreement import agree
from wlb.parallel.data import gradient_square
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import Mesh, World, build_mesh
from wlb.plan import PipelinePlan, PlannerState, StepPlan, Telemetry
from wlb.sharding import STRATEGIES
from wlb.spec import LossNormalizer, RunSpec
from wlb.train import checkpoint
from wlb.train.calibrate import Calibration
from wlb.train.evaluate import Evaluator
from wlb.train.feed import PlanFeed
from wlb.train.optimizer import Optimizers
from wlb.train.prefetch import InputPrefetcher
from wlb.train.ranks import RankMeter
from wlb.train.reader import StoreReader
from wlb.train.reduce import StepReducer
from wlb.train.refuse import with_backend
from wlb.train.report_log import Report
from wlb.train.tally import Tally
from wlb.train.telemetry import TelemetryMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank is started with. spec has dp and vocabulary size filled in.

    resume: the checkpoint to go on from; init_from: the one whose weights a new run begins with.
    calibrate: the kernel profile to write when training has ended, or None.
    """

    spec: RunSpec
    train_store: StoreName
    heldout_store: str
    resume: Path | None
    title: str
    started_s: float
    calibrate: Path | None = None
    init_from: Path | None = None

    @property
    def directory(self) -> Path:
        return Path(self.spec.run.output_dir) / self.spec.run.name


class Trainer:
    """Runs a job on one rank; all ranks construct it and call `run` together."""

    def __init__(self, job: Job, world: World, mesh: Mesh) -> None:
        spec = job.spec
        self.job, self.spec, self.mesh = job, spec, mesh
        self.priced = priced = _agree_on_kernel(spec, world, mesh)
        self.executor = Executor(spec, mesh)
        self.optimizers = Optimizers(spec, dict(self.executor.stages))
        self.reader = StoreReader(job.train_store, spec.model.vocab_size)
        state: PlannerState | None = None
        self.steps_done = 0
        if job.resume is not None:
            self.steps_done = checkpoint.load(
                job.resume, stages=self.executor.stages, optimizers=self.optimizers
            )
            state = checkpoint.planner_state(job.resume)
        elif job.init_from is not None:
            checkpoint.load_weights(job.init_from, stages=self.executor.stages)
        self.feed = PlanFeed(priced, job.train_store, world, mesh, state)
        self.inputs = InputPrefetcher(self.executor, self.reader, ahead=spec.data.prefetch)
        self.reducer = StepReducer(mesh, tuple(STRATEGIES))
        self.evaluator: Evaluator | None = None
        if spec.eval.steps and job.heldout_store:
            self.evaluator = Evaluator(priced, job.heldout_store, self.executor)
        self.meter = TelemetryMeter(priced, mesh) if spec.telemetry.enabled else None
        self.ranks = RankMeter(priced, mesh, world) if spec.telemetry.enabled else None
        self.calibration = Calibration(priced, keeps=job.calibrate is not None)
        self._num_measured = 0
        self.state = state
        self.saved = state
        self.tally = Tally()

    def run(self) -> Tally:
        """Train until training.steps or the end of data; evaluate, save, show a summary."""
        with self._report() as report:
            try:
                # Plans of the first two steps are compared here, later ones two steps ahead.
                first = self.feed.peek(1) + self.feed.peek(2)
                held = self.evaluator.plans if self.evaluator is not None else []
                self.reducer.reduce(first + held)
                if self.job.resume is None:
                    self._evaluate(report)
                while self.steps_done < self.spec.training.steps:
                    item = self.feed.next()
                    if item is None:
                        break
                    self._step(*item, report)
            finally:
                self.inputs.close()
                self.feed.close()
            self._evaluate(report)
            self._save()
        if self.mesh.rank == 0:
            report.summary(self.tally, self._checkpoint_path())
        if self.job.calibrate is not None:
            assert self.meter is not None
            self.calibration.finish(
                self.job.calibrate,
                cost=self.meter.cost,
                run=self.job.directory,
                collectives=self.meter.times_hold_collectives,
                console=report.console if self.mesh.rank == 0 else None,
            )
        return self.tally

    def _report(self) -> Report:
        return Report(
            self.job,
            is_shown=self.mesh.rank == 0,
            priced=self.priced,
            device=self.mesh.device.type,
            steps_done=self.steps_done,
            places=self.ranks.places if self.ranks is not None else (),
        )

    def _step(self, plan: StepPlan, pipeline: PipelinePlan, report: Report) -> None:
        begin = time.perf_counter()
        scale = self._loss_scale(plan)
        loss = square = None
        if plan.num_targets:
            inputs = self.inputs.take(pipeline, loss_scale=scale)
            self._load_ahead()
            loss = self.executor.train_step(pipeline, self.reader, loss_scale=scale, inputs=inputs)
            square = gradient_square(self.executor.named_parameters(), self.mesh)
        sums = self.reducer.reduce(
            self.feed.peek(2), loss=loss, gradient_square=square, done=pipeline
        )
        if not math.isfinite(sums.loss + sums.gradient_norm):
            raise FloatingPointError(
                f"step {plan.step}: loss {sums.loss}, gradient norm {sums.gradient_norm}; nothing "
                f"was updated. Lower training.learning_rate or go on from the last checkpoint "
                f"with --resume"
            )
        if plan.num_targets:
            # A step without a label moves neither the optimiser nor the learning rate.
            self.optimizers.step(self.steps_done, norm=sums.gradient_norm)
            self.steps_done += 1
        self.state = plan.state
        telemetry = self._measure(plan, pipeline)
        predicted = replace(
            plan.predicted,
            cp_imbalance=sums.cp_imbalance,
            sharding_counts=tuple(sums.shardings.items()),
        )
        measured = replace(
            predicted,
            origin="measured",
            imbalance=telemetry and telemetry.imbalance,
            max_workload_ns=telemetry.slowest_ns if telemetry else 0,
            mean_workload_ns=telemetry.mean_ns if telemetry else 0.0,
            telemetry=telemetry,
            loss=sums.loss / (scale * plan.num_targets) if plan.num_targets else None,
            grad_norm=sums.gradient_norm if plan.num_targets else None,
            step_time_s=time.perf_counter() - begin,
        )
        self.tally.add(measured, predicted, plan.baseline)
        report.step(self.steps_done, measured, predicted, plan.baseline)
        self._record_ranks(plan, report)
        if plan.num_targets and self._is_due(self.spec.eval.interval):
            self._evaluate(report)
        if plan.num_targets and self._is_due(self.spec.checkpoint.interval):
            self._save()

    def _measure(self, plan: StepPlan, pipeline: PipelinePlan) -> Telemetry | None:
        """The record of the steps since the last one, if it is due; the device was waited for."""
        clock, meter = self.executor.clock, self.meter
        if clock is None or meter is None:
            return None
        if plan.num_targets:
            meter.add(pipeline, clock.take(), loading_ns=self.inputs.exposed_ns)
        # A record ends with the warm-up, so that none holds steps of both.
        self._num_measured += bool(plan.num_targets)
        ends_warm_up = self._num_measured == self.spec.telemetry.warmup_steps
        is_due = meter.num_steps == self.spec.telemetry.interval or self._is_last() or ends_warm_up
        if not (is_due and meter.num_steps):
            return None
        own_ns = meter.own_ns
        telemetry = meter.reduce()
        if self.calibration.take(telemetry):
            self.tally.telemetry.add(telemetry)
            if self.ranks is not None:
                self.ranks.add(own_ns, telemetry.num_steps)
        return telemetry

    def _record_ranks(self, plan: StepPlan, report: Report) -> None:
        """The table of ranks and the timeline, where they are due."""
        clock, ranks = self.executor.clock, self.ranks
        if clock is None or ranks is None or not plan.num_targets:
            return
        is_last = self._is_last()
        if ranks.is_table_due(is_last=is_last):
            table = ranks.table(plan.step, self.steps_done)
            if table is not None:
                report.ranks(table)
                self.tally.stragglers.add(table)
        if ranks.is_timeline_due(self.steps_done, is_last=is_last):
            timeline = ranks.timeline(clock.spans(), plan.step, self.steps_done)
            if timeline is not None:
                report.timeline(timeline)

    def _is_last(self) -> bool:
        return self.steps_done == self.spec.training.steps or not self.feed.peek(1)

    def _load_ahead(self) -> None:
        for ahead in range(1, self.spec.data.prefetch + 1):
            for plan, pipeline in self.feed.peek(ahead):
                if plan.num_targets:
                    self.inputs.start(pipeline, loss_scale=self._loss_scale(plan))

    def _loss_scale(self, plan: StepPlan) -> float:
        if self.spec.training.loss_normalizer == LossNormalizer.CONSTANT:
            return 1.0 / self.spec.tokens_per_step
        return 1.0 / max(1, plan.num_targets)

    def _is_due(self, interval: int) -> bool:
        is_end = self.steps_done == self.spec.training.steps
        return bool(interval) and self.steps_done % interval == 0 and not is_end

    def _evaluate(self, report: Report) -> None:
        if self.evaluator is not None:
            loss = self.evaluator.run()
            self.tally.heldout.append((self.steps_done, loss))
            report.evaluation(self.steps_done, loss)

    def _save(self) -> None:
        # By state, not by steps_done: a step without a label moves the state alone.
        if self.state is None or self.state is self.saved:
            return
        checkpoint.save(
            self.job.directory / "checkpoints",
            step=self.steps_done,
            spec=self.spec,
            stages=self.executor.stages,
            optimizers=self.optimizers,
            state=self.state,
        )
        self.saved = self.state

    def _checkpoint_path(self) -> Path:
        return checkpoint.folder_of(self.job.directory / "checkpoints", self.steps_done)


def _agree_on_kernel(spec: RunSpec, world: World, mesh: Mesh) -> RunSpec:
    """The spec with the attention kernel that all ranks compute and price plans with.

    ValueError on all of them if they would compute by different ones, or one cannot, or if they'd
    price by different profiles: devices and what is installed may differ from node to node.
    """
    priced, profile, problem = spec, "", None
    try:
        priced = with_backend(spec, mesh.device.type)
        profile = workload_for(priced, mesh.device.type).profile.name
    except ValueError as error:
        problem = error
    group = dist.group.WORLD if world.world_size > 1 else None
    declared = {"attention kernel": priced.kernels.attention, "kernel profile": profile}
    agree(declared, problem, group=group)
    return priced


def run_rank(world: World, job: Job, device: torch.device) -> Tally:
    """A rank's whole life once its process group stands."""
    if job.calibrate is not None and device.type == "cpu":
        torch.set_num_threads(1)  # as profiles are measured; with more, CPU time tells nothing
    mesh = build_mesh(job.spec.parallel, device)
    return Trainer(job, world, mesh).run()
