"""Tests options of experiments: what cannot be used ends with one line and status 2."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("experiment", "words", "said"),
    [
        ("fig09", "--cp 0", "0 must be at least 1"),
        ("fig09", "--lengths 5,0", "5,0: each length must be at least 1"),
        ("fig09", "--lengths x", "invalid lengths_of value: 'x'"),
        ("fig15", "--device none --cp 0", "0 must be at least 1"),
        ("fig15", "--device none --count 0", "0 must be at least 1"),
        ("fig15", "--device none --windows 1000", "--windows 1000 must be a multiple of 32768"),
        ("fig15", "--device cpu --scale 1/0", "'1/0' is no fraction, such as 1/16"),
        ("fig15", "--device cpu --scale 2", "2 must be above 0 and at most 1"),
        ("fig15", "--device none --profile h100", "--profile h100 is for --device cuda"),
        ("fig15", "--device cpu --profile h100", "--profile h100 is for --device cuda"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    experiment: str,
    words: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = importlib.import_module(f"experiments.paper.{experiment}.__main__")
    monkeypatch.setattr(sys, "argv", [experiment, *words.split()])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 2
    assert said in capsys.readouterr().err
