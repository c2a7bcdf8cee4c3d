"""Turn text documents into two token stores, for `data.corpus` of a training run.

`prepare` trains a BPE on the documents, encodes them in threads and writes a training store and a
held-out store. It uses the same steps as `wlb prepare`. A second call with equal inputs (names and
sizes of the documents, Python version, arguments) finds the stores without reading any text. If
several processes prepare the same prefix, one works and the others wait.
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
from wlb.prepare.files import find_or_make, write_text
from wlb.prepare.parts import PartJob, heldout_rows, merge_parts, remove_unfinished, totals
from wlb.prepare.pipeline import encode_parts
from wlb.prepare.records import OnError, document_shards
from wlb.prepare.request import Status, StoreReport, report_of
from wlb.prepare.text import Skip, TextDocuments, describe_empty
from wlb.prepare.tokenizer import sample_texts, train_bpe

# Increase this when equal arguments give different stores, so that old stores are not reused.
_FORMAT = 1
_NUM_BYTES = 256
_SHARD_BYTES = 1 << 22

Progress = Callable[[int, int], None]
"""Called with the bytes of text that are done, and the bytes of all text."""


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
    """Make the stores `<prefix>-train` and `<prefix>-heldout`, unless they exist already.

    Their tokenizer is a BPE in `<prefix>-tokenizer.json`.

    Args:
        documents: The text documents to encode.
        prefix: Path of the stores without the suffixes above.
        vocab_size: Vocabulary size of the BPE.
        heldout_fraction: Share of the documents that are held out.
        seed: Decides which documents are held out, and which text the BPE is trained on.
        sample_bytes: Bytes of text on which the BPE is trained.
        progress: Called during encoding; None = no calls.

    Raises:
        UserError: An argument is out of range, or no document has UTF-8 text.
    """
    if vocab_size <= _NUM_BYTES:
        raise UserError(
            f"data.bpe_vocab_size = {vocab_size} must be at least {_NUM_BYTES + 1}, for 256 bytes "
            f"and the special token {END_OF_TEXT}"
        )
    check_between("data.heldout_fraction", heldout_fraction, 0, 1)
    check_at_least("sample_bytes", sample_bytes, 1)
    listing = [[name, size] for name, size in zip(documents.names, documents.sizes, strict=True)]
    arguments = (vocab_size, heldout_fraction, seed, sample_bytes)
    inputs = json.dumps([_FORMAT, platform.python_version(), listing, *arguments])
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
    return find_or_make(lock, lambda: _find(documents, prefix, fingerprint), make)


def _paths(prefix: str | Path) -> tuple[str, str, Path]:
    """Return prefix of the training store, prefix of the held-out store, path of the tokenizer."""
    return f"{prefix}-train", f"{prefix}-heldout", store_path(prefix, "-tokenizer.json")


def _find(documents: TextDocuments, prefix: str | Path, fingerprint: str) -> StoreReport | None:
    """Return the report of the stores, or None if they must be made.

    Args:
        documents: The text documents of which the stores are made.
        prefix: Path of the stores without "-train" and "-heldout".
        fingerprint: Hash of the inputs and arguments. Stores with another hash are made again.
    """
    *prefixes, tokenizer = _paths(prefix)
    try:
        stores = [TokenStore(side) for side in prefixes]
        checksum = file_checksum(tokenizer)
    except (UserError, OSError):
        # The files do not exist, or are incomplete.
        return None
    mark = {"fingerprint": fingerprint, "tokenizer_checksum": checksum}.items()
    if any(store.info is None or not mark <= store.info.preparation.items() for store in stores):
        return None
    return report_of(*stores, num_files=len(documents.sizes), num_bytes=sum(documents.sizes))


def _sample(
    documents: TextDocuments, heldout_fraction: float, seed: int, sample_bytes: int
) -> Iterator[str]:
    """Yield texts of random training documents, `sample_bytes` in all; the last text is cut.

    Held-out documents are not read. `heldout_fraction` and `seed` decide which documents these are.
    """
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
    """Encode the documents into parts, and merge the parts into the two stores.

    Args:
        documents: The text documents.
        prefix: Path of the stores without "-train" and "-heldout".
        job: Settings of the encoding.
        fingerprint: Hash of the inputs and arguments, which the stores record.
        progress: Called during encoding; None = no calls.
    """
    *prefixes, tokenizer = _paths(prefix)

    def report(status: Status) -> None:
        if progress and status.stage == "encode":
            progress(status.done, status.size)

    shards = document_shards(documents, shard_bytes=_SHARD_BYTES)
    processes = os.cpu_count() or 1
    encoded = encode_parts(job, shards, processes=processes, in_threads=True, report=report)
    parts = [part for part, _ in encoded]
    left_out = {str(reason): count for reason, count in documents.skipped.items()}
    skipped = totals(parts, left_out)["skipped"]
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
