"""Tests stores whose documents have drawn lengths."""

from pathlib import Path

import numpy as np
import pytest

from wlb.cli import main
from wlb.data import TokenStore, verify_store
from wlb.data.lengths import lengths_of_family
from wlb.plan import UserError
from wlb.prepare.synthetic import DRAWN_AT_A_TIME, EOS, VOCAB_SIZE, prepare_synthetic
from wlb.prepare.text import folder_documents


def made(prefix: Path, **changes: object) -> TokenStore:
    options = {"family": "wlb_paper", "num_tokens": 300_000, "window": 16_384, "seed": 1}
    prepare_synthetic(prefix, **{**options, **changes})  # type: ignore[arg-type]
    return TokenStore(prefix)


def test_lengths_are_those_of_the_family_and_end_with_the_asked_tokens(tmp_path: Path) -> None:
    store = made(tmp_path / "drawn")
    verify_store(tmp_path / "drawn")
    drawn = lengths_of_family(window=16_384, num_documents=DRAWN_AT_A_TIME, seed=1_000_003).lengths
    assert store.lengths.tolist() == drawn[: store.num_documents].tolist()
    assert 300_000 <= store.num_tokens < 300_000 + int(store.lengths[-1])
    assert store.vocab_size == VOCAB_SIZE


def test_documents_are_text_behind_each_other_and_end_with_eos(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("abc" * 40)
    documents = folder_documents(tmp_path / "text")
    store = made(tmp_path / "drawn", documents=documents, num_tokens=5_000)
    for i in range(store.num_documents):
        tokens = store.read(i)
        expected = np.resize(np.frombuffer(b"abc" * 40, np.uint8), tokens.size)
        assert tokens[-1] == EOS
        assert tokens[:-1].tolist() == expected[:-1].tolist()


def test_files_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("abc")
    (tmp_path / "text" / "b.bin").write_bytes(b"\xff\xfe")
    documents = folder_documents(tmp_path / "text")
    store = made(tmp_path / "drawn", documents=documents, num_tokens=500)
    tokens = np.concatenate([store.read(i) for i in range(store.num_documents)])
    assert set(tokens.tolist()) <= {*b"abc", EOS}
    (tmp_path / "text" / "a.txt").unlink()
    documents = folder_documents(tmp_path / "text")
    with pytest.raises(UserError, match="has no UTF-8 text with which"):
        made(tmp_path / "none", documents=documents)


def test_a_larger_store_begins_as_a_smaller_one_does(tmp_path: Path) -> None:
    small = made(tmp_path / "small", window=256, num_tokens=5_000)
    large = made(tmp_path / "large", window=256, num_tokens=50_000)
    assert large.num_documents > DRAWN_AT_A_TIME
    assert large.lengths[: small.num_documents].tolist() == small.lengths.tolist()


def test_a_store_that_exists_is_kept(tmp_path: Path) -> None:
    made(tmp_path / "drawn", num_tokens=10)
    with pytest.raises(UserError, match=r"drawn already exists; .*--overwrite"):
        made(tmp_path / "drawn", num_tokens=10)
    made(tmp_path / "drawn", num_tokens=20, overwrite=True)
    made(tmp_path / "drawn-heldout", num_tokens=10)
    with pytest.raises(UserError, match="drawn-heldout exists, but would not belong to"):
        made(tmp_path / "drawn", num_tokens=20, overwrite=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--synthetic wlb_paper --tokens 100", "--synthetic needs --out PREFIX and --tokens N"),
        ("--synthetic wlb_paper --out OUT", "--synthetic needs --out PREFIX and --tokens N"),
        ("x.txt --synthetic wlb_paper --tokens 9 --out OUT", "reads no INPUT; remove x.txt"),
        (
            "--synthetic other --tokens 9 --out OUT",
            "'other' is not a distribution of document lengths; use one of",
        ),
        ("--synthetic wlb_paper --tokens 0 --out OUT", "--tokens = 0"),
        ("--synthetic wlb_paper --tokens 9 --out OUT --window 1", "--window = 1 must be at least"),
        (
            "--synthetic wlb_paper --tokens 9 --out OUT --window 0",
            "--window = 0 must be at least 2 tokens, for one byte of text",
        ),
        ("--synthetic wlb_paper --tokens 9 --out OUT --tokenizer x", "--tokenizer x has no effect"),
        ("--synthetic wlb_paper --tokens 9 --out OUT --processes 2", "--processes 2 has no effect"),
        ("--synthetic wlb_paper --tokens 9 --out OUT --limit 2", "--limit 2 has no effect"),
        ("--synthetic wlb_paper --tokens 9 --out OUT --bos x", "--bos x has no effect"),
        ("x.txt --window 9 --out OUT", "--window has an effect only with --synthetic"),
        ("x.txt --tokens 9 --out OUT", "--tokens has an effect only with --synthetic"),
        ("--out OUT", "no INPUT is given"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drawn"
    words = [str(out) if word == "OUT" else word for word in arguments.split()]
    assert main(["prepare", *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "drawn"
    command = ["--synthetic", "wlb_paper", "--tokens", "9000", "--window", "1024", "--verify"]
    assert main(["prepare", *command, "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{TokenStore(out).num_tokens:,} tokens; lengths in tokens drawn from wlb_paper" in shown
    assert f"--set data.store={out}" in shown
    assert "the checksum is correct, all tokens are in the vocabulary" in shown
