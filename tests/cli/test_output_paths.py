"""Tests that every command refuses, soon and by name, an output path that leads nowhere."""

import argparse
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.words import lacks
from wlb.cli import main
from wlb.cli.main import parser_of
from wlb.data import folder

LIMIT_S = 120
"""Time that a command may take to refuse a path; a loop that does not end fails the test."""
FILES = {"--out", "--json", "--html", "--trace", "--timeline", "--plot", "--calibrate"}
"""Options that name an output."""
DRAWN = ["demo_single", "--synthetic", "wlb_paper", "--steps", "2"]
PREPARE = ["prepare", "texts.jsonl", "--tokenizer", "bytes", "--out"]
TRAIN = ["train", "demo_single", "--set"]

COMMANDS = {
    "prepare --out": PREPARE,
    "train --calibrate": ["train", "demo_single", "--calibrate"],
    "doctor --json": ["doctor", "demo_single", "--json"],
    "pack --out": ["pack", "demo_single", "--set", "data.store=stores/x", "--out"],
    **{f"plan {name}": ["plan", *DRAWN, name] for name in ("--json", "--html", "--out")},
    **{
        f"simulate {name}": ["simulate", *DRAWN, name]
        for name in ("--json", "--trace", "--timeline")
    },
    **{
        f"tune packing {name}": ["tune", "packing", *DRAWN, name]
        for name in ("--json", "--plot", "--out")
    },
    **{
        f"tune layout {name}": ["tune", "layout", *DRAWN, "--gpus", "1", name]
        for name in ("--json", "--out")
    },
    **{f"rehearse {name}": ["rehearse", "demo_single", name] for name in ("--json", "--trace")},
    "profile --out": ["profile", "--device", "cpu", "--quick", "--out"],
    "report --out": ["report", "runs/demo", "--out"],
    "export --out": ["export", "runs/demo", "--out"],
    "import --out": ["import", "model", "--out"],
}
"""Each command up to the value of an option that names an output."""
ENDINGS = {"pack --out": ".npz", "profile --out": ".json", "train --calibrate": ".json"}


@pytest.fixture(autouse=True)
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs a test in a folder with texts and with links that lead nowhere, within the limit."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the command has not ended after {LIMIT_S} s")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder, "PAUSE_S", 0)
    Path("texts.jsonl").write_text('{"text": "some words"}\n')
    Path("away").symlink_to("/not_mounted/here")
    Path("round").symlink_to("round")
    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def outputs(parser: argparse.ArgumentParser, words: str = "") -> Iterator[str]:
    """Yields the options of all commands that name an output, as in "tune packing --out"."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from outputs(command, f"{words}{name} ")
        yield from (f"{words}{option}" for option in action.option_strings if option in FILES)


def test_the_commands_here_are_all_that_write_files() -> None:
    assert set(outputs(parser_of()[0])) == set(COMMANDS)


@pytest.mark.parametrize("option", COMMANDS)
@pytest.mark.parametrize(
    ("place", "cause"),
    [
        ("away/s/d", "away is a link to /not_mounted/here, which leads nowhere"),
        ("away/d", "away is a link to /not_mounted/here, which leads nowhere"),
        ("round/d", "round is a link to round, which leads nowhere"),
        ("texts.jsonl/d", "texts.jsonl is a file, not a folder"),
    ],
)
def test_an_output_that_leads_nowhere_is_refused_by_name(
    option: str, place: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMANDS[option], place + ENDINGS.get(option, "")]) == 2
    said = capsys.readouterr().err
    assert lacks(said, cause, "or choose another") == []
    assert said.splitlines()[-1].startswith(f"wlb {option.split()[0]}: ")


@pytest.mark.parametrize(
    "words",
    [
        [*PREPARE, "/proc/x/y"],
        [*TRAIN, "run.output_dir=away/runs"],
        [*TRAIN, "run.output_dir=away"],
        [*TRAIN, "run.output_dir=round/runs"],
    ],
)
def test_folders_that_cannot_be_made_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = "creating /proc/x fails (No such file or directory); choose another folder"
    said = capsys.readouterr().err
    place = words[-1].partition("=")[2] or words[-1]
    cause = told if place.startswith("/proc") else f"{place.split('/')[0]} is a link to "
    assert lacks(said, " cannot be created: ", cause) == []
