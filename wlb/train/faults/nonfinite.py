"""Decide the reaction to a non-finite loss or gradient (`training.on_nonfinite`), and count skips.

All ranks see the same sums, so they decide alike without communication.
"""

from dataclasses import dataclass, field

from wlb.spec import OnNonfinite

MOST_SKIPPED = 10
"""Updates in a row that may be skipped. A run that skips more has diverged, and each further step
is wasted."""


@dataclass(slots=True)
class NonfiniteSteps:
    """A step that fails again after a rollback is skipped, because the cause is then its documents
    rather than a transient hardware fault.
    """

    action: OnNonfinite
    _in_a_row: int = 0
    _failed: set[int] = field(default_factory=set[int])

    def decide(self, step: int, *, loss: float, norm: float, has_checkpoint: bool) -> OnNonfinite:
        """Return SKIP or ROLLBACK; FloatingPointError if the run has to stop."""
        found = f"step {step}: loss {loss}, gradient norm {norm}"
        if self.action == OnNonfinite.STOP:
            raise FloatingPointError(
                f"{found}; nothing was updated. Lower training.learning_rate or continue from "
                f"the last checkpoint with --resume, with training.on_nonfinite = skip if such "
                f"steps are rare"
            )
        is_new = step not in self._failed
        self._failed.add(step)
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
        """A step was finite, so that skipped ones are counted anew."""
        self._in_a_row = 0
