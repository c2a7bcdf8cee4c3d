"""Fuzzes the records of a sweep on disk, from which an interrupted `wlb profile` goes on."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import Refused, damaged, fuzzed, misshapen, outcome
from wlb.plan import UserError
from wlb.profile.tasks import Record, RecordFile, Task

HEADER = {"device": "a CPU", "versions": {"torch": "2.13"}, "tokens": [8, 16]}
RECORDS: list[dict[str, Any]] = [
    {"kind": "gemm", "point": {"tokens": i}, "numbers": {"forward_ns": i + 0.5}, "failed": ""}
    for i in range(2)
]
FAILED = {"kind": "gemm", "point": {"tokens": 9}, "numbers": {}, "failed": "out of memory: no"}
LINES: list[dict[str, Any]] = [
    {"header": HEADER},
    *RECORDS,
    FAILED,
    {"start": {"date": "2026-01-01", "points": 2}},
]
TASKS = [Task(kind="gemm", point={"tokens": i}, run=lambda: {"forward_ns": 7.0}) for i in range(3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweeps") / "records.jsonl"


def swept(path: Path) -> list[Record]:
    """All tasks, from the file or measured now; a start is noted."""
    with RecordFile(path, HEADER) as file:
        found = list(file.run(TASKS))
        file.end({"date": "2026-01-02"})
    with RecordFile(path, HEADER) as again:
        assert [again.records[task.key] for task in TASKS] == found
    return found


def check(found: Any) -> None:
    if not isinstance(found, Refused):
        assert [record.point for record in found] == [task.point for task in TASKS]
        for record in found:
            assert all(math.isfinite(value) for value in record.numbers.values())


@fuzzed(0.5)
@given(st.data())
def test_misshapen_records_are_read_or_refused(path: Path, data: st.DataObject) -> None:
    lines = [json.dumps(line) for line in LINES]
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = data.draw(misshapen(LINES[at]))
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
    check(outcome(lambda: swept(path)))


@fuzzed(0.5)
@given(st.data())
def test_damaged_records_are_read_or_refused(path: Path, data: st.DataObject) -> None:
    path.write_bytes(data.draw(damaged("".join(f"{json.dumps(x)}\n" for x in LINES).encode())))
    check(outcome(lambda: swept(path)))


def test_whole_records_are_taken_from_the_file(path: Path) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    assert [r.numbers["forward_ns"] for r in swept(path)] == [0.5, 1.5, 7.0]


@pytest.mark.parametrize("numbers", [{"forward_ns": 1e300}, {"forward_ns": "1"}, [1.0], None])
def test_a_record_of_no_numbers_is_refused_by_its_line(path: Path, numbers: Any) -> None:
    lines = [LINES[0], {**RECORDS[0], "numbers": numbers}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(UserError, match=r"line 2 of .* is not a measurement by"):
        RecordFile(path, HEADER)
