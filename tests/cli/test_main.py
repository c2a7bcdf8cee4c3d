"""Tests all commands: warnings and user errors take one line on stderr, bugs keep a traceback."""

import io
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sets import nightly
from tests.words import lacks
from wlb.cli import main, report
from wlb.cli.output import never_fail_to_encode
from wlb.plan import UserError
from wlb.spec import load

PLAN = ["plan", "--synthetic", "wlb_paper", "--steps", "2", "--json", "-"]


@pytest.mark.filterwarnings("default")
def test_a_renamed_key_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--set", "data.num_micro_batches=4"]) == 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert lacks(told, "wlb plan: warning: ", "data.num_micro_batches=4", "data.num_windows") == []


def test_a_users_error_is_one_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path / "absent.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wlb plan: ")
    assert "absent.toml' is neither a preset" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["train", "FILE"],
        ["simulate", "FILE"],
        ["plan", "--synthetic", "wlb_paper", "--set", "cost.profile=FILE"],
        ["plan", "--lengths", "FILE"],
        ["tune", "packing", "--lengths", "FILE"],
        ["prepare", "TEXT", "--out", "OUT", "--tokenizer", "FILE"],
        ["prepare", "TEXT", "--out", "OUT", "--chat", "FILE"],
    ],
    ids=" ".join,
)
def test_a_binary_file_where_text_belongs_is_a_users_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    path = tmp_path / "binary.json"
    path.write_bytes(b"\n\x0e\n\x05<unk>\xce\x00")
    text = tmp_path / "a.txt"
    text.write_text("text")
    names = {"FILE": str(path), "TEXT": str(text), "OUT": str(tmp_path / "out")}
    given = [word.replace("FILE", str(path)) for word in words]
    assert main([names.get(word, word) for word in given]) == 2
    error = capsys.readouterr().err
    assert lacks(error, f"wlb {words[0]}: ", str(path)) == []
    assert any(word in " ".join(error.split()) for word in ("UTF-8", "utf-8", "not JSON"))


def test_no_command_at_all_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for words in ("usage: wlb ", "train", "completion", "First steps: wlb train demo"):
        assert words in said.out


def test_a_wrong_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "demo"]) == 2
    assert capsys.readouterr().err == "wlb: there is no command 'trian'; did you mean 'train'?\n"
    with pytest.raises(SystemExit):
        main(["xyz"])
    assert "invalid choice: 'xyz'" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        raise ValueError(f"an invariant does not hold in {folder.name}")

    monkeypatch.setattr(report, "read_run", broken)
    with pytest.raises(ValueError, match="an invariant does not hold") as raised:
        main(["report", str(tmp_path)])
    assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize("command", [["simulate", "--timeline"], ["tune", "packing", "--plot"]])
def test_a_format_of_pictures_that_is_none_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "step.xyz", "demo", "--synthetic", "wlb_paper"]) == 2
    assert "step.xyz: matplotlib cannot write .xyz pictures; give a file" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "7b_128k", "--synthetic", "wlb_paper", "--steps", "2"],
        ["plan", "7b_128k", "--synthetic", "wlb_paper", "--steps", "4"],
        ["tune", "packing", "7b_128k", "--synthetic", "wlb_paper", "--steps", "4"],
        ["train", "7b_128k", "--dry-run"],
    ],
    ids=["simulate", "plan", "tune", "train"],
)
def test_no_number_is_cut_on_a_narrow_terminal(
    words: list[str],
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = ["--thresholds", "0.3", "--s-max", "1.1"] if words[0] == "tune" else []
    assert main([*words, *more]) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*words, *more]) == 0
    narrow = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    tables = [line for line in narrow.splitlines() if set("│─━") & set(line)]
    assert tables
    assert max(map(len, tables)) <= columns
    assert "…" not in narrow
    # Measured milliseconds of packing differ between calls.
    numbers = [Counter(re.findall(r"\d+\.\d+", text)) for text in (wide, narrow)]
    assert sum((numbers[0] - numbers[1]).values()) <= (words[0] == "plan") * 12


def test_a_word_with_a_zero_character_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Files' names end at one; a shell passes none, a program that calls `main` may."""
    assert main(["prepare", "x.txt", "--out", "a\0b"]) == 2
    assert capsys.readouterr().err == (
        "wlb: the argument 'a\\x00b' contains a NUL character (\\x00); remove the character\n"
    )


ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale whose names and streams are ASCII; Python would otherwise choose UTF-8 there."""


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("ascii", "ü 😀", "\\u00fc \\U0001f600"),
        ("latin-1", "ü 日", "ü \\u65e5"),
        ("utf-8", "日 \udcff", "日 \\udcff"),
    ],
)
def test_no_stream_fails_to_encode(encoding: str, text: str, written: str) -> None:
    out = io.BytesIO()
    stream = io.TextIOWrapper(out, encoding)
    never_fail_to_encode(stream)
    stream.write(text)
    stream.flush()
    assert out.getvalue() == written.encode(encoding)
    never_fail_to_encode(io.StringIO())  # encodes nothing


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize("locale", [{**ASCII, "PYTHONIOENCODING": "ascii"}, *nightly(ASCII, {})])
def test_what_a_stream_cannot_encode_is_escaped(tmp_path: Path, locale: dict[str, str]) -> None:
    """A path of other characters, and one that is no UTF-8, which no stream of text encodes."""
    (tmp_path / "texts.jsonl").write_text('{"text": "some words"}\n')
    (tmp_path / "ö").mkdir()
    command = [sys.executable, "-m", "wlb"]
    prepare = [*command, "prepare", "texts.jsonl", "--tokenizer", "bytes", "--out"]
    plan = [*command, "plan", "demo_single", "--synthetic", "wlb_paper", "--steps", "2"]
    for words in (
        [*prepare, "ünï cödé/x"],
        [*prepare, os.fsdecode(b"\xff\xfe/x")],
        [*plan, "--html", "ö/p.html", "--out", "ö/p.toml", "--json", "ö/p.json"],
    ):
        made = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, **locale}, capture_output=True, check=False
        )
        assert made.returncode == 0, made.stderr
    written = {path.name for path in (tmp_path / "ö").iterdir()}
    assert written == {"p.html", "p.toml", "p.json"}
    for folder in ("ünï cödé", os.fsdecode(b"\xff\xfe")):
        assert (tmp_path / folder / "x.idx").exists()


@pytest.mark.process
def test_a_printed_configuration_is_read_back_from_a_stream_of_ascii(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "wlb", "init", "demo", "--set", "run.name=ünï-😀"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    printed = subprocess.run(words, env=environment, capture_output=True, check=True).stdout
    (tmp_path / "my.toml").write_bytes(printed)
    assert printed.isascii()
    assert load(str(tmp_path / "my.toml")).run.name == "ünï-😀"


@pytest.mark.parametrize(
    ("words", "usage", "said"),
    [
        (
            ["plan", "--lenghts", "l.npy"],
            "usage: wlb plan ",
            "--lenghts; did you mean '--lengths'?",
        ),
        (
            ["tune", "packing", "--polcies=x"],
            "usage: wlb tune packing ",
            "did you mean '--policies'?",
        ),
        (["doctor", "--zzz"], "usage: wlb doctor ", "there is no option --zzz\n"),
        (["plan", "demo", "more"], "usage: wlb plan ", "unrecognized arguments: more"),
    ],
)
def test_unknown_options_show_the_usage_of_their_command(
    words: list[str], usage: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    found = capsys.readouterr().err
    assert found.startswith(usage)
    assert said in found
