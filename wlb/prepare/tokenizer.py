"""The tokenizer of a preparation: a copy of a file, or a BPE trained on a sample of its records.

The sample is of training records only, from all shards in seeded order.
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
"""Most characters of a word from which a BPE is trained; those of languages have less than 100."""
# A word has a space in front at most; a run of white space is one as well.
# To Python, U+001C to U+001F are white space; to the tokenizers library they are not.
_RUN = re.compile(rf"[\S\x1c-\x1f]{{1,{MOST_WORD - 1}}}|[^\S\x1c-\x1f]{{1,{MOST_WORD - 1}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTokenizer:
    """The tokenizer of a preparation. path: its file, "" for raw bytes. config: the object of the
    tokenizer_config.json beside the file that was copied, empty if there was none.
    """

    path: str
    vocabulary: Vocabulary
    checksum: str
    config: dict[str, Any] = field(default_factory=dict[str, Any])


def prepare_tokenizer(
    options: PrepareOptions, choice: EncoderChoice, folder: Path, shards: Sequence[Shard]
) -> PreparedTokenizer:
    """Writes `folder`/tokenizer.json, with the special tokens that `choice` needs.

    A BPE that an interrupted call trained is reused. UserError for a tokenizer that cannot be read,
    lacks a token of the options, or cannot get those of `choice`.
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
    """The text of the file, with the special tokens `names` that it lacks."""
    if names:
        from tokenizers import Tokenizer

        # load_tokenizer raises UserError for a file that is no tokenizer.
        load_tokenizer(source)
        tokenizer = Tokenizer.from_file(str(source))
        if add_special_tokens(tokenizer, names):
            return tokenizer.to_str(pretty=True)
    return read_text(source, remedy="give a tokenizer.json")


def _trained(
    options: PrepareOptions, choice: EncoderChoice, shards: Sequence[Shard], names: Sequence[str]
) -> str:
    """A BPE of `options.vocab_size` tokens, `names` among them."""
    size = options.vocab_size - len(names)
    if size <= 256:
        raise UserError(
            f"--vocab-size = {options.vocab_size} must be above {256 + len(names)}: 256 bytes, "
            f"{', '.join([END_OF_TEXT, *names])}"
        )
    # Parquet files without row groups have no shard.
    if not shards:
        raise UserError(
            f"--tokenizer {BPE}: {', '.join(options.inputs)} holds no record to train one on"
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
    """About `sample_bytes` of text from groups in seeded order, at most `share_bytes` of each."""
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
    """A byte-level BPE with `<|endoftext|>`, which never matches special tokens in text.

    All 256 bytes are in the vocabulary, so every text encodes and decodes to itself. Training sees
    words of at most MOST_WORD characters, as its time grows with the square of a word's length.
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
    """The text in pieces none of whose words has more than MOST_WORD characters; one piece, the
    text itself, where no word is longer.

    A word of a byte-level BPE has no white space except one space in front, or is only white
    space.
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
        # Encoding refuses or counts bad records.
        with suppress(BadRecord):
            if not isinstance(record, BadRecord):
                yield from choice.texts(record)
