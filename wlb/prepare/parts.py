"""Encode shards into parts, and merge parts into the final stores.

A part is what one shard becomes: a store of training documents, a store of held-out documents, and
a summary. The summary is written last, so a part with a summary is complete. Merging reads parts in
order, so the result does not depend on which process made which part.
Whether a record is held out depends only on its name: `draw` maps (seed, name) to a number in
[0, 1), and the record is held out if the number is below the held-out fraction. If that would leave
the training store or the held-out store empty, the record whose number is closest to the fraction
moves to the other store.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from wlb.data.store import TokenStore, TokenStoreWriter
from wlb.data.targets import spans_of
from wlb.data.verify import check_store
from wlb.plan import BoolArray, UserError
from wlb.plan.read_file import malformed, read_object
from wlb.plan.schema import COUNT, OTHERS, Schema, check_schema
from wlb.prepare.encode import Encoded, EncoderChoice, RecordEncoder, Vocabulary
from wlb.prepare.files import write_text
from wlb.prepare.records import AnyShard, BadRecord, OnError, RecordPosition, read_shard
from wlb.prepare.request import Status
from wlb.prepare.text import MOST_EXAMPLES, Skip

SIDES = ("train", "heldout")
"""Names of the two stores of a part. The argument `side` of functions is an index into this."""
NO_ERROR = (Skip.EMPTY, Skip.BLANK_LINE)
"""Reasons for which records are always skipped without an error, because no text is lost."""
# A worker checks after this many records whether it should stop.
_STOP_EVERY = 64


class Stopped(Exception):
    """Raised in a worker to stop encoding its shard, because another shard failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJob:
    """Settings that all shards of a preparation share."""

    folder: str  # where parts are written
    choice: EncoderChoice  # the kind of records, and how they are encoded
    tokenizer: str  # path of a tokenizer.json, "" for bytes
    vocabulary: Vocabulary
    text_key: str  # a text file or line becomes a record that has its text under this key
    heldout_fraction: float  # share of the records that are held out
    seed: int  # decides which records are held out
    on_error: OnError  # what to do with a record that is not a document

    def open_encoder(self) -> RecordEncoder:
        """Return an encoder for the records of the shards. Each worker calls this once."""
        return self.choice.open(self.tokenizer, self.vocabulary)

    def prefix(self, shard: int, side: int) -> Path:
        """Return the path, without suffixes, of a store into which a shard is encoded.

        Args:
            shard: Number of the shard.
            side: 0 for the store of training documents, 1 for that of held-out documents.
        """
        return Path(self.folder, f"{shard:06}-{SIDES[side]}")

    def summary_path(self, shard: int) -> Path:
        """Return the path of the summary that is written when a shard is encoded."""
        return Path(self.folder, f"{shard:06}.json")


# A record, as three values: its number from `draw`, the index of its first document in the part's
# store, and its number of documents.
_Nearest = tuple[float, int, int]
_SUMMARY: Schema = {
    "shard": COUNT,
    "size": COUNT,
    "num_documents": [COUNT],
    "num_tokens": [COUNT],
    "num_unknown": COUNT,
    "counts": {OTHERS: COUNT},
    "skipped": {OTHERS: COUNT},
    "examples": {OTHERS: [str]},
    "nearest": [([float], None)],
}


@dataclass(slots=True, kw_only=True)
class PartSummary:
    """Statistics of one part, which are collected while its shard is encoded."""

    shard: int  # number of the shard
    size: int  # bytes of input in the shard
    # Each list has one number for the training store and one for the held-out store.
    num_documents: list[int] = field(default_factory=lambda: [0, 0])
    num_tokens: list[int] = field(default_factory=lambda: [0, 0])
    num_unknown: int = 0  # tokens that stand for unknown characters
    counts: Counter[str] = field(default_factory=Counter[str])  # sums of `Encoded.counts`
    skipped: Counter[str] = field(default_factory=Counter[str])  # skipped records, by reason
    # Descriptions of the first skipped records, by reason.
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    # For each of the two stores, the record that was nearest to being put into the other one, by
    # its random number from `draw`; None for a store without records. If the other store would be
    # empty, this record moves there (`moved_record`).
    nearest: list[_Nearest | None] = field(default_factory=lambda: [None, None])

    @classmethod
    def read(cls, path: Path) -> "PartSummary":
        """Read a summary from a JSON file; raise UserError if the file is damaged."""
        remedy = "prepare again with --overwrite"
        with malformed(path, remedy):
            data = read_object(path)
            check_schema(data, _SUMMARY, path, remedy=remedy)
            return cls(**{f.name: data[f.name] for f in fields(cls)})

    def write(self, path: Path) -> None:
        """Write the summary as JSON."""
        write_text(path, json.dumps({f.name: getattr(self, f.name) for f in fields(self)}))

    def leave_out(self, job: PartJob, position: RecordPosition, bad: BadRecord) -> None:
        """Count a record that is not a document as skipped, or raise UserError.

        Args:
            job: Settings of all shards, which say whether such records are errors.
            position: Where the record is in the inputs.
            bad: Why the record is not a document.
        """
        action, option = job.on_error, "--on-error"
        actions = job.choice.actions
        if bad.reason in actions:
            action, option = actions[bad.reason], f"--on-{bad.reason.replace('_', '-')}"
        if bad.reason not in NO_ERROR and action == OnError.FAIL:
            raise UserError(
                f"{position.describe()}: {bad}. Correct the record, or skip and count such "
                f"records with {option} skip"
            )
        self.skipped[str(bad.reason)] += 1
        shown = self.examples.setdefault(str(bad.reason), [])
        if len(shown) < MOST_EXAMPLES:
            shown.append(f"{position.describe()}: {bad}")


def encode_shard(
    job: PartJob,
    encoder: RecordEncoder,
    number: int,
    shard: AnyShard,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> PartSummary:
    """Encode a shard and write the result as a part: two stores and a summary.

    Args:
        job: Settings of all shards.
        encoder: The opened encoder.
        number: Number of the shard.
        shard: The part of the input to read.
        is_stopped: Returns whether to stop early, because another shard failed.

    Raises:
        UserError: A record is not a document, and `job` says that such records are errors.
        Stopped: `is_stopped` returned True.
    """
    summary = PartSummary(shard=number, size=shard.size)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                TokenStoreWriter(job.prefix(number, side), vocab_size=job.vocabulary.size)
            )
            for side in range(2)
        ]
        for position, documents in _records(job, encoder, shard, summary, is_stopped):
            drawn = draw(job.seed, position.name)
            side = int(drawn < job.heldout_fraction)
            # Training records have numbers above the held-out fraction, so the lowest number is the
            # closest. Held-out records have numbers below the fraction, so the highest number is.
            at = summary.nearest[side]
            if at is None or (drawn > at[0] if side else drawn < at[0]):
                summary.nearest[side] = (drawn, writers[side].num_documents, len(documents))
            for encoded in documents:
                summary.num_unknown += encoded.num_unknown
                summary.counts.update(encoded.counts)
                add(writers[side], encoded, position)
        summary.num_documents = [writer.num_documents for writer in writers]
        summary.num_tokens = [writer.num_tokens for writer in writers]
    summary.write(job.summary_path(number))
    return summary


def _records(
    job: PartJob,
    encoder: RecordEncoder,
    shard: AnyShard,
    summary: PartSummary,
    is_stopped: Callable[[], bool],
) -> Iterator[tuple[RecordPosition, Sequence[Encoded]]]:
    """Yield the position and the encoded documents of each record of a shard.

    Args:
        job: Settings of all shards.
        encoder: The opened encoder.
        shard: The part of the input to read.
        summary: Counts the records that are not documents and are skipped. Updated in place.
        is_stopped: Returns whether to stop early, because another shard failed.

    Raises:
        UserError: A record is not a document, and `job` says that such records are errors.
        Stopped: `is_stopped` returned True.
    """
    records = read_shard(shard, text_key=job.text_key, columns=job.choice.columns)
    for number, (position, record) in enumerate(records):
        if number % _STOP_EVERY == 0 and is_stopped():
            raise Stopped
        try:
            if isinstance(record, BadRecord):
                raise record
            made = encoder.encode(record)
        except BadRecord as bad:
            summary.leave_out(job, position, bad)
            continue
        if not made:
            raise UserError(
                f"{position.describe()}: RecordEncoder.encode must return at least one document or "
                f"raise BadRecord, but returned none"
            )
        yield position, made


def add(writer: TokenStoreWriter, encoded: Encoded, position: RecordPosition) -> None:
    """Append a document to a store. An error message names the document's place in the inputs."""
    try:
        writer.add(encoded.tokens, encoded.trained)
    except UserError as error:
        raise UserError(f"{position.describe()}: {error}") from None


def find_part(job: PartJob, shard: int) -> PartSummary | None:
    """Return the summary of a shard's part, or None if the part is missing or damaged."""
    try:
        summary = PartSummary.read(job.summary_path(shard))
        for side in range(2):
            store = TokenStore(job.prefix(shard, side))
            if store.info is None or store.num_documents != summary.num_documents[side]:
                return None
            check_store(store)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return summary


def remove_unfinished(folder: Path, *, prefix: str = "") -> None:
    """Remove temporary files and folders that killed processes left in `folder`.

    Args:
        folder: The folder.
        prefix: Remove only those that were to become a file or folder whose name begins with this.
    """
    for entry in os.scandir(folder):
        if entry.name.startswith(f".{prefix}") and entry.name.endswith(".tmp"):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def draw(seed: int, name: str) -> float:
    """Return a number in [0, 1), which is a hash of a seed and the name of a record.

    The record is held out if this number is below the held-out fraction.
    """
    data = f"{seed}\0{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") / 2**48


def heldout_rows(names: Iterable[str], *, fraction: float, seed: int) -> BoolArray:
    """Decide which documents are held out, by hashing their names.

    If there are at least two documents, at least one is held out and at least one is trained
    (unless `fraction` is 0). A single document is trained.

    Args:
        names: Names of the documents.
        fraction: Share of the documents to hold out.
        seed: Seed of the choice.

    Returns:
        A mask of the held-out documents, shape [num_documents].
    """
    draws = np.array([draw(seed, name) for name in names])
    heldout = draws < fraction
    if heldout.size <= 1:
        heldout[:] = False
    elif fraction > 0 and not heldout.any():
        heldout[np.argmin(draws)] = True
    elif heldout.all():
        heldout[np.argmax(draws)] = False
    return heldout


def moved_record(
    summaries: Sequence[PartSummary], *, fraction: float
) -> tuple[int, int, range] | None:
    """Find the record to move between training and held-out store so that neither is empty.

    Each record has a random number in [0, 1) (`draw`), and is held out if that is below `fraction`.
    The record whose number is closest to `fraction` moves, with all its documents.

    Args:
        summaries: Summaries of all parts.
        fraction: Share of the records that is held out.

    Returns:
        The record's shard, the store that it leaves (0 = training, 1 = held-out), and the indices
        of its documents there. None if no record must move. Also None if only one record has
        documents and it is in the training store, because a run needs training documents.
    """
    totals = [sum(summary.num_documents[side] for summary in summaries) for side in range(2)]
    if all(totals) or not any(totals) or fraction == 0:
        return None
    side = int(totals[1] > 0)
    found = [(n[0], s.shard, n[1], n[2]) for s in summaries if (n := s.nearest[side]) is not None]
    _, shard, first, num = max(found) if side else min(found)
    if side == 0 and totals[0] == num:
        return None
    return shard, side, range(first, first + num)


def merge_parts(
    job: PartJob,
    parts: Sequence[PartSummary],
    prefixes: Sequence[str],
    about: dict[str, Any],
    *,
    report: Callable[[Status], None],
) -> None:
    """Write the final stores from the parts, in the order of the parts.

    Args:
        job: Settings of the preparation.
        parts: Summaries of the parts, which are the stores that workers wrote; in order.
        prefixes: Prefix of the training store, and of the held-out store if there is one.
        about: Other keyword arguments of `TokenStoreWriter`, for both stores.
        report: Called with the progress after each part.
    """
    vocabulary = job.vocabulary
    about = {"vocab_size": vocabulary.size, "eos_id": job.choice.eos_id(vocabulary), **about}
    moved = moved_record(parts, fraction=job.heldout_fraction)
    total, done = sum(part.size for part in parts), 0
    # ExitStack closes the held-out store first, so the training store becomes visible last. If the
    # training store exists, both stores are complete.
    with ExitStack() as stack:
        writers = [stack.enter_context(TokenStoreWriter(prefix, **about)) for prefix in prefixes]
        for part in parts:
            for side in range(2):
                store = TokenStore(job.prefix(part.shard, side))
                for row in range(store.num_documents):
                    is_moved = moved is not None and moved[:2] == (part.shard, side)
                    target = 1 - side if is_moved and row in moved[2] else side
                    trained = spans_of(store.trained(row)) if store.has_targets else None
                    writers[target].add(store.read(row), trained)
            done += part.size
            report(Status(stage="merge", size=total, done=done))


def totals(
    summaries: Sequence[PartSummary], left_out: Mapping[str, int], unreadable: Sequence[str] = ()
) -> dict[str, Any]:
    """Add up the statistics of all parts of a store.

    Args:
        summaries: Summaries of all parts.
        left_out: Number of skipped input files, by reason.
        unreadable: The first files that cannot be read, each with the reason.

    Returns:
        The fields skipped, examples, num_unknown and counts of a `StoreReport`.
    """
    skipped = Counter[str](left_out)
    counts: Counter[str] = Counter()
    examples = {str(Skip.UNREADABLE): list(unreadable)} if unreadable else dict[str, list[str]]()
    for summary in summaries:
        skipped.update(summary.skipped)
        counts.update(summary.counts)
        for reason, shown in summary.examples.items():
            examples[reason] = (examples.get(reason, []) + shown)[:MOST_EXAMPLES]
    return {
        "skipped": dict(sorted(skipped.items())),
        "examples": dict(sorted(examples.items())),
        "num_unknown": sum(summary.num_unknown for summary in summaries),
        "counts": dict(sorted(counts.items())),
    }
