"""Records which tokens each step trains (`telemetry.ledger`), to prove that none is trained twice.

Rank 0 writes the file ledger.jsonl in the run's folder. The file has one line per step, with the
pieces of documents that the step trained. At every start of training, and after every rollback, a
line with the number of the next step is written. From then on, earlier lines about that step or
later ones do not count, because the weights come from a checkpoint that was saved before these
steps.

A killed process may leave an incomplete line. If the disk was full, the next line says how many
lines were lost. The count of tokens is then not exact.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wlb.plan import IntArray, Pieces, PlannerState, StepPlan, UserError
from wlb.plan.read_file import Fields, object_of, parse_json
from wlb.planner import Planner
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.appended import AppendedFile

FILE = "ledger.jsonl"
# Key of the read position of a source of ready-made packs (`PackedBatches`), which counts steps.
# Other sources count documents and lack this key.
_IN_STEPS = "step"
# Columns of `Pieces` that are written to a step's line in the ledger.
_COLUMNS = ("document", "start", "stop", "source")


def _columns(pieces: Pieces) -> dict[str, list[int]]:
    return {name: getattr(pieces, name).tolist() for name in _COLUMNS}


class Ledger:
    """Writes the file ledger.jsonl in a run's folder, one line per step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = AppendedFile(folder / FILE)
        self._num_reported = 0

    def begin(self, step: int) -> None:
        """Record that training begins or continues with the step number `step`."""
        self._write({"begin": step}, before="\n")

    def add(self, plan: StepPlan, *, updated: bool) -> None:
        """Record the pieces of documents that an executed step trained.

        Args:
            plan: The step.
            updated: Whether the step updated the weights.
        """
        pieces = Pieces.concat(*(batch.pieces for batch in plan.packing.micro_batches))
        self._write({"step": plan.step, "updated": updated, **_columns(pieces)})

    def _write(self, data: dict[str, Any], *, before: str = "") -> None:
        """Write `data` as a line of JSON, after the text `before`.

        If earlier lines could not be written, a line with their number is written first.
        """
        file = self._file
        lost = file.num_lost
        if lost > self._num_reported and file.write("\n" + json.dumps({"lost": lost}) + "\n"):
            self._num_reported = lost
        file.write(before + json.dumps(data) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RecordLedger(Hook):
    """Writes to ledger.jsonl which tokens each step trained. Only rank 0 has this hook."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def begin(self, run: RunContext) -> None:
        """Write to ledger.jsonl the number of the step with which training begins."""
        self.ledger.begin(run.progress.next_step if run.progress else 0)

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Write to ledger.jsonl which tokens the step trained."""
        self.ledger.add(step.plan, updated=step.updated)

    def rolled_back(self, run: RunContext, saved_in: Path) -> None:
        """Write to ledger.jsonl the number of the step with which training continues."""
        self.begin(run)

    def close(self) -> None:
        """Close the file."""
        self.ledger.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How many of the tokens that the loader read were trained once, never, or repeatedly.

    Only the steps before the newest checkpoint count, because its weights contain their updates.
    """

    once: int  # number of tokens trained once
    never: int  # number of tokens that were not trained and do not wait either
    repeated: int  # number of tokens trained more than once, or trained although they still wait
    waiting: int  # number of tokens that wait for later steps
    skipped: int  # number of tokens in steps that did not update the weights
    num_steps: int  # number of steps before the newest checkpoint
    num_begun: int  # number of starts of training: the first start, resumes and rollbacks
    # Number of steps in the ledger that do not count: they came after the newest checkpoint, or
    # training later returned to a checkpoint before them.
    num_undone: int
    num_lost: int = 0  # number of steps that were trained but whose lines could not be written

    @property
    def is_exact(self) -> bool:
        """Whether every token that was read was trained exactly once, or waits for a later step."""
        return not (self.never or self.repeated or self.skipped or self.num_lost)


def lineage(folder: Path) -> tuple[dict[int, dict[str, Any]], int, int]:
    """Read from the ledger the steps that led to the run's present weights.

    Args:
        folder: The run's folder.

    Returns:
        The ledger's entry for each of these steps, by step number; the number of starts of
            training; and the number of recorded steps that do not count, because training resumed
            before them.

    Raises:
        UserError: If the entry of a step follows a damaged line, or if a step is missing although
            no entry says that lines could not be written.
    """
    path = folder / FILE
    if not path.exists():
        raise UserError(
            f"{path} does not exist, so there are no recorded steps to read; train "
            "with telemetry.ledger = true"
        )
    steps: dict[int, dict[str, Any]] = {}
    num_begun = num_undone = 0
    has_lost = False
    for data in _lines(path):
        of = Fields(data, str(path))
        if "lost" in data:
            has_lost = True
        elif "begin" in data:
            num_begun += 1
            begin = of.whole("begin", at_least=0)
            gone = [step for step in steps if step >= begin]
            num_undone += len(gone)
            for step in gone:
                del steps[step]
        elif (step := of.whole("step", at_least=0)) != len(steps) and not has_lost:
            raise UserError(
                f"{path} is damaged: it has a line for step {step} where step {len(steps)} must "
                "follow; restore the file, or train again with telemetry.ledger = true"
            )
        else:
            steps[step] = data
    return steps, num_begun, num_undone


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ledger as dictionaries.

    An incomplete line that a killed process left is skipped.
    """
    torn = ""
    for line in path.read_text("utf-8", errors="replace").splitlines():
        if not line:
            # There are empty lines, because every start of training first writes a line end, in
            # case a killed process has left an incomplete line.
            continue
        try:
            data = object_of(parse_json(line, path), path)
        except UserError:
            torn = line
            continue
        if torn and not {"begin", "lost"} & data.keys():
            raise UserError(
                f"{path} is damaged: the incomplete line {torn[:40]!r} is followed by the line of "
                "a step, but only the line of a restart may follow it; restore the file, or train "
                "again with telemetry.ledger = true"
            )
        torn = ""
        yield data


def count(folder: Path, planner: Planner, state: PlannerState) -> Count:
    """Count how many times each token was trained, for all tokens read before a checkpoint.

    To find these tokens, the lengths of documents are read again from the run's source, up to the
    position in the data that the checkpoint has.

    Args:
        folder: The run's folder, which has the ledger.
        planner: A planner of the run. The lengths are read from its source.
        state: The planner's state in the newest checkpoint.
    """
    steps, num_begun, num_undone = lineage(folder)
    # Leave out steps after the checkpoint, because its weights do not contain their updates.
    done = {step: line for step, line in steps.items() if step < state.next_step}
    lengths = _lengths_read(planner, state)
    waiting_pieces = Pieces.concat(
        state.carry.pieces, *(b.pieces for plan in state.ready for b in plan.micro_batches)
    )
    # For each token of each document, the number of times that it was trained, plus 1 if it waits.
    covered = {key: np.zeros(length, np.int64) for key, length in lengths.items()}
    skipped = 0
    for line in done.values():
        num_tokens = _cover(covered, line)
        skipped += 0 if line["updated"] else num_tokens
    trained: IntArray = np.concatenate([np.zeros(0, np.int64), *covered.values()])
    waiting = _cover(covered, _columns(waiting_pieces))
    times: IntArray = np.concatenate([np.zeros(0, np.int64), *covered.values()])
    return Count(
        once=int(((trained == 1) & (times == 1)).sum()),
        never=int((times == 0).sum()),
        repeated=int((times > 1).sum()),
        waiting=waiting,
        skipped=skipped,
        num_steps=len(done),
        num_begun=num_begun,
        num_undone=num_undone + len(steps) - len(done),
        num_lost=state.next_step - len(done),
    )


def _cover(covered: dict[tuple[int, int], np.ndarray], columns: dict[str, Any]) -> int:
    """Add 1 to the count of every token of some pieces, and return the number of these tokens.

    Args:
        covered: By (source, id) of each document, an array with the count of each of its tokens.
            The arrays are changed.
        columns: The document's id, start, stop and source of each piece, by name (`_COLUMNS`).
    """
    num_tokens = 0
    rows = zip(*(columns[name] for name in _COLUMNS), strict=True)
    for document, start, stop, source in rows:
        covered[source, document][start:stop] += 1
        num_tokens += stop - start
    return num_tokens


def _lengths_read(planner: Planner, state: PlannerState) -> dict[tuple[int, int], int]:
    """Return the length of each document that was read before `state` was saved, by (source, id).

    This function reads the documents again in global batches. Their size may have changed since
    `state` was saved, so the last batch may go beyond the read position of `state`. The documents
    after that position are left out.
    """
    found: dict[tuple[int, int], int] = {}
    end = _position(state.corpus)
    at = planner.source.start()
    while (left := end - _position(at)) > 0:
        item = planner.source.next(at)
        assert item is not None
        batch, at = item
        d = batch.documents
        used = slice(None) if _IN_STEPS in at else slice(left)
        columns = (d.source.tolist()[used], d.id.tolist()[used], d.length.tolist()[used])
        for source, i, length in zip(*columns, strict=True):
            found[source, i] = length
    return found


def _position(corpus: dict[str, Any]) -> int:
    """Return how far a source of documents was read, as one number.

    The number counts documents, or steps if the source has ready-made packs.

    Args:
        corpus: The read position of the source, as the planner's state has it.
    """
    if _IN_STEPS in corpus:
        return corpus[_IN_STEPS]
    if "documents_read" in corpus:
        return sum(corpus["documents_read"])
    return corpus["epoch"] * corpus["num_documents"] + corpus["position"]
