"""Tests encoders: equal to the tokenizer, policies, text that looks like special tokens."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from wlb.prepare import BadRecord, DocumentPolicy
from wlb.prepare.encode import (
    TextChoice,
    Vocabulary,
    byte_vocabulary,
    load_tokenizer,
    read_vocabulary,
)
from wlb.prepare.tokenizer import MOST_WORD, cut_words, train_bpe

ATTACK = "a <s> b </s> c <|endoftext|> <unk>"


def bpe(*specials, post=False):
    """Returns a byte-level BPE file's tokenizer, with special tokens after the vocabulary."""
    tokenizer = train_bpe(["some text to train on, some more text"] * 20, vocab_size=280)
    tokenizer.add_special_tokens(list(specials))
    if post:  # what Llama's tokenizer.json has
        bos = specials[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding(length=16)
    return tokenizer


def saved(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def encoder(path, policy=DocumentPolicy.SEPARATOR, **names):
    vocabulary = read_vocabulary(path, **names)
    return TextChoice(policy=policy).open(str(path), vocabulary)


def test_policies_of_a_tokenizer_that_adds_cuts_and_pads_by_itself(tmp_path):
    path = saved(tmp_path, bpe("<s>", "</s>", post=True))
    text = "some text that is longer than eight tokens: xyz " * 3
    plain = load_tokenizer(path).encode(text, add_special_tokens=False).ids
    assert len(plain) > 16
    bos, eos = (Tokenizer.from_file(str(path)).token_to_id(t) for t in ("<s>", "</s>"))
    expected = {
        DocumentPolicy.EOS_BOS: [bos, *plain, eos],
        DocumentPolicy.SEPARATOR: [*plain, eos],
        DocumentPolicy.NONE: plain,
    }
    for policy, tokens in expected.items():
        made = encoder(path, policy, bos="<s>", eos="</s>")
        assert made.encode({"text": text})[0].tokens.tolist() == tokens
        assert made.encode({"text": text})[0].trained is None


@pytest.mark.parametrize("unit", ["ACGT", "\n", " ", "ACGT\n\t", "\u3042", "\u00a0", "a1", "-\x1c"])
def test_a_bpe_is_trained_on_words_of_bounded_length(unit, monkeypatch):
    """Training on one run of 250,000 letters did not end; the run is cut for training only."""
    words: list[int] = []
    train = Tokenizer.train_from_iterator

    def counted(self, texts, **options):
        texts = list(texts)
        assert "".join(texts) == text
        split = self.pre_tokenizer.pre_tokenize_str
        words.extend(stop - start for one in texts for _, (start, stop) in split(one))
        return train(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "train_from_iterator", counted)
    text = f"before {unit * 5000} after"
    made = train_bpe([text], vocab_size=270)
    assert max(words) <= MOST_WORD
    assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text


def test_texts_of_ordinary_words_are_trained_on_as_they_are():
    text = "some text " * 500 + "x" * 998
    assert list(cut_words(text)) == [text]
    assert list(cut_words("")) == [""]


def test_text_never_gives_special_tokens(tmp_path):
    path = saved(tmp_path, bpe("<s>", "</s>"))
    ids = encoder(path, DocumentPolicy.NONE).encode({"text": ATTACK})[0].tokens
    assert not set(ids.tolist()) & set(read_vocabulary(path).special)
    assert load_tokenizer(path).decode(ids.tolist(), skip_special_tokens=False) == ATTACK


def test_a_special_token_that_is_an_ordinary_piece_too_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    path = saved(tmp_path, tokenizer)
    made = encoder(path)
    with pytest.raises(BadRecord, match="encodes to the special token with the id 1") as refused:
        made.encode({"text": "a </s> a"})
    assert refused.value.reason == "special_token"
    # A character without a token is not an error, and is counted.
    (encoded,) = made.encode({"text": "a b a c"})
    assert (encoded.tokens.tolist(), encoded.num_unknown) == ([0, 2, 0, 2, 1], 2)


def test_unigram_unknown_by_id(tmp_path):
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    path = saved(tmp_path, tokenizer)
    assert read_vocabulary(path).unknown_id == 0
    assert encoder(path, DocumentPolicy.NONE).encode({"text": "azza"})[0].num_unknown >= 1


def test_vocabulary_holds_added_tokens_and_gaps(tmp_path):
    tokenizer = bpe("<s>", "</s>")
    tokenizer.add_tokens([AddedToken("<code>", normalized=False)])
    path = saved(tmp_path, tokenizer)
    found = read_vocabulary(path)
    assert found.size == tokenizer.get_vocab_size(with_added_tokens=True)
    assert found.size > tokenizer.get_vocab_size(with_added_tokens=False)
    assert set(found.special) == {
        tokenizer.token_to_id(t) for t in ("<s>", "</s>", "<|endoftext|>")
    }
    gap = Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert read_vocabulary(saved(tmp_path, gap)).size == 10


def test_which_token_ends_a_document(tmp_path):
    path = saved(tmp_path, bpe("<s>", "</s>"))
    tokenizer = Tokenizer.from_file(str(path))
    assert read_vocabulary(path).eos_id is None  # </s> or <|endoftext|>: not guessed
    with pytest.raises(ValueError, match=r"--documents separator needs the EOS token.*--eos TOKEN"):
        encoder(path)
    assert read_vocabulary(path, eos="</s>").eos_id == tokenizer.token_to_id("</s>")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"}))
    found = read_vocabulary(path)
    assert (found.bos_id, found.eos_id) == tuple(map(tokenizer.token_to_id, ("<s>", "</s>")))
    assert read_vocabulary(path, eos="<|endoftext|>").eos_id == 0
    with pytest.raises(
        ValueError, match=r"--eos '<end>' is not a token of .*special tokens, which are"
    ):
        read_vocabulary(path, eos="<end>")
    config.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        read_vocabulary(path)


def test_one_usual_name_is_taken(tmp_path):
    path = saved(tmp_path, bpe())
    assert read_vocabulary(path).eos_id == 0
    with pytest.raises(ValueError, match=r"--documents eos_bos needs the BOS token.*--bos TOKEN"):
        encoder(path, DocumentPolicy.EOS_BOS)


def test_bytes():
    def ids(policy, text):
        encoder = TextChoice(policy=policy).open("", byte_vocabulary())
        return encoder.encode({"text": text})[0].tokens.tolist()

    assert ids(DocumentPolicy.EOS_BOS, "é") == [256, 0xC3, 0xA9, 257]
    assert ids(DocumentPolicy.SEPARATOR, "a") == [97, 257]
    assert ids(DocumentPolicy.NONE, "a") == [97]
    assert byte_vocabulary() == Vocabulary(size=258, bos_id=256, eos_id=257)


@pytest.mark.parametrize(
    ("record", "reason", "message"),
    [
        ({}, "no_text", r"no key 'text' \(its keys are \).*--text-key"),
        ({"body": "x"}, "no_text", r"keys are 'body'"),
        ({"text": None}, "no_text", "^the text under 'text' is null$"),
        ({"text": 7}, "not_text", "'text' must be text, but is of type int"),
        ({"text": ["a"]}, "not_text", "list"),
        ({"text": ""}, "empty", "is empty"),
        ({"text": b""}, "empty", "is empty"),
        ({"text": b"a\xff"}, "not_utf8", "not UTF-8 at byte 1"),
        ({"text": "a\ud800"}, "not_utf8", "character 1 is half of a surrogate pair"),
    ],
)
def test_records_without_text(record, reason, message):
    made = TextChoice().open("", byte_vocabulary())
    with pytest.raises(BadRecord, match=message) as refused:
        made.encode(record)
    assert refused.value.reason == reason


def test_a_text_that_gives_no_token_is_empty(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    with pytest.raises(BadRecord, match="returns no token"):
        encoder(saved(tmp_path, tokenizer)).encode({"text": "   "})


def test_long_text_of_a_foreign_tokenizer_is_encoded_whole(tmp_path, monkeypatch):
    """A Metaspace tokenizer marks the start of a text: parts would mark every part."""
    monkeypatch.setattr("wlb.prepare.encode.PIECE_CHARACTERS", 10)
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "\n": 3, "▁a": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    path = saved(tmp_path, tokenizer)
    text = "aaaa\n" * 8
    found = encoder(path, DocumentPolicy.NONE).encode({"text": text})[0].tokens
    assert found.tolist() == tokenizer.encode(text).ids
    assert np.count_nonzero(found == 4) == 1


def test_not_a_tokenizer(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json is not a valid tokenizer\.json"):
        read_vocabulary(tmp_path / "t.json")
