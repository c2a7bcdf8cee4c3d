"""Tests `wlb init`: every key with its meaning, and a file that trains the same run."""

import re
import tomllib
from pathlib import Path

import pytest

from wlb.cli import main
from wlb.spec import RunSpec, apply, check, list_keys, load, presets, to_dict


def made(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["init", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("preset", presets())
def test_loading_it_gives_the_preset(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(made(capsys, preset), "utf-8")
    assert load(str(path)) == load(preset)


def test_every_key_stands_below_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    lines = made(capsys, "7b_128k").splitlines()
    assert max(map(len, lines)) <= 100
    section, found = "", dict[str, str]()
    comment: list[str] = []
    for line in lines[3:]:
        if named := re.fullmatch(r"\[(.+)\]", line):
            section = named[1]
        elif key := re.fullmatch(r"#?([a-z0-9_]+) = .*", line):
            found[f"{section}.{key[1]}"] = " ".join(comment)
        if line.startswith("# "):
            comment.append(line[2:])
        else:
            comment = []
    assert list(found) == [key.name for key in list_keys(RunSpec)]
    for key in list_keys(RunSpec):
        said = found[key.name]
        assert said.startswith(" ".join(key.doc.split())), key.name
        assert f"default: {key.default})" in said
        assert key.unit in said


def test_defaults_that_are_uncommented_stay_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"^#(?=[a-z0-9_]+ = )", "", made(capsys, "demo"), flags=re.MULTILINE)
    spec = check(apply(RunSpec(), tomllib.loads(text), source="all keys"))
    assert spec == load("demo")
    assert tomllib.loads(text) == to_dict(spec)


def test_system_and_keys_are_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    words = ["7b_128k", "--system", "plain_4d", "--set", "training.steps=7"]
    path.write_text(made(capsys, *words), "utf-8")
    spec = load(str(path))
    assert spec.training.steps == 7
    assert spec.packing.policy == "original"
    assert path.read_text("utf-8").startswith(f"# Made by wlb init {' '.join(words)}.\n")
    assert main(["init", "nonesuch"]) == 2
