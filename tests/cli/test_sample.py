"""Tests `wlb sample`: what it prints for a model of texts, and for one of conversations."""

from pathlib import Path

import pytest

from tests.weights.case import SPEC, write_hub
from tests.weights.test_hub_export_chat import model_folder, prepare, trained_on
from wlb.cli import main
from wlb.weights import import_folder, load


def test_a_text_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = model_folder(tmp_path / "hub")
    checkpoint = trained_on(prepare(tmp_path, "--tokenizer", str(hub), "--text-key", "output"), hub)
    capsys.readouterr()
    assert main(["sample", str(checkpoint), "--prompt", "Hi", "--tokens", "9"]) == 0
    out, told = capsys.readouterr()
    model = load(checkpoint)
    made = model.greedy(list(b"Hi"), most=9)
    assert out == model.decode([*b"Hi", *made]) + "\n"
    assert f"{checkpoint}: {len(made)} tokens after 2, " in told


def test_a_message_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = model_folder(tmp_path / "hub")
    checkpoint = trained_on(prepare(tmp_path, "--chat", str(hub)), hub)
    model = load(checkpoint)
    capsys.readouterr()
    for plain, expected in (
        ([], model.decode(model.greedy(model.encode("Hi"), most=3))),
        (["--plain"], "Hi" + model.decode(model.greedy(list(b"Hi"), most=3))),
    ):
        assert main(["sample", str(checkpoint), "--prompt", "Hi", "--tokens", "3", *plain]) == 0
        assert capsys.readouterr().out == expected + "\n"


def test_what_cannot_be_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = import_folder(write_hub(tmp_path / "hub", spec=SPEC), tmp_path / "a").checkpoint
    for source, options, message in (
        (str(checkpoint), [], "no tokenizer: the checkpoint names no token store"),
        (str(tmp_path / "none"), [], "none"),
        (str(checkpoint), ["--tokens", "0"], "--tokens = 0 must be at least 1 token"),
    ):
        assert main(["sample", source, "--prompt", "x", *options]) == 2
        assert message in capsys.readouterr().err
