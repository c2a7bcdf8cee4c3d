"""Tests what is shown: plain lines in a log file, a live table on a terminal."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tests.plan.test_telemetry import record
from tests.words import lacks
from wlb.plan import MeasuredStep, RankTable, StepMetrics, Straggler, Work
from wlb.plan.tally import Tally
from wlb.report import tables
from wlb.train.telemetry.display import Display, summary

STRAGGLER = Straggler(rank=3, over=1.5, host="gpu[007]", node=1, tp=1, cp=1, pp=0, dp=0)


PREDICTED = StepMetrics(step=0, num_documents=3, num_tokens=2000, num_targets=1997)


def metrics(step: int) -> MeasuredStep:
    return MeasuredStep(
        step=step,
        num_documents=3,
        num_tokens=2000,
        num_targets=1997,
        loss=5.5 - step,
        step_time_s=0.5,
        sharding_counts=(("per_document", 2), ("per_sequence", 0)),
    )


def shown(console: Console) -> str:
    with Display(console, "a run", total_steps=3) as screen:
        screen.evaluation(0, 6.0)
        for step in range(3):
            screen.step(step + 1, metrics(step), PREDICTED, None)
        screen.say(f"straggler: {STRAGGLER.text}")
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_log_file_gets_a_plain_line_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", StringIO())
    console = tables.console()
    assert not console.is_terminal
    text = shown(console)
    assert "\x1b" not in text  # neither colours nor moves of the cursor
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "a run"
    assert lines[3] == "held-out loss 6.000 after 0 steps"
    assert [line.split()[:4] for line in lines[4:7]] == [
        ["1/3", "5.500", "2000", "4,000"],
        ["2/3", "4.500", "2000", "4,000"],
        ["3/3", "3.500", "2000", "4,000"],
    ]
    place = "rank 3 on gpu[007] (node 1; tp 1, cp 1, pp 0, dp 0)"
    assert lacks(lines[7], "straggler: ", place, "1.50 times", "median rank") == []
    assert len(lines) == 8


def test_lines_are_in_the_file_as_soon_as_they_are_said() -> None:
    class Watched(StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    file = Watched()
    with Display(Console(file=file, width=110), "a run", total_steps=3) as screen:
        screen.step(1, metrics(0), PREDICTED, None)
        assert "1/3" in file.flushed


def test_a_terminal_gets_a_table_that_is_drawn_again() -> None:
    console = Console(
        file=StringIO(),
        highlight=False,
        force_terminal=True,
        width=100,
        height=40,
        _environ={"TERM": "xterm"},
    )
    text = shown(console)
    assert "\x1b[" in text
    assert "3/3" in text
    assert "straggler: rank 3 on gpu[007]" in text


def test_a_dumb_terminal_gets_lines_at_once() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=110, _environ={"TERM": "dumb"})
    with Display(console, "a run", total_steps=3) as screen:
        screen.step(1, metrics(0), PREDICTED, None)
        assert "1/3" in file.getvalue()


def test_late_documents_are_told_once_and_counted_in_the_summary() -> None:
    console, tally = Console(file=StringIO(), width=400), Tally()
    late = replace(PREDICTED, num_overdue=3, max_delay=14)
    with Display(console, "a run", total_steps=3) as screen:
        for step, predicted in enumerate((PREDICTED, late, late)):
            screen.step(step + 1, metrics(step), predicted, None)
            tally.add(replace(metrics(step), max_delay=predicted.max_delay), predicted, None)
    assert isinstance(console.file, StringIO)
    (warning,) = [x for x in console.file.getvalue().splitlines() if "warning" in x]
    said = ("in step 2, 3 pieces", "up to 14 steps", "raise packing.step_tokens or packing.s_max")
    assert lacks(warning, *said) == []
    summary(console, tally, files={}, wall_s=1.0)
    assert "6 pieces of documents were trained later" in console.file.getvalue()


def test_the_summary_names_stragglers_or_says_that_there_were_none() -> None:
    def said(tally: Tally) -> str:
        console = Console(file=StringIO(), width=250)
        summary(console, tally, files={}, wall_s=1.0)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    tally = Tally()
    assert "stragglers" not in said(tally)
    columns = ("measured_us", "predicted_us", "compute_us", "bubble_us", "loading_us")
    data = {name: [1] for name in columns}
    empty = RankTable.from_json(
        {"step": 9, "steps_done": 10, "num_steps": 10, "stragglers": [], **data}
    )
    tally.stragglers.add(empty)
    assert "none in 1 tables of ranks" in said(tally)
    tally.stragglers.add(replace(empty, stragglers=(STRAGGLER,)))
    assert "rank 3 on gpu[007] (node 1; tp 1, cp 1" in said(tally)
    assert "named in 1 of 2 tables" in said(tally)


def test_the_summary_has_mfu_where_the_peak_is_known() -> None:
    def row(work: Work) -> str:
        tally = Tally()
        tally.telemetry.add(record(work=work))
        tally.telemetry.add(record(work=work))
        console = Console(file=StringIO(), width=250)
        summary(console, tally, files={}, wall_s=1.0)
        assert isinstance(console.file, StringIO)
        lines = console.file.getvalue().splitlines()
        return next(line for line in lines if "model FLOP/s" in line)

    work = Work(rank_s=8.0, model_flops=4e12, window_flops=6e12)
    assert "0.5 TFLOP/s a rank, of the documents' own FLOPs" in row(work)
    assert "counted as full windows: 0.75 TFLOP/s " in row(work)
    assert "MFU" not in row(work)
    known = row(Work(rank_s=8.0, model_flops=4e12, window_flops=6e12, peak_flops=1.6e13))
    assert "0.5 TFLOP/s, MFU 25.0% a rank" in known
    assert "full windows: 0.75 TFLOP/s, MFU 37.5%" in known
