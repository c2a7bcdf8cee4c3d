"""Decides how a run reacts to a loss or gradient that is not finite (`training.on_nonfinite`).

The loss and the gradient norm are sums over all ranks, so all ranks reach the same decision without
communication.
"""

from dataclasses import dataclass, field

from wlb.spec import OnNonfinite

MOST_SKIPPED = 10
"""Most steps in a row that a run may skip.

A run that would skip more has probably diverged, so further steps would be a waste of time."""


@dataclass(slots=True)
class NonfiniteSteps:
    """Decides how the run reacts to steps whose loss or gradient is not finite.

    With `training.on_nonfinite` = `rollback`, the run returns to a checkpoint and trains the step a
    second time. If the loss or gradient is not finite again, the step is skipped, because the cause
    is then its documents rather than a transient hardware fault. Without a checkpoint the step is
    skipped at once.
    """

    action: OnNonfinite  # the configured reaction (`training.on_nonfinite`)
    _in_a_row: int = 0  # number of steps skipped since the last finite step or rollback
    # Numbers of the steps that were not finite, for `rollback` and `skip`.
    _failed: set[int] = field(default_factory=set[int])

    def decide(self, step: int, *, loss: float, norm: float, has_checkpoint: bool) -> OnNonfinite:
        """Return SKIP or ROLLBACK for a step whose loss or gradient norm is not finite.

        Args:
            step: Number of the step.
            loss: The step's loss, for the message.
            norm: The step's gradient norm, for the message.
            has_checkpoint: Whether there is a checkpoint to roll back to.

        Raises:
            FloatingPointError: If `training.on_nonfinite` is `stop`, or if more than `MOST_SKIPPED`
                steps in a row would be skipped.
        """
        found = f"step {step}: loss {loss}, gradient norm {norm}"
        if self.action == OnNonfinite.STOP:
            raise FloatingPointError(
                f"{found} is not finite, so the weights were not updated. Lower "
                "training.learning_rate, or continue from the last checkpoint with "
                "--resume. If such steps are rare, set training.on_nonfinite = skip"
            )
        is_new = step not in self._failed
        self._failed.add(step)
        # Roll back only once for each step, because the same step would probably fail each time.
        if self.action == OnNonfinite.ROLLBACK and is_new and has_checkpoint:
            self._in_a_row = 0
            return OnNonfinite.ROLLBACK
        self._in_a_row += 1
        if self._in_a_row > MOST_SKIPPED:
            raise FloatingPointError(
                f"{found} is not finite, as in the last {self._in_a_row} steps in a row, but "
                f"a run may skip at most {MOST_SKIPPED} in a row. Lower "
                "training.learning_rate and continue from an earlier checkpoint with "
                "--resume"
            )
        return OnNonfinite.SKIP

    def finite(self) -> None:
        """Reset the count of skipped steps in a row, after a step with finite loss and gradient."""
        self._in_a_row = 0
