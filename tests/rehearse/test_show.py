"""Tests that a rehearsal's tables fit a terminal of 80 columns with all their numbers."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from wlb.rehearse.prove import Proof
from wlb.rehearse.results import Fault, RankResult, Reserved, StepResult
from wlb.rehearse.run import Rehearsed
from wlb.rehearse.show import GIB, show, verdict
from wlb.spec import load

PARTS = ("attention", "GEMM", "element-wise", "tp", "cp", "fsdp", "pp")


def taken(*, failed_at: str = "") -> Reserved:
    return Reserved(
        peak_bytes=71 * GIB,
        allocated_bytes=70 * GIB,
        retries=0,
        failed_bytes=3 * GIB if failed_at else 0,
        failed_at=failed_at,
    )


def step() -> StepResult:
    """A long step: 123,456 calls and 98,765.4 ms of each part."""
    each = {"calls": 123456, "time_ns": 98_765.4e6, "num_bytes": 87_654.32e9, "flops": 7_654.32e12}
    return StepResult(
        step=1,
        num_tokens=1 << 20,
        longest=1 << 17,
        peak_bytes=70 * GIB,
        estimate_bytes=72 * GIB,
        parts={part: dict(each) for part in PARTS},
        exposed_ns=dict.fromkeys(PARTS, 54_321.1e6),
        time_ns=1e9,
        host_waits=(),
        graphs=0,
        exchange="an all-gather of 8,192 rows of each rank, in 1 stage",
    )


def result() -> RankResult:
    return RankResult(
        rank=8191,
        coordinates=(7, 15, 15, 3),
        steps=(step(), step()),
        messages=[],
        spans=[],
        streams=(),
        host_waits=(),
        peak_bytes=70 * GIB,
        at_peak={name: 12 * GIB for name in ("activations", "gathered parameters", "optimizer")},
        reserved={"expandable": taken(), "segments": taken()},
        copied={},
        calibration="",
        faults=(),
        wall_s=1.0,
    )


def found_by(*ranks: RankResult) -> Rehearsed:
    return Rehearsed(spec=load("405b_128k", []), ranks=ranks, proof=Proof(num_ranks=len(ranks)))


def test_tables_fit_a_terminal_of_80_columns() -> None:
    file = StringIO()
    show(found_by(result()), Console(width=80, file=file))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    rows = [line for line in text.splitlines() if "123,456" in line]
    assert len(rows) == len(PARTS)
    for row, part in zip(rows, PARTS, strict=True):
        assert part in row
        assert ("54,321.1" in row) == (part in ("tp", "cp", "fsdp", "pp"))
        for number in ("98,765.4", "87,654.32", "7,654.32"):
            assert number in row
    (memory,) = [line for line in text.splitlines() if "8191" in line and "72.00" in line]
    assert memory.count("71.00") == 2
    said = "longest micro-batch of the last step: an all-gather of 8,192 rows of each rank"
    assert said in " ".join(text.split())


def test_a_verdict_names_steps_and_call_sites() -> None:
    fault = Fault(rank=3, step=2, error="freed", op="aten.mm", where="wlb/a.py:7", trace="")
    many = replace(result(), rank=3, faults=(fault,) * 11)
    full = replace(
        result(),
        reserved={"expandable": taken(failed_at="step 4, wlb/b.py:9"), "segments": taken()},
    )
    lines = verdict(found_by(many, full))
    assert lines[:8] == ["FAULT: rank 3, step 2, aten.mm, wlb/a.py:7: freed"] * 8
    assert lines[8].startswith("FAULT: rank 3 has 3 more")
    (memory,) = [line for line in lines if "runs out of" in line]
    assert "(step 4, wlb/b.py:9)" in memory
    assert not found_by(many).passed
    assert not found_by(full).passed
