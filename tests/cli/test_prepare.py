"""Tests `wlb prepare` from the command line: a store, its summary, errors, checking a store."""

import json
from pathlib import Path

import pytest

from tests.prepare.chat_case import CHATML_TOKENS, byte_tokenizer
from wlb.cli import main
from wlb.data import TokenStore
from wlb.prepare.load_template import CHATML


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
        f"{out}: {train.num_documents} documents, {train.num_tokens:,} tokens; the checksum is",
        f"{out}-heldout: {held.num_documents} documents",
    ):
        assert text in shown
    assert run(*command) == 0
    assert "the store existed already" in capsys.readouterr().out


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
    assert "records left out (not_json): 1 in all;" in shown
    assert f"  {corpus}, line 51: not JSON" in shown


def test_files_of_text_are_counted_and_have_no_key(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (corpus.parent / "b.txt").write_text("words")
    out = corpus.parent / "x"
    both = [corpus, corpus.parent / "b.txt", "--out", out, "--tokenizer", "bytes"]
    assert run(*both, "--text-key", "body") == 0
    assert "2 files (1 read as text), 0.0 MB" in capsys.readouterr().out
    assert TokenStore(out).num_documents == 51
    assert run(*both[1:], "--text-key", "body", "--overwrite") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert (
        "--text-key body applies only to files of records (.jsonl, .ndjson, .json, .parquet)"
        in error
    )


def test_a_json_list_of_instructions_is_prepared_as_text_and_as_conversations(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alpaca's data is such a file."""
    path, out = corpus.parent / "alpaca.json", corpus.parent / "x"
    items = [{"instruction": f"say {i}", "input": "", "output": "so"} for i in range(9)]
    path.write_text(json.dumps(items, indent=4))
    assert run(path, "--out", out, "--tokenizer", "bytes") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "record 0: the record has no key 'text' (its keys are 'instruction'" in error
    command = [path, "--out", out, "--tokenizer", "bytes", "--overwrite"]
    assert run(*command, "--text-key", "output") == 0
    assert TokenStore(out).num_documents == 9
    assert "1 files, 0.0 MB" in capsys.readouterr().out
    chat = [path, "--out", f"{out}-chat", "--chat", "chatml", "--vocab-size", 300]
    assert run(*chat) == 0
    assert TokenStore(f"{out}-chat").has_targets


def test_checking_stores(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = corpus.parent / "x"
    assert run(corpus, "--out", out, "--tokenizer", "bytes", "--text-key", "body") == 0
    assert run("--verify", out) == 0
    assert "the checksum is correct, all tokens are in the vocabulary" in capsys.readouterr().out
    path = Path(f"{out}.bin")
    path.write_bytes(b"zz" + path.read_bytes()[2:])
    assert run("--verify", out) == 2
    assert "has checksum" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-2])
    assert run("--verify", out) == 2
    assert "one of the two files is incomplete" in capsys.readouterr().err
    assert run("--verify", corpus.parent / "none") == 2
    assert "no token store at" in capsys.readouterr().err


def test_out_is_needed(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(corpus) == 2
    assert "--out PREFIX" in capsys.readouterr().err


def test_text_a_line_and_a_trained_bpe(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = corpus.parent / "lines.txt"
    path.write_text("one line\nanother line\n\nthe last")
    out = corpus.parent / "lines"
    command = [path, "--out", out, "--one-per", "line", "--vocab-size", 262]
    assert run(*command, "--sample-bytes", 100) == 0
    assert TokenStore(out).num_documents == 3
    assert "1 blank_line" in capsys.readouterr().out
    assert Path(f"{out}-tokenizer.json").is_file()
    capsys.readouterr()
    for option in ("--vocab-size", "--sample-bytes"):
        assert run(path, "--out", out, "--tokenizer", "bytes", option, 300, "--overwrite") == 2
        error = capsys.readouterr().err
        assert f"{option} 300 applies only when a BPE is trained, but --tokenizer bytes" in error


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns two turns each; every tenth conversation is long, the last one has no answer."""
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "chats.jsonl"
    turn = ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."})
    records = [{"messages": [*turn, *turn]} for _ in range(30)]
    for i in range(0, 30, 10):
        records[i] = {"messages": [*turn, *turn, *turn]}
    records.append({"messages": [turn[0]]})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    byte_tokenizer(CHATML_TOKENS).save(str(path))
    return path


def trained(prefix: Path) -> list[int]:
    """Returns the trained tokens of each document."""
    return TokenStore(prefix).num_targets.tolist()


def test_conversations(chats: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = chats.parent / "out" / "chat"
    command = [chats, "--out", out, "--chat", "chatml", "--tokenizer", tokenizer, "--verify"]
    assert run(*command, "--limit", 60, "--heldout-fraction", 0.2) == 0
    shown = capsys.readouterr().out
    train, held = TokenStore(out), TokenStore(f"{out}-heldout")
    assert sorted(trained(out) + trained(Path(f"{out}-heldout"))) == [4] * 3 + [8] * 30
    for text in (
        f"{train.num_tokens:,}",
        f"{train.num_targets.sum()} tokens, {train.num_targets.sum() / train.num_tokens:.1%}",
        "3 split, 6 split documents",
        "1 untrained",
        "records left out (untrained): 1 in all;",
        f"  {chats}, line 31: none of the conversation's 12 tokens is trained (",
        f"{out}: {train.num_documents} documents, {train.num_tokens:,} tokens; the checksum is",
        f"{out}-heldout: {held.num_documents} documents",
    ):
        assert text in shown
    assert run(*command, "--limit", 60, "--heldout-fraction", 0.2) == 0
    again = capsys.readouterr().out
    assert "the store existed already" in again
    assert "3 split, 6 split documents" in again


def test_flags_of_conversations(
    chats: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = chats.parent / "chat"
    command = [chats, "--out", out, "--chat", "chatml", "--tokenizer", tokenizer, "--overwrite"]
    assert run(*command, "--turns", "last") == 0
    assert trained(out) == [4] * 30
    assert run(*command, "--limit", 60, "--too-long", "truncate_left") == 0
    assert "3 truncated, 12 truncated targets, 84 truncated tokens" in capsys.readouterr().out
    assert trained(out) == [8] * 30
    assert run(*command, "--limit", 60, "--too-long", "refuse") == 2
    assert "line 1: the conversation has 84 tokens, more than the" in capsys.readouterr().err
    assert run(*command, "--limit", 60, "--too-long", "refuse", "--on-error", "skip") == 0
    assert "3 too_long, 1 untrained" in capsys.readouterr().out
    assert trained(out) == [8] * 27
    assert run(*command, "--on-untrained", "fail") == 2
    error = capsys.readouterr().err
    assert f"{chats}, line 31: none of the conversation's 12 tokens is trained (" in error
    assert "with --on-untrained skip" in error
    assert run(*command, "--on-untrained", "skip", "--turns", "all", "--too-long", "split") == 2
    assert "--too-long split has no effect without a limit; add --limit" in capsys.readouterr().err


def test_special_tokens_of_conversations(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plain = chats.parent / "chat", chats.parent / "plain.json"
    byte_tokenizer([]).save(str(plain))
    command = [chats, "--out", out, "--chat", "llama3"]
    assert run(*command, "--tokenizer", plain) == 2
    assert "the tokenizer has no token <|begin_of_text|>" in capsys.readouterr().err
    assert run(*command, "--tokenizer", "bytes") == 2
    assert "--tokenizer bytes has no special tokens, but --chat llama3" in capsys.readouterr().err
    assert run(*command, "--tokenizer", plain, "--add-tokens") == 0
    assert TokenStore(out).vocab_size == 260
    assert run(*command, "--tokenizer", "bpe", "--vocab-size", 300, "--overwrite") == 0
    assert TokenStore(out).vocab_size == 264  # there is not more to merge
    assert TokenStore(out).read(0)[0] == 260
    capsys.readouterr()
    template = chats.parent / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    )
    names = ["<|end|>", "<|user|>", "<|assistant|>"]
    byte_tokenizer(names).save(str(plain))
    command = [chats, "--out", out, "--chat", template, "--overwrite"]
    assert run(*command, "--tokenizer", plain) == 0
    assert TokenStore(out).read(3).tolist()[:6] == [257, *b"Why?", 256]
    assert run(*command, "--tokenizer", "bpe") == 2
    assert "works only with the built-in chat templates" in capsys.readouterr().err


def test_a_saved_tokenizer_without_a_limit_of_length(
    corpus: Path, chats: Path, tmp_path: Path
) -> None:
    """Transformers writes a limit of more than 64 bits then; the store keeps what was written."""
    folder = tmp_path / "model"
    folder.mkdir()
    byte_tokenizer(["</s>", *CHATML_TOKENS]).save(str(folder / "tokenizer.json"))
    config = '{"model_max_length": 1000000000000000019884624838656, "eos_token": "</s>"}'
    (folder / "tokenizer_config.json").write_text(config)
    (folder / "chat_template.jinja").write_text(CHATML.source)
    text = [corpus, "--text-key", "body"]
    for i, words in enumerate(
        (
            [*text, "--tokenizer", folder / "tokenizer.json"],
            [*text, "--tokenizer", folder],
            [chats, "--chat", folder],
        )
    ):
        out = tmp_path / f"s{i}"
        assert run(*words, "--out", out) == 0
        info = TokenStore(out).info
        assert info is not None
        assert info.preparation["tokenizer_config"] == json.loads(config)


@pytest.mark.parametrize("name", ["", "tokenizer.model", "spiece.model", "tokenizer.model.v1"])
def test_a_sentence_piece_model_is_named(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Given as a file, or as the folder of a model that has no tokenizer.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / (name or "tokenizer.model")).write_bytes(b"\n\x0e\n\x05<unk>")
    command = [corpus, "--text-key", "body", "--out", tmp_path / "x"]
    assert run(*command, "--tokenizer", folder / name) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "is a SentencePiece model, not a tokenizer.json; convert it with" in error
    assert f"AutoTokenizer.from_pretrained('{folder}').save_pretrained(OUT)" in error


@pytest.mark.parametrize("option", ["--tokenizer", "--chat"])
def test_a_binary_file_where_text_belongs_is_said(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "binary").write_bytes(b"\n\x0e\n\x05<unk>\xce\x00")
    assert run(corpus, "--out", tmp_path / "x", option, tmp_path / "binary") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "binary is not UTF-8 text (it has the byte 0xce at position 9); give " in error


def test_marks_of_other_trainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A message that is marked is not trained; keys that are not read are in the report."""
    question = {"role": "user", "content": "hi", "name": "Ann"}
    asked = [question, {"role": "assistant", "content": "a"}]
    marked = [{**question, "id": 1}, {**asked[1], "train": False}]
    path = tmp_path / "a.jsonl"
    command = [path, "--chat", "chatml", "--vocab-size", 400, "--out"]
    path.write_text(json.dumps({"messages": [*marked, *asked]}) + "\n")
    assert run(*command, tmp_path / "x") == 0
    store = TokenStore(tmp_path / "x")
    assert store.num_targets.tolist() == [2]  # "a" and the token that ends the turn
    assert store.info is not None
    assert store.info.preparation["counts"] == {"unread:id": 1, "unread:name": 2}
    said = " ".join(capsys.readouterr().out.split())
    assert "not read │ 'name' of 2 messages, 'id' of 1 messages │" in said
    assert "counts │" not in said
    path.write_text(json.dumps({"messages": asked, "loss_mask": [0, 0]}) + "\n")
    assert run(*command, tmp_path / "y") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "a.jsonl, line 1: the record has loss_mask = [0, 0], but wlb cannot leave out" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", 9], "--limit 9 has an effect only for conversations"),
        (["--turns", "last"], "--turns last has an effect only for conversations"),
        (["--too-long", "refuse"], "--too-long refuse has an effect only for conversations"),
        (["--on-untrained", "fail"], "--on-untrained fail has an effect only for conversations"),
        (["--add-tokens"], "--add-tokens has an effect only for conversations"),
        (["--chat", "chatml", "--limit", 1], "--limit = 1 must be at least 2 tokens"),
        (
            ["--chat", "chatml", "--documents", "none"],
            "--documents none has an effect only for plain text",
        ),
        (
            ["--chat", "chatml", "--text-key", "body"],
            "--text-key body has an effect only for plain text",
        ),
        (
            ["--chat", "chatml", "--one-per", "line"],
            "--one-per line has an effect only for plain text",
        ),
        (["--chat", "chatml", "--eos", "</s>"], "--eos </s> has an effect only for plain text"),
        (["--chat", "chatml", "--bos", "<s>"], "--bos <s> has an effect only for plain text"),
        (["--chat", "vicuna"], "there is no chat template vicuna; give one of chatml, llama3"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    chats: Path, capsys: pytest.CaptureFixture[str], words: list[object], message: str
) -> None:
    assert run(chats, "--out", chats.parent / "x", *words) == 2
    assert f"wlb prepare: {message}" in capsys.readouterr().err
    assert not (chats.parent / "x.idx").exists()
