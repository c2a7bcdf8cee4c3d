"""A training run, read back from its folder: the lines of metrics.jsonl and the configuration.

A resumed run appends to the same file. Lines of steps after the checkpoint from which it resumed
are dropped, so that each step counts once, as it was trained last.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wlb.plan import (
    FloatArray,
    MeasuredStep,
    MeasuredTimeline,
    Place,
    RankTable,
    StepMetrics,
    Telemetry,
    UserError,
    places_from_json,
)
from wlb.plan.ranks import PLACES, TABLE, TIMELINE
from wlb.plan.read_file import Fields, malformed, object_of, parse_json, read_object
from wlb.plan.schema import ANYTHING, COUNT, OTHERS, Schema, check_schema
from wlb.spec import RunSpec, apply

EVENT_KINDS = ("checkpoint", "nonfinite", "spike", "stop")
"""Kinds of lines about events: a checkpoint, a refused or skipped step, an early stop."""
_REMEDY = "remove the line, which no run wrote"


class StepRecord(NamedTuple):
    """The line of a step."""

    step: int  # number of the step, from 0
    steps_done: int  # executed steps of the run, this one included
    measured: MeasuredStep
    predicted: StepMetrics
    plain: StepMetrics | None  # prediction for the usual loader; None if planner.baseline is off
    # most memory that rank 0 has used since the run began: GPU memory as torch's allocator counts
    # it, or memory of the process on a CPU
    memory_bytes: int | None = None
    # whether the step was planned with prices that the run had learned while it trained, as earlier
    # versions could do (`cost.online`)
    has_learned_prices: bool = False


@dataclass(kw_only=True)
class RunRecords:
    """Everything that was recorded about a run; lists are in the order of steps."""

    folder: Path
    spec: RunSpec
    starts: list[dict[str, Any]]  # one line for each start of the run
    steps: list[StepRecord]
    evaluations: list[tuple[int, float]]  # (steps_done, held-out loss) of each evaluation
    tables: list[RankTable]  # times of all ranks, every few steps
    timelines: list[MeasuredTimeline]  # passes of a few ranks
    # lines of `EVENT_KINDS`
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    since_start: frozenset[int] = frozenset()  # numbers of the steps since the last start
    num_replaced: int = 0  # steps that were trained more than once
    # lines that are not JSON, such as the last line of a run that was killed
    num_unreadable: int = 0
    # seconds of each phase of the last start; empty if it has not ended
    wall: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def learned_from(self) -> StepRecord | None:
        """The first step that was planned with learned prices; None if there is none.

        Neither this step nor any later one can be planned once more.
        """
        return next((step for step in self.steps if step.has_learned_prices), None)

    @property
    def num_restarts(self) -> int:
        """Number of starts after the first one."""
        return max(0, len(self.starts) - 1)

    @property
    def restarts(self) -> list[int]:
        """`steps_done` at each restart, as far as it is recorded."""
        found = [resumed_at(start) for start in self.starts[1:]]
        return [at for at in found if at is not None]

    @property
    def places(self) -> tuple[Place, ...]:
        """Host and node of each rank in the last start; empty if they are not recorded."""
        data = self.starts[-1].get("places") if self.starts else None
        return places_from_json(data) if data else ()

    @cached_property
    def steps_done(self) -> FloatArray:
        """Number of executed steps after each recorded step."""
        return self.column(lambda s: s.steps_done)

    def column(self, of: Callable[[StepRecord], float | None]) -> FloatArray:
        """Return a value of every step; NaN where `of` returns None."""
        values = (of(step) for step in self.steps)
        return np.array([np.nan if v is None else v for v in values], np.float64)

    @property
    def telemetry(self) -> list[tuple[int, Telemetry]]:
        """Pairs (steps_done, record) after the warm-up, or all if there are none after it."""
        found = [
            (s.steps_done, s.measured.telemetry)
            for s in self.steps
            if s.measured.telemetry is not None
        ]
        warm = [item for item in found if item[0] > self.spec.telemetry.warmup_steps]
        return warm or found

    def at(self, steps_done: int) -> StepRecord:
        """Return the record with this `steps_done`; UserError if there is none."""
        for step in self.steps:
            if step.steps_done == steps_done and step.measured.num_targets:
                return step
        shown = [s.steps_done for s in self.steps]
        raise UserError(
            f"--step {steps_done}: {self.folder / 'metrics.jsonl'} has steps {min(shown)} to "
            f"{max(shown)}"
        )


_DONE = range(10**9 + 1)
_LINES: dict[str, Schema] = {
    "start": {
        "steps_done?": _DONE,
        "resumed_from?": (str, None),
        "places?": (PLACES, None),
        "spec?": ({OTHERS: dict}, None),
        "device?": (str, None),
        "train_store?": ([str], str, None),
        OTHERS: ANYTHING,
    },
    "step": {
        "step": _DONE,
        "steps_done": _DONE,
        "learning_rate?": (float, None),
        "memory_bytes?": (int, None),
        "measured": MeasuredStep.schema(),
        "predicted": StepMetrics.schema(),
        "plain_4d": (StepMetrics.schema(), None),
        "prices?": dict,
        OTHERS: ANYTHING,
    },
    "evaluation": {"steps_done": _DONE, "heldout_loss": float, OTHERS: ANYTHING},
    "ranks": {**TABLE, OTHERS: ANYTHING},
    "timeline": {**TIMELINE, OTHERS: ANYTHING},
    "wall": {"steps_done?": _DONE, "seconds": {OTHERS: float}, OTHERS: ANYTHING},
    "checkpoint": {
        "step": _DONE,
        "stall_s": float,
        "write_s": float,
        "num_bytes": COUNT,
        "error": str,
        OTHERS: ANYTHING,
    },
    # Files of the first version have no `steps_done` here, because they did not number refused
    # steps.
    "nonfinite": {
        "step": _DONE,
        "steps_done?": _DONE,
        "found": str,
        "action": str,
        OTHERS: ANYTHING,
    },
    "spike": {"steps_done": _DONE, "found": str, OTHERS: ANYTHING},
    "stop": {"steps_done": _DONE, "asked_by": str, OTHERS: ANYTHING},
}
"""Schema of each kind of line that is read. Further keys are for other readers of the file."""


def read_run(folder: Path) -> RunRecords:
    """Return the run in `folder` (run.output_dir/run.name); UserError if it recorded nothing."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the folder of a run that trained")
    read = _Reading()
    with path.open("rb") as file:
        read.take(file, path)
    if not read.by_step["step"]:
        raise UserError(f"{path} has no step yet; wait until the run has trained one")
    found = {kind: [lines[i] for i in sorted(lines)] for kind, lines in read.by_step.items()}
    with malformed(path, _REMEDY):
        made = RunRecords(
            folder=folder,
            spec=_spec(folder, read.starts),
            starts=read.starts,
            steps=[_step(line) for line in found["step"]],
            evaluations=[_evaluation(line) for line in found["evaluation"]],
            tables=_tables(found["ranks"]),
            timelines=[MeasuredTimeline.from_json(line) for line in found["timeline"]],
            events=read.events,
            since_start=frozenset(read.since_start),
            num_replaced=read.num_replaced,
            num_unreadable=read.num_unreadable,
            wall=read.wall,
        )
        # Evaluate these properties here: they parse values of the file, and an error must name the
        # file.
        _ = made.places, made.restarts
    return made


def resumed_at(start: dict[str, Any]) -> int | None:
    """Return the `steps_done` from which a start resumed; None if its line does not say."""
    if "steps_done" in start:
        return start["steps_done"]
    named = re.search(r"step-(\d+)$", start.get("resumed_from") or "")
    return int(named[1]) if named else None


_Line = dict[str, Any]
_BY_STEP = ("step", "evaluation", "ranks", "timeline")


@dataclass
class _Reading:
    """Collects the lines of metrics.jsonl that count.

    A later line replaces an earlier one of the same kind and step.
    """

    starts: list[_Line] = field(default_factory=list[_Line])
    # lines of each kind in `_BY_STEP`, by the number of their step
    by_step: dict[str, dict[int, _Line]] = field(
        default_factory=lambda: {kind: {} for kind in _BY_STEP}
    )
    since_start: set[int] = field(default_factory=set[int])
    events: list[_Line] = field(default_factory=list[_Line])
    num_replaced: int = 0
    num_unreadable: int = 0
    wall: dict[str, float] = field(default_factory=dict[str, float])

    def take(self, lines: Iterable[bytes], path: Path) -> None:
        """Read all lines of the file."""
        for number, text in enumerate(lines, 1):
            try:
                line = parse_json(text, path)
            except UserError:  # a run that was killed may leave an incomplete line
                self.num_unreadable += bool(text.strip())
                continue
            where = f"{path}, line {number}"
            with malformed(where, _REMEDY):
                self._add(Fields(object_of(line, where), where))

    def _add(self, of: Fields) -> None:
        """Add a line; kinds that only later versions write are ignored."""
        line = dict(of.values)
        kind = of.text("kind")
        if kind in _LINES:
            check_schema(line, _LINES[kind], of.where, remedy=_REMEDY)
        if kind == "start":
            if self.starts and _layout(line) != _layout(self.starts[-1]):
                # Ranks of different layouts do not fit in the same table.
                self.by_step |= {"ranks": {}, "timeline": {}}
            self.starts.append(line)
            self.since_start.clear()
            self.wall = {}
            # The run trains the steps after the checkpoint once more.
            self._roll_back(resumed_at(line))
        elif kind in self.by_step:
            number = line["steps_done" if kind == "evaluation" else "step"]
            self.num_replaced += kind == "step" and number in self.by_step[kind]
            self.by_step[kind][number] = line
            if kind == "step":
                self.since_start.add(number)
        elif kind in EVENT_KINDS:
            self.events.append(line)
        elif kind == "wall":
            self.wall = {name: float(seconds) for name, seconds in line["seconds"].items()}

    def _roll_back(self, steps_done: int | None) -> None:
        """Drop the lines of steps after `steps_done`, which a resumed run trains once more."""
        if steps_done is None:
            return
        for kind, lines in self.by_step.items():
            late = [number for number, line in lines.items() if line["steps_done"] > steps_done]
            self.num_replaced += len(late) if kind == "step" else 0
            for number in late:
                del lines[number]


def _tables(lines: list[_Line]) -> list[RankTable]:
    """Return the tables of ranks; UserError if their numbers of ranks differ."""
    tables = [RankTable.from_json(line) for line in lines]
    if len(sizes := {table.measured_us.size for table in tables}) > 1:
        raise UserError(f"tables of one layout have {sorted(sizes)} ranks")
    return tables


def _evaluation(line: dict[str, Any]) -> tuple[int, float]:
    """Return (steps_done, held-out loss); a loss may be NaN if training diverged."""
    return line["steps_done"], float(line["heldout_loss"])


def _layout(start: dict[str, Any]) -> Any:
    """Return the parallelism of a start, for comparison."""
    return start.get("spec", {}).get("parallel")


def _step(line: dict[str, Any]) -> StepRecord:
    """Return the record of a step's line."""
    plain = line["plain_4d"]
    return StepRecord(
        step=line["step"],
        steps_done=line["steps_done"],
        measured=MeasuredStep.from_json(line["measured"]),
        predicted=StepMetrics.from_json(line["predicted"]),
        plain=None if plain is None else StepMetrics.from_json(plain),
        memory_bytes=line.get("memory_bytes"),
        has_learned_prices="prices" in line,
    )


def _spec(folder: Path, starts: list[dict[str, Any]]) -> RunSpec:
    """Return the configuration of the last start or, in old files, of the newest checkpoint."""
    source, stored = folder / "metrics.jsonl", starts[-1].get("spec") if starts else None
    if stored is None:
        saved = sorted((folder / "checkpoints").glob("step-*/run.json"))
        if not saved:
            raise UserError(
                f"neither {source} nor a checkpoint in {folder / 'checkpoints'} says how the run "
                f"was configured"
            )
        source, about = saved[-1], read_object(saved[-1], wide=True)
        check_schema(about, {"spec": dict, OTHERS: ANYTHING}, source, remedy="repair or remove it")
        stored = about["spec"]
    return apply(RunSpec(), stored, source=str(source), is_stored=True)
