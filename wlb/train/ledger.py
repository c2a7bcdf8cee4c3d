"""Which tokens every executed step trained (`telemetry.ledger`), and the proof that each was once.

`ledger.jsonl` of a run's folder has a line a step, from rank 0: the pieces of documents in its
plan, which all ranks have compared by digest. A training that goes on from a checkpoint writes the
step that it begins with; what was recorded of that step and later ones before is not in the lineage
of its weights any more. A process that is killed may leave half a line before such a beginning.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from wlb.plan import IntArray, Pieces, PlannerState, StepPlan
from wlb.planner import Planner

FILE = "ledger.jsonl"


class Ledger:
    """Writes the file. Each line is with the operating system when the call returns, so that
    killing the process loses none."""

    def __init__(self, folder: Path, *, is_on: bool) -> None:
        self._file: IO[str] | None = None
        if is_on:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / FILE).open("a", encoding="utf-8", buffering=1)

    def begin(self, step: int) -> None:
        """The next step to be executed is `step`, with the weights of a checkpoint or new ones."""
        self._write({"begin": step}, before="\n")

    def add(self, plan: StepPlan, *, updated: bool) -> None:
        """A step was executed; updated: and moved the weights."""
        if self._file is None:
            return
        pieces = Pieces.concat(*(batch.pieces for batch in plan.packing.micro_batches))
        columns = {name: getattr(pieces, name).tolist() for name in ("document", "start", "stop")}
        columns["source"] = pieces.source.tolist()
        self._write({"step": plan.step, "updated": updated, **columns})

    def _write(self, data: dict[str, Any], *, before: str = "") -> None:
        if self._file is not None:
            self._file.write(before + json.dumps(data) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Tokens by how often the steps of a lineage trained them, of those that the loader gave.

    waiting: held back, for later steps. skipped: in steps without an update. num_begun: trainings,
    the first and each that went on. num_undone: recorded steps that are not in the lineage.
    """

    once: int
    never: int
    repeated: int
    waiting: int
    skipped: int
    num_steps: int
    num_begun: int
    num_undone: int

    @property
    def is_exact(self) -> bool:
        """Whether every token that was given is trained once, or waits."""
        return not (self.never or self.repeated or self.skipped)


def lineage(folder: Path) -> tuple[dict[int, dict[str, Any]], int, int]:
    """Lines by step of the run's present weights; trainings begun, steps undone. ValueError for a
    line that is torn without a new beginning after it, or a step that is missing."""
    path = folder / FILE
    if not path.exists():
        raise ValueError(f"{path} does not exist; train with telemetry.ledger = true")
    steps: dict[int, dict[str, Any]] = {}
    num_begun = num_undone = 0
    for data in _lines(path):
        if "begin" in data:
            num_begun += 1
            gone = [step for step in steps if step >= data["begin"]]
            num_undone += len(gone)
            for step in gone:
                del steps[step]
        elif data["step"] != len(steps):
            raise ValueError(f"{path}: step {data['step']} follows {len(steps)} steps")
        else:
            steps[data["step"]] = data
    return steps, num_begun, num_undone


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    torn = ""
    for line in path.read_text("utf-8").splitlines():
        if not line:
            continue  # before a beginning, whatever the line before it lacks
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            torn = line
            continue
        if torn and "begin" not in data:
            raise ValueError(f"{path}: half a line, {torn[:40]!r}, is followed by a step")
        torn = ""
        yield data


def count(folder: Path, planner: Planner, state: PlannerState) -> Count:
    """Counts every token that `planner`'s source gave until `state`, the last checkpoint's."""
    steps, num_begun, num_undone = lineage(folder)
    done = {step: line for step, line in steps.items() if step < state.next_step}
    given = _given(planner, state)
    held = Pieces.concat(
        state.carry.pieces, *(b.pieces for plan in state.ready for b in plan.micro_batches)
    )
    covered = {key: np.zeros(length, np.int64) for key, length in given.items()}
    skipped = 0
    for line in done.values():
        columns = (line["source"], line["document"], line["start"], line["stop"])
        for source, document, start, stop in zip(*columns, strict=True):
            covered[source, document][start:stop] += 1
            skipped += 0 if line["updated"] else stop - start
    waiting = 0
    for source, document, start, stop in zip(
        held.source.tolist(),
        held.document.tolist(),
        held.start.tolist(),
        held.stop.tolist(),
        strict=True,
    ):
        covered[source, document][start:stop] += 1
        waiting += stop - start
    times: IntArray = np.concatenate([np.zeros(0, np.int64), *covered.values()])
    return Count(
        once=int((times == 1).sum()) - waiting,
        never=int((times == 0).sum()),
        repeated=int((times > 1).sum()),
        waiting=waiting,
        skipped=skipped,
        num_steps=len(done),
        num_begun=num_begun,
        num_undone=num_undone + len(steps) - len(done),
    )


def _given(planner: Planner, state: PlannerState) -> dict[tuple[int, int], int]:
    """Length of each document, by (source, id), of the loader's first `state.num_batches`."""
    found: dict[tuple[int, int], int] = {}
    at = planner.source.start()
    for _ in range(state.num_batches):
        item = planner.source.next(at)
        assert item is not None
        batch, at = item
        d = batch.documents
        for source, i, length in zip(
            d.source.tolist(), d.id.tolist(), d.length.tolist(), strict=True
        ):
            found[source, i] = length
    return found
