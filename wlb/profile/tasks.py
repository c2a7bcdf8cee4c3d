"""Tasks of a sweep, and the file of their records, from which a sweep can be resumed.

A sweep is a run of `wlb profile`. Its file has one JSON object per line:

- The first line (the header) describes the device, versions, model and settings. A sweep refuses
  a file with another header.
- Each result is appended as a line. If the sweep is started again, it skips tasks that already have
  a result.
- Each start of the sweep that measures something appends a line with its date, command, commit, and
  the clocks and throttling of the device.

A task that runs out of memory is recorded as failed, and the sweep continues.
"""

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from wlb.data.folder import make_folder
from wlb.plan import UserError
from wlb.plan.plain import flat
from wlb.plan.read_file import parse_json

Numbers = dict[str, float]
"""Measured numbers by name. A name ends in the unit, as in forward_ns."""
_MOST = 1e30
"""Largest number that a record may have. Times in ns, bytes and ratios are far smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A measurement of a sweep, identified by `kind` and `point` together."""

    kind: str  # what is measured, such as "gemm"
    point: Mapping[str, Any]  # sizes and settings of the measurement, as plain JSON values
    run: Callable[[], Numbers]  # measures and returns the numbers
    # Whether the sweep continues after any error of this task, or only if memory ran out.
    may_fail: bool = False

    @property
    def key(self) -> str:
        """Text that identifies the task in a file of records."""
        return _key(self.kind, self.point)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of a task."""

    kind: str  # `Task.kind` of the task
    point: Mapping[str, Any]  # `Task.point` of the task
    numbers: Numbers  # the measured numbers; empty if the task failed
    failed: str = ""  # why the task failed; "" = the task succeeded


def measured(records: Iterable[Record], kind: str) -> list[Record]:
    """Return the records of one kind of task, without tasks that failed."""
    return [r for r in records if r.kind == kind and not r.failed]


class RecordFile:
    """The file with the records of a sweep, as a context manager.

    Attributes:
        records: `Task.key` -> record of the task.
        starts: Date, command, commit and conditions of each start of the sweep that measured
            something, oldest first.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Open or create the file.

        Args:
            path: The file.
            header: Description of the device, versions, model and settings of the sweep.

        Raises:
            UserError: If the file has the records of a sweep with another header.
        """
        self.path = path
        self.records: dict[str, Record] = {}
        self.starts: list[dict[str, Any]] = []
        self._num_measured = 0
        if path.is_file() and path.stat().st_size:
            self._read(header)
        else:
            make_folder(path.parent)
            path.write_text(json.dumps({"header": header}, sort_keys=True) + "\n", "utf-8")
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, header: Mapping[str, Any]) -> None:
        """Read the records that earlier starts of the sweep wrote.

        Raises:
            UserError: If the header of the file differs from `header`, or the file is damaged.
        """
        try:
            first, *lines = self.path.read_text("utf-8").splitlines(keepends=True)
        except UnicodeDecodeError:
            raise UserError(
                f"{self.path} is not a file of measurements by `wlb profile`; move it away, or "
                f"give another --out"
            ) from None
        found = _loaded(first).get("header")
        if not isinstance(found, dict):
            raise UserError(
                f"{self.path} is not a file of measurements by `wlb profile`; move it away, or "
                f"give another --out"
            )
        stored, now = dict(flat(found)), dict(flat(json.loads(json.dumps(header))))
        differences = ", ".join(
            f"{k}: {stored.get(k)!r} in the file, {now.get(k)!r} now"
            for k in sorted({*stored, *now})
            if stored.get(k) != now.get(k)
        )
        if differences:
            raise UserError(
                f"{self.path} has measurements made under other conditions ({differences}); remove "
                f"the file or give another --out"
            )
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) != len(lines):
            # A sweep that was killed leaves an incomplete last line. Remove this line.
            self.path.write_text("".join([first, *whole]), "utf-8")
        for number, line in enumerate(whole, 2):
            data = _loaded(line)
            if isinstance(data.get("start"), dict):
                self.starts.append(data["start"])
                continue
            if (record := _record_of(data)) is None:
                raise UserError(
                    f"line {number} of {self.path} is not a measurement by `wlb profile`; remove "
                    f"the line or the file"
                )
            self.records[_key(record.kind, record.point)] = record

    def run(self, tasks: Sequence[Task]) -> Iterator[Record]:
        """Yield the record of each task, and measure the tasks of which the file has no record."""
        for task in tasks:
            if task.key not in self.records:
                record = _measured(task)
                self._write(asdict(record))
                self.records[task.key] = record
                self._num_measured += 1
            yield self.records[task.key]

    def end(self, start: Mapping[str, Any]) -> None:
        """Append a line about this start of the sweep to the file, if any task was measured.

        A sweep that was interrupted is started several times.

        Args:
            start: Date, command, commit and conditions of this start.
        """
        if self._num_measured:
            self.starts.append({**start, "points": self._num_measured})
            self._write({"start": self.starts[-1]})

    def _write(self, data: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(data) + "\n")


def _key(kind: str, point: Mapping[str, Any]) -> str:
    return json.dumps([kind, point], sort_keys=True)


def _loaded(line: str) -> dict[str, Any]:
    """Return the JSON object in a line of the file, or {} if the line has no JSON object."""
    try:
        data = parse_json(line, "a line")
    except UserError:
        return {}
    return data if isinstance(data, dict) else {}


def _record_of(data: dict[str, Any]) -> Record | None:
    """Return the record that a line's JSON object holds, or None if it is not a valid record."""
    try:
        record = Record(**data)
        texts = (record.kind, record.failed)
        valid = all(isinstance(text, str) for text in texts) and isinstance(record.point, dict)
        valid = valid and isinstance(record.numbers, dict)
    except TypeError:
        return None
    return record if valid and all(map(_is_number, record.numbers.values())) else None


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -_MOST <= value <= _MOST  # type: ignore[operator]


def _measured(task: Task) -> Record:
    """Run a task and return its record.

    If memory runs out, or if a task with `may_fail` raises any error, the record says why.
    """
    try:
        return Record(kind=task.kind, point=task.point, numbers=task.run())
    except Exception as error:
        is_memory = _is_out_of_memory(error)
        if not is_memory and not task.may_fail:
            raise
        first_line = next(iter(str(error).splitlines()), "")[:200]
        failed = f"{'out of memory' if is_memory else type(error).__name__}: {first_line}"
    # Free what the failed task allocated, so that it does not make later tasks fail.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return Record(kind=task.kind, point=task.point, numbers={}, failed=failed)


def _is_out_of_memory(error: Exception) -> bool:
    # torch's CPU allocator, cuBLAS, cuDNN and NCCL use these words in their errors.
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
