"""Writes a run's records to files and its messages to the screen, on rank 0 only."""

from contextlib import ExitStack, closing
from datetime import UTC, datetime
from typing import Any, Self

from wlb.cost.machine import program_version
from wlb.plan import Place, places_to_json
from wlb.report.tables import console
from wlb.spec import RunSpec
from wlb.train.job import Job
from wlb.train.telemetry.display import Display
from wlb.train.telemetry.sinks import Sink, open_sinks


class RunReport:
    """Writes records to metrics.jsonl and the other sinks, and messages to the screen.

    Use it as a context manager.

    Args:
        job: The run.
        is_shown: Whether this rank writes anything; true only on rank 0.
        priced: The run's spec. Its kernels.attention names the kernel that computes, never `auto`.
        device: Kind of device, "cpu" or "cuda".
        steps_done: Number of updates in the checkpoint that the run resumes from; 0 for a new run.
        places: Node and host of each rank; empty except on rank 0.
    """

    def __init__(
        self,
        job: Job,
        *,
        is_shown: bool,
        priced: RunSpec,
        device: str,
        steps_done: int,
        places: tuple[Place, ...],
    ) -> None:
        self.job, self.steps_done = job, steps_done
        self.places = places
        self.console = console()
        self.path = job.directory / "metrics.jsonl"
        shown = Display(
            self.console,
            job.title,
            total_steps=job.spec.training.steps,
            experts=bool(job.spec.model.experts.num),
            verbose=job.verbose,
        )
        self.display = shown if is_shown else None
        self._sinks: list[Sink] = []
        self._opened = ExitStack()
        self._about: dict[str, Any] = {
            "version": program_version(),
            "device": device,
            "train_store": job.train_store,
            "places": places_to_json(places) if places else None,
            "spec": priced.to_dict(),
        }

    def __enter__(self) -> Self:
        if self.display is not None:
            job = self.job
            self._sinks = open_sinks(job.spec, job.directory, steps_done=self.steps_done)
            for sink in reversed(self._sinks):
                self._opened.enter_context(closing(sink))
            self.start(job.resume and str(job.resume), steps_done=self.steps_done)
            self._opened.enter_context(self.display)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def write(self, kind: str, **values: Any) -> None:
        """Write a record to every sink. In metrics.jsonl it is one line.

        Args:
            kind: What the record is about, such as "step".
            **values: The record's other entries.
        """
        for sink in self._sinks:
            sink.write({"kind": kind, **values})

    def say(self, line: str) -> None:
        """Print a line on rank 0's screen, above the live table if there is one."""
        if self.display is not None:
            self.display.say(line)

    def start(self, resumed_from: str | None, *, steps_done: int) -> None:
        """Record that training begins or resumes.

        Args:
            resumed_from: The checkpoint from which training resumes; None for a new run.
            steps_done: Number of updates that the weights have had.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"resumed_from": resumed_from, "steps_done": steps_done, "time": now}
        self.write("start", **about, **self._about)
