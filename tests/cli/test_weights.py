"""Tests what `wlb import` and `wlb export` make, print and refuse."""

import builtins
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.weights.case import SPEC, hub_tensors, write_hub
from wlb.cli import main


def test_import_then_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub, saved, out = write_hub(tmp_path / "hub"), tmp_path / "saved", tmp_path / "out"
    assert main(["import", str(hub), "--out", str(saved)]) == 0
    said = capsys.readouterr().out
    assert f"{saved}: {SPEC.num_parameters:,} parameters in float32" in said
    assert "vocabulary of 301 tokens, padded with 211 rows of zeros" in said
    assert f"wlb train {saved / 'model.toml'} --set" in said
    assert "[model]\nvocab_size = 301\n" in said
    assert "the output head shares the weights of the embedding" not in said
    sizes = ["--dtype", "bfloat16", "--shard-size", "25KB"]
    assert main(["export", str(saved), "--out", str(out), *sizes]) == 0
    said = capsys.readouterr().out
    held = [load_file(path) for path in sorted(out.glob("*.safetensors"))]
    num_bytes = sum(value.nbytes for part in held for value in part.values())
    assert f"{out}: {saved} in bfloat16, {num_bytes:,} bytes in {len(held)} files" in said
    assert len(held) > 1
    assert "tokenizer: no tokenizer.json was copied (give one with --tokenizer FILE): the" in said


def test_weights_that_are_no_numbers_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = hub_tensors(SPEC)
    assert main(["import", str(write_hub(tmp_path / "a")), "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err == ""
    tensors["lm_head.weight"][300, :2] = float("nan")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("-inf")
    hub = write_hub(tmp_path / "hub", tensors=tensors)
    assert main(["import", str(hub), "--out", str(tmp_path / "saved")]) == 0
    told = "3 weights are NaN or infinite, in the tensors lm_head.weight (2), "
    told += "model.layers.1.mlp.up_proj.weight (1), so every loss"
    assert f"wlb import: warning: {told}" in capsys.readouterr().err


def test_bad_input_is_refused_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = write_hub(tmp_path / "hub", hidden_act="gelu")
    assert main(["import", str(hub), "--out", str(tmp_path / "saved")]) == 2
    assert "wlb import: " in capsys.readouterr().err
    assert main(["export", str(hub), "--out", str(tmp_path / "out")]) == 2
    assert "wlb export: " in capsys.readouterr().err


def test_without_safetensors_the_message_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "wlb" and "weights" in (args[2] or ()):
            raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["import", str(tmp_path), "--out", str(tmp_path / "saved")]) == 2
    assert "weights need safetensors, which is not installed; run: pip" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["99999999999999999999", "0", "5XB", "²GB", "1_000"])
def test_a_shard_size_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path), "--out", str(tmp_path / "out"), "--shard-size", size])
    assert ended.value.code == 2
    assert f"argument --shard-size: {size!r}" in capsys.readouterr().err
