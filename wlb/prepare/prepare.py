"""Text to token stores: train a byte-level BPE on a sample, encode all, split off held-out data.

1. Split: a document is held out if the hash of (seed, name) is below `heldout_fraction`, so a
   corpus that grows keeps its split. If a fraction above 0 leaves one side without any document,
   the document nearest to the limit changes sides.
2. Tokenizer: byte-level BPE on about `sample_bytes` of training documents in seeded order. All 256
   bytes are in the vocabulary, so every text encodes and decodes to itself.
3. Encode: every document ends with the id of `<|endoftext|>`. Special tokens are matched nowhere
   in text, so a document that contains the words "<|endoftext|>" gets ordinary tokens for them.

Guarantees: files are complete or absent (`TokenStoreWriter`); equal inputs give equal files; a
second call with the same inputs (document names and sizes, Python version, arguments) reuses them
without reading text. Processes that prepare the same prefix wait for the first one where the file
system has locks, and otherwise do the same work twice. An edit that keeps a file's size is not
noticed: remove `<prefix>-train.json` to encode again.
Cost: 2 cores encode some 7 MB/s; memory is a few times the longest document, at least 0.3 GB.
"""

import hashlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wlb.data.shuffle import permute
from wlb.data.store import (
    TokenArray,
    TokenStore,
    TokenStoreWriter,
    file_checksum,
    store_path,
    temporary_name,
)
from wlb.plan import IntArray
from wlb.prepare.text import Skip, TextDocuments, read_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
_FORMAT = 1
_NUM_BYTES = 256
_CHUNK_BYTES = 1 << 22
_PART_CHARACTERS = 1 << 20

BoolArray = npt.NDArray[np.bool_]
Progress = Callable[[int, int], None]
"""Called with (bytes of text done, bytes of text in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStores:
    """Prefixes of the two stores, the tokenizer's file, and what went into them.

    skipped: files left out, by reason. reused: the stores were there already. time_s: of this call.
    """

    train: str
    heldout: str
    tokenizer: str
    vocab_size: int
    eos_id: int
    num_documents: int
    num_tokens: int
    num_heldout_documents: int
    num_heldout_tokens: int
    skipped: dict[str, int]
    reused: bool
    time_s: float


def prepare(
    documents: TextDocuments,
    prefix: str | Path,
    *,
    vocab_size: int,
    heldout_fraction: float,
    seed: int,
    sample_bytes: int = 2_000_000,
    progress: Progress | None = None,
) -> PreparedStores:
    """Writes, or finds, `<prefix>-train`, `<prefix>-heldout` and `<prefix>-tokenizer.json`."""
    if vocab_size <= _NUM_BYTES:
        raise ValueError(
            f"data.bpe_vocab_size = {vocab_size} must be above {_NUM_BYTES}: 256 bytes and "
            f"{END_OF_TEXT}"
        )
    if not 0 <= heldout_fraction < 1:
        raise ValueError(f"data.heldout_fraction = {heldout_fraction} must be in [0, 1)")
    if sample_bytes < 1:
        raise ValueError(f"sample_bytes = {sample_bytes} must be at least 1")
    began = time.perf_counter()
    fingerprint = _fingerprint(documents, vocab_size, heldout_fraction, seed, sample_bytes)
    found = _find(prefix, fingerprint)
    if found is None:
        with locked(store_path(prefix, ".lock")):
            found = _find(prefix, fingerprint)  # another process may have been faster
            if found is None:
                heldout = _heldout(documents.names, fraction=heldout_fraction, seed=seed)
                sample = _sample(documents, ~heldout, seed=seed, sample_bytes=sample_bytes)
                tokenizer = train_bpe(sample, vocab_size)
                _write(documents, prefix, tokenizer, heldout, fingerprint, progress)
                found = _find(prefix, fingerprint)
                if found is None:
                    raise RuntimeError(f"another process replaced {prefix} with other settings")
                found = replace(found, reused=False)
    return replace(found, time_s=time.perf_counter() - began)


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """A tokenizer that encodes text as `prepare` did: special tokens are never matched in it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _paths(prefix: str | Path) -> tuple[str, str, Path]:
    return f"{prefix}-train", f"{prefix}-heldout", store_path(prefix, "-tokenizer.json")


def _fingerprint(documents: TextDocuments, *arguments: object) -> str:
    listing = [[name, size] for name, size in zip(documents.names, documents.sizes, strict=True)]
    inputs = [_FORMAT, platform.python_version(), listing, *arguments]
    return hashlib.blake2b(json.dumps(inputs).encode(), digest_size=16).hexdigest()


def _find(prefix: str | Path, fingerprint: str) -> PreparedStores | None:
    """The stores of `fingerprint` if all files are there and belong together."""
    train_prefix, heldout_prefix, tokenizer = _paths(prefix)
    try:
        train, heldout = TokenStore(train_prefix), TokenStore(heldout_prefix)
        checksum = file_checksum(tokenizer)
    except (ValueError, OSError):  # absent, not complete, or of another preparation
        return None
    info = train.info
    if info is None or heldout.info is None or info.eos_id is None:
        return None
    mark = {"fingerprint": fingerprint, "tokenizer_checksum": checksum}
    if any(not mark.items() <= side.preparation.items() for side in (info, heldout.info)):
        return None
    return PreparedStores(
        train=train_prefix,
        heldout=heldout_prefix,
        tokenizer=str(tokenizer),
        vocab_size=info.vocab_size,
        eos_id=info.eos_id,
        num_documents=train.num_documents,
        num_tokens=train.num_tokens,
        num_heldout_documents=heldout.num_documents,
        num_heldout_tokens=heldout.num_tokens,
        skipped=dict(info.preparation.get("skipped", {})),
        reused=True,
        time_s=0.0,
    )


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Holds a lock file, where system and file system have such locks; else goes on without."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield  # closing the file gives the lock back, also when the process dies


def _heldout(names: Iterable[str], *, fraction: float, seed: int) -> BoolArray:
    """Which documents are held out, bool [num_documents]."""
    draws = np.array([draw(seed, name) for name in names])
    heldout = draws < fraction
    if fraction > 0 and heldout.size > 1:
        if not heldout.any():
            heldout[np.argmin(draws)] = True
        elif heldout.all():
            heldout[np.argmax(draws)] = False
    elif heldout.all():
        heldout[:] = False
    return heldout


def draw(seed: int, name: str) -> float:
    """A number in [0, 1) that (seed, name) decides: below `heldout_fraction` is held out."""
    data = f"{seed}\0{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") / 2**48


def _sample(
    documents: TextDocuments, use: BoolArray, *, seed: int, sample_bytes: int
) -> Iterator[str]:
    """Texts of documents with `use`, in seeded order, of about `sample_bytes` together."""
    rows: IntArray = np.flatnonzero(use)
    missing = sample_bytes if rows.size else 0
    for row in rows[permute(np.arange(rows.size), max(1, rows.size), seed)]:
        if missing <= 0:
            return
        text = documents.read(int(row))
        if not isinstance(text, Skip):
            part = text[:missing]
            missing -= len(part.encode())
            yield part


def train_bpe(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """A byte-level BPE with `<|endoftext|>`, which never matches special tokens in text."""
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
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _write(
    documents: TextDocuments,
    prefix: str | Path,
    tokenizer: "Tokenizer",
    heldout: BoolArray,
    fingerprint: str,
    progress: Progress | None,
) -> None:
    train_prefix, heldout_prefix, tokenizer_path = _paths(prefix)
    write_text(tokenizer_path, tokenizer.to_str(pretty=True))
    skipped: Counter[Skip] = Counter()
    about: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_id": tokenizer.token_to_id(END_OF_TEXT),
        "tokenizer": tokenizer_path.name,
        "source": documents.description,
        "preparation": {
            "fingerprint": fingerprint,
            "tokenizer_checksum": file_checksum(tokenizer_path),
        },
    }
    done, total = 0, sum(documents.sizes)
    with ExitStack() as stack:
        sides = [
            stack.enter_context(TokenStoreWriter(side, **about))
            for side in (train_prefix, heldout_prefix)
        ]
        for rows, texts in _chunks(read_texts(documents, skipped=skipped), documents.sizes):
            for row, ids in zip(rows, encode_texts(tokenizer, texts), strict=True):
                sides[int(heldout[row])].add(np.append(ids, about["eos_id"]))
            done += sum(documents.sizes[row] for row in rows)
            if progress:
                progress(done, total)
        if progress:
            progress(total, total)  # files that had to be left out were not counted above
        counts = {str(reason): count for reason, count in skipped.items()}
        for writer in sides:
            writer.preparation["skipped"] = counts
        if not sides[0].num_documents:
            raise ValueError(
                f"no document of {documents.description} is left for training (left out: "
                f"{counts}); lower data.heldout_fraction or add documents"
            )


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file that is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _chunks(
    texts: Iterable[tuple[int, str]], sizes: Sequence[int]
) -> Iterator[tuple[list[int], list[str]]]:
    """Documents in groups of about `_CHUNK_BYTES`; a longer document ends its group."""
    rows: list[int] = []
    group: list[str] = []
    num_bytes = 0
    for row, text in texts:
        rows.append(row)
        group.append(text)
        num_bytes += sizes[row]
        if num_bytes >= _CHUNK_BYTES:
            yield rows, group
            rows, group, num_bytes = [], [], 0
    if rows:
        yield rows, group


def encode_texts(tokenizer: "Tokenizer", texts: list[str]) -> Iterator[TokenArray]:
    """Token ids of each text. A long text is encoded in parts that end with a line where it can.

    An encoding takes some 100 bytes a token until it is freed, hence parts and groups of parts.
    """
    short = [text for text in texts if len(text) <= _PART_CHARACTERS]
    encoded = iter(_ids(tokenizer, short))
    for text in texts:
        if len(text) <= _PART_CHARACTERS:
            yield next(encoded)
        else:
            parts = list(_parts(text))
            groups = [parts[i : i + 4] for i in range(0, len(parts), 4)]
            yield np.concatenate([ids for group in groups for ids in _ids(tokenizer, group)])


def _ids(tokenizer: "Tokenizer", texts: list[str]) -> list[TokenArray]:
    encodings: Any = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.int64) for encoding in encodings]


def _parts(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + _PART_CHARACTERS
        if stop < len(text):
            stop = (text.rfind("\n", start, stop) + 1) or stop
        yield text[start:stop]
        start = stop
