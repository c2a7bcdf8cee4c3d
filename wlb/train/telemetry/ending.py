"""The hooks that report the end of a run: what stopped it early, and its summary."""

from wlb.train.checkpoint import folder as checkpoint
from wlb.train.faults.stop import StopRequest
from wlb.train.hooks import Hook, RunContext
from wlb.train.telemetry.display import summary
from wlb.train.telemetry.wall import wall_line


class TellStop(Hook):
    """Reports what stopped a run early, and whether there is a checkpoint to resume from."""

    def __init__(self, request: StopRequest) -> None:
        self.request = request

    def end(self, run: RunContext) -> None:
        """If the run was stopped, print and record what stopped it."""
        if run.stop:
            asked_by = self.request.words[run.stop]
            run.report.write("stop", steps_done=run.steps_done, asked_by=asked_by)
            steps = run.job.spec.training.steps
            run.tally.stopped = f"after step {run.steps_done} of {steps} by {asked_by}"
            is_saved = run.saved is not None
            then = (
                "saved; continue with --resume"
                if is_saved
                else "there was nothing to save; start the run again"
            )
            run.report.say(f"stopped {run.tally.stopped}; {then}")


class ShowSummary(Hook):
    """Prints the run's summary on rank 0, and records the wall time of each phase.

    A run that was stopped before its first step has no summary.
    """

    def end(self, run: RunContext) -> None:
        """Record the wall time of each phase of the run (`Phase`)."""
        seconds = {str(phase): s for phase, s in run.wall.seconds.items()}
        run.report.write("wall", steps_done=run.steps_done, seconds=seconds)

    def finished(self, run: RunContext) -> None:
        """Print the run's summary: balance, losses, speed, time, and what went wrong."""
        if run.report.display is not None and (run.tally.ours.steps or not run.stop):
            files = {
                "metrics": run.report.path,
                "checkpoint": checkpoint.folder_of(run.job.checkpoints, run.steps_done),
            }
            wall = run.wall
            line = wall_line(wall.seconds, before_ranks_s=wall.before_ranks_s)
            verbose = run.job.verbose
            summary(run.report.console, run.tally, files=files, wall=line, verbose=verbose)
