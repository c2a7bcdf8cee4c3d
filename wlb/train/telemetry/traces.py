"""The hook that traces whole steps with torch.profiler: `telemetry.trace_steps`.

A trace holds every operator and kernel of a rank's step, for Perfetto or chrome://tracing. It makes
the traced steps slower, so their times are not those of other steps.
"""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.wall import Phase

FOLDER = "traces"
TRACED_RANK = 0
"""The rank whose steps are traced. More ranks write more files of hundreds of megabytes."""


class TraceSteps(Hook):
    """Traces the steps of `telemetry.trace_steps`, as the table of steps counts them, on this
    rank.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.folder, self.rank = directory / FOLDER, rank
        self._running: Any = None

    def begin(self, run: RunContext) -> None:
        self._start_if_due(run)

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        if self._running is None:
            return
        # Writing a trace may take longer than its step, and is no part of it.
        with run.wall.phase(Phase.REST):
            self._write(run)

    def _write(self, run: RunContext) -> None:
        running, self._running = self._running, None
        running.stop()
        try:
            self.folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            # The run's folder was removed or renamed, with which KeepFolder ends the run.
            return
        path = self.folder / f"step-{run.steps_done:08d}-rank-{self.rank}.json.gz"
        running.export_chrome_trace(str(path))
        run.report.say(f"trace of step {run.steps_done}: {path} (https://ui.perfetto.dev)")

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        self._start_if_due(run)

    def close(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _start_if_due(self, run: RunContext) -> None:
        if run.steps_done + 1 not in run.spec.telemetry.trace_steps:
            return
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        # A trace is of one cycle; without `acc_events` torch 2.11 warns that it forgets others.
        started = profile(activities=kinds, acc_events=True)
        started.start()
        self._running = started
