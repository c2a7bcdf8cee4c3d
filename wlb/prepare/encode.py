"""Records to tokens: the tokenizer, and the special tokens before and after a document.

A preparation knows a kind of records only by its `EncoderChoice`, plain data that travels to worker
processes and opens an encoder there. Special tokens come from the policy alone. Cost: 2 to 3 MB/s a
process for BPE, and some 100 bytes a token of the longest piece of text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from wlb.data.store import TokenArray
from wlb.plan import IntArray, UserError
from wlb.plan.read_file import malformed, read_object
from wlb.prepare.marks import RECORD_MARKS, check_record
from wlb.prepare.records import BadRecord, OnError, Record
from wlb.prepare.text import Skip

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
"""The special token of a BPE that is trained here; it ends every document."""
BYTES = "bytes"
BPE = "bpe"
BYTES_BOS, BYTES_EOS, BYTES_VOCAB = 256, 257, 258
PIECE_CHARACTERS = 1 << 20

_KNOWN_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|endofsentence|>")
_KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<|startoftext|>")


class DocumentPolicy(StrEnum):
    """Special tokens of a document: BOS before and EOS after it, only EOS, or none."""

    EOS_BOS = "eos_bos"
    SEPARATOR = "separator"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One document. tokens: shape [n], n >= 1. trained: half-open spans of trained tokens, shape
    [m, 2]; None for all. num_unknown: tokens that stand for unknown characters. counts: statistics
    by name, summed over documents; those of a whole record are in one of its documents.
    """

    tokens: TokenArray
    trained: IntArray | None = None
    num_unknown: int = 0
    counts: Mapping[str, int] = field(default_factory=dict[str, int])


class RecordEncoder(Protocol):
    """Turns records into documents; raises `BadRecord`, with the reason, for one that is none."""

    def encode(self, record: Record) -> Sequence[Encoded]:
        """The documents of a record, at least one; all go to the same side of the split."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer's size and special tokens, by id; None where it has none.

    special: ids that text must not encode to.
    """

    size: int
    bos_id: int | None = None
    eos_id: int | None = None
    unknown_id: int | None = None
    special: tuple[int, ...] = ()


class EncoderChoice(Protocol):
    """A kind of records, for `prepare_store`: plain, picklable data; derive from it.

    arguments: JSON-able; an interrupted preparation continues only with equal ones. actions: for
    records that are left out for a reason with an option of its own, `--on-<reason>`.
    """

    @property
    def arguments(self) -> dict[str, Any]: ...

    @property
    def actions(self) -> Mapping[Skip, OnError]:
        return {}

    def columns(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of a Parquet file to read; UserError where it lacks some."""
        ...

    def texts(self, record: Record) -> Sequence[str]:
        """Return the text that a BPE may be trained on; `BadRecord` if the record is left out."""
        raise UserError(
            f"--tokenizer {BPE}: these records have no text to train one on; give a tokenizer.json"
        )

    def special_tokens(self, tokenizer: str) -> tuple[str, ...]:
        """Special tokens to add to the tokenizer if it lacks them. tokenizer: "bpe" or a path."""
        return ()

    def eos_id(self, vocabulary: Vocabulary) -> int | None:
        """The token that ends every document; None if there is none."""
        return None

    def about(self, tokenizer: str, vocabulary: Vocabulary) -> dict[str, Any]:
        """What users of the model must know, JSON-able; it goes to the sidecar's `preparation`."""
        return {}

    def open(self, tokenizer: str, vocabulary: Vocabulary) -> RecordEncoder:
        """The encoder, opened once in every worker. tokenizer: a path, or "" for raw bytes.

        UserError for a tokenizer that these records cannot be encoded with.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChoice(EncoderChoice):
    """Records with a text under `text_key`.

    in_pieces: whether long text may be cut at line ends before encoding, as for our own BPE: it
    decodes to the same text, but may get other tokens at a cut before an indented line.
    """

    policy: DocumentPolicy = DocumentPolicy.SEPARATOR
    text_key: str = "text"
    in_pieces: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        return {"policy": self.policy, "text_key": self.text_key}

    def columns(self, names: Sequence[str]) -> tuple[str, ...]:
        if self.text_key not in names:
            raise UserError(
                f"has no column {self.text_key!r}; its columns are {', '.join(names)}: choose one "
                f"with --text-key"
            )
        # The marks are read to be refused where they say that not all of a text is trained.
        return (
            self.text_key,
            *(n for n in names if n.lower() in RECORD_MARKS and n != self.text_key),
        )

    def texts(self, record: Record) -> Sequence[str]:
        return (text_of(record, self.text_key),)

    def eos_id(self, vocabulary: Vocabulary) -> int | None:
        return vocabulary.eos_id if self.policy != DocumentPolicy.NONE else None

    def open(self, tokenizer: str, vocabulary: Vocabulary) -> "TextEncoder":
        return TextEncoder(self, tokenizer, vocabulary)


class TextEncoder:
    """Encodes the text of a record and puts the policy's tokens around it."""

    def __init__(self, choice: TextChoice, tokenizer: str, vocabulary: Vocabulary) -> None:
        self._key = choice.text_key
        self._special = np.array(vocabulary.special, np.int64)
        self._unknown = vocabulary.unknown_id
        self._before, self._after = around(choice.policy, vocabulary)
        self._ids: Callable[[str], TokenArray] = byte_ids
        if tokenizer:
            opened = load_tokenizer(tokenizer)
            encode = _in_pieces if choice.in_pieces else _whole
            self._ids = lambda text: encode(opened, text)

    def encode(self, record: Record) -> Sequence[Encoded]:
        text = text_of(record, self._key)
        try:
            check_record(record, besides=self._key)
        except UserError as error:
            raise BadRecord(Skip.NOT_TEXT, str(error)) from None
        ids = self._ids(text)
        if not ids.size:
            raise BadRecord(Skip.EMPTY, "the tokenizer makes no token of it")
        if self._special.size and (found := np.isin(ids, self._special)).any():
            raise BadRecord(
                Skip.SPECIAL_TOKEN,
                f"its text encodes to the special token {ids[found][0]}, which only the policy may "
                f"set; use a tokenizer without that piece, or take it out of the text",
            )
        tokens = np.concatenate([self._before, ids, self._after])
        return [Encoded(tokens=tokens, num_unknown=count_of(self._unknown, ids))]


def count_of(token: int | None, ids: TokenArray) -> int:
    """How often `token` is in `ids`; never where there is no such token."""
    return 0 if token is None else int((ids == token).sum())


def around(policy: DocumentPolicy, vocabulary: Vocabulary) -> tuple[IntArray, IntArray]:
    """Tokens before and after a document; UserError where the vocabulary lacks one."""
    after = [vocabulary.eos_id] if policy != DocumentPolicy.NONE else []
    before = [vocabulary.bos_id] if policy == DocumentPolicy.EOS_BOS else []
    for option, wanted in (("--eos", after), ("--bos", before)):
        if None in wanted:
            raise UserError(
                f"--documents {policy} needs a token that the tokenizer does not name; say which "
                f"with {option} TOKEN, or use --documents none"
            )
    return np.array(before, np.int64), np.array(after, np.int64)


def text_of(record: Record, key: str) -> str:
    """`record[key]`, a string with UTF-8; BadRecord with the reason otherwise."""
    if key not in record:
        known = ", ".join(map(repr, list(record)[:8]))
        raise BadRecord(
            Skip.NO_TEXT, f"no text under {key!r} (keys: {known}); choose one with --text-key"
        )
    if (value := record[key]) is None:
        raise BadRecord(Skip.NO_TEXT, f"{key!r} is null")
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRecord(Skip.NOT_UTF8, f"{key!r} is not UTF-8 at byte {error.start}") from None
    if not isinstance(value, str):
        raise BadRecord(Skip.NOT_TEXT, f"{key!r} is {type(value).__name__}, not a string")
    if not value:
        raise BadRecord(Skip.EMPTY, f"{key!r} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord(
            Skip.NOT_UTF8, f"{key!r} has half a surrogate pair at character {error.start}"
        ) from None
    return value


_MOST_ID = 1 << 24
_LARGE_ID = re.compile(rb":\s*([0-9]{8,19})")


def byte_ids(text: str) -> TokenArray:
    """The UTF-8 bytes of `text` as tokens 0 to 255."""
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Opens a tokenizer that never matches special tokens in text and does not cut or pad.

    UserError without the tokenizers library, or for a file that it cannot read.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise UserError(
            "tokenizers is not installed; pip install 'wlb-llm[data]', or use --tokenizer bytes"
        ) from None
    refuse_sentence_piece(Path(path))
    _check_ids(Path(path))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # tokenizers raises plain Exception, and where it panics an exception that is none.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{path} is not a tokenizer.json ({error})") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def refuse_sentence_piece(path: Path) -> None:
    """UserError for a SentencePiece model, which older models have and the tokenizers library does
    not read. Mistral's have a version behind the suffix.
    """
    if ".model" in path.suffixes and path.is_file():
        raise UserError(
            f"{path} is a SentencePiece model, not a tokenizer.json; convert it with transformers: "
            f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained(OUT), and give "
            f"OUT"
        )


def _check_ids(path: Path) -> None:
    """UserError for a vocabulary with an id so large that the tokenizers library, which counts up
    to it, would not end.
    """
    data = path.read_bytes() if path.is_file() else b""
    if not any(int(found[1]) > _MOST_ID for found in _LARGE_ID.finditer(data)):
        return
    with malformed(path, "give a tokenizer.json"):
        vocabulary: Any = read_object(path, wide=True)["model"].get("vocab")
        if isinstance(vocabulary, dict):
            for name, index in cast("dict[str, Any]", vocabulary).items():
                if isinstance(index, int) and index > _MOST_ID:
                    raise UserError(
                        f"{path}: token {name!r} has the id {index}, must be at most {_MOST_ID}; "
                        f"give the tokenizer of a model"
                    )


def _whole(tokenizer: "Tokenizer", text: str) -> TokenArray:
    # encode_batch_fast of one text runs on one thread and, unlike encode(), computes no offsets.
    encoded: Any = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoded[0].ids, np.int64)


def _in_pieces(tokenizer: "Tokenizer", text: str) -> TokenArray:
    """Encodes a long text piece by piece: an encoding takes some 100 bytes a token until freed."""
    return np.concatenate([_whole(tokenizer, piece) for piece in text_pieces(text)])


def text_pieces(text: str) -> Iterator[str]:
    """Yield pieces of at most PIECE_CHARACTERS, which end with a line where possible."""
    start = 0
    while start < len(text):
        stop = start + PIECE_CHARACTERS
        if stop < len(text):
            stop = (text.rfind("\n", start, stop) + 1) or stop
        yield text[start:stop]
        start = stop


def byte_vocabulary() -> Vocabulary:
    return Vocabulary(size=BYTES_VOCAB, bos_id=BYTES_BOS, eos_id=BYTES_EOS)


def add_special_tokens(tokenizer: "Tokenizer", names: Sequence[str]) -> int:
    """Adds those of `names` that the tokenizer lacks; returns how many."""
    from tokenizers import AddedToken

    tokens = [AddedToken(name, special=True, normalized=False) for name in names]
    added: int = cast(Any, tokenizer).add_special_tokens(tokens)
    return added


def read_vocabulary(
    path: str | Path, *, bos: str = "", eos: str = "", folder: str | Path | None = None
) -> Vocabulary:
    """Size and special tokens of a tokenizer file.

    bos, eos: tokens by name; "" for the token of the tokenizer_config.json in `folder` (that of the
    file), or else the one special token with a usual name. size: the largest id, added tokens
    included, plus one.
    """
    tokenizer = load_tokenizer(path)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    special = {index: token.content for index, token in added.items() if token.special}
    unknown = unknown_id(tokenizer)
    config = tokenizer_config(Path(folder or Path(path).parent) / "tokenizer_config.json")

    def id_of(kind: str, name: str | None, usual: tuple[str, ...]) -> int | None:
        if not name:
            found = [index for index, content in special.items() if content in usual]
            return found[0] if len(found) == 1 else None
        if name not in vocabulary:
            some = ", ".join(list(special.values())[:12]) or "none"
            raise UserError(
                f"{path} has no token {name!r} for --{kind}; its special tokens are {some}"
            )
        return vocabulary[name]

    bos_id = id_of("bos", bos or token_text(config.get("bos_token")), _KNOWN_BOS)
    eos_id = id_of("eos", eos or token_text(config.get("eos_token")), _KNOWN_EOS)
    named = {index for index in (bos_id, eos_id) if index is not None}
    return Vocabulary(
        size=max(vocabulary.values(), default=-1) + 1,
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=unknown,
        special=tuple(sorted((set(special) | named) - {unknown})),
    )


def unknown_id(tokenizer: "Tokenizer") -> int | None:
    """The token that stands for unknown characters; None if there is none."""
    model = cast("dict[str, Any]", json.loads(tokenizer.to_str())["model"])
    if isinstance(index := model.get("unk_id"), int):
        return index
    name = model.get("unk_token")
    return tokenizer.token_to_id(name) if isinstance(name, str) else None


def token_text(value: Any) -> str | None:
    """A token as configurations write it: its text, or an object with its content."""
    content = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def tokenizer_config(path: Path) -> dict[str, Any]:
    """The object of a tokenizer_config.json; empty where there is none."""
    try:
        return read_object(path, remedy="repair or remove it", wide=True)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); repair or remove it") from None
