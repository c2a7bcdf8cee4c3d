"""Tests a sweep's records on disk: resuming after a kill, another sweep's file, out of memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wlb.profile.tasks import Numbers, Record, RecordFile, Task

HEADER = {"device": "a CPU", "versions": {"torch": "2.13"}, "tokens": (8, 16)}


def _task(i: int, run: Callable[[], Numbers]) -> Task:
    return Task(kind="gemm", point={"tokens": i, "rows": 4}, run=run)


def _counted(ran: list[int], *wanted: int) -> list[Task]:
    def run(i: int) -> Numbers:
        ran.append(i)
        return {"forward_ns": i / 3}

    return [_task(i, lambda i=i: run(i)) for i in wanted]


def _sweep(path: Path, tasks: list[Task], header: dict[str, object] | None = None) -> list[Record]:
    with RecordFile(path, header or HEADER) as file:
        return list(file.run(tasks))


def test_keys_do_not_depend_on_the_order_of_a_point():
    one = Task(kind="gemm", point={"a": 1, "b": 2}, run=dict)
    other = Task(kind="gemm", point={"b": 2, "a": 1}, run=dict)
    assert one.key == other.key == '["gemm", {"a": 1, "b": 2}]'


def test_a_later_start_measures_only_what_is_missing(tmp_path: Path):
    path, ran = tmp_path / "new" / "records.jsonl", []
    first = _sweep(path, _counted(ran, 1, 2))
    assert ran == [1, 2]
    again = _sweep(path, _counted(ran, 3, 2, 1))
    assert ran == [1, 2, 3]
    assert [again[2], again[1]] == first
    assert [r.point["tokens"] for r in again] == [3, 2, 1]
    assert [r.numbers for r in again] == [{"forward_ns": i / 3} for i in (3, 2, 1)]
    header, *lines = path.read_text("utf-8").splitlines()
    assert json.loads(header) == {"header": {**HEADER, "tokens": [8, 16]}}
    assert len(lines) == 3


@pytest.mark.parametrize("left", [1, 30, -1])
def test_a_sweep_killed_in_the_middle_of_a_line_goes_on(tmp_path: Path, left: int):
    path, ran = tmp_path / "records.jsonl", []
    _sweep(path, _counted(ran, 1, 2))
    *whole, last = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join([*whole, last[:left]]), "utf-8")
    records = _sweep(path, _counted(ran, 1, 2, 3))
    assert ran == [1, 2, 2, 3]
    assert [r.numbers["forward_ns"] for r in records] == [1 / 3, 2 / 3, 1]
    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()[1:]] == [
        {"kind": "gemm", "point": {"tokens": i, "rows": 4}, "numbers": {"forward_ns": i / 3},
         "failed": ""}
        for i in (1, 2, 3)
    ]  # fmt: skip


def test_records_are_on_disk_before_the_next_point_is_measured(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    seen: list[int] = []

    def run() -> Numbers:
        seen.append(len(path.read_text("utf-8").splitlines()))
        return {}

    _sweep(path, [_task(i, run) for i in range(3)])
    assert seen == [1, 2, 3]


def test_another_sweep_s_file_is_refused_by_what_differs_and_kept(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    _sweep(path, _counted([], 1))
    before = path.read_text("utf-8")
    other = {**HEADER, "device": "a GPU", "dtype": "bfloat16"}
    with pytest.raises(ValueError, match="measurements made under other conditions") as caught:
        RecordFile(path, other)
    message = str(caught.value)
    assert "device: 'a CPU' in the file, 'a GPU' now" in message
    assert "dtype: None in the file, 'bfloat16' now" in message
    assert "tokens" not in message
    assert path.read_text("utf-8") == before


@pytest.mark.parametrize("text", ["tokens,ns\n1,2\n", '{"other": 1}\n', "[1, 2]\n"])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, text: str):
    path = tmp_path / "records.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match="not a file of measurements by `wlb profile`"):
        RecordFile(path, HEADER)
    assert path.read_text("utf-8") == text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.\nGPU 0 has ..."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 99 bytes."
        ),
        MemoryError("Unable to allocate 1 TiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_point_out_of_memory_is_recorded_and_the_sweep_goes_on(tmp_path: Path, error: Exception):
    path, ran = tmp_path / "records.jsonl", []

    def run() -> Numbers:
        ran.append(2)
        raise error

    first, middle, last = _counted(ran, 1, 2, 3)
    tasks = [first, _task(2, run), last]
    records = _sweep(path, tasks)
    assert ran == [1, 2, 3]
    assert records[1].numbers == {}
    assert records[1].failed == f"out of memory: {str(error).splitlines()[0]}"
    assert [r.failed for r in (records[0], records[2])] == ["", ""]
    # It is not tried again, not even where it would work now.
    assert _sweep(path, [first, middle, last]) == records
    assert ran == [1, 2, 3]


def test_a_real_allocation_that_fails_is_out_of_memory(tmp_path: Path):
    task = _task(1, lambda: {"bytes": float(torch.empty(1 << 60, dtype=torch.uint8).numel())})
    (record,) = _sweep(tmp_path / "records.jsonl", [task])
    assert record.failed.startswith("out of memory: ")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyboardInterrupt])
def test_other_errors_end_the_sweep_and_are_not_recorded(tmp_path: Path, kind: type[BaseException]):
    path, ran = tmp_path / "records.jsonl", []

    def run() -> Numbers:
        raise kind("shapes do not match")

    with pytest.raises(kind, match="shapes do not match"):
        _sweep(path, [*_counted(ran, 1), _task(2, run)])
    _sweep(path, _counted(ran, 1, 2))
    assert ran == [1, 2]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error: Cuda failure 2 'out of memory'"),
        MemoryError(),
    ],
)
def test_libraries_run_out_of_memory_in_their_own_words(tmp_path: Path, error: Exception):
    def run() -> Numbers:
        raise error

    (record,) = _sweep(tmp_path / "records.jsonl", [_task(1, run)])
    assert record.failed.startswith("out of memory: ")


def test_what_may_fail_is_recorded_with_its_error_and_the_sweep_goes_on(tmp_path: Path):
    def run() -> Numbers:
        raise NotImplementedError("no heads of 320")

    path = tmp_path / "records.jsonl"
    may = replace(_task(1, run), may_fail=True)
    records = _sweep(path, [may, _task(2, lambda: {"forward_ns": 1.0})])
    assert [r.failed for r in records] == ["NotImplementedError: no heads of 320", ""]
    assert _sweep(path, [may])[0].failed == "NotImplementedError: no heads of 320"
    with pytest.raises(NotImplementedError):
        _sweep(tmp_path / "other.jsonl", [_task(1, run)])


@pytest.mark.parametrize("line", ["not json\n", "[1]\n", '{"kind": "gemm"}\n', '{"x": 1}\n'])
def test_a_broken_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "records.jsonl"
    _sweep(path, _counted([], 1))
    path.write_text(path.read_text("utf-8") + line, "utf-8")
    with pytest.raises(ValueError, match=r"line 3 of .*records\.jsonl is not a measurement by"):
        RecordFile(path, HEADER)


def test_starts_that_measured_are_kept_in_order(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    for number, tasks in enumerate(([1, 2], [1, 2], [1, 2, 3])):
        with RecordFile(path, HEADER) as file:
            list(file.run([_task(i, dict) for i in tasks]))
            file.end({"command": f"start {number}"})
    with RecordFile(path, HEADER) as file:
        assert file.starts == [
            {"command": "start 0", "points": 2},
            {"command": "start 2", "points": 1},
        ]
