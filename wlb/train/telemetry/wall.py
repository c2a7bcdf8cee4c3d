"""Measures the wall time of a run by phase, such as start-up, steps and checkpoints.

Every second belongs to exactly one phase, so the times of all phases add up to the whole time.
Phases may nest, and the time of an inner phase is not counted in the outer phase. The first phase
is the start-up. It begins when the command begins (`Job.started_s`), before the ranks exist.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class Phase(StrEnum):
    """A part of a run's wall time."""

    START = "start-up"  # until the first plans are needed
    PLANNING = "planning"  # waiting for plans, and comparing the first plans across ranks
    STEPS = "steps"  # steps, including loading their inputs and writing their records
    EVALUATION = "evaluation"  # computing the held-out loss
    CHECKPOINTS = "checkpoints"  # waiting for saves, and loading a checkpoint for a rollback
    REST = "rest"  # all other work between steps and at the end


class WallTimes:
    """Adds up the wall time of one rank by phase.

    Args:
        started_s: Unix time at which the command began.
        ready_s: Unix time at which everything was ready for the ranks to begin (`Job.ready_s`); 0
            if not known.
    """

    def __init__(self, *, started_s: float, ready_s: float = 0.0) -> None:
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._seconds[Phase.START] = max(0.0, time.time() - started_s) if started_s else 0.0
        self.before_ranks_s = max(0.0, ready_s - started_s)
        self._phase = Phase.START
        self._mark_s = time.perf_counter()

    def switch(self, phase: Phase) -> Phase:
        """End the current phase and begin `phase`. Return the phase that has ended."""
        now_s, before = time.perf_counter(), self._phase
        self._seconds[before] += now_s - self._mark_s
        self._phase, self._mark_s = phase, now_s
        return before

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Add the time of the block to `phase`, without the time of phases inside the block."""
        outer = self.switch(phase)
        try:
            yield
        finally:
            self.switch(outer)

    @property
    def seconds(self) -> dict[Phase, float]:
        """Wall time of each phase until now, in seconds."""
        self.switch(self._phase)
        return dict(self._seconds)


def wall_line(seconds: dict[Phase, float], *, before_ranks_s: float) -> str:
    """Return the wall time of all phases in one line, for the summary that a run prints.

    Args:
        seconds: Seconds of each phase.
        before_ranks_s: Seconds of the start-up until the ranks could begin; 0 if not known.
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
