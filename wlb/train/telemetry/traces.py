"""The hook that traces whole steps with torch.profiler (`telemetry.trace_steps`).

A trace has every operator and kernel of a step on one rank; Perfetto and chrome://tracing display
it. Tracing makes the step slower, so the time of a traced step says nothing about other steps.
"""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.wall import Phase

FOLDER = "traces"
TRACED_RANK = 0
"""The rank whose steps are traced.

Only one rank is traced, because each rank would write a file of hundreds of megabytes."""


class TraceSteps(Hook):
    """Traces this rank in the steps that `telemetry.trace_steps` lists."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.folder, self.rank = directory / FOLDER, rank
        self._running: Any = None

    def begin(self, run: RunContext) -> None:
        """Start a trace if `telemetry.trace_steps` lists the step that is executed next."""
        self._start_if_due(run)

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Write the trace of the step that has ended, if the step was traced."""
        if self._running is None:
            return
        # Writing a trace may take longer than a step, so do not count it as time of steps.
        with run.wall.phase(Phase.REST):
            self._write(run)

    def _write(self, run: RunContext) -> None:
        running, self._running = self._running, None
        running.stop()
        try:
            self.folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            # The run's folder was removed or renamed, so `KeepFolder` will end the run soon.
            return
        path = self.folder / f"step-{run.steps_done:08d}-rank-{self.rank}.json.gz"
        running.export_chrome_trace(str(path))
        run.report.say(f"trace of step {run.steps_done}: {path} (https://ui.perfetto.dev)")

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        """Start a trace if `telemetry.trace_steps` lists the next step."""
        self._start_if_due(run)

    def close(self) -> None:
        """Stop a trace that is still running, without writing it."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def _start_if_due(self, run: RunContext) -> None:
        if run.steps_done + 1 not in run.spec.telemetry.trace_steps:
            return
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        # Without `acc_events`, torch 2.11 warns that events of earlier profiler cycles are dropped,
        # although a trace has only one cycle here.
        started = profile(activities=kinds, acc_events=True)
        started.start()
        self._running = started
