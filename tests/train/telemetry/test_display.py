"""Tests what is shown: plain lines in a log file, a live table on a terminal."""

import re
import time
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tests.plan.test_telemetry import record
from tests.words import lacks
from wlb.plan import (
    ExpertLoad,
    ExpertLoads,
    KeyRows,
    MeasuredStep,
    RankTable,
    StepMetrics,
    Straggler,
    Work,
)
from wlb.plan.tally import Tally
from wlb.report import tables
from wlb.train.telemetry.display import HEADINGS, Display, StepFigures, TimeLeft, fitting, summary

FIGURES = StepFigures(learning_rate=3e-4, memory_bytes=3 << 29)
STRAGGLER = Straggler(rank=3, over=1.5, host="gpu[007]", node=1, tp=1, cp=1, pp=0, dp=0)


PREDICTED = StepMetrics(step=0, num_documents=3, num_tokens=2000, num_targets=1997)


def metrics(step: int) -> MeasuredStep:
    return MeasuredStep(
        step=step,
        num_documents=3,
        num_tokens=2000,
        num_targets=1997,
        loss=5.5 - step,
        grad_norm=0.25,
        step_time_s=0.5,
        sharding_counts=(("per_document", 2), ("per_sequence", 0)),
    )


def shown(console: Console, *, verbose: bool = True) -> str:
    with Display(console, "a run", total_steps=3, verbose=verbose) as screen:
        screen.evaluation(0, 6.0)
        for step in range(3):
            screen.step(step + 1, metrics(step), PREDICTED, None, FIGURES)
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
    above = ("gradient", "learning", "imbalance", "imbalance", "delay,", "steps", "sharding")
    assert lines[1].split() == [*above, "peak", "time"]
    assert lines[4].split()[4:6] == ["0.25", "3.00e-04"]
    assert lines[4].split()[-2:] == ["1.50", "-"]
    assert re.fullmatch(r"0:00:\d\d", lines[5].split()[-1])
    place = "rank 3 on gpu[007] (node 1; tp 1, cp 1, pp 0, dp 0)"
    assert lacks(lines[7], "straggler: ", place, "1.50 times", "median rank") == []
    assert len(lines) == 8


def test_few_columns_are_shown_unless_all_are_asked_for() -> None:
    text = shown(Console(file=StringIO(), width=200), verbose=False)
    lines = text.splitlines()
    assert lines[1].split() == ["imbalance", "imbalance", "time"]
    assert lines[2].split() == ["step", "loss", "tokens/s", "usual", "ours", "left"]
    assert lines[4].split() == ["1/3", "5.500", "4,000", "-", "1.00", "-"]


def test_a_summary_says_first_what_balance_gained_and_then_few_rows() -> None:
    tally = Tally(stopped="after step 1 of 3 by SIGTERM")
    ours = replace(PREDICTED, max_workload_ns=1010, mean_workload_ns=1000)
    tally.add(metrics(0), ours, replace(ours, max_workload_ns=1250))
    rows: dict[bool, str] = {}
    for verbose in (False, True):
        console = Console(file=StringIO(), width=300)
        summary(console, tally, files={}, wall="1.0 s", verbose=verbose)
        assert isinstance(console.file, StringIO)
        rows[verbose] = " ".join(console.file.getvalue().split())
    said = "balance │ imbalance 1.010, with the usual loader 1.250: the slowest micro-batches take "
    for text in rows.values():
        assert lacks(text, "stopped │ after step 1 of 3 by SIGTERM", f"{said}19.2% less time") == []
        assert text.index("stopped") < text.index("balance") < text.index("training loss")
        assert text.index("training loss") < text.index("speed") < text.index("1.0 s")
    assert "sharding chosen" in rows[True]
    assert "sharding chosen" not in rows[False]
    assert "--verbose and `wlb report` have" in rows[False]


def test_lines_are_in_the_file_as_soon_as_they_are_said() -> None:
    class Watched(StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    file = Watched()
    with Display(Console(file=file, width=110), "a run", total_steps=3) as screen:
        screen.step(1, metrics(0), PREDICTED, None, FIGURES)
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


@pytest.mark.parametrize("width", [40, 80, 100, 140])
def test_a_narrow_terminal_gets_fewer_columns_and_their_names(width: int) -> None:
    console = Console(
        file=StringIO(), force_terminal=True, width=width, height=40, _environ={"TERM": "xterm"}
    )
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(console))
    kept = [HEADINGS[i].whole for i in fitting(width)]
    assert "…" not in text
    # Lines that are said are wrapped by the terminal itself.
    drawn = [line for line in text.splitlines() if "straggler" not in line]
    assert max(map(len, drawn)) <= width
    left_out = [heading.whole for heading in HEADINGS if heading.whole not in kept]
    assert ("a wider terminal also shows" in text) == bool(left_out)
    assert lacks(" ".join(text.split()), *left_out) == []
    assert {"step", "loss", "tokens/s", "time left"} <= set(kept)
    if width >= 80:
        assert {"imbalance ours", "imbalance usual", "gradient norm"} <= set(kept)
    assert bool(left_out) == (width < 140)


def test_the_time_left_goes_by_all_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 50.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    left = TimeLeft(1000)
    assert left.after(100) == "-"  # of a run that goes on
    now_s += 7.5
    assert left.after(105) == "0:22:22"  # 895 steps of 1.5 s
    now_s += 1e5
    assert left.after(110) == "103 d 00 h"
    assert left.after(90) == "-"  # after a rollback


def test_a_dumb_terminal_gets_lines_at_once() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=110, _environ={"TERM": "dumb"})
    with Display(console, "a run", total_steps=3) as screen:
        screen.step(1, metrics(0), PREDICTED, None, FIGURES)
        assert "1/3" in file.getvalue()


def test_late_documents_are_told_once_and_counted_in_the_summary() -> None:
    console, tally = Console(file=StringIO(), width=400), Tally()
    late = replace(PREDICTED, num_overdue=3, max_delay=14)
    with Display(console, "a run", total_steps=3) as screen:
        for step, predicted in enumerate((PREDICTED, late, late)):
            screen.step(step + 1, metrics(step), predicted, None, FIGURES)
            tally.add(replace(metrics(step), max_delay=predicted.max_delay), predicted, None)
    assert isinstance(console.file, StringIO)
    (warning,) = [x for x in console.file.getvalue().splitlines() if "warning" in x]
    said = ("in step 2, 3 pieces", "up to 14 steps", "raise packing.step_tokens or packing.s_max")
    assert lacks(warning, *said) == []
    summary(console, tally, files={}, wall="1.0 s")
    assert "6 pieces of documents were trained later" in console.file.getvalue()


def test_the_summary_warns_of_starved_steps() -> None:
    def said(*tokens: int) -> str:
        tally, console = Tally(), Console(file=StringIO(), width=400)
        for step, num in enumerate(tokens):
            tally.add(replace(metrics(step), num_tokens=num), PREDICTED, None)
        summary(console, tally, files={}, wall="1.0 s")
        assert isinstance(console.file, StringIO)
        return " ".join(console.file.getvalue().split())

    text = said(4000, 250, 4000, 999, 0, 5000)
    assert "starved steps" in text
    assert "warning: 2 of 5 steps are starved" in text
    assert "4,000 tokens; the smallest has 250 tokens" in text
    assert "starved" not in said(4000, 1000, 4000)


def test_the_summary_names_stragglers_or_says_that_there_were_none() -> None:
    def said(tally: Tally) -> str:
        console = Console(file=StringIO(), width=250)
        summary(console, tally, files={}, wall="1.0 s")
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
    assert "a straggler in 1 of 2 tables" in said(tally)


def test_the_summary_says_how_keys_were_exchanged_where_ranks_did() -> None:
    def said(rows: KeyRows | None) -> str:
        tally, console = Tally(), Console(file=StringIO(), width=250)
        for step in range(2):
            tally.add(replace(metrics(step), key_rows=rows), PREDICTED, None)
        summary(console, tally, files={}, wall="1.0 s")
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    assert "keys exchanged" not in said(None)
    text = said(KeyRows(num_by_need=1, received=300, gathered=800))
    assert "only the needed rows in 2 of 4 micro-batches" in text
    assert "37.5% of an all-gather's rows" in text


LOAD = ExpertLoad(layers=(0, 3), expert=(1.5, 2.5), rank=(1.1, 1.3), ranks=(0.75, 1.25))


def test_loads_of_experts_are_beside_those_of_attention() -> None:
    console, tally = Console(file=StringIO(), width=400), Tally()
    with Display(console, "a run", total_steps=3, experts=True, verbose=True) as screen:
        for step, load in enumerate((LOAD, None, replace(LOAD, rank=(1.1, 1.5)))):
            measured = replace(
                metrics(step),
                experts=load,
                cp_imbalance=1.04,
                expert_load=None if load is None else load.mean_expert,
            )
            screen.step(step + 1, measured, PREDICTED, None, FIGURES)
            tally.add(measured, PREDICTED, None)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert lacks(lines[1] + lines[2], "slowest rank", "CP, experts") == []
    assert [" 1.04, 1.20 " in lines[3], " 1.04, 1.30 " in lines[5]] == [True, True]
    assert "1.04" not in lines[4]
    summary(console, tally, files={}, wall="1.0 s")
    text = " ".join(console.file.getvalue().split())
    said = ("2.00 mean of steps", "most in layer 3 (2.50)", "attention 1.04 (slowest CP rank")
    said += (
        "experts 1.25 (tokens of the EP rank",
        "most in layer 3 (1.40)",
        "EP rank 1 (1.25) has",
    )
    assert lacks(text, *said) == []


def test_loads_of_ranks_begin_anew_with_another_degree() -> None:
    """After a restart over fewer or more EP ranks, a rank holds other experts than before."""
    sums = ExpertLoads()
    loads = [LOAD] * 3 + [replace(LOAD, ranks=(1.0, 0.5, 2.0, 0.5))] * 2 + [LOAD]
    found: list[tuple[int, float]] = []
    for load in loads:
        sums.add(load, attention=1.0)
        found.append(sums.worst("ranks"))
    assert found == [(1, 1.25)] * 3 + [(2, 2.0)] * 2 + [(1, 1.25)]
    assert sums.worst("expert") == (3, 2.5)


def test_the_summary_has_mfu_where_the_peak_is_known() -> None:
    def row(work: Work) -> str:
        tally = Tally()
        tally.telemetry.add(record(work=work))
        tally.telemetry.add(record(work=work))
        console = Console(file=StringIO(), width=250)
        summary(console, tally, files={}, wall="1.0 s")
        assert isinstance(console.file, StringIO)
        lines = console.file.getvalue().splitlines()
        return next(line for line in lines if "model FLOP/s" in line)

    work = Work(rank_s=8.0, model_flops=4e12, window_flops=6e12)
    assert "0.5 TFLOP/s per rank, with the FLOPs of the documents" in row(work)
    assert "counted as full windows: 0.75 TFLOP/s " in row(work)
    assert "MFU" not in row(work)
    known = row(Work(rank_s=8.0, model_flops=4e12, window_flops=6e12, peak_flops=1.6e13))
    assert "0.5 TFLOP/s, MFU 25.0% per rank" in known
    assert "full windows: 0.75 TFLOP/s, MFU 37.5%" in known
