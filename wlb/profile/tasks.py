"""Tasks of a sweep, and the file their results go to, so that an interrupted sweep goes on.

A sweep is a list of tasks. Each measures one point and gives numbers; results are appended to a
JSON-lines file as they come, under the task's key, and a later start skips what is there. The
file's first line says what was being measured (device, versions, settings); another sweep's file
is refused, not mixed in. A point that runs out of memory is recorded as failed; the sweep goes on.
"""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One point: `kind` and `point` (plain JSON values) name it, `run` measures it."""

    kind: str
    point: Mapping[str, Any]
    run: Callable[[], Numbers]

    @property
    def key(self) -> str:
        return json.dumps([self.kind, self.point], sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A task's result: numbers, or why there are none."""

    kind: str
    point: Mapping[str, Any]
    numbers: Numbers
    failed: str = ""


class RecordFile:
    """Results of a sweep on disk; a context manager."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Opens `path` to go on, or makes it. ValueError if it belongs to another sweep."""
        self.path = path
        self.records: dict[str, Record] = {}
        if path.is_file() and path.stat().st_size:
            self._read(header)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"header": header}, sort_keys=True) + "\n", "utf-8")
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, header: Mapping[str, Any]) -> None:
        first, *lines = self.path.read_text("utf-8").splitlines(keepends=True)
        try:
            found = json.loads(first)["header"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} is not a file of sweep records; move it away") from None
        expected = json.loads(json.dumps(header))
        differing = [k for k in sorted({*found, *expected}) if found.get(k) != expected.get(k)]
        if differing:
            told = ", ".join(
                f"{k}: {found.get(k)!r} there, {expected.get(k)!r} now" for k in differing
            )
            raise ValueError(
                f"{self.path} holds the records of another sweep ({told}); remove it or give "
                f"another --out"
            )
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) != len(lines):
            # The last line was cut off when the sweep was killed.
            self.path.write_text("".join([first, *whole]), "utf-8")
        for line in whole:
            data = json.loads(line)
            record = Record(**data)
            self.records[json.dumps([record.kind, record.point], sort_keys=True)] = record

    def run(self, tasks: Sequence[Task]) -> Iterator[Record]:
        """Each task's record, from disk or measured now."""
        for task in tasks:
            if task.key not in self.records:
                record = _measured(task)
                self._file.write(
                    json.dumps(
                        {
                            "kind": record.kind,
                            "point": record.point,
                            "numbers": record.numbers,
                            "failed": record.failed,
                        }
                    )
                    + "\n"
                )
                self.records[task.key] = record
            yield self.records[task.key]


def _measured(task: Task) -> Record:
    try:
        return Record(kind=task.kind, point=task.point, numbers=task.run())
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        failed = f"out of memory: {first_line[:200]}"
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return Record(kind=task.kind, point=task.point, numbers={}, failed=failed)


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "DefaultCPUAllocator: can't allocate memory" in str(error)
