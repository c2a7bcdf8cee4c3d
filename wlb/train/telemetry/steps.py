"""The hook that records and shows the predictions and measurements of every step.

The hook also records steps that update nothing because their loss or gradient is not finite.
"""

import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from wlb.plan import MeasuredStep
from wlb.spec import OnNonfinite
from wlb.train.hooks import ExecutedStep, Hook, RefusedStep, RunContext
from wlb.train.optimizer import learning_rate
from wlb.train.telemetry.display import StepFigures


class RecordSteps(Hook):
    """Writes a record of each step, shows the step, and adds it to the run's totals (`Tally`)."""

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Record and show an executed step."""
        plan, sums = step.plan, step.sums
        predicted = replace(
            plan.predicted,
            cp_imbalance=sums.cp_imbalance,
            sharding_counts=tuple(sums.shardings.items()),
            key_rows=sums.key_rows,
        )
        measured = MeasuredStep.of(
            predicted,
            loss=step.loss if step.updated else None,
            grad_norm=sums.gradient_norm if step.updated else None,
            step_time_s=time.perf_counter() - step.began_s,
            telemetry=step.telemetry,
            experts=sums.experts,
        )
        run.tally.add(measured, predicted, plan.baseline)
        if run.report.display is None:
            return
        figures = StepFigures(
            learning_rate=learning_rate(run.spec, max(0, run.steps_done - 1)),
            memory_bytes=peak_memory_bytes(run.mesh.device),
        )
        run.report.write(
            "step",
            step=plan.step,
            steps_done=run.steps_done,
            **figures._asdict(),
            measured=measured.to_json(),
            predicted=predicted.to_json(),
            plain_4d=None if plan.baseline is None else plan.baseline.to_json(),
        )
        run.report.display.step(run.steps_done, measured, predicted, plan.baseline, figures)

    def refused(self, run: RunContext, step: RefusedStep) -> None:
        """Record and show a step whose loss or gradient norm is not finite."""
        run.tally.refused[str(step.action)] += 1
        run.tally.skipped_tokens += step.plan.packing.num_tokens
        found = f"loss {step.sums.loss}, gradient norm {step.sums.gradient_norm}"
        run.report.write(
            "nonfinite",
            step=step.plan.step,
            steps_done=run.steps_done,
            found=found,
            action=str(step.action),
        )
        is_rollback = step.action == OnNonfinite.ROLLBACK
        then = f"training returns to {step.saved_in}" if is_rollback else "the update is skipped"
        run.report.say(f"the step after step {run.steps_done} is not finite: {found}; {then}")

    def rolled_back(self, run: RunContext, saved_in: Path) -> None:
        """Record that training continues from the checkpoint `saved_in`."""
        run.report.start(str(saved_in), steps_done=run.steps_done)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has used so far.

    On a GPU, this is the peak of the memory that torch allocated for tensors. On a CPU, it is the
    peak resident memory of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
