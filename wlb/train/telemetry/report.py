"""What a run writes and shows while it trains: records for the sinks, and the screen, on rank 0."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from wlb.cost.machine import program_version
from wlb.plan import (
    MeasuredTimeline,
    Place,
    RankTable,
    StepMetrics,
    Straggler,
    places_to_json,
)
from wlb.spec import OnNonfinite, RunSpec
from wlb.train.checkpoint.saver import Saved
from wlb.train.job import Job
from wlb.train.optimizer import learning_rate
from wlb.train.reduce import StepSums
from wlb.train.telemetry.display import Display, console, summary
from wlb.train.telemetry.sinks import Sink, open_sinks
from wlb.train.telemetry.tally import Tally


class Report:
    """metrics.jsonl, other sinks and the screen, on rank 0; does nothing on other ranks.

    priced: the run's spec with the attention kernel it computes with. places: where ranks are.
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
        self.job = job
        self.console = console()
        self.path = job.directory / "metrics.jsonl"
        self._display: Display | None = None
        self._sinks: list[Sink] = []
        self._stragglers: dict[int, Straggler] = {}
        self._about: dict[str, Any] = {}
        self._reported: Saved | None = None
        if is_shown:
            self._sinks = open_sinks(job.spec, job.directory, steps_done=steps_done)
            self._about = {
                "version": program_version(),
                "device": device,
                "train_store": job.train_store,
                "places": places_to_json(places) if places else None,
                "spec": priced.to_dict(),
            }
            self.start(job.resume and str(job.resume), steps_done=steps_done)
            self._display = Display(self.console, job.title, total_steps=job.spec.training.steps)

    def __enter__(self) -> "Report":
        if self._display is not None:
            self._display.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._display is not None:
            self._display.__exit__()
        for sink in self._sinks:
            sink.close()

    def step(
        self,
        steps_done: int,
        measured: StepMetrics,
        predicted: StepMetrics,
        plain: StepMetrics | None,
    ) -> None:
        if self._display is None:
            return
        self._write(
            {
                "kind": "step",
                "step": measured.step,
                "steps_done": steps_done,
                "learning_rate": learning_rate(self.job.spec, max(0, steps_done - 1)),
                "measured": measured.to_json(),
                "predicted": predicted.to_json(),
                "plain_4d": None if plain is None else plain.to_json(),
            }
        )
        self._display.step(steps_done, measured, predicted, plain)

    def say(self, line: str) -> None:
        if self._display is not None:
            self._display.say(line)

    def start(self, resumed_from: str | None, *, steps_done: int) -> None:
        """Records after this one are of a training that began, or went on from a checkpoint."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"resumed_from": resumed_from, "steps_done": steps_done, "time": now}
        self._write({"kind": "start", **about, **self._about})

    def saves(self, ended: list[Saved]) -> None:
        """Each save that ended, once."""
        for saved in ended:
            if self._display is None or saved is self._reported:
                continue
            self._reported = saved
            self._write({"kind": "checkpoint", **asdict(saved)})
            if saved.error:
                self._display.say(
                    f"the checkpoint after step {saved.step} could not be written: {saved.error}; "
                    f"training goes on, those before it are as they were"
                )

    def nonfinite(
        self,
        step: int,
        sums: StepSums,
        action: OnNonfinite,
        saved_in: Path | None,
        *,
        steps_done: int,
    ) -> None:
        """A step whose update was refused, and what is done about it. step: of the plan, from 0;
        steps_done: before it."""
        if self._display is None:
            return
        found = f"loss {sums.loss}, gradient norm {sums.gradient_norm}"
        about = {"step": step, "steps_done": steps_done, "found": found, "action": str(action)}
        self._write({"kind": "nonfinite", **about})
        then = "its update is skipped"
        if action == OnNonfinite.ROLLBACK:
            then = f"training goes back to {saved_in}"
        self._display.say(f"the step after step {steps_done}: {found}; {then}")

    def stopped(self, steps_done: int, asked_by: str, *, is_saved: bool) -> None:
        """The run ends early, as it was asked to. is_saved: there is a checkpoint of it."""
        if self._display is not None:
            self._write({"kind": "stop", "steps_done": steps_done, "asked_by": asked_by})
            then = (
                "saved, go on with --resume" if is_saved else "nothing is to save, start it again"
            )
            self._display.say(f"stopped after step {steps_done} by {asked_by}; {then}")

    def compiled(self, steps_done: int, graphs: int, total: int) -> None:
        """torch.compile was at work since the last step."""
        if self._display is not None:
            about = {"steps_done": steps_done, "graphs": graphs, "total": total}
            self._write({"kind": "compiled", **about})
            self._display.say(
                f"compiled {graphs} graphs of a decoder layer by step {steps_done}, {total} in all"
            )

    def evaluation(self, step: int, tokens: int, loss: float) -> None:
        """tokens: of documents, trained so far."""
        if self._display is not None:
            about = {"kind": "evaluation", "steps_done": step, "num_tokens": tokens}
            self._write({**about, "heldout_loss": loss})
            self._display.evaluation(step, loss)

    def ranks(self, table: RankTable) -> None:
        """A table of ranks; who is named anew as a straggler, or not any more, is said."""
        if self._display is None:
            return
        self._write({"kind": "ranks", **table.to_json()})
        known = {s.rank: s for s in table.stragglers}
        for rank, straggler in known.items():
            if rank not in self._stragglers:
                self._display.say(f"straggler: {straggler.text} (step {table.steps_done})")
        for rank in self._stragglers.keys() - known.keys():
            self._display.say(f"rank {rank} is no straggler any more (step {table.steps_done})")
        self._stragglers = known

    def timeline(self, made: MeasuredTimeline) -> None:
        self._write({"kind": "timeline", **made.to_json()})

    def summary(self, tally: Tally, saved: Path) -> None:
        files = {"metrics": self.path, "checkpoint": saved}
        wall_s = time.time() - self.job.started_s
        summary(self.console, tally, files=files, wall_s=wall_s)

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)
