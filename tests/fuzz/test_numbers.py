"""Fuzzes the numbers of the command line: any text is a number within its bounds, or refused."""

import argparse
import contextlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import MOST_CHARACTERS, NUMBERS, cpu_limit, fuzzed
from wlb.cli import main
from wlb.cli.main import parser_of

ODD = ["", " ", "nan", "-nan", "inf", "-inf", "1e5", "1_000", "\u0661\u0662", "0x10", "1e400", "--"]
ODD += ["9" * 4000, "9" * 5000, "1." + "0" * 5000, "x" * 5000, "\0", "5 GB", "-0", "+3", "1/2"]
DEMO = ["--set", "data.context_window=64", "data.num_windows=4", "model.num_layers=4"]


class Option(NamedTuple):
    command: str
    name: str
    read: Any


def _options(parser: argparse.ArgumentParser, command: str = "") -> Iterator[Option]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _options(inner, f"{command} {name}".strip())
        elif getattr(action.type, "__name__", "") in ("int", "float"):
            yield Option(command, action.option_strings[0], action.type)


OPTIONS = list(_options(parser_of()[0]))


def texts() -> st.SearchStrategy[str]:
    numbers = st.one_of(st.integers(), st.floats(), st.integers(0, 40)).map(str)
    return st.one_of(st.sampled_from([*map(str, NUMBERS), *ODD]), numbers, st.text(max_size=30))


def few_or_far() -> st.SearchStrategy[str]:
    """Numbers of little work, and those far beyond it: some thousand steps are work, no hang."""
    far = [str(10**9), str(10**9 - 1), "-1000000000", "1e9", "2147483648", "1048576000"]
    odd = st.sampled_from([*map(str, NUMBERS), *ODD, *far, "0.5", "1e-5", "-0.5"])
    return st.one_of(st.integers(-3, 40).map(str), odd)


def test_every_number_has_bounds() -> None:
    """Of both signs. `int` and `float` themselves have none."""
    assert len(OPTIONS) > 30
    for option in OPTIONS:
        assert option.read not in (int, float), option
        for text in (str(10**40), str(-(10**40))):
            with pytest.raises(argparse.ArgumentTypeError, match="must be at most"):
                option.read(text)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: f"{o.command} {o.name}")
@fuzzed(0.1, nightly=1000)
@given(texts())
def test_any_text_is_a_number_within_bounds_or_refused(option: Option, text: str) -> None:
    try:
        value = option.read(text)
    except argparse.ArgumentTypeError as error:
        message = str(error)
    else:
        _hold(option, value, text)
        return
    assert 0 < len(message) <= MOST_CHARACTERS


def _hold(option: Option, value: Any, text: str) -> None:
    assert type(value).__name__ == option.read.__name__
    assert not math.isnan(value)
    assert abs(value) <= 2**64 or math.isinf(value)
    # It means what Python reads, and nothing is cut.
    assert value == (float(text) if isinstance(value, float) else int(text))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("numbers")
    (made / "lengths.txt").write_text("\n".join(map(str, [3, 64, 20, 9, 33, 1, 12] * 9)))
    (made / "a.jsonl").write_text("".join(json.dumps({"text": "some words"}) + "\n" for _ in "abc"))
    return made


def words_of(command: str, folder: Path) -> list[str]:
    """A small call of each command that plans or prepares in this process, with fewest steps."""
    lengths = ["demo", "--lengths", str(folder / "lengths.txt"), *DEMO, "--steps", "2"]
    packing = ["tune", "packing", *lengths, "--thresholds", "0.5", "--policies", "var_len"]
    out = ["--out", str(folder / "store"), "--overwrite", "--tokenizer", "bytes"]
    return {
        "plan": ["plan", *lengths],
        "simulate": ["simulate", *lengths],
        "tune packing": packing,
        "tune layout": ["tune", "layout", *lengths, "--gpus", "2", "--jobs", "1", "--tp", "1"],
        "prepare": ["prepare", str(folder / "a.jsonl"), *out],
        "report": ["report", str(folder)],
    }[command]


COMMANDS = ["plan", "simulate", "tune packing", "tune layout", "prepare", "report"]
PROCESSES = {"--jobs", "--processes", "--replay"}
"""Numbers of processes that a command starts: held by their parsers alone."""


def called(words: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a command in this process, which may take so much of its time."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), cpu_limit():
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return code, said.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
@fuzzed(0.05, nightly=100)
@given(st.data())
def test_a_command_ends_for_any_number(folder: Path, command: str, data: st.DataObject) -> None:
    """Nightly 100 calls of each command: one takes a second, a parser takes microseconds."""
    mine = [o.name for o in OPTIONS if o.command == command and o.name not in PROCESSES]
    words = words_of(command, folder)
    for name in data.draw(st.lists(st.sampled_from(mine), min_size=1, max_size=2, unique=True)):
        words = [*words, f"{name}={data.draw(few_or_far())}"]
    code, said = called(words)
    assert code in (0, 1, 2), said
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1:] or [""]
    assert code != 2 or 0 < len(last[0]) <= MOST_CHARACTERS + 50, said


def test_the_small_calls_work(folder: Path) -> None:
    for command in COMMANDS[:-1]:
        assert called(words_of(command, folder))[0] == 0, command
