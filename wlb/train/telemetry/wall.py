"""Wall time of a run by phase. Every second belongs to one phase, so the phases sum to the total.

Phases may nest; the time of the inner phase is not counted in the outer one. The clock starts in
the start-up, which began before the ranks existed (`Job.started_s`).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class Phase(StrEnum):
    """A part of a run's wall time."""

    START = "start-up"  # until the first plans are needed
    PLANNING = "planning"  # waits for plans, and their first comparison
    STEPS = "steps"  # including loading inputs and writing records
    EVALUATION = "evaluation"
    CHECKPOINTS = "checkpoints"
    REST = "rest"  # between steps and at the end


class WallTimes:
    """Adds up the wall time of one rank by phase.

    Args:
        started_s: Unix time at which the run began.
        ready_s: Unix time at which its ranks could begin; 0 if not known.
    """

    def __init__(self, *, started_s: float, ready_s: float = 0.0) -> None:
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._seconds[Phase.START] = max(0.0, time.time() - started_s) if started_s else 0.0
        self.before_ranks_s = max(0.0, ready_s - started_s)
        self._phase = Phase.START
        self._mark_s = time.perf_counter()

    def switch(self, phase: Phase) -> Phase:
        """End the current phase and begin another; return the phase that ended."""
        now_s, before = time.perf_counter(), self._phase
        self._seconds[before] += now_s - self._mark_s
        self._phase, self._mark_s = phase, now_s
        return before

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Count the time of the block to `phase`, without the time of phases inside."""
        outer = self.switch(phase)
        try:
            yield
        finally:
            self.switch(outer)

    @property
    def seconds(self) -> dict[Phase, float]:
        """Seconds of each phase until now."""
        self.switch(self._phase)
        return dict(self._seconds)


def wall_line(seconds: dict[Phase, float], *, before_ranks_s: float) -> str:
    """Return all phases in one sentence.

    Args:
        seconds: Seconds by phase.
        before_ranks_s: Seconds of the start-up before ranks could begin; 0 if not known.
    """
    parts = ", ".join(f"{name} {s:.1f}" for name, s in seconds.items())
    line = f"{sum(seconds.values()):.1f} s = {parts}"
    if before_ranks_s:
        ranks_s = seconds[Phase.START] - before_ranks_s
        line += (
            f"; start-up: {before_ranks_s:.1f} s of imports, stores and checks, {ranks_s:.1f} s of "
            f"ranks, model and communicators"
        )
    return line
