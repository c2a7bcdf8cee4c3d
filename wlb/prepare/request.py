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
"""Key that a record's text has unless another is given."""
MOST_VOCABULARY = 10**6
"""Most tokens of a BPE that is trained here, as for data.bpe_vocab_size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Arguments of `prepare_store`; messages use the option names of `wlb prepare`.

    inputs: paths, folders, glob patterns. out: prefix of the store. tokenizer: "bpe", "bytes", or a
    tokenizer.json or its folder. vocab_size, sample_bytes: for training a BPE, refused with another
    tokenizer. bos, eos: token names; "" for the tokenizer's own. shard_bytes: 0 for 1/256 of the
    input, within 1 to 64 MiB.
    """

    inputs: tuple[str, ...]
    out: str
    tokenizer: str = BPE
    vocab_size: int = 32768
    sample_bytes: int = 10_000_000
    bos: str = ""
    eos: str = ""
    policy: DocumentPolicy = DocumentPolicy.SEPARATOR
    text_key: str = TEXT_KEY
    text_unit: TextUnit = TextUnit.FILE
    heldout_fraction: float = 0.0
    seed: int = 0
    on_error: OnError = OnError.FAIL
    processes: int = 1
    shard_bytes: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.inputs:
            raise UserError("there is no input; give files, folders or glob patterns")
        if self.tokenizer == BPE and self.vocab_size <= 256:
            raise UserError(
                f"--vocab-size = {self.vocab_size} must be above 256: 256 bytes and {END_OF_TEXT}"
            )
        if self.vocab_size > MOST_VOCABULARY:
            raise UserError(
                f"--vocab-size = {self.vocab_size} must be at most {MOST_VOCABULARY}; lower it"
            )
        check_between("--heldout-fraction", self.heldout_fraction, 0, 1)
        if self.tokenizer == BYTES and (self.bos or self.eos):
            raise UserError("--bos and --eos are for a tokenizer.json; bytes have their own")
        if self.tokenizer != BPE:
            self._refuse_options_of_the_bpe()
        if self.tokenizer == BPE and self.policy == DocumentPolicy.EOS_BOS and not self.bos:
            raise UserError(
                f"--documents eos_bos: the BPE that is trained has one special token; add --bos "
                f"'{END_OF_TEXT}' to use it on both sides"
            )
        minimum = {"sample_bytes": 1, "processes": 1, "shard_bytes": 0, "seed": 0}
        for name, least in minimum.items():
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), least)

    def _refuse_options_of_the_bpe(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("vocab_size", "sample_bytes") and value != field.default:
                raise UserError(
                    f"--{field.name.replace('_', '-')} {value} is for training a BPE; --tokenizer "
                    f"{self.tokenizer} has its vocabulary: leave it out, or use --tokenizer {BPE}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Progress of a preparation. size, done: bytes of input; skipped: records left out so far."""

    stage: str
    size: int
    done: int
    num_documents: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """The stores that were made. heldout: prefix of the held-out store, "" where there is none.

    num_targets: trained tokens. lengths_p50, lengths_p99, longest: tokens of training documents.
    counts, skipped, num_unknown: sums over both stores of `Encoded.counts`, of records left out by
    reason (with the first `examples`), of tokens for unknown characters. num_shards, num_kept: all
    parts, and those that an interrupted call had made. num_text_files: inputs of `prepare_store`
    that were read as text, not as records. time_s: of this call.
    """

    prefix: str
    heldout: str
    tokenizer: str
    vocab_size: int
    num_documents: int
    num_tokens: int
    num_targets: int
    num_heldout_documents: int
    num_heldout_tokens: int
    num_heldout_targets: int
    lengths_p50: int
    lengths_p99: int
    longest: int
    counts: dict[str, int]
    skipped: dict[str, int]
    examples: dict[str, list[str]]
    num_unknown: int
    checksum: str
    num_files: int
    num_bytes: int
    num_text_files: int = 0
    num_shards: int = 0
    num_kept: int = 0
    reused: bool = True
    time_s: float = 0.0


def report_of(
    train: TokenStore, heldout: TokenStore | None = None, *, num_files: int, num_bytes: int
) -> StoreReport:
    """The report of stores that exist, made of `num_files` inputs of `num_bytes` together."""
    info, lengths = train.info, train.lengths
    assert info is not None
    p50, p99 = (int(x) for x in np.percentile(lengths, [50, 99]))
    # Stores of earlier versions have no counts.
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
    """The options that the content of the store depends on."""
    names = {f: v for f, v in asdict(options).items() if f not in ("out", "processes", "overwrite")}
    names["inputs"] = list(options.inputs)
    if options.tokenizer not in (BPE, BYTES):
        path = tokenizer_path(options.tokenizer)
        names["tokenizer_checksum"] = file_checksum(path)
        config = path.parent / "tokenizer_config.json"
        names["tokenizer_config"] = file_checksum(config) if config.is_file() else ""
    # vocab_size and sample_bytes are used only to train a BPE.
    if options.tokenizer != BPE:
        del names["vocab_size"], names["sample_bytes"]
    return names


def tokenizer_path(text: str) -> Path:
    """The tokenizer.json that `text` (a file, or a folder with one) names; UserError if none."""
    path = Path(text, "tokenizer.json") if Path(text).is_dir() else Path(text)
    model = path.with_name("tokenizer.model")
    refuse_sentence_piece(model if not path.is_file() and Path(text).is_dir() else path)
    if not path.is_file():
        raise UserError(
            f"--tokenizer {text}: there is no file {path}; give a tokenizer.json, {BPE!r} or "
            f"{BYTES!r}"
        )
    return path
