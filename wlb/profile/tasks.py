"""Tasks of a sweep and the JSON-lines file of their records, so that a sweep can be resumed.

Results are appended under their task's key; a later start skips them. The first line describes what
is measured (device, versions, model, settings): the file of another sweep is refused. Every start
that measures something appends its date, command, commit and conditions. A point that runs out of
memory is recorded as failed and the sweep goes on.
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
_MOST = 1e30
"""Largest number of a record: times in ns, bytes and ratios are far smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One point: `kind` and `point` (plain JSON values) name it, `run` measures it. may_fail: every
    error is recorded and the sweep goes on; else only running out of memory is.
    """

    kind: str
    point: Mapping[str, Any]
    run: Callable[[], Numbers]
    may_fail: bool = False

    @property
    def key(self) -> str:
        return _key(self.kind, self.point)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A task's result: numbers, or the reason of failure."""

    kind: str
    point: Mapping[str, Any]
    numbers: Numbers
    failed: str = ""


def measured(records: Iterable[Record], kind: str) -> list[Record]:
    """The records of a kind that did not fail."""
    return [r for r in records if r.kind == kind and not r.failed]


class RecordFile:
    """Results of a sweep on disk; a context manager. records: by key. starts: those that measured
    something, oldest first.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Opens or makes `path`; raises UserError if it belongs to another sweep."""
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
        try:
            first, *lines = self.path.read_text("utf-8").splitlines(keepends=True)
        except UnicodeDecodeError:
            raise UserError(f"{self.path} is not a file of sweep records; move it away") from None
        found = _loaded(first).get("header")
        if not isinstance(found, dict):
            raise UserError(f"{self.path} is not a file of sweep records; move it away")
        there, now = dict(flat(found)), dict(flat(json.loads(json.dumps(header))))
        told = ", ".join(
            f"{k}: {there.get(k)!r} there, {now.get(k)!r} now"
            for k in sorted({*there, *now})
            if there.get(k) != now.get(k)
        )
        if told:
            raise UserError(
                f"{self.path} holds the records of another sweep ({told}); remove it or give "
                f"another --out"
            )
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) != len(lines):
            # A killed sweep leaves an incomplete last line.
            self.path.write_text("".join([first, *whole]), "utf-8")
        for number, line in enumerate(whole, 2):
            data = _loaded(line)
            if isinstance(data.get("start"), dict):
                self.starts.append(data["start"])
                continue
            if (record := _record_of(data)) is None:
                raise UserError(
                    f"line {number} of {self.path} is no record of a sweep; remove it or the file"
                )
            self.records[_key(record.kind, record.point)] = record

    def run(self, tasks: Sequence[Task]) -> Iterator[Record]:
        """Yields each task's record, from disk or measured now."""
        for task in tasks:
            if task.key not in self.records:
                record = _measured(task)
                self._write(asdict(record))
                self.records[task.key] = record
                self._num_measured += 1
            yield self.records[task.key]

    def end(self, start: Mapping[str, Any]) -> None:
        """Appends a line for this start if it measured something."""
        if self._num_measured:
            self.starts.append({**start, "points": self._num_measured})
            self._write({"start": self.starts[-1]})

    def _write(self, data: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(data) + "\n")


def _key(kind: str, point: Mapping[str, Any]) -> str:
    return json.dumps([kind, point], sort_keys=True)


def _loaded(line: str) -> dict[str, Any]:
    """The JSON object of a line; {} where there is none."""
    try:
        data = parse_json(line, "a line")
    except UserError:
        return {}
    return data if isinstance(data, dict) else {}


def _record_of(data: dict[str, Any]) -> Record | None:
    """The record of a line; None for one that no sweep writes."""
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
    try:
        return Record(kind=task.kind, point=task.point, numbers=task.run())
    except Exception as error:
        is_memory = _is_out_of_memory(error)
        if not is_memory and not task.may_fail:
            raise
        first_line = next(iter(str(error).splitlines()), "")[:200]
        failed = f"{'out of memory' if is_memory else type(error).__name__}: {first_line}"
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return Record(kind=task.kind, point=task.point, numbers={}, failed=failed)


def _is_out_of_memory(error: Exception) -> bool:
    # Messages of the CPU's allocator, cuBLAS, cuDNN and NCCL.
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
