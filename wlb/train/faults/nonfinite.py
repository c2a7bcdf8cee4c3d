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
        self._skip(found, "were not finite", "Lower training.learning_rate")
        return OnNonfinite.SKIP

    def finite(self, step: int, *, norm: float, median: float | None) -> OnNonfinite | None:
        """None for a step that updates weights, SKIP for one whose norm is a spike over `median`
        (`training.skip_spikes`); FloatingPointError if the run has to stop."""
        if median is None:
            self._in_a_row = 0
            return None
        found = f"step {step}: gradient norm {norm:g} with a median of {median:g}"
        remedy = "Raise training.skip_spikes if such norms are usual, or lower the learning rate"
        self._skip(found, "were spikes or not finite", remedy)
        return OnNonfinite.SKIP

    def _skip(self, found: str, what: str, remedy: str) -> None:
        self._in_a_row += 1
        if self._in_a_row > MOST_SKIPPED:
            raise FloatingPointError(
                f"{found}; {self._in_a_row} steps in a row {what}, more than the {MOST_SKIPPED} "
                f"that a run may skip. {remedy} and continue from a checkpoint with --resume"
            )
