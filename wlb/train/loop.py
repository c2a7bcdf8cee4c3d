"""The training loop of one rank."""

import math
import time
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from wlb.cost import workload_for
from wlb.data.reader import StoreReader
from wlb.launch.position import Position
from wlb.parallel.collectives import agree
from wlb.parallel.compiled import num_graphs
from wlb.parallel.data import gradient_square
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import Mesh, build_mesh, limit_collectives
from wlb.parallel.world import World
from wlb.plan import PipelinePlan, PlannerState, StepPlan, Telemetry
from wlb.sharding import STRATEGIES
from wlb.spec import LossNormalizer, OnNonfinite, RunSpec
from wlb.train import checkpoint
from wlb.train.checkpoint import saver
from wlb.train.checkpoint.saver import CheckpointError, CheckpointSaver, Saved
from wlb.train.checkpoint.shared_folder import refuse_unshared
from wlb.train.evaluate import Evaluator
from wlb.train.faults.nonfinite import NonfiniteSteps
from wlb.train.faults.stop import Stop, StopRequest
from wlb.train.faults.watched import watched
from wlb.train.feed import PlanFeed
from wlb.train.job import Job
from wlb.train.memory import budget_of, hold_against
from wlb.train.optimizer import Optimizers
from wlb.train.prefetch import InputPrefetcher
from wlb.train.reduce import StepReducer, StepSums
from wlb.train.refuse import with_backend
from wlb.train.telemetry.calibrate import Calibration
from wlb.train.telemetry.clock import StepClock
from wlb.train.telemetry.ledger import Ledger
from wlb.train.telemetry.meter import Exposed, TelemetryMeter
from wlb.train.telemetry.ranks import RankMeter
from wlb.train.telemetry.report import Report
from wlb.train.telemetry.tally import Tally
from wlb.train.telemetry.work import WorkMeter


class Trainer:
    """Runs a job on one rank; all ranks construct it and call `run` together. position: is told
    what is at work. request: to stop; one that is there already ends the run before a step."""

    def __init__(
        self,
        job: Job,
        world: World,
        mesh: Mesh,
        position: Position | None = None,
        request: StopRequest | None = None,
    ) -> None:
        spec = job.spec
        self.job, self.spec, self.mesh = job, spec, mesh
        self.world = world
        priced, profile = _agree_on_kernel(spec, world, mesh)
        self._priced = priced
        self._graphs_before = num_graphs()
        self.position = position or Position()
        self.clock = StepClock.of(mesh.device) if spec.telemetry.enabled else None
        self.executor = Executor(spec, mesh, progress=self.position, timer=self.clock)
        self.optimizers = Optimizers(spec, dict(self.executor.stages))
        self.reader = StoreReader(job.train_store, spec.model.vocab_size)
        state: PlannerState | None = None
        self.steps_done = 0
        if job.resume is not None:
            state = self._load(job.resume)
        elif job.init_from is not None:
            saver.load_weights(job.init_from, mesh, stages=self.executor.stages)
        self.feed = PlanFeed(priced, job.train_store, world, mesh, state)
        self.inputs = InputPrefetcher(self.executor, self.reader, ahead=spec.data.prefetch)
        self.reducer = StepReducer(mesh, tuple(STRATEGIES))
        self.evaluator: Evaluator | None = None
        if spec.eval.steps and job.heldout_store:
            self.evaluator = Evaluator(priced, job.heldout_store, self.executor)
        self.meter = TelemetryMeter(priced, mesh) if spec.telemetry.enabled else None
        self.work = WorkMeter(priced, mesh)
        self.ranks = RankMeter(priced, mesh, world) if spec.telemetry.enabled else None
        self.saver = CheckpointSaver(
            job.checkpoints,
            spec,
            mesh,
            stages=self.executor.stages,
            optimizers=self.optimizers,
            profile=profile,
            origin=job.resume or job.init_from,
        )
        self.ledger = Ledger(job.directory, is_on=spec.telemetry.ledger and mesh.rank == 0)
        self.nonfinite = NonfiniteSteps(spec.training.on_nonfinite, spec.training.max_nonfinite)
        self.stop_request = request or StopRequest(spec.run.stop_file, rank=mesh.rank)
        self.calibration = Calibration(priced, keeps=job.calibrate is not None)
        self._num_measured = self._records_ns = self._waited_before_ns = 0
        self.state = state
        self._tokens_then = state.num_tokens if state else 0
        self.saved = state
        self.tally = Tally()
        self._saved_tallies = {self.steps_done: Tally()}

    def _load(self, saved_in: Path) -> PlannerState:
        self.position.enter(f"loading {saved_in.name}", is_slow=True)
        self.steps_done = saver.load(
            saved_in, self.mesh, stages=self.executor.stages, optimizers=self.optimizers
        )
        return checkpoint.planner_state(saved_in)

    def run(self) -> Tally:
        """Train until training.steps, the end of data or a request to stop; evaluate unless
        stopped, save, show a summary."""
        with self._report() as report, closing(self.ledger):
            if self.meter is not None and self.work.note:
                report.say(self.work.note)
            self.ledger.begin(self.state.next_step if self.state else 0)
            try:
                # Plans of the first two steps are compared here, later ones two steps ahead.
                first = self.feed.peek(1) + self.feed.peek(2)
                held = self.evaluator.plans if self.evaluator is not None else []
                asked = self.stop_request.signalled
                stop = self.reducer.reduce(first + held, stop=asked).stop
                if self.job.resume is None and not stop:
                    self._evaluate(report)
                while not stop and self.steps_done < self.spec.training.steps:
                    self.position.enter("waiting for the next step's plan")
                    item = self.feed.next()
                    if item is None:
                        break
                    stop = self._step(*item, report)
            finally:
                self.inputs.close()
                self.feed.close()
            if not stop:
                self._evaluate(report)
            self._save(report, is_last=True)
            self.saver.close()
            if stop:
                asked_by = self.stop_request.words[stop]
                report.stopped(self.steps_done, asked_by, is_saved=self.saved is not None)
            self.tally.most_graphs = self._most_graphs()
        if self.mesh.rank == 0 and (self.tally.ours.steps or not stop):
            report.summary(self.tally, self._checkpoint_path())
        if self.job.calibrate is not None and not stop:
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
            priced=self._priced,
            device=self.mesh.device.type,
            steps_done=self.steps_done,
            places=self.ranks.places if self.ranks is not None else (),
        )

    def _step(self, plan: StepPlan, pipeline: PipelinePlan, report: Report) -> Stop:
        """Executes a planned step; whether the run was asked to stop."""
        begin = time.perf_counter()
        self._waited_before_ns = self.feed.waited_ns
        self.position.enter("reading its tokens", step=plan.step)
        sums = self._compute(plan, pipeline)
        if not math.isfinite(sums.loss + sums.gradient_norm):
            if self._refuse(plan, sums, report) == OnNonfinite.ROLLBACK:
                return sums.stop
            updated = False
        else:
            self.nonfinite.passed()
            updated = bool(plan.num_targets)
        if updated:
            self.position.enter("updating weights")
            # A step without a label moves neither the optimiser nor the learning rate.
            self.optimizers.step(self.steps_done, norm=sums.gradient_norm)
            self.steps_done += 1
        self.state = plan.state
        self.position.enter("recording the step")
        records_begin = time.thread_time_ns()  # without waits for ranks whose step is longer
        self._record(plan, pipeline, sums, report, updated=updated, begin=begin)
        self._count_graphs(report)
        self._record_ranks(plan, report)
        self.ledger.add(plan, updated=updated)
        self._records_ns += time.thread_time_ns() - records_begin
        if updated and self._is_evaluation_due(plan):
            self._evaluate(report)
        if updated and self._is_due(self.spec.checkpoint.interval):
            self._save(report)
        self._tell_saves(self.saver.poll(), report)
        return sums.stop

    def _compute(self, plan: StepPlan, pipeline: PipelinePlan) -> StepSums:
        """Forward and backward of all micro-batches, and the step's sums over all ranks."""
        scale = self._loss_scale(plan)
        loss = square = None
        if plan.num_targets:
            inputs = self.inputs.take(pipeline, loss_scale=scale)
            self._load_ahead()
            self.position.enter("computing")
            loss = self.executor.train_step(pipeline, self.reader, loss_scale=scale, inputs=inputs)
            square = gradient_square(self.executor.named_parameters(), self.mesh)
        self.position.enter("adding up loss and gradients' norm over all ranks")
        return self.reducer.reduce(
            self.feed.peek(2),
            loss=loss,
            gradient_square=square,
            done=pipeline,
            stop=self.stop_request.now(),
        )

    def _refuse(self, plan: StepPlan, sums: StepSums, report: Report) -> OnNonfinite:
        """Nothing is updated: the step is passed over, or training goes back."""
        newest = self._newest_checkpoint()
        action = self.nonfinite.decide(
            plan.step, loss=sums.loss, norm=sums.gradient_norm, has_checkpoint=newest is not None
        )
        self.tally.refused[str(action)] += 1
        self.optimizers.clear()
        report.nonfinite(plan.step, sums, action, newest, steps_done=self.steps_done)
        self.tally.skipped_tokens += plan.packing.num_tokens
        if action == OnNonfinite.ROLLBACK:
            assert newest is not None
            self._roll_back(newest, report)
        return action

    def _newest_checkpoint(self) -> Path | None:
        """The same on all ranks: rank 0's, as other nodes may see new folders later."""
        self.saver.finish_for_reading()
        there = checkpoint.list_complete(self.job.checkpoints) if self.mesh.rank == 0 else []
        newest = [there[-1].name if there else ""]
        dist.broadcast_object_list(newest, src=0)
        return self.job.checkpoints / newest[0] if newest[0] else None

    def _roll_back(self, saved_in: Path, report: Report) -> None:
        self.inputs.close()
        self.feed.close()
        state = self._load(saved_in)
        self.feed = PlanFeed(self._priced, self.job.train_store, self.world, self.mesh, state)
        self.inputs = InputPrefetcher(self.executor, self.reader, ahead=self.spec.data.prefetch)
        self.state = self.saved = state
        self.tally = self.tally.of_steps(self._saved_tallies[self.steps_done])
        self.ledger.begin(state.next_step)
        report.start(str(saved_in), steps_done=self.steps_done)

    def _record(
        self,
        plan: StepPlan,
        pipeline: PipelinePlan,
        sums: StepSums,
        report: Report,
        *,
        updated: bool,
        begin: float,
    ) -> None:
        telemetry = self._measure(plan, pipeline, begin=begin)
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
            loss=sums.loss / (self._loss_scale(plan) * plan.num_targets) if updated else None,
            grad_norm=sums.gradient_norm if updated else None,
            step_time_s=time.perf_counter() - begin,
        )
        self.tally.add(measured, predicted, plan.baseline)
        report.step(self.steps_done, measured, predicted, plan.baseline)

    def _count_graphs(self, report: Report) -> None:
        """Says that a step waited for the compiler, so that nobody wonders about its time."""
        graphs = num_graphs() - self._graphs_before
        if self.spec.training.compile and graphs > self.tally.graphs:
            report.compiled(self.steps_done, graphs - self.tally.graphs, graphs)
            self.tally.graphs = graphs

    def _most_graphs(self) -> int:
        """Of any rank; a collective call of runs that compile."""
        most = torch.tensor(num_graphs() - self._graphs_before)
        if self.spec.training.compile:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _measure(self, plan: StepPlan, pipeline: PipelinePlan, *, begin: float) -> Telemetry | None:
        """The record of the steps since the last one, if it is due; the device was waited for."""
        clock, meter = self.clock, self.meter
        if clock is None or meter is None:
            return None
        if plan.num_targets:
            meter.add(pipeline, clock.take(), self._exposed(begin, clock.marks_ns))
        # A record ends with the warm-up, so that none holds steps of both.
        self._num_measured += bool(plan.num_targets)
        ends_warm_up = self._num_measured == self.spec.telemetry.warmup_steps
        is_due = meter.num_steps == self.spec.telemetry.interval or self._is_last() or ends_warm_up
        own_ns = meter.own_ns
        reduced = meter.reduce() if is_due and meter.num_steps else None
        if plan.num_targets:
            self.work.add(plan.packing, time.perf_counter() - begin)
        if reduced is None:
            return None
        telemetry = replace(reduced, work=self.work.take())
        if self.calibration.take(telemetry):
            self.tally.telemetry.add(telemetry)
            if self.ranks is not None:
                self.ranks.add(own_ns, telemetry.num_steps)
        return telemetry

    def _exposed(self, begin: float, marks_ns: int) -> Exposed:
        """Of this step, with the waits since the last one; records of it are counted with the
        next. Waits after its beginning are in its time already."""
        exposed = Exposed(
            loading_ns=self.inputs.exposed_ns,
            planning_ns=self.feed.waited_ns,
            records_ns=self._records_ns + marks_ns,
            step_ns=round((time.perf_counter() - begin) * 1e9) + self._waited_before_ns,
        )
        self.feed.waited_ns = self._records_ns = 0
        return exposed

    def _record_ranks(self, plan: StepPlan, report: Report) -> None:
        """The table of ranks and the timeline, where they are due."""
        clock, ranks = self.clock, self.ranks
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

    def _is_evaluation_due(self, plan: StepPlan) -> bool:
        tokens = self.spec.eval.interval_tokens
        if not tokens:
            return self._is_due(self.spec.eval.interval)
        # Since it was last asked: a step that was passed over evaluates nothing.
        done = plan.state.num_tokens
        before, self._tokens_then = min(self._tokens_then, done - plan.packing.num_tokens), done
        return done // tokens > before // tokens and not self._is_last()

    def _evaluate(self, report: Report) -> None:
        if self.evaluator is not None:
            self.position.enter("evaluating")
            loss = self.evaluator.run()
            self.tally.heldout.append((self.steps_done, loss))
            tokens = self.state.num_tokens if self.state is not None else 0
            report.evaluation(self.steps_done, tokens, loss)

    def _save(self, report: Report, *, is_last: bool = False) -> None:
        """Saves unless this state is saved; what is the last of a run is waited for."""
        self.position.enter("saving a checkpoint", is_slow=True)
        began_s = time.perf_counter()
        ended = self.saver.wait()
        if any(saved.error for saved in ended):
            self.saved = None  # known to all ranks here, and to none before
        # By state, not by steps_done: a step without a label moves the state alone.
        if self.state is not None and self.state is not self.saved:
            if self.spec.training.on_nonfinite == OnNonfinite.ROLLBACK:
                self._saved_tallies[self.steps_done] = deepcopy(self.tally)
            ended += self.saver.save(self.steps_done, self.state, began_s=began_s)
            self.saved = self.state
        if is_last:
            ended += self.saver.wait()
        self._tell_saves(ended, report)
        if is_last and ended and ended[-1].error:
            raise CheckpointError(
                f"the last checkpoint, after step {ended[-1].step}, could not be written: "
                f"{ended[-1].error}. Those before it in {self.job.checkpoints} are as they were; "
                f"make room or correct run.output_dir, and go on with --resume"
            )

    def _tell_saves(self, ended: list[Saved], report: Report) -> None:
        for saved in ended:
            self.tally.saves.add(saved.step, saved.stall_s, saved.error)
            if not saved.error:  # training never goes back behind it
                for step in [s for s in self._saved_tallies if s < saved.step]:
                    del self._saved_tallies[step]
        report.saves(ended)

    def _checkpoint_path(self) -> Path:
        return checkpoint.folder_of(self.job.checkpoints, self.steps_done)


def _agree_on_kernel(spec: RunSpec, world: World, mesh: Mesh) -> tuple[RunSpec, str]:
    """The spec with the attention kernel that all ranks compute and price plans with; the name of
    the kernel profile.

    ValueError on all of them if they would compute by different ones, or one cannot or lacks the
    memory, or if they'd price by different profiles: devices and what is installed may differ from
    node to node.
    """
    priced, profile, problem = spec, "", None
    try:
        priced = with_backend(spec, mesh.device.type)
        profile = workload_for(priced, mesh.device.type).profile.name
        hold_against(spec, budget_of(spec, mesh.device.type))  # of this node's devices
    except ValueError as error:
        problem = error
    group = dist.group.WORLD if world.world_size > 1 else None
    declared = {"attention kernel": priced.kernels.attention, "kernel profile": profile}
    agree(declared, problem, group=group)
    return priced, profile


def run_rank(world: World, job: Job, device: torch.device, request: StopRequest) -> Tally:
    """A rank's whole life once its process group stands."""
    if job.calibrate is not None and device.type == "cpu":
        torch.set_num_threads(1)  # as profiles are measured; with more, CPU time tells nothing
    spec = job.spec
    if world.world_size > 1:
        refuse_unshared(
            job.directory,
            world,
            within_s=min(checkpoint.SEEN_WITHIN_S, spec.training.timeout_s / 2),
        )
    mesh = build_mesh(spec.parallel, device, shard_size=spec.fsdp.shard_size)
    limit_s = collective_limit_s(spec, world, device)
    limit_collectives(limit_s)
    limit_collectives(limit_s, mesh)
    position = Position()
    with watched(job.directory, spec, world=world, mesh=mesh, position=position):
        return Trainer(job, world, mesh, position, request).run()


def collective_limit_s(spec: RunSpec, world: World, device: torch.device) -> float:
    """How long a collective may take. Where ranks watch over each other, past what they give one
    that hangs: NCCL ends the process of a rank that waited too long, which would then be reported
    in place of the one it waited for. Gloo raises, and the watch knows that for waiting."""
    is_watched = bool(spec.training.heartbeat_s) and world.world_size > 1
    timeout_s = spec.training.timeout_s
    return 2 * timeout_s + 30 if is_watched and device.type == "cuda" else timeout_s
