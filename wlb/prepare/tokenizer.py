"""Provide the tokenizer of a preparation: copy a file, or train a BPE on a sample of the records.

The sample has only training records, not held-out records. Shards are visited in random order.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wlb.data.shuffle import permute
from wlb.data.store import file_checksum
from wlb.plan import UserError
from wlb.plan.read_file import read_text
from wlb.prepare.encode import (
    BPE,
    BYTES,
    END_OF_TEXT,
    EncoderChoice,
    Vocabulary,
    add_special_tokens,
    byte_vocabulary,
    load_tokenizer,
    read_vocabulary,
    tokenizer_config,
)
from wlb.prepare.files import write_text
from wlb.prepare.parts import draw
from wlb.prepare.records import BadRecord, Shard, read_shard
from wlb.prepare.request import PrepareOptions, tokenizer_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_WORD = 1000
"""The longest word in characters on which a BPE is trained.

Words of languages are shorter than 100 characters.
"""
# Finds a run of white space or a run of other characters, of at most MOST_WORD - 1 characters. (A
# word may also have one space in front of it.) Python counts U+001C to U+001F as white space, but
# the tokenizers library does not.
_RUN = re.compile(rf"[\S\x1c-\x1f]{{1,{MOST_WORD - 1}}}|[^\S\x1c-\x1f]{{1,{MOST_WORD - 1}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTokenizer:
    """The tokenizer that `prepare_store` uses."""

    path: str  # path of the tokenizer.json; "" if tokens are bytes
    vocabulary: Vocabulary
    checksum: str  # checksum of the tokenizer.json; "bytes" if tokens are bytes
    # Content of the tokenizer_config.json beside the user's tokenizer.json, empty if there is none.
    config: dict[str, Any] = field(default_factory=dict[str, Any])


def prepare_tokenizer(
    options: PrepareOptions, choice: EncoderChoice, folder: Path, shards: Sequence[Shard]
) -> PreparedTokenizer:
    """Copy or train the tokenizer, and write it to `folder`/tokenizer.json.

    Special tokens that the records need are added to the tokenizer. If an interrupted call has
    already trained the BPE, that BPE is reused.

    Args:
        options: Which tokenizer to use, or how to train one.
        choice: The kind of records, which may need special tokens.
        folder: The folder of the parts.
        shards: All shards, of which some text is read to train a BPE.

    Raises:
        UserError: The tokenizer cannot be read, or lacks a special token that cannot be added.
    """
    if options.tokenizer == BYTES:
        return PreparedTokenizer(path="", vocabulary=byte_vocabulary(), checksum=BYTES)
    path, eos = folder / "tokenizer.json", options.eos
    names, config = choice.special_tokens(options.tokenizer), dict[str, Any]()
    if options.tokenizer == BPE:
        if not path.exists():
            write_text(path, _trained(options, choice, shards, names))
        vocabulary = read_vocabulary(path, bos=options.bos, eos=eos or END_OF_TEXT)
    else:
        source = tokenizer_path(options.tokenizer)
        config = tokenizer_config(source.with_name("tokenizer_config.json"))
        write_text(path, _copied(source, names))
        vocabulary = read_vocabulary(
            path if names else source, bos=options.bos, eos=eos, folder=source.parent
        )
    checksum = file_checksum(path)
    return PreparedTokenizer(
        path=str(path), vocabulary=vocabulary, checksum=checksum, config=config
    )


def _copied(source: Path, names: Sequence[str]) -> str:
    """Return the content of a tokenizer.json, after adding the tokens `names` that it lacks."""
    if names:
        from tokenizers import Tokenizer

        # load_tokenizer checks the file, but also changes settings of the tokenizer. The copy must
        # keep the settings, so load the file again.
        load_tokenizer(source)
        tokenizer = Tokenizer.from_file(str(source))
        if add_special_tokens(tokenizer, names):
            return tokenizer.to_str(pretty=True)
    return read_text(source, remedy="give a tokenizer.json")


def _trained(
    options: PrepareOptions, choice: EncoderChoice, shards: Sequence[Shard], names: Sequence[str]
) -> str:
    """Train a BPE of `options.vocab_size` tokens, and return its tokenizer.json.

    Args:
        options: Settings of the training, such as `sample_bytes`.
        choice: The kind of records, which says what text they have.
        shards: All shards, of which some text is read.
        names: Special tokens to add, which count in `vocab_size`.
    """
    size = options.vocab_size - len(names)
    if size <= 256:
        raise UserError(
            f"--vocab-size = {options.vocab_size} must be at least {257 + len(names)}, for 256 "
            f"bytes and {1 + len(names)} special tokens: {', '.join([END_OF_TEXT, *names])}"
        )
    # There may be files but no shards, because a Parquet file without row groups has no shard.
    if not shards:
        raise UserError(
            f"--tokenizer {BPE} cannot train a BPE, because {', '.join(options.inputs)} has no "
            f"record; give files with text, or a tokenizer.json"
        )

    def texts(number: int) -> Iterator[str]:
        return _texts(options, choice, shards[number])

    total = options.sample_bytes
    share = max(1 << 16, -(-total // len(shards)))
    sample = sample_texts(
        len(shards), texts, seed=options.seed, sample_bytes=total, share_bytes=share
    )
    tokenizer = train_bpe(sample, vocab_size=size)
    add_special_tokens(tokenizer, names)
    return tokenizer.to_str(pretty=True)


def sample_texts(
    num_groups: int,
    texts: Callable[[int], Iterable[str]],
    *,
    seed: int,
    sample_bytes: int,
    share_bytes: int,
) -> Iterator[str]:
    """Yield about `sample_bytes` of text from groups of texts, visited in random order.

    Args:
        num_groups: Number of groups (such as shards).
        texts: Returns the texts of a group, given its number.
        seed: Seed of the order.
        sample_bytes: Bytes of text to return from all groups.
        share_bytes: The most bytes from one group.
    """
    missing = sample_bytes
    for number in permute(np.arange(num_groups), max(1, num_groups), seed):
        left = min(share_bytes, missing)
        for text in texts(int(number)):
            part = text[:left]
            size = len(part.encode())
            left -= size
            missing -= size
            yield part
            if left <= 0:
                break
        if missing <= 0:
            return


def train_bpe(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Train a byte-level BPE with the special token `<|endoftext|>`.

    All 256 bytes are in the vocabulary, so encoding and decoding returns every text unchanged. The
    tokenizer encodes special tokens in text as ordinary text. Longer words than MOST_WORD are cut
    for the training, because its time grows with the square of a word's length.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    cut = (piece for text in texts for piece in cut_words(text))
    tokenizer.train_from_iterator(cut, trainer=trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def cut_words(text: str) -> Iterator[str]:
    """Cut a text so that no word has more than MOST_WORD characters.

    A text without longer words is returned whole. For a byte-level BPE, a word is a run of white
    space, or a run of other characters with at most one space in front.
    """
    start = 0
    for found in _RUN.finditer(text):
        if found.end() - found.start() == MOST_WORD - 1:
            yield text[start : found.end()]
            start = found.end()
    if start < len(text) or not text:
        yield text[start:]


def _texts(options: PrepareOptions, choice: EncoderChoice, shard: Shard) -> Iterator[str]:
    for position, record in read_shard(shard, text_key=options.text_key, columns=choice.columns):
        if draw(options.seed, position.name) < options.heldout_fraction:
            continue
        # Ignore bad records here, because encoding counts or refuses them later.
        with suppress(BadRecord):
            if not isinstance(record, BadRecord):
                yield from choice.texts(record)
