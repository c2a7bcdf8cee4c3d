"""Reading of a training run from its folder: the lines of metrics.jsonl and the configuration.

A resumed run appends to the same file and trains the steps after its checkpoint once more. For such
a step, the older line is dropped, so that each step counts once.
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
"""Kinds of lines about events: a checkpoint; a step whose loss or gradient was not finite; a step
with an unusually large loss or gradient; an early stop."""
_REMEDY = "remove this line, which wlb did not write in this form"


class StepRecord(NamedTuple):
    """What metrics.jsonl has about one step."""

    step: int  # number of the step, from 0
    steps_done: int  # number of steps that the run has executed, this one included
    measured: MeasuredStep  # measurements of the step
    predicted: StepMetrics  # the planner's prediction of the step
    plain: StepMetrics | None  # prediction for the usual loader; None if planner.baseline is off
    # largest memory that rank 0 has used since the run began: GPU memory as torch's allocator
    # counts it, or on a CPU the memory of the process; None if the line does not have it
    memory_bytes: int | None = None
    # whether the step was planned with prices that the run had adjusted to measured times during
    # training, which was possible in earlier versions (`cost.online`)
    has_learned_prices: bool = False


@dataclass(kw_only=True)
class RunRecords:
    """Everything that was recorded about a run. Lists are in the order of steps."""

    folder: Path  # folder of the run
    spec: RunSpec  # configuration of the run
    starts: list[dict[str, Any]]  # a line of metrics.jsonl for each time that the run was started
    steps: list[StepRecord]  # all steps; a step that was trained twice has one record, the newer
    # for each evaluation: number of steps executed before it, and held-out loss
    evaluations: list[tuple[int, float]]
    tables: list[RankTable]  # tables of all ranks' times
    timelines: list[MeasuredTimeline]  # timelines of the passes of a few ranks
    # lines of metrics.jsonl about checkpoints, about losses or gradients that are not finite or are
    # unusually large, and about early stops (`EVENT_KINDS`)
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    since_start: frozenset[int] = frozenset()  # numbers of the steps since the last start
    num_replaced: int = 0  # number of steps that were trained more than once
    # number of lines that are not JSON, such as the last line of a run that was killed
    num_unreadable: int = 0
    # wall time in seconds of each phase (such as planning and steps) since the last start; empty if
    # the run has not ended
    wall: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def learned_from(self) -> StepRecord | None:
        """The first step planned with prices that the run had adjusted (`cost.online`), or None.

        An earlier version of wlb adjusted prices. This version does not, so it cannot plan this
        step and later steps again.
        """
        return next((step for step in self.steps if step.has_learned_prices), None)

    @property
    def num_restarts(self) -> int:
        """How many times the run was started after the first time."""
        return max(0, len(self.starts) - 1)

    @property
    def restarts(self) -> list[int]:
        """Number of steps executed before each restart; restarts that lack it are left out."""
        found = [resumed_at(start) for start in self.starts[1:]]
        return [at for at in found if at is not None]

    @property
    def places(self) -> tuple[Place, ...]:
        """Host and node of each rank since the last start; empty if they are not recorded."""
        data = self.starts[-1].get("places") if self.starts else None
        return places_from_json(data) if data else ()

    @cached_property
    def steps_done(self) -> FloatArray:
        """For each recorded step, the number of steps executed up to it, shape [num_steps]."""
        return self.column(lambda s: s.steps_done)

    def column(self, of: Callable[[StepRecord], float | None]) -> FloatArray:
        """Return an array with the value `of(step)` of each step; NaN where it is None."""
        values = (of(step) for step in self.steps)
        return np.array([np.nan if v is None else v for v in values], np.float64)

    @property
    def telemetry(self) -> list[tuple[int, Telemetry]]:
        """Pairs (steps_done, telemetry record) of all steps for which telemetry was recorded.

        The first `telemetry.warmup_steps` steps are left out, unless no other step has telemetry.
        """
        found = [
            (s.steps_done, s.measured.telemetry)
            for s in self.steps
            if s.measured.telemetry is not None
        ]
        warm = [item for item in found if item[0] > self.spec.telemetry.warmup_steps]
        return warm or found

    def at(self, steps_done: int) -> StepRecord:
        """Return the record of the step with this `StepRecord.steps_done`.

        Raises:
            UserError: There is no such record, or its step trained no token.
        """
        for step in self.steps:
            if step.steps_done == steps_done and step.measured.num_targets:
                return step
        shown = [s.steps_done for s in self.steps]
        raise UserError(
            f"--step {steps_done}: {self.folder / 'metrics.jsonl'} has no such step, or the step "
            f"trained no token; give another step from {min(shown)} to {max(shown)}"
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
    # `steps_done` is optional here, because the first version of wlb did not write it.
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
"""Schema (`wlb.plan.schema`) of each kind of line that is read. Lines may have further keys, which
are ignored."""


def read_run(folder: Path) -> RunRecords:
    """Return the records of a run.

    Args:
        folder: Folder of the run, run.output_dir/run.name.

    Raises:
        UserError: The folder has no metrics.jsonl, the file has no step, or a line is malformed.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; give the folder of a run that has trained, "
            f"run.output_dir/run.name"
        )
    read = _Reading()
    with path.open("rb") as file:
        read.take(file, path)
    if not read.by_step["step"]:
        raise UserError(
            f"{path} has no step yet; repeat the command when the run has trained a step"
        )
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
        # Evaluate these properties inside of `malformed`: they parse values of the file, and an
        # error must name the file.
        _ = made.places, made.restarts
    return made


def resumed_at(start: dict[str, Any]) -> int | None:
    """Return how many steps a run had executed when it was started.

    Args:
        start: Line of the start in metrics.jsonl.

    Returns:
        The number; None if the line does not state it.
    """
    if "steps_done" in start:
        return start["steps_done"]
    named = re.search(r"step-(\d+)$", start.get("resumed_from") or "")
    return int(named[1]) if named else None


_Line = dict[str, Any]
_BY_STEP = ("step", "evaluation", "ranks", "timeline")


@dataclass
class _Reading:
    """Collects the lines of metrics.jsonl while it is read.

    A later line replaces an earlier one of the same kind and step.
    """

    # lines about starts of the run
    starts: list[_Line] = field(default_factory=list[_Line])
    # for each kind in `_BY_STEP`: its lines by the number of their step
    by_step: dict[str, dict[int, _Line]] = field(
        default_factory=lambda: {kind: {} for kind in _BY_STEP}
    )
    # numbers of the steps since the last start
    since_start: set[int] = field(default_factory=set[int])
    events: list[_Line] = field(default_factory=list[_Line])  # lines of the kinds `EVENT_KINDS`
    num_replaced: int = 0  # number of steps that were trained more than once
    num_unreadable: int = 0  # number of lines that are not JSON
    # wall time in seconds of each phase (such as planning and steps) since the last start; empty if
    # the run has not ended
    wall: dict[str, float] = field(default_factory=dict[str, float])

    def take(self, lines: Iterable[bytes], path: Path) -> None:
        """Read all lines of metrics.jsonl.

        Args:
            lines: The lines.
            path: The file, for error messages.
        """
        for number, text in enumerate(lines, 1):
            try:
                line = parse_json(text, path)
            except UserError:  # the line is incomplete, because the run was killed
                self.num_unreadable += bool(text.strip())
                continue
            where = f"{path}, line {number}"
            with malformed(where, _REMEDY):
                self._add(Fields(object_of(line, where), where))

    def _add(self, of: Fields) -> None:
        """Add a line of metrics.jsonl; ignore unknown kinds, which later versions may write."""
        line = dict(of.values)
        kind = of.text("kind")
        if kind in _LINES:
            check_schema(line, _LINES[kind], of.where, remedy=_REMEDY)
        if kind == "start":
            if self.starts and _layout(line) != _layout(self.starts[-1]):
                # Drop earlier tables of ranks if the parallel layout has changed, because the
                # number and the work of ranks differ.
                self.by_step |= {"ranks": {}, "timeline": {}}
            self.starts.append(line)
            self.since_start.clear()
            self.wall = {}
            # Drop the lines of steps after the checkpoint, because the run trains them once more.
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
        """Drop the lines about steps after the first `steps_done`; None drops nothing."""
        if steps_done is None:
            return
        for kind, lines in self.by_step.items():
            late = [number for number, line in lines.items() if line["steps_done"] > steps_done]
            self.num_replaced += len(late) if kind == "step" else 0
            for number in late:
                del lines[number]


def _tables(lines: list[_Line]) -> list[RankTable]:
    """Return the tables of all ranks' times; UserError if they differ in the number of ranks."""
    tables = [RankTable.from_json(line) for line in lines]
    if len(sizes := {table.measured_us.size for table in tables}) > 1:
        raise UserError(
            f"metrics.jsonl has lines of kind 'ranks' with the times of {sorted(sizes)} ranks, but "
            "after the last change of the layout all such lines must have the same number of "
            "ranks; remove the lines with another number"
        )
    return tables


def _evaluation(line: dict[str, Any]) -> tuple[int, float]:
    """Return (steps_done, held-out loss) of an evaluation's line."""
    return line["steps_done"], float(line["heldout_loss"])


def _layout(start: dict[str, Any]) -> Any:
    """Return the parallel layout that a run wrote to metrics.jsonl when it started, or None."""
    return start.get("spec", {}).get("parallel")


def _step(line: dict[str, Any]) -> StepRecord:
    """Make the record of a step from its line in metrics.jsonl."""
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
    """Return the configuration of the run.

    Each start of a run writes the configuration into metrics.jsonl, and the last start counts.
    Early versions of wlb did not write it; then it is read from the newest checkpoint.

    Args:
        folder: Folder of the run.
        starts: The line of metrics.jsonl about each start of the run.
    """
    source, stored = folder / "metrics.jsonl", starts[-1].get("spec") if starts else None
    if stored is None:
        saved = sorted((folder / "checkpoints").glob("step-*/run.json"))
        if not saved:
            raise UserError(
                f"the configuration of the run is neither in {source} nor in a checkpoint in "
                f"{folder / 'checkpoints'}; give the folder of a run that has one of these files"
            )
        source, about = saved[-1], read_object(saved[-1], wide=True)
        check_schema(about, {"spec": dict, OTHERS: ANYTHING}, source, remedy="repair or remove it")
        stored = about["spec"]
    return apply(RunSpec(), stored, source=str(source), is_stored=True)
