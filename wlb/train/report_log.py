"""What a run writes and shows while it trains: `metrics.jsonl` and the screen, on rank 0."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from wlb.plan import StepMetrics
from wlb.train.display import Display, console, summary
from wlb.train.optimizer import learning_rate
from wlb.train.tally import Tally

if TYPE_CHECKING:
    from wlb.train.loop import Job


class Report:
    """metrics.jsonl and the screen, on rank 0; does nothing on other ranks."""

    def __init__(self, job: "Job", *, is_shown: bool) -> None:
        self.job = job
        self.console = console()
        self.path = job.directory / "metrics.jsonl"
        self._display: Display | None = None
        self._file: IO[str] | None = None
        if is_shown:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
            self._write({"kind": "start", "resumed_from": job.resume and str(job.resume)})
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
        if self._file is not None:
            self._file.close()

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

    def evaluation(self, step: int, loss: float) -> None:
        if self._display is not None:
            self._write({"kind": "evaluation", "steps_done": step, "heldout_loss": loss})
            self._display.evaluation(step, loss)

    def summary(self, tally: Tally, saved: Path) -> None:
        files = {"metrics": self.path, "checkpoint": saved}
        wall_s = time.time() - self.job.started_s
        summary(self.console, tally, files=files, wall_s=wall_s)

    def _write(self, data: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(data) + "\n")
