"""Decides what follows a non-finite loss or gradient (`training.on_nonfinite`), and counts skips.

All ranks have the same sums, so all decide the same without communication.
"""

from dataclasses import dataclass, field

from wlb.spec import OnNonfinite

MOST_SKIPPED = 10
"""Steps in a row that may be skipped.

A run that skips more has diverged, and further steps are wasted."""


@dataclass(slots=True)
class NonfiniteSteps:
    """Decides what follows a step whose loss or gradient is not finite.

    A step that fails once more after a rollback is skipped: its documents are then the cause, not a
    transient hardware fault.
    """

    action: OnNonfinite  # the configured reaction (`training.on_nonfinite`)
    _in_a_row: int = 0  # skipped steps since the last finite step
    # Numbers of steps that were not finite before.
    _failed: set[int] = field(default_factory=set[int])

    def decide(self, step: int, *, loss: float, norm: float, has_checkpoint: bool) -> OnNonfinite:
        """Return SKIP or ROLLBACK for a step that is not finite.

        Args:
            step: Number of the step.
            loss: Its loss, for the message.
            norm: Its gradient norm, for the message.
            has_checkpoint: Whether there is a checkpoint to roll back to.

        Raises:
            FloatingPointError: If the run has to stop.
        """
        found = f"step {step}: loss {loss}, gradient norm {norm}"
        if self.action == OnNonfinite.STOP:
            raise FloatingPointError(
                f"{found}; nothing was updated. Lower training.learning_rate or continue from "
                f"the last checkpoint with --resume, with training.on_nonfinite = skip if such "
                f"steps are rare"
            )
        is_new = step not in self._failed
        self._failed.add(step)
        # Roll back only once for each step. If the step fails once more, skip it.
        if self.action == OnNonfinite.ROLLBACK and is_new and has_checkpoint:
            self._in_a_row = 0
            return OnNonfinite.ROLLBACK
        self._in_a_row += 1
        if self._in_a_row > MOST_SKIPPED:
            raise FloatingPointError(
                f"{found}; {self._in_a_row} steps in a row were not finite, more than the "
                f"{MOST_SKIPPED} that a run may skip. Lower training.learning_rate and continue "
                f"from a checkpoint with --resume"
            )
        return OnNonfinite.SKIP

    def finite(self) -> None:
        """Note a finite step, which ends a series of skipped steps."""
        self._in_a_row = 0
