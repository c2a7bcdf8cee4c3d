"""Options and report of `prepare_store`."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from wlb.data.store import TokenStore, file_checksum
from wlb.plan import UserError, check_at_least, check_between
from wlb.prepare.encode import BPE, BYTES, END_OF_TEXT, DocumentPolicy, refuse_sentence_piece
from wlb.prepare.records import OnError, TextUnit

TEXT_KEY = "text"
"""The default key under which a record has its text."""
MOST_VOCABULARY = 10**6
"""The largest vocabulary of a BPE that wlb trains, also the limit of data.bpe_vocab_size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Arguments of `prepare_store`. Error messages use the option names of `wlb prepare`."""

    inputs: tuple[str, ...]  # paths, folders and glob patterns
    out: str  # prefix of the store: path of its files without their suffixes
    tokenizer: str = BPE  # "bpe", "bytes", a tokenizer.json, or a folder with one
    # vocab_size and sample_bytes apply only if a BPE is trained. With another tokenizer, only these
    # defaults are accepted.
    vocab_size: int = 32768
    sample_bytes: int = 10_000_000  # bytes of text on which the BPE is trained
    # Texts of the BOS and EOS tokens. "" means those that the tokenizer's configuration names.
    bos: str = ""
    eos: str = ""
    policy: DocumentPolicy = DocumentPolicy.SEPARATOR  # special tokens around each document
    text_key: str = TEXT_KEY  # key under which a record has its text
    text_unit: TextUnit = TextUnit.FILE  # whether a text file is one document, or each line is
    heldout_fraction: float = 0.0  # share of the records that go to the held-out store
    seed: int = 0  # decides which records are held out
    on_error: OnError = OnError.FAIL  # what to do with a record that is not a document
    processes: int = 1  # number of worker processes
    shard_bytes: int = 0  # bytes of input in a shard; 0 = 1/256 of the input, from 1 to 64 MiB
    overwrite: bool = False  # whether to replace a store that was made with other arguments

    def __post_init__(self) -> None:
        if not self.inputs:
            raise UserError("there is no input; give files, folders or glob patterns")
        if self.tokenizer == BPE and self.vocab_size <= 256:
            raise UserError(
                f"--vocab-size = {self.vocab_size} must be at least 257, for 256 bytes and the "
                f"special token {END_OF_TEXT}"
            )
        if self.vocab_size > MOST_VOCABULARY:
            raise UserError(f"--vocab-size = {self.vocab_size} must be at most {MOST_VOCABULARY}")
        check_between("--heldout-fraction", self.heldout_fraction, 0, 1)
        if self.tokenizer == BYTES and (self.bos or self.eos):
            raise UserError(
                f"--bos and --eos apply only to a tokenizer.json or a BPE; leave them out with "
                f"--tokenizer {BYTES}"
            )
        if self.tokenizer != BPE:
            self._refuse_bpe_options()
        if self.tokenizer == BPE and self.policy == DocumentPolicy.EOS_BOS and not self.bos:
            raise UserError(
                f"--documents eos_bos needs a BOS token, but the only special token of a BPE that "
                f"wlb trains is {END_OF_TEXT}; give --bos '{END_OF_TEXT}' to put this token before "
                f"and after each document"
            )
        minimum = {"sample_bytes": 1, "processes": 1, "shard_bytes": 0, "seed": 0}
        for name, least in minimum.items():
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), least)

    def _refuse_bpe_options(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("vocab_size", "sample_bytes") and value != field.default:
                raise UserError(
                    f"--{field.name.replace('_', '-')} {value} applies only when a BPE is trained, "
                    f"but --tokenizer {self.tokenizer} already has a vocabulary; leave out "
                    f"--{field.name.replace('_', '-')}, or use --tokenizer {BPE}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Progress of `prepare_store`."""

    stage: str  # "tokenizer", "encode" or "merge"
    size: int  # bytes of input
    done: int  # bytes of input that this stage has processed
    num_documents: int = 0
    skipped: int = 0  # records skipped so far


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """Description of the stores that `prepare_store` wrote, or that existed already."""

    prefix: str  # path of the training store without the suffixes of its files
    heldout: str  # path of the held-out store without suffixes, "" if there is none
    tokenizer: str  # path of the tokenizer's file, "" for bytes
    vocab_size: int
    # Size of the training store.
    num_documents: int
    num_tokens: int
    num_targets: int  # tokens that are trained
    # Size of the held-out store.
    num_heldout_documents: int
    num_heldout_tokens: int
    num_heldout_targets: int
    # Median, 99th percentile and maximum of the document lengths in the training store, in tokens.
    lengths_p50: int
    lengths_p99: int
    longest: int
    # Sums over both stores.
    counts: dict[str, int]  # statistics of the encoder (`Encoded.counts`)
    skipped: dict[str, int]  # number of records and files that were skipped, by reason
    examples: dict[str, list[str]]  # descriptions of the first skipped records, by reason
    num_unknown: int  # tokens that stand for unknown characters
    checksum: str  # checksum of the training store's tokens
    # Number of input files, and their bytes together.
    num_files: int
    num_bytes: int
    num_text_files: int = 0  # files that were read as text and not as records
    # What this call of `prepare_store` did.
    num_shards: int = 0  # parts into which the input was divided to encode it in parallel
    num_kept: int = 0  # shards that an interrupted call had already encoded
    reused: bool = True  # whether the stores existed already
    time_s: float = 0.0  # time of this call in seconds


def report_of(
    train: TokenStore, heldout: TokenStore | None = None, *, num_files: int, num_bytes: int
) -> StoreReport:
    """Return the report of stores that exist already.

    Args:
        train: The training store.
        heldout: The held-out store; None if there is none.
        num_files: Number of input files.
        num_bytes: Bytes of all input files.
    """
    info, lengths = train.info, train.lengths
    assert info is not None
    p50, p99 = (int(x) for x in np.percentile(lengths, [50, 99]))
    # Stores that earlier versions made have no such statistics.
    unknown: dict[str, Any] = {"counts": {}, "skipped": {}, "examples": {}, "num_unknown": 0}
    about: dict[str, Any] = {**unknown, **info.preparation}
    return StoreReport(
        prefix=train.prefix,
        heldout=heldout.prefix if heldout else "",
        tokenizer=str(Path(train.prefix).parent / info.tokenizer) if info.tokenizer else "",
        vocab_size=info.vocab_size,
        num_documents=train.num_documents,
        num_tokens=train.num_tokens,
        num_targets=int(train.num_targets.sum()),
        num_heldout_documents=heldout.num_documents if heldout else 0,
        num_heldout_tokens=heldout.num_tokens if heldout else 0,
        num_heldout_targets=int(heldout.num_targets.sum()) if heldout else 0,
        lengths_p50=p50,
        lengths_p99=p99,
        longest=int(lengths.max()),
        **{name: about[name] for name in ("counts", "skipped", "examples", "num_unknown")},
        checksum=info.checksum,
        num_files=num_files,
        num_bytes=num_bytes,
    )


def arguments_of(options: PrepareOptions) -> dict[str, Any]:
    """Return the options on which the content of the store depends.

    They include checksums of the tokenizer's files, so that an edited tokenizer is noticed.
    """
    names = {f: v for f, v in asdict(options).items() if f not in ("out", "processes", "overwrite")}
    names["inputs"] = list(options.inputs)
    if options.tokenizer not in (BPE, BYTES):
        path = tokenizer_path(options.tokenizer)
        names["tokenizer_checksum"] = file_checksum(path)
        config = path.parent / "tokenizer_config.json"
        names["tokenizer_config"] = file_checksum(config) if config.is_file() else ""
    # vocab_size and sample_bytes have an effect only if a BPE is trained.
    if options.tokenizer != BPE:
        del names["vocab_size"], names["sample_bytes"]
    return names


def tokenizer_path(text: str) -> Path:
    """Return the path of the tokenizer.json that --tokenizer names.

    Args:
        text: Path of the file, or of a folder that contains it.

    Raises:
        UserError: There is no such file.
    """
    path = Path(text, "tokenizer.json") if Path(text).is_dir() else Path(text)
    model = path.with_name("tokenizer.model")
    refuse_sentence_piece(model if not path.is_file() and Path(text).is_dir() else path)
    if not path.is_file():
        raise UserError(
            f"--tokenizer {text}: the file {path} does not exist; give a tokenizer.json, {BPE!r} "
            f"or {BYTES!r}"
        )
    return path
