"""`prepare`: text documents to two token stores in one call, for `data.corpus` of a training run.

It is the pipeline of `wlb prepare` for documents that are listed already: threads encode them with
a BPE of their own text. A second call with equal inputs (document names and sizes, Python version,
arguments) finds the stores without reading text. Processes that prepare the same prefix wait.
"""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from wlb.data.store import TokenStore, file_checksum, store_path
from wlb.plan import IntArray, UserError, check_at_least, check_between
from wlb.prepare.encode import END_OF_TEXT, TextChoice, Vocabulary
from wlb.prepare.files import found_or_made, write_text
from wlb.prepare.parts import PartJob, heldout_rows, merge_parts, remove_unfinished, totals
from wlb.prepare.pipeline import encode_parts
from wlb.prepare.records import OnError, document_shards
from wlb.prepare.request import Status, StoreReport, report_of
from wlb.prepare.text import Skip, TextDocuments, describe_empty
from wlb.prepare.tokenizer import sample_texts, train_bpe

_FORMAT = 1
_NUM_BYTES = 256
_SHARD_BYTES = 1 << 22

Progress = Callable[[int, int], None]
"""Called with (bytes of text done, bytes of text in all)."""


def prepare(
    documents: TextDocuments,
    prefix: str | Path,
    *,
    vocab_size: int,
    heldout_fraction: float,
    seed: int,
    sample_bytes: int = 2_000_000,
    progress: Progress | None = None,
) -> StoreReport:
    """Writes, or finds, `<prefix>-train`, `<prefix>-heldout` and `<prefix>-tokenizer.json`.

    UserError for arguments out of range and for documents without any UTF-8 text.
    """
    if vocab_size <= _NUM_BYTES:
        raise UserError(
            f"data.bpe_vocab_size = {vocab_size} must be above {_NUM_BYTES}: 256 bytes and "
            f"{END_OF_TEXT}"
        )
    check_between("data.heldout_fraction", heldout_fraction, 0, 1)
    check_at_least("sample_bytes", sample_bytes, 1)
    listing = [[name, size] for name, size in zip(documents.names, documents.sizes, strict=True)]
    asked = (vocab_size, heldout_fraction, seed, sample_bytes)
    inputs = json.dumps([_FORMAT, platform.python_version(), listing, *asked])
    fingerprint = hashlib.blake2b(inputs.encode(), digest_size=16).hexdigest()

    def make() -> None:
        for side in ("-train.", "-heldout.", "-tokenizer."):
            remove_unfinished(Path(prefix).parent, prefix=f"{Path(prefix).name}{side}")
        texts = _sample(documents, heldout_fraction, seed, sample_bytes)
        tokenizer = train_bpe(texts, vocab_size)
        path = _paths(prefix)[2]
        write_text(path, tokenizer.to_str(pretty=True))
        eos_id = tokenizer.token_to_id(END_OF_TEXT)
        assert eos_id is not None
        size = tokenizer.get_vocab_size()
        choice = TextChoice(in_pieces=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        ) as folder:
            job = PartJob(
                folder=folder,
                choice=choice,
                tokenizer=str(path),
                vocabulary=Vocabulary(size=size, eos_id=eos_id, special=(eos_id,)),
                text_key=choice.text_key,
                heldout_fraction=heldout_fraction,
                seed=seed,
                on_error=OnError.SKIP,
            )
            _write(documents, prefix, job, fingerprint=fingerprint, progress=progress)

    lock = store_path(prefix, ".lock")
    return found_or_made(lock, lambda: _find(documents, prefix, fingerprint), make)


def _paths(prefix: str | Path) -> tuple[str, str, Path]:
    return f"{prefix}-train", f"{prefix}-heldout", store_path(prefix, "-tokenizer.json")


def _find(documents: TextDocuments, prefix: str | Path, fingerprint: str) -> StoreReport | None:
    """The stores of `fingerprint` if all files are there and belong together."""
    *prefixes, tokenizer = _paths(prefix)
    try:
        stores = [TokenStore(side) for side in prefixes]
        checksum = file_checksum(tokenizer)
    except (UserError, OSError):  # absent, not complete, or of another preparation
        return None
    mark = {"fingerprint": fingerprint, "tokenizer_checksum": checksum}.items()
    if any(store.info is None or not mark <= store.info.preparation.items() for store in stores):
        return None
    return report_of(*stores, num_files=len(documents.sizes), num_bytes=sum(documents.sizes))


def _sample(
    documents: TextDocuments, heldout_fraction: float, seed: int, sample_bytes: int
) -> Iterator[str]:
    """Texts of training documents, whole but for the last one."""
    heldout = heldout_rows(documents.names, fraction=heldout_fraction, seed=seed)
    rows: IntArray = np.flatnonzero(~heldout)

    def texts(number: int) -> Iterator[str]:
        text = documents.read(int(rows[number]))
        if not isinstance(text, Skip):
            yield text

    return sample_texts(
        rows.size, texts, seed=seed, sample_bytes=sample_bytes, share_bytes=sample_bytes
    )


def _write(
    documents: TextDocuments,
    prefix: str | Path,
    job: PartJob,
    *,
    fingerprint: str,
    progress: Progress | None,
) -> None:
    """Encodes into the parts of `job` and merges them into the two stores."""
    *prefixes, tokenizer = _paths(prefix)

    def report(status: Status) -> None:
        if progress and status.stage == "encode":
            progress(status.done, status.size)

    shards = document_shards(documents, shard_bytes=_SHARD_BYTES)
    processes = os.cpu_count() or 1
    encoded = encode_parts(job, shards, processes=processes, in_threads=True, report=report)
    parts = [part for part, _ in encoded]
    listed = {str(reason): count for reason, count in documents.skipped.items()}
    skipped = totals(parts, listed)["skipped"]
    if not any(sum(part.num_documents) for part in parts):
        raise UserError(describe_empty(documents.description, skipped))
    about = {
        "tokenizer": tokenizer.name,
        "source": documents.description,
        "preparation": {
            "fingerprint": fingerprint,
            "tokenizer_checksum": file_checksum(tokenizer),
            "skipped": skipped,
        },
    }
    merge_parts(job, parts, prefixes, about, report=report)
