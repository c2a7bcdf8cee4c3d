"""Tests tables of narrow terminals and pipes: a number is never cut, and no column is lost."""

import sys
from io import StringIO

import pytest
from rich.console import Console

from wlb.report.tables import WHOLE, console, facts_table, new_table


def printed(table: object, width: int) -> list[str]:
    screen = Console(file=StringIO(), width=width)
    screen.print(table)
    assert isinstance(screen.file, StringIO)
    return [line.rstrip() for line in screen.file.getvalue().splitlines()]


def test_a_wide_table_becomes_blocks_with_the_labels_in_each() -> None:
    numbers = ["s/step", "ktok/s", "gain", "bubble"]
    table = new_table("Systems", labels=["system"], numbers=numbers, is_plain=True, caption="end")
    table.add_row("plain", "12.345", "1,166", "1.000", "30.1%", style="bold")
    table.add_row("wlb", "10.001", "1,436", "1.231", "9.7%")
    assert printed(table, 100)[2].split() == ["system", "s/step", "ktok/s", "gain", "bubble"]
    assert printed(table, 28) == [
        "Systems",
        "",
        " system   s/step   ktok/s",
        " ────────────────────────",
        " plain    12.345    1,166",
        " wlb      10.001    1,436",
        "",
        "",
        " system    gain   bubble",
        " ───────────────────────",
        " plain    1.000    30.1%",
        " wlb      1.231     9.7%",
        "",
        "end",
    ]


def test_a_text_folds_before_numbers_move() -> None:
    table = new_table(texts=["setting"], numbers=["imbalance", "delay"])
    table.add_row("one of many settings with a long name", "1.234", "0.50")
    lines = printed(table, 45)
    assert sum("setting" in line for line in lines) == 2  # the head, and the folded name
    assert sum("1.234" in line and "0.50" in line for line in lines) == 1


def test_pipes_get_the_whole_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = new_table(labels=["name"], numbers=[f"column {i}" for i in range(40)])
    table.add_row("a", *(f"{i}.{i:09d}" for i in range(40)))
    console().print(table)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "39.000000039" in line]
    assert "0.000000000" in row
    assert console(stderr=True).width == WHOLE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert console(force_terminal=True).width == 20


def test_brackets_in_a_title_are_text() -> None:
    table = facts_table("run [bold]")
    table.add_row("a", "a long value")
    assert printed(table, 40)[0] == "run [bold]"
