"""`wlb prepare` from the command line: a store, its summary, errors, and checking a store."""

import json
from pathlib import Path

import pytest

from wlb.cli import main
from wlb.corpus import TokenStore


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "a.jsonl"
    texts = [f"text {i} " * (i % 7 + 1) for i in range(50)]
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return path


def run(*arguments: object) -> int:
    return main(["prepare", *map(str, arguments)])


def test_a_store_and_its_summary(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = corpus.parent / "out" / "web"
    command = [corpus, "--out", out, "--tokenizer", "bytes", "--text-key", "body", "--verify"]
    command += ["--heldout-fraction", 0.2, "--documents", "eos_bos", "--seed", 1]
    assert run(*command) == 0
    shown = capsys.readouterr().out
    train, held = TokenStore(out), TokenStore(f"{out}-heldout")
    assert train.num_documents + held.num_documents == 50
    assert held.num_documents > 2
    assert train.read(0)[[0, -1]].tolist() == [256, 257]
    assert train.info is not None
    for text in (
        f"{train.num_documents}",
        f"{train.num_tokens:,}",
        train.info.checksum,
        f"longest {train.lengths.max()}",
        f"{held.num_documents} documents, {held.num_tokens:,} tokens in {out}-heldout",
        "nothing",
        "1 files, 0.0 MB",
        f"{out}: {train.num_documents} documents, {train.num_tokens:,} tokens; checksum and",
        f"{out}-heldout: {held.num_documents} documents",
    ):
        assert text in shown
    assert run(*command) == 0
    assert "the store was there already" in capsys.readouterr().out


def test_errors_are_a_line_and_skipped_records_are_shown(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(corpus, "a") as file:
        file.write("{\n")
    out = corpus.parent / "x"
    command = [corpus, "--out", out, "--tokenizer", "bytes", "--text-key", "body"]
    assert run(*command) == 2
    error = capsys.readouterr().err
    assert f"wlb prepare: {corpus}, line 51: not JSON" in error
    assert "Traceback" not in error
    assert run(*command, "--on-error", "skip", "--overwrite") == 0
    shown = capsys.readouterr().out
    assert "1 not_json" in shown
    assert "left out, not_json, 1 in all:" in shown
    assert f"  {corpus}, line 51: not JSON" in shown


def test_checking_stores(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = corpus.parent / "x"
    assert run(corpus, "--out", out, "--tokenizer", "bytes", "--text-key", "body") == 0
    assert run("--verify", out) == 0
    assert "checksum and vocabulary are right" in capsys.readouterr().out
    path = Path(f"{out}.bin")
    path.write_bytes(b"zz" + path.read_bytes()[2:])
    assert run("--verify", out) == 2
    assert "has checksum" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-2])
    assert run("--verify", out) == 2
    assert "the copy is not complete" in capsys.readouterr().err
    assert run("--verify", corpus.parent / "none") == 2
    assert "no token store at" in capsys.readouterr().err


def test_out_is_needed(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(corpus) == 2
    assert "--out PREFIX says where the store goes" in capsys.readouterr().err


def test_text_a_line_and_a_trained_bpe(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = corpus.parent / "lines.txt"
    path.write_text("one line\nanother line\n\nthe last")
    out = corpus.parent / "lines"
    command = [path, "--out", out, "--one-per", "line", "--vocab-size", 262]
    assert run(*command, "--sample-bytes", 100) == 0
    assert TokenStore(out).num_documents == 3
    assert "1 blank_line" in capsys.readouterr().out
    assert Path(f"{out}-tokenizer.json").is_file()
