"""Computes the held-out loss with forward passes, on the ranks and in the layout of training.

Each evaluation starts at the beginning of the held-out store and fills windows of C tokens like the
paper's Plain-4D. So the loss depends on the weights alone, and not on the run's packing policy.
"""

from itertools import islice

import torch
import torch.distributed as dist

from wlb.data.reader import StoreReader
from wlb.parallel.execute import Executor
from wlb.plan import PipelinePlan, StepPlan
from wlb.planner import open_heldout_planner
from wlb.spec import RunSpec
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.wall import Phase


class Evaluator:
    """Computes the loss on the first `eval.steps` global batches of the held-out store.

    Args:
        spec: The run. Its kernels.attention is the kernel for which plans are priced, not `auto`.
        store: Prefix of the held-out token store.
        executor: Runs the forward passes.

    Attributes:
        plans: A pair for each global batch: the plan of all pipelines, and the plan of this rank's
            pipeline.
    """

    def __init__(self, spec: RunSpec, store: str, executor: Executor) -> None:
        self.executor = executor
        self.reader = StoreReader(store, spec.model.vocab_size)
        planner = open_heldout_planner(spec, store, executor.mesh.device.type)
        pipeline = executor.mesh.at.dp
        self.plans: list[tuple[StepPlan, PipelinePlan]] = [
            (plan, planner.shard(plan, pipeline))
            for plan in islice(planner.steps(), spec.eval.steps)
        ]

    def run(self) -> float:
        """Return the mean loss per target in nats, the same on every rank. A collective call."""
        mesh = self.executor.mesh
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for _, pipeline in self.plans:
            loss = self.executor.evaluate(pipeline, self.reader)
            # All TP ranks have the same loss, so only one of them adds it to the sum.
            if mesh.at.tp == 0:
                total += loss.double()
        dist.all_reduce(total)
        return float(total) / max(1, sum(plan.num_targets for plan, _ in self.plans))


class EvaluateHeldOut(Hook):
    """Computes the held-out loss before a new run begins, at intervals, and when a run ends.

    The interval is `eval.interval` updates, or, if `eval.interval_tokens` is set, this number of
    trained tokens. A run that was stopped does not evaluate at its end.
    """

    phase = Phase.EVALUATION

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self._tokens_before = 0

    def begin(self, run: RunContext) -> None:
        """Evaluate a new run before its first step."""
        self._tokens_before = run.progress.num_tokens if run.progress else 0
        if run.job.resume is None and not run.stop:
            self._evaluate(run)

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        """Evaluate if an evaluation is due after this step."""
        if step.updated and self._is_due(run, step.plan):
            self._evaluate(run)

    def end(self, run: RunContext) -> None:
        """Evaluate the trained weights, unless the run was stopped."""
        if not run.stop:
            self._evaluate(run)

    def _is_due(self, run: RunContext, plan: StepPlan) -> bool:
        tokens = run.spec.eval.interval_tokens
        if not tokens:
            return run.is_due(run.spec.eval.interval)
        # An evaluation is due if the number of trained tokens has reached or passed a multiple of
        # the interval since the previous step that updated the weights. `_tokens_before` is the
        # number after that previous step. After a rollback, `_tokens_before` may be too large, so
        # it is limited to the number before this step.
        done = plan.progress.num_tokens
        before = min(self._tokens_before, done - plan.packing.num_tokens)
        self._tokens_before = done
        return done // tokens > before // tokens and not run.is_last_step

    def _evaluate(self, run: RunContext) -> None:
        run.position.enter("evaluating")
        loss = self.evaluator.run()
        run.tally.heldout.append((run.steps_done, loss))
        tokens = run.progress.num_tokens if run.progress is not None else 0
        run.report.write(
            "evaluation", steps_done=run.steps_done, num_tokens=tokens, heldout_loss=loss
        )
        if run.report.display is not None:
            run.report.display.evaluation(run.steps_done, loss)
