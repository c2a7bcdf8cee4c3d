"""The training loop of one rank: plan, load, forward and backward, reduce, update.

In each step, the host waits for the device once, in the all-reduce of `StepReducer`. Everything
that measures, records, evaluates or saves is a hook (`wlb.train.hooks`); `wlb.train.watchers` lists
the hooks of a run.
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from wlb.data.reader import StoreReader
from wlb.launch.position import Position
from wlb.parallel.data import gradient_square
from wlb.parallel.execute import Executor
from wlb.parallel.expert_parallel import load_values
from wlb.parallel.mesh import Mesh
from wlb.parallel.world import World
from wlb.plan import PipelinePlan, PlannerState, StepPlan
from wlb.plan.tally import Tally
from wlb.sharding import STRATEGIES
from wlb.spec import OnNonfinite
from wlb.train.checkpoint.folder import planner_state
from wlb.train.checkpoint.saver import CheckpointSaver, load_sound, load_weights
from wlb.train.checkpoint.saves import SaveCheckpoints
from wlb.train.evaluate import Evaluator
from wlb.train.faults.nonfinite import NonfiniteSteps
from wlb.train.faults.stop import StopRequest
from wlb.train.feed import PlanFeed
from wlb.train.hooks import ExecutedStep, LoadedRun, RefusedStep, RunContext
from wlb.train.job import Job
from wlb.train.optimizer import Optimizers
from wlb.train.prefetch import InputPrefetcher
from wlb.train.reduce import StepReducer, StepSums
from wlb.train.refuse import agree_on_kernel
from wlb.train.telemetry.clock import StepClock
from wlb.train.telemetry.ranks import gather_places
from wlb.train.telemetry.report import RunReport
from wlb.train.telemetry.wall import Phase
from wlb.train.watchers import hooks_of


class Trainer:
    """Runs a job on one rank. All ranks construct it and call `run` together.

    Args:
        job: The arguments that every rank of the run gets.
        world: This rank's place among the processes of the launcher.
        mesh: This rank's place in the 4-D layout, with its process groups.
        position: The object in which the rank notes what it is doing, for reports of failures. With
            None, the notes are in this process' memory only, where no report can read them.
        stop_request: Notices signals and stop files that ask the run to end, also those that came
            before training. With None, only stop files are noticed.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        mesh: Mesh,
        position: Position | None = None,
        stop_request: StopRequest | None = None,
    ) -> None:
        spec = job.spec
        self.job, self.spec, self.world, self.mesh = job, spec, world, mesh
        self.reader = StoreReader(job.train_store, spec.model.vocab_size)
        self.priced, profile = agree_on_kernel(spec, world, mesh, stores=self.reader.identity)
        self.position = position or Position()
        clock = StepClock.of(mesh.device)
        # Draw random weights only if the run begins without a checkpoint. Otherwise the checkpoint
        # would overwrite all of them.
        draws = job.resume is None and job.init_from is None
        self.executor = Executor(spec, mesh, progress=self.position, timer=clock, draws=draws)
        self.optimizers = Optimizers(spec, dict(self.executor.stages))
        self.reducer = StepReducer(mesh, STRATEGIES, spec.model)
        self.nonfinite = NonfiniteSteps(spec.training.on_nonfinite)
        self.stop_request = stop_request or StopRequest(spec.run, rank=mesh.rank)
        self.context = self._context()
        heldout = job.heldout_store if spec.eval.steps else ""
        self.evaluator = Evaluator(self.priced, heldout, self.executor) if heldout else None
        saver = CheckpointSaver(
            job.checkpoints,
            spec,
            mesh,
            stages=self.executor.stages,
            optimizers=self.optimizers,
            profile=profile,
            origin=self.job.resume or job.init_from,
        )
        self.saves = SaveCheckpoints(saver)
        self.hooks = hooks_of(
            self.context,
            self.priced,
            clock=clock,
            evaluator=self.evaluator,
            saves=self.saves,
            stop_request=self.stop_request,
        )

    def run(self) -> Tally:
        """Train until `training.steps` updates are done, the data end, or somebody stops the run.

        Returns:
            Sums over the trained steps, from which the summary is made.
        """
        run = self.context
        with ExitStack() as opened:
            opened.enter_context(run.report)
            for hook in self.hooks:
                # With callbacks, hooks are closed even if another hook or a step raises an error.
                opened.callback(hook.close)
            try:
                with run.wall.phase(Phase.PLANNING):
                    self._agree_on_first_plans()
                for hook in self.hooks:
                    with run.wall.phase(hook.phase or Phase.START):
                        hook.begin(run)
                run.wall.switch(Phase.REST)
                while not run.stop and run.steps_done < self.spec.training.steps:
                    self.position.enter("waiting for the next step's plan")
                    with run.wall.phase(Phase.PLANNING):
                        item = run.feed.next()
                    if item is None:
                        break
                    with run.wall.phase(Phase.STEPS):
                        self._step(*item)
            finally:
                run.inputs.close()
                run.feed.close()
            for hook in self.hooks:
                with run.wall.phase(hook.phase or Phase.REST):
                    hook.end(run)
        for hook in self.hooks:
            hook.finished(run)
        return run.tally

    def _step(self, plan: StepPlan, pipeline: PipelinePlan) -> None:
        run, began_s = self.context, time.perf_counter()
        waited_ns = run.feed.waited_ns
        self.position.enter("reading its tokens", step=plan.step)
        sums = self._compute(plan, pipeline)
        run.stop = sums.stop
        action = self._reaction(plan, sums)
        # After a rollback, this step will be trained a second time, so it must not be recorded now.
        if action == OnNonfinite.ROLLBACK:
            return
        # A step without targets has no gradients, so it is not an update.
        updated = action is None and bool(plan.num_targets)
        if updated:
            self.position.enter("updating weights")
            self.optimizers.step(run.steps_done, norm=sums.gradient_norm)
            run.steps_done += 1
        run.progress = plan.progress
        step = ExecutedStep(
            plan=plan,
            pipeline=pipeline,
            sums=sums,
            loss=sums.loss / (self.spec.loss_scale(plan.num_targets) * max(1, plan.num_targets)),
            updated=updated,
            began_s=began_s,
            waited_ns=waited_ns,
        )
        self.position.enter("recording the step")
        # Measure the CPU time of this thread, because some hooks call collectives, and wall time
        # would include their waits for slower ranks.
        begin_ns = time.thread_time_ns()
        for hook in self.hooks:
            hook.record(run, step)
        run.records_ns += time.thread_time_ns() - begin_ns
        for hook in self.hooks:
            with run.wall.phase(hook.phase or Phase.REST):
                hook.after_step(run, step)

    def _compute(self, plan: StepPlan, pipeline: PipelinePlan) -> StepSums:
        """Run forward and backward of all micro-batches, and sum the results over ranks."""
        run, scale = self.context, self.spec.loss_scale(plan.num_targets)
        loss = square = load = None
        if plan.num_targets:
            inputs = run.inputs.take(pipeline, loss_scale=scale)
            # A thread loads the next step's inputs while this step computes.
            run.inputs.start_next(run.feed)
            self.position.enter("computing")
            loss = self.executor.train_step(pipeline, self.reader, loss_scale=scale, inputs=inputs)
            square = gradient_square(self.executor.counted_parameters(), self.mesh)
            load = load_values(self.executor.stages.values(), self.spec.model.num_layers, self.mesh)
        self.position.enter("adding up loss and gradients' norm over all ranks")
        return self.reducer.reduce(
            # Compare the plans of the step after the next one across ranks. No rank has loaded
            # inputs for that step yet.
            run.feed.peek(2),
            loss=loss,
            gradient_square=square,
            expert_load=load,
            done=pipeline,
            stop=self.stop_request.now(),
        )

    def _reaction(self, plan: StepPlan, sums: StepSums) -> OnNonfinite | None:
        """Handle a step whose loss or gradient norm is not finite, so that it updates nothing.

        The step is either skipped, or the run loads the newest checkpoint and continues from there
        (a rollback).

        Returns:
            None if the loss and the gradient norm are finite, else SKIP or ROLLBACK.
        """
        if sums.is_finite:
            self.nonfinite.finite()
            return None
        run, newest = self.context, self.saves.newest(self.context)
        found = {"loss": sums.loss, "norm": sums.gradient_norm}
        action = self.nonfinite.decide(plan.step, **found, has_checkpoint=newest is not None)
        self.optimizers.clear()
        for hook in self.hooks:
            hook.refused(run, RefusedStep(plan, sums, action, newest))
        # For a rollback, drop the plans and inputs of coming steps, load the checkpoint, and plan
        # again from the planner's state in the checkpoint.
        if newest is not None and action == OnNonfinite.ROLLBACK:
            run.inputs.close()
            run.feed.close()
            with run.wall.phase(Phase.CHECKPOINTS):
                loaded = self._load(newest)
            run.resume_from(loaded)
            run.feed, run.inputs = self._open_feed(loaded.state)
            for hook in self.hooks:
                hook.rolled_back(run, loaded.saved_in)
        return action

    def _agree_on_first_plans(self) -> None:
        """Check that all ranks have the same plans for the first two steps and the evaluation.

        `_compute` checks the plans of all later steps.
        """
        run = self.context
        self.stop_request.steps_begin()
        evaluation_plans = self.evaluator.plans if self.evaluator is not None else []
        run.stop = self.reducer.reduce(
            [*run.feed.peek(1), *run.feed.peek(2), *evaluation_plans],
            stop=self.stop_request.signalled,
        ).stop

    def _context(self) -> RunContext:
        """Load the checkpoint of the run, if any, and return the state that loop and hooks share.

        A resumed run loads the whole state in one of its own checkpoints. A new run loads only the
        weights in another run's checkpoint if `checkpoint.init_from` is set.
        """
        loaded = self._load(self.job.resume) if self.job.resume is not None else None
        if loaded is None and self.job.init_from is not None:
            load_weights(self.job.init_from, self.mesh, stages=self.executor.stages)
        feed, inputs = self._open_feed(loaded.state if loaded is not None else None)
        report = RunReport(
            self.job,
            is_shown=self.mesh.rank == 0,
            priced=self.priced,
            device=self.mesh.device.type,
            steps_done=loaded.steps_done if loaded is not None else 0,
            places=gather_places(self.mesh, self.world),
        )
        run = RunContext(
            job=self.job,
            mesh=self.mesh,
            position=self.position,
            report=report,
            feed=feed,
            inputs=inputs,
        )
        if loaded is not None:
            run.resume_from(loaded)
        return run

    def _load(self, saved_in: Path) -> LoadedRun:
        """Load weights and optimisers from a checkpoint, and return where the run continues.

        If the checkpoint is damaged and `Job.falls_back` is true, an older checkpoint is loaded.
        """
        self.position.enter(f"loading {saved_in.name}")
        trained = (self.executor.stages, self.optimizers, self.job.falls_back)
        steps_done, saved_in = load_sound(saved_in, self.mesh, *trained)
        self.job = replace(self.job, resume=saved_in)
        # If the planner's state was saved at the end of the data, it is marked as finished.
        # `reopened` removes the mark, because data.epochs may have been raised since.
        return LoadedRun(saved_in, steps_done, planner_state(saved_in).reopened())

    def _open_feed(self, state: PlannerState | None) -> tuple[PlanFeed, InputPrefetcher]:
        feed = PlanFeed(self.priced, self.job.train_store, self.world, self.mesh, state)
        return feed, InputPrefetcher(self.executor, self.reader)
