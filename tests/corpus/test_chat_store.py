"""JSONL to stores of conversations: counts, lines in messages, what is left out, held-out data."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.corpus.chat_case import CHATML_TOKENS, byte_tokenizer, shown
from wlb.collate import IGNORE
from wlb.corpus import (
    OnError,
    TokenStore,
    TooLong,
    Turns,
    docstring_conversations,
    prepare_conversations,
)
from wlb.corpus.prepare import train_bpe
from wlb.train.reader import StoreReader


def ask(question: str, *answers: str) -> dict:
    turns = [m for answer in answers for m in (("user", question), ("assistant", answer))]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def jsonl(folder: Path, *records: object) -> Path:
    path = folder / "chat.jsonl"
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", "utf-8", errors="surrogateescape")
    return path


def prepared(folder: Path, *records: object, **options):
    options.setdefault("tokenizer", byte_tokenizer(CHATML_TOKENS))
    return prepare_conversations(jsonl(folder, *records), folder / "s", **options)


def test_a_store_holds_tokens_and_what_is_trained(tmp_path) -> None:
    made = prepared(tmp_path, ask("Hi", "Yo"), "", ask("?", "No", "Yes"))
    store = TokenStore(made.train)
    store.verify()
    assert (made.counts.num_records, made.counts.num_documents) == (2, 2)
    assert made.counts.num_tokens == store.num_tokens == 25 + 24 + 25
    assert store.num_targets.tolist() == [3, 3 + 4]
    assert made.counts.num_targets == 10
    reader = StoreReader(made.train, made.vocab_size)
    labels = reader.labels(1, 1, 49)
    tokenizer = Tokenizer.from_file(made.tokenizer)
    kept = labels[labels != IGNORE].tolist()
    assert shown(tokenizer, kept) == ["No", "<|im_end|>", "Yes", "<|im_end|>"]
    assert store.info is not None
    assert store.info.preparation["counts"] == made.counts.to_json()
    assert store.info.preparation["template"] == "chatml"
    assert TokenStore(made.heldout).num_documents == 0


def test_only_the_last_turn(tmp_path) -> None:
    made = prepared(tmp_path, ask("?", "No", "Yes"), turns=Turns.LAST)
    assert TokenStore(made.train).num_targets.tolist() == [4]


def test_what_cannot_be_read_names_its_line(tmp_path) -> None:
    bad = {"messages": [{"role": "user", "content": 3}]}
    records = [ask("?", "!"), bad, "{", '"\udcff"', ask("?", "!")]
    with pytest.raises(
        ValueError, match=r'chat.jsonl, line 2: content of message 0 is 3; .*"skip"'
    ):
        prepared(tmp_path, *records)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".jsonl"]
    counts = prepared(tmp_path, *records, on_invalid=OnError.SKIP).counts
    assert (counts.num_records, counts.num_invalid, counts.num_documents) == (5, 3, 2)
    assert [problem.partition("chat.jsonl, ")[2][:40] for problem in counts.problems] == [
        "line 2: content of message 0 is 3; only ",
        "line 3: not a JSON value in UTF-8: Expec",
        "line 4: not a JSON value in UTF-8: 'utf-",
    ]


def test_a_conversation_without_a_trained_token_is_reported(tmp_path) -> None:
    records = [ask("?", "!"), {"messages": [{"role": "user", "content": "Hello?"}]}]
    made = prepared(tmp_path, *records)
    assert (made.counts.num_untrained, made.counts.num_documents) == (1, 1)
    assert "line 2: no token of it is trained" in made.counts.problems[0]
    with pytest.raises(ValueError, match=r"line 2: no token of it is trained \(14 tokens"):
        prepared(tmp_path, *records, on_untrained=OnError.FAIL)
    with pytest.raises(ValueError, match=r'is left to train on .*"num_untrained": 1'):
        prepared(tmp_path, records[1])


def test_conversations_that_are_too_long_are_counted(tmp_path) -> None:
    records = [ask("Hi", "Yo"), ask("?", "No", "Yes"), ask("x" * 40, "y")]
    split = prepared(tmp_path, *records, limit=30).counts
    assert (split.num_too_long, split.num_split, split.num_split_documents) == (2, 2, 4)
    assert (split.num_untrained_parts, split.num_untrained_part_tokens) == (1, 30)
    assert split.num_targets == 3 + 3 + 4 + 2
    left = prepared(tmp_path, *records, limit=30, too_long=TooLong.TRUNCATE_LEFT).counts
    assert (left.num_too_long, left.num_truncated) == (2, 2)
    assert (left.num_truncated_tokens, left.num_truncated_targets) == (24 + 32, 3)
    with pytest.raises(ValueError, match=r"line 2: the conversation has 49 tokens, more than the"):
        prepared(tmp_path, *records, limit=30, too_long=TooLong.REFUSE)


def test_truncation_may_leave_nothing_to_train(tmp_path) -> None:
    asks = {"messages": [*ask("?", "!")["messages"], {"role": "user", "content": "x" * 40}]}
    how = {"limit": 20, "too_long": TooLong.TRUNCATE_LEFT}
    counts = prepared(
        tmp_path,
        {"prompt": "", "completion": ""},
        asks,
        limit=24,
        too_long=TooLong.TRUNCATE_LEFT,
    ).counts
    assert (counts.num_untrained, counts.num_too_long, counts.num_documents) == (1, 1, 1)
    assert "line 2: no trained token is left of its 71 tokens" in counts.problems[0]
    with pytest.raises(ValueError, match="no trained token is left"):
        prepared(tmp_path, asks, on_untrained=OnError.FAIL, **how)


def test_heldout_conversations_keep_their_side(tmp_path) -> None:
    talks = [ask(f"{i}?", str(i)) for i in range(200)]
    first = prepared(tmp_path, *talks, heldout_fraction=0.2, seed=1)
    store, heldout = TokenStore(first.train), TokenStore(first.heldout)
    assert store.num_documents + heldout.num_documents == 200
    assert 20 < heldout.num_documents == first.counts.num_heldout_documents < 60
    assert heldout.has_targets
    kept = {heldout.read(i).tobytes() for i in range(heldout.num_documents)}
    more = prepared(tmp_path, *talks, *talks[:50], ask("new", "!"), heldout_fraction=0.2, seed=1)
    again = TokenStore(more.heldout)
    assert kept <= {again.read(i).tobytes() for i in range(again.num_documents)}
    train = TokenStore(more.train)
    assert not kept & {train.read(i).tobytes() for i in range(train.num_documents)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heldout_fraction": 1.0}, r"heldout_fraction = 1.0 must be in \[0, 1\)"),
        ({"limit": 1}, "limit = 1 must be at least 2 tokens"),
        ({"tokenizer": byte_tokenizer([])}, "has no token"),
        ({"template": "vicuna"}, "no chat template vicuna"),
        ({"template": __file__, "add_tokens": True}, "add_tokens is for built-in templates, not"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, ask("?", "!"), **options)


def test_the_standard_library_with_a_tokenizer_of_its_own(tmp_path) -> None:
    """Docstrings to a store, with a tokenizer that is trained on them and gets ChatML's tokens."""
    records = list(islice(docstring_conversations(), 400))
    lines = [message["content"] for record in records for message in record["messages"]]
    made = prepared(
        tmp_path,
        *records,
        tokenizer=train_bpe(lines, 512),
        add_tokens=True,
        limit=512,
        heldout_fraction=0.05,
    )
    store = TokenStore(made.train)
    assert made.vocab_size == 514
    assert int(store.lengths.max()) <= 512
    assert store.num_documents + made.counts.num_heldout_documents == made.counts.num_documents
    assert made.counts.num_split > 50
    assert made.counts.num_invalid == made.counts.num_untrained == 0
    assert np.all(store.num_targets > 0)
    assert 0.5 < store.num_targets.sum() / store.num_tokens < 0.95
