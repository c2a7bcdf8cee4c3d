"""The hook that saves checkpoints during training and finds the checkpoint for a rollback."""

import time
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from wlb.parallel.host import host_group
from wlb.plan.tally import Tally
from wlb.spec import OnNonfinite, RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.checkpoint.saver import CheckpointError, CheckpointSaver, Saved
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.wall import Phase

MOST_FAILED = 3
"""Number of failed saves in a row after which the run ends, because its progress is not saved.

With a larger number, a run would survive a longer disturbance of the disk, but would lose more
steps if the disk stayed broken."""


def unsaved_remark(spec: RunSpec, saved_in: Path | None) -> str:
    """Return a warning if the run saves only when it ends (checkpoint.interval = 0), else "".

    Args:
        spec: The run.
        saved_in: The checkpoint that the run resumes from; None for a new run.
    """
    if spec.checkpoint.interval:
        return ""
    begin = checkpoint.read_run(saved_in)["step"] if saved_in is not None else 0
    after = f" after step {begin:,}" if begin else ""
    return (
        "checkpoint.interval = 0, so the run saves a checkpoint only when it ends, or when Ctrl-C "
        "or SIGTERM stops it. If it fails or is killed, all its steps"
        f"{after} are lost (up to {spec.training.steps - begin:,}); set checkpoint.interval to "
        "save regularly"
    )


class SaveCheckpoints(Hook):
    """Saves a checkpoint after every `checkpoint.interval` updates, and at the end of the run.

    All ranks save together. The hook ends the run after `MOST_FAILED` failed saves in a row.
    """

    phase = Phase.CHECKPOINTS

    def __init__(self, saver: CheckpointSaver) -> None:
        self.saver = saver
        self._reported: Saved | None = None
        self._failed_in_a_row = 0
        # The totals that the run prints when it ends (`Tally`), as they were at each checkpoint to
        # which a rollback may return. The key is the number of updates.
        self._tallies: dict[int, Tally] = {}

    def begin(self, run: RunContext) -> None:
        """Record that the run's totals (`Tally`) are zero now, in case a rollback returns here."""
        self._tallies[run.steps_done] = Tally()

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        """Save a checkpoint if one is due, and report a save that has ended."""
        if step.updated and run.is_due(run.spec.checkpoint.interval):
            self._save(run)
        self._report(run, self.saver.poll())

    def end(self, run: RunContext) -> None:
        """Save the final state, and wait until it is saved."""
        self._save(run, is_last=True)
        self.saver.close()

    def newest(self, run: RunContext) -> Path | None:
        """Return the newest complete checkpoint, or None. A collective call.

        Rank 0 chooses the checkpoint, because only rank 0 gives checkpoints their final names.
        """
        self.saver.finish_for_reading()
        complete = checkpoint.list_complete(run.job.checkpoints) if run.mesh.rank == 0 else []
        newest = [complete[-1].name if complete else ""]
        dist.broadcast_object_list(newest, src=0, group=host_group())
        return run.job.checkpoints / newest[0] if newest[0] else None

    def rolled_back(self, run: RunContext, saved_in: Path) -> None:
        """Reset the totals of the run's summary, because the checkpoint `saved_in` was loaded.

        The totals get the values that they had when `saved_in` was saved. Kept as they are: the
        counts of saves and of steps that were not finite, and the lines that hooks have added.
        """
        run.saved = run.progress
        # The totals are zero if an earlier process saved this checkpoint.
        run.tally = run.tally.rolled_back(self._tallies.get(run.steps_done, Tally()))

    def _save(self, run: RunContext, *, is_last: bool = False) -> None:
        """Save the current state, unless it is saved already.

        At the end of the run `is_last` is true, and the function waits until the save has ended.

        Raises:
            CheckpointError: If the save at the end of the run failed, or `MOST_FAILED` saves in a
                row.
        """
        run.position.enter("saving a checkpoint")
        began_s = time.perf_counter()
        ended = self.saver.wait()
        self._count(run, ended)
        # Compare the planner's states instead of the numbers of updates, because a step without
        # targets updates nothing but changes the planner's state.
        is_new = run.progress is not None and run.progress is not run.saved
        if is_new and (is_last or not self._failed_too_often()):
            saved = self._begin(run, began_s)
            # If one more failed save would end the run, wait for the result of this save now. A
            # failure then loses no further steps.
            if is_last or (self._failed_in_a_row and self._failed_too_often(more=1)):
                saved += self.saver.wait()
            self._count(run, saved)
            ended += saved
        self._report(run, ended)
        if is_last and ended and ended[-1].error:
            raise CheckpointError(
                f"the last checkpoint, after step {ended[-1].step}, could not be "
                f"written: {ended[-1].error}. Older checkpoints in "
                f"{run.job.checkpoints} are intact; free space on the disk or correct "
                "run.output_dir, then continue with --resume"
            )
        if not is_last and self._failed_too_often():
            raise CheckpointError(
                f"{MOST_FAILED} saves in a row failed, the last one after step "
                f"{ended[-1].step}: {ended[-1].error}. Older checkpoints in "
                f"{run.job.checkpoints} are intact; free space on the disk or correct "
                "run.output_dir, then continue with --resume"
            )

    def _begin(self, run: RunContext, began_s: float) -> list[Saved]:
        """Start to save the current state, and return a list with the result of the previous save.

        The list is empty if there was none, or if its result was returned before. `began_s` is the
        value of time.perf_counter when training began to wait.
        """
        assert run.progress is not None
        if run.spec.training.on_nonfinite == OnNonfinite.ROLLBACK:
            self._tallies[run.steps_done] = deepcopy(run.tally)
        state = run.progress.state
        run.saved = run.progress
        return self.saver.save(run.steps_done, state, began_s=began_s)

    def _count(self, run: RunContext, ended: list[Saved]) -> None:
        """Count how many saves in a row have failed, given the saves that ended most recently.

        Ranks call this after they have waited for a save, and not whenever a save happens to end.
        So all ranks count a failure at the same step, and end the run together.
        """
        for saved in ended:
            self._failed_in_a_row = self._failed_in_a_row + 1 if saved.error else 0
            if saved.error:
                run.saved = None
            self._forget_tallies(saved, keep=run.spec.checkpoint.keep)

    def _forget_tallies(self, saved: Saved, *, keep: int) -> None:
        """Drop the totals to which no rollback returns, because their checkpoint does not exist.

        A rollback returns to the newest checkpoint, or to an older one if the newest is damaged.

        Args:
            saved: The save that has ended.
            keep: Number of checkpoints that are kept.
        """
        if saved.error:
            self._tallies.pop(saved.step, None)
            return
        complete = sorted(step for step in self._tallies if step <= saved.step)
        for step in complete[:-keep]:
            del self._tallies[step]

    def _failed_too_often(self, *, more: int = 0) -> bool:
        """Return whether the failed saves in a row, plus `more` failures, reach `MOST_FAILED`."""
        return self._failed_in_a_row + more >= MOST_FAILED

    def _report(self, run: RunContext, ended: list[Saved]) -> None:
        """Write the results of the saves `ended` to the run's records and to the screen.

        A save that was reported before is not reported again.
        """
        for saved in ended:
            run.tally.saves.add(saved.step, saved.stall_s, saved.error)
            if saved is not self._reported:
                self._reported = saved
                run.report.write("checkpoint", **asdict(saved))
                if saved.dropped:
                    run.report.say(
                        f"WARNING: the disk was full, so {saved.dropped} was removed "
                        f"to save the checkpoint after step {saved.step}. Free space "
                        "on the disk, or lower checkpoint.keep = "
                        f"{run.spec.checkpoint.keep}"
                    )
                if saved.error:
                    run.report.say(
                        f"WARNING: the checkpoint after step {saved.step} could not be "
                        f"written: {saved.error}. Older checkpoints are intact"
                    )
