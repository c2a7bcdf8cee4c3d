"""Encode records as tokens, with special tokens before and after each document.

Each kind of records (plain text, conversations) has an `EncoderChoice`. It is plain data that is
sent to worker processes and opens a `RecordEncoder` there. The rest of the pipeline does not know
what records contain. Special tokens come only from the `DocumentPolicy`: text that looks like a
special token is encoded as ordinary text.
Cost: a process encodes 2 to 3 MB/s with a BPE, and needs about 100 bytes of memory per token of the
longest piece of text.
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
"""The special token of a BPE that wlb trains. It ends every document."""
# Values of the option --tokenizer that are not paths.
BYTES = "bytes"
BPE = "bpe"
# Tokens 0 to 255 of the tokenizer "bytes" are the bytes of the text.
BYTES_BOS, BYTES_EOS, BYTES_VOCAB = 256, 257, 258
PIECE_CHARACTERS = 1 << 20
"""The most characters that are encoded in one call."""

# Usual names of special tokens, for tokenizers that do not say which token is EOS or BOS.
_KNOWN_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|endofsentence|>")
_KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<|startoftext|>")


class DocumentPolicy(StrEnum):
    """Which special tokens are added to each document."""

    EOS_BOS = "eos_bos"  # BOS before the document and EOS after it
    SEPARATOR = "separator"  # only EOS after the document
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One encoded document."""

    tokens: TokenArray  # shape [num_tokens], at least one token
    # Half-open spans of trained tokens, shape [k, 2]. None means that all tokens are trained.
    trained: IntArray | None = None
    num_unknown: int = 0  # number of tokens that stand for unknown characters
    # Statistics by name, which are summed over all documents. If a record becomes several
    # documents, the record's statistics are in one of them.
    counts: Mapping[str, int] = field(default_factory=dict[str, int])


class RecordEncoder(Protocol):
    """Encodes records of one kind as documents."""

    def encode(self, record: Record) -> Sequence[Encoded]:
        """Return the documents of a record, at least one.

        If a record becomes several documents, either all of them are held out or none is.

        Raises:
            BadRecord: The record is not a document.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The size and the special tokens of a tokenizer. An id is None if there is no such token."""

    size: int
    bos_id: int | None = None  # id of the token that begins a text
    eos_id: int | None = None  # id of the token that ends a text
    unknown_id: int | None = None  # id of the token that stands for unknown characters
    special: tuple[int, ...] = ()  # ids of special tokens, which ordinary text must never become


class EncoderChoice(Protocol):
    """A kind of records, and how `prepare_store` encodes them.

    Derive a frozen dataclass from it. Its objects are pickled and sent to worker processes.
    """

    @property
    def arguments(self) -> dict[str, Any]:
        """All settings as JSON values.

        `prepare_store` continues interrupted work only if its settings were equal to these.
        """
        ...

    @property
    def actions(self) -> Mapping[Skip, OnError]:
        """What to do with bad records, for each reason that has an option `--on-<reason>`."""
        return {}

    def columns(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return which of the columns `names` of a Parquet file to read.

        Raises:
            UserError: A column that is needed is not among them.
        """
        ...

    def texts(self, record: Record) -> Sequence[str]:
        """Return the texts of a record on which a BPE may be trained: one, or several in a chat.

        Raises:
            BadRecord: The record is not a document.
            UserError: These records have no text to train a BPE on.
        """
        raise UserError(
            f"--tokenizer {BPE} cannot train a BPE, because records of this kind have no text; "
            f"give a tokenizer.json"
        )

    def special_tokens(self, tokenizer: str) -> tuple[str, ...]:
        """Return special tokens to add to the tokenizer if it lacks them.

        Args:
            tokenizer: The option --tokenizer, "bpe" or a path.
        """
        return ()

    def eos_id(self, vocabulary: Vocabulary) -> int | None:
        """Return the token that ends every document, or None if there is none."""
        return None

    def about(self, tokenizer: str, vocabulary: Vocabulary) -> dict[str, Any]:
        """Return what users of the trained model must know about the encoding, as JSON values.

        The store's description keeps these values (`StoreInfo.preparation`).
        """
        return {}

    def open(self, tokenizer: str, vocabulary: Vocabulary) -> RecordEncoder:
        """Return an encoder that uses this tokenizer. Each worker calls this once.

        Args:
            tokenizer: Path of a tokenizer.json, or "" for bytes.
            vocabulary: Size and special tokens of the tokenizer.

        Raises:
            UserError: These records cannot be encoded with this tokenizer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChoice(EncoderChoice):
    """Records of plain text, which have their text under one key."""

    policy: DocumentPolicy = DocumentPolicy.SEPARATOR
    text_key: str = "text"
    # Whether to cut long text at line ends before encoding, which bounds the memory. The tokens
    # decode to the same text, but near a cut they may differ from the tokens of the whole text. So
    # this is used only with a BPE that wlb trains.
    in_pieces: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings on which the tokens of a record depend, as JSON values."""
        return {"policy": self.policy, "text_key": self.text_key}

    def columns(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return which of the columns `names` to read.

        They are the column of the text, and columns such as loss_mask or weight, because records
        are refused for some values in these.
        """
        if self.text_key not in names:
            raise UserError(
                f"has no column {self.text_key!r}, but the columns {', '.join(names)}; name the "
                f"column of the text with --text-key"
            )
        return (
            self.text_key,
            *(n for n in names if n.lower() in RECORD_MARKS and n != self.text_key),
        )

    def texts(self, record: Record) -> Sequence[str]:
        """Return the text of a record."""
        return (text_of(record, self.text_key),)

    def eos_id(self, vocabulary: Vocabulary) -> int | None:
        """Return the token that ends every document; None with `DocumentPolicy.NONE`."""
        return vocabulary.eos_id if self.policy != DocumentPolicy.NONE else None

    def open(self, tokenizer: str, vocabulary: Vocabulary) -> "TextEncoder":
        """Return an encoder that uses this tokenizer."""
        return TextEncoder(self, tokenizer, vocabulary)


class TextEncoder:
    """Encodes the text of a record, and adds special tokens around it as `--documents` says."""

    def __init__(self, choice: TextChoice, tokenizer: str, vocabulary: Vocabulary) -> None:
        self._key = choice.text_key
        self._special = np.array(vocabulary.special, np.int64)
        self._unknown = vocabulary.unknown_id
        self._before, self._after = tokens_around(choice.policy, vocabulary)
        self._ids: Callable[[str], TokenArray] = byte_ids
        if tokenizer:
            opened = load_tokenizer(tokenizer)
            encode = _in_pieces if choice.in_pieces else _whole
            self._ids = lambda text: encode(opened, text)

    def encode(self, record: Record) -> Sequence[Encoded]:
        """Return the one document of a record; raise `BadRecord` if it has no usable text."""
        text = text_of(record, self._key)
        try:
            check_record(record, besides=self._key)
        except UserError as error:
            raise BadRecord(Skip.NOT_TEXT, str(error)) from None
        ids = self._ids(text)
        if not ids.size:
            raise BadRecord(Skip.EMPTY, "the tokenizer returns no token for the text")
        if self._special.size and (found := np.isin(ids, self._special)).any():
            raise BadRecord(
                Skip.SPECIAL_TOKEN,
                f"the text encodes to the special token with the id {ids[found][0]}, which only "
                f"--documents may add; remove that part of the text, or use another tokenizer",
            )
        tokens = np.concatenate([self._before, ids, self._after])
        return [Encoded(tokens=tokens, num_unknown=count_of(self._unknown, ids))]


def count_of(token: int | None, ids: TokenArray) -> int:
    """Return how often `token` is in `ids`, or 0 if `token` is None."""
    return 0 if token is None else int((ids == token).sum())


def tokens_around(policy: DocumentPolicy, vocabulary: Vocabulary) -> tuple[IntArray, IntArray]:
    """Return the special tokens to add before each document, and those to add after it.

    Raises:
        UserError: The policy needs a special token that the tokenizer does not have.
    """
    after = [vocabulary.eos_id] if policy != DocumentPolicy.NONE else []
    before = [vocabulary.bos_id] if policy == DocumentPolicy.EOS_BOS else []
    for option, wanted in (("--eos", after), ("--bos", before)):
        if None in wanted:
            raise UserError(
                f"--documents {policy} needs the {option.strip('-').upper()} token, but the "
                f"tokenizer does not say which token that is; give {option} TOKEN, or use "
                f"--documents none"
            )
    return np.array(before, np.int64), np.array(after, np.int64)


def text_of(record: Record, key: str) -> str:
    """Return the text under a key of a record.

    Raises:
        BadRecord: There is no such key, or its value is empty or not text of valid Unicode.
    """
    if key not in record:
        known = ", ".join(map(repr, list(record)[:8]))
        raise BadRecord(
            Skip.NO_TEXT,
            f"the record has no key {key!r} (its keys are {known}); name the key of the text "
            f"with --text-key",
        )
    if (value := record[key]) is None:
        raise BadRecord(Skip.NO_TEXT, f"the text under {key!r} is null")
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRecord(
                Skip.NOT_UTF8, f"the text under {key!r} is not UTF-8 at byte {error.start}"
            ) from None
    if not isinstance(value, str):
        raise BadRecord(
            Skip.NOT_TEXT,
            f"the value of {key!r} must be text, but is of type {type(value).__name__}",
        )
    if not value:
        raise BadRecord(Skip.EMPTY, f"the text under {key!r} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord(
            Skip.NOT_UTF8,
            f"the text under {key!r} is not valid Unicode, because character {error.start} is half "
            f"of a surrogate pair",
        ) from None
    return value


# The largest token id that a tokenizer.json may have. `_LARGE_ID` finds numbers of 8 or more
# digits, which may be ids above this limit.
_MOST_ID = 1 << 24
_LARGE_ID = re.compile(rb":\s*([0-9]{8,19})")


def byte_ids(text: str) -> TokenArray:
    """Return the UTF-8 bytes of `text` as tokens 0 to 255."""
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Open a tokenizer.json.

    The tokenizer does not truncate or pad, and it encodes special tokens in text as ordinary text.

    Raises:
        UserError: The tokenizers library is missing, or it cannot read the file.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise UserError(
            "the library tokenizers is not installed; run pip install 'wlb-llm[data]', or use "
            "--tokenizer bytes"
        ) from None
    refuse_sentence_piece(Path(path))
    _check_ids(Path(path))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The library raises a plain Exception, or a BaseException if its Rust code panics.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{path} is not a valid tokenizer.json ({error}); give the tokenizer.json of a model"
        ) from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def refuse_sentence_piece(path: Path) -> None:
    """Raise UserError if the file is a SentencePiece model.

    The tokenizers library cannot read such files. Folders of older models have one whose name is
    *.model or, with Mistral, *.model.v3.
    """
    if ".model" in path.suffixes and path.is_file():
        raise UserError(
            f"{path} is a SentencePiece model, not a tokenizer.json; convert it with "
            f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained(OUT) of the "
            f"transformers library, and give the folder OUT"
        )


def _check_ids(path: Path) -> None:
    """Raise UserError if a token has an id above `_MOST_ID`.

    The tokenizers library loops over all numbers up to the largest id, so a huge id would keep it
    busy almost forever.
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
                        f"{path}: token {name!r} has the id {index}, but ids must be at most "
                        f"{_MOST_ID}; give the tokenizer.json of a model"
                    )


def _whole(tokenizer: "Tokenizer", text: str) -> TokenArray:
    # encode_batch_fast is faster than encode(), because it computes no character offsets. With one
    # text it uses one thread.
    encoded: Any = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoded[0].ids, np.int64)


def _in_pieces(tokenizer: "Tokenizer", text: str) -> TokenArray:
    """Encode a long text piece by piece, because encoding needs 100 bytes of memory per token."""
    return np.concatenate([_whole(tokenizer, piece) for piece in text_pieces(text)])


def text_pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces of at most PIECE_CHARACTERS, at line ends where possible."""
    start = 0
    while start < len(text):
        stop = start + PIECE_CHARACTERS
        if stop < len(text):
            stop = (text.rfind("\n", start, stop) + 1) or stop
        yield text[start:stop]
        start = stop


def byte_vocabulary() -> Vocabulary:
    """Return the vocabulary of the tokenizer "bytes"."""
    return Vocabulary(size=BYTES_VOCAB, bos_id=BYTES_BOS, eos_id=BYTES_EOS)


def add_special_tokens(tokenizer: "Tokenizer", names: Sequence[str]) -> int:
    """Add the special tokens `names` that a tokenizer lacks; return how many were added."""
    from tokenizers import AddedToken

    tokens = [AddedToken(name, special=True, normalized=False) for name in names]
    added: int = cast(Any, tokenizer).add_special_tokens(tokens)
    return added


def read_vocabulary(
    path: str | Path, *, bos: str = "", eos: str = "", folder: str | Path | None = None
) -> Vocabulary:
    """Read the size and the special tokens of a tokenizer.json.

    Args:
        path: The tokenizer.json.
        bos: Text of the BOS token. "" means the token that tokenizer_config.json names. If the file
            names none, a special token with a usual name such as "<s>" is taken as BOS. If there is
            no special token with such a name, or several, the vocabulary has no BOS token.
        eos: Text of the EOS token. "" has the same meaning as for `bos`.
        folder: Folder of the tokenizer_config.json. None means the folder of `path`.

    Returns:
        The vocabulary. Its size is the largest id, including added tokens, plus 1.
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
                f"--{kind} {name!r} is not a token of {path}; give a token of this tokenizer, for "
                f"example one of its special tokens, which are {some}"
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
    """Return the id of the token that stands for unknown characters, or None if there is none."""
    model = cast("dict[str, Any]", json.loads(tokenizer.to_str())["model"])
    if isinstance(index := model.get("unk_id"), int):
        return index
    name = model.get("unk_token")
    return tokenizer.token_to_id(name) if isinstance(name, str) else None


def token_text(value: Any) -> str | None:
    """Return the text of a token in a tokenizer_config.json, or None if there is no text.

    Args:
        value: The value in the configuration: text, or an object with the key "content".
    """
    content = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def tokenizer_config(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json, or an empty dict if there is no such file."""
    try:
        return read_object(path, remedy="repair or remove it", wide=True)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); repair or remove the file") from None
