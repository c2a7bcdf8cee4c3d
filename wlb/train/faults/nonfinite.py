"""What follows a step whose loss or gradient is not finite (`training.on_nonfinite`).

All ranks see the same sums, so they decide alike without talking.
"""

from dataclasses import dataclass, field

from wlb.spec import OnNonfinite


@dataclass(slots=True)
class NonfiniteSteps:
    """Decides. most_in_a_row: skipped updates that are taken as chance.

    rollback trains again from the last checkpoint; a step that fails again is skipped then, since
    its documents and not a passing fault of the hardware are the cause.
    """

    action: OnNonfinite
    most_in_a_row: int
    _in_a_row: int = 0
    _failed: set[int] = field(default_factory=set[int])

    def decide(self, step: int, *, loss: float, norm: float, has_checkpoint: bool) -> OnNonfinite:
        """SKIP or ROLLBACK; FloatingPointError where the run has to stop."""
        found = f"step {step}: loss {loss}, gradient norm {norm}"
        if self.action == OnNonfinite.STOP:
            raise FloatingPointError(
                f"{found}; nothing was updated. Lower training.learning_rate or go on from the "
                f"last checkpoint with --resume, with training.on_nonfinite = skip if such steps "
                f"are rare"
            )
        is_new = step not in self._failed
        self._failed.add(step)
        if self.action == OnNonfinite.ROLLBACK and is_new and has_checkpoint:
            self._in_a_row = 0
            return OnNonfinite.ROLLBACK
        self._in_a_row += 1
        if self._in_a_row > self.most_in_a_row:
            raise FloatingPointError(
                f"{found}; {self._in_a_row} steps in a row were not finite, more than "
                f"training.max_nonfinite = {self.most_in_a_row}. Lower training.learning_rate and "
                f"go on from a checkpoint with --resume"
            )
        return OnNonfinite.SKIP

    def passed(self) -> None:
        """A step was finite."""
        self._in_a_row = 0
