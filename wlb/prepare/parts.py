"""Parts: the pair of stores (train, held-out) that a shard becomes, and their merging.

A part is complete when its summary exists, which is written after both of its stores. Merging reads
parts in order, so the result does not depend on who made which part or when. A record is held out
where a hash of (seed, name) is below the fraction; where a fraction above 0 leaves one side empty,
the record nearest to the limit changes sides.
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
NO_ERROR = (Skip.EMPTY, Skip.BLANK_LINE)
"""Reasons that never stop a preparation, whatever --on-error is, because no text is lost."""
_STOP_EVERY = 64


class Stopped(Exception):
    """A worker left its shard because the preparation stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJob:
    """Settings that all shards of a preparation share.

    folder: where parts are written. tokenizer: a path, or "" for raw bytes. text_key: the key that
    the text of a file or line gets.
    """

    folder: str
    choice: EncoderChoice
    tokenizer: str
    vocabulary: Vocabulary
    text_key: str
    heldout_fraction: float
    seed: int
    on_error: OnError

    def open_encoder(self) -> RecordEncoder:
        return self.choice.open(self.tokenizer, self.vocabulary)

    def prefix(self, shard: int, side: int) -> Path:
        return Path(self.folder, f"{shard:06}-{SIDES[side]}")

    def summary_path(self, shard: int) -> Path:
        return Path(self.folder, f"{shard:06}.json")


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
    """The outcome of a shard, filled in while it is encoded.

    num_documents, num_tokens: of train and held-out. counts: sums of `Encoded.counts`. examples:
    the first records left out, by reason. nearest: for each side (draw, first row, number of rows)
    of the record nearest to the held-out limit.
    """

    shard: int
    size: int
    num_documents: list[int] = field(default_factory=lambda: [0, 0])
    num_tokens: list[int] = field(default_factory=lambda: [0, 0])
    num_unknown: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    nearest: list[_Nearest | None] = field(default_factory=lambda: [None, None])

    @classmethod
    def read(cls, path: Path) -> "PartSummary":
        remedy = "prepare again with --overwrite"
        with malformed(path, remedy):
            data = read_object(path)
            check_schema(data, _SUMMARY, path, remedy=remedy)
            return cls(**{f.name: data[f.name] for f in fields(cls)})

    def write(self, path: Path) -> None:
        write_text(path, json.dumps({f.name: getattr(self, f.name) for f in fields(self)}))

    def leave_out(self, job: PartJob, position: RecordPosition, bad: BadRecord) -> None:
        """Counts a record that is no document, or raises UserError with its place."""
        action, option = job.on_error, "--on-error"
        actions = job.choice.actions
        if bad.reason in actions:
            action, option = actions[bad.reason], f"--on-{bad.reason.replace('_', '-')}"
        if bad.reason not in NO_ERROR and action == OnError.FAIL:
            raise UserError(
                f"{position.spoken()}: {bad}. Correct it, or leave out and count such records "
                f"with {option} skip"
            )
        self.skipped[str(bad.reason)] += 1
        shown = self.examples.setdefault(str(bad.reason), [])
        if len(shown) < MOST_EXAMPLES:
            shown.append(f"{position.spoken()}: {bad}")


def encode_shard(
    job: PartJob,
    encoder: RecordEncoder,
    number: int,
    shard: AnyShard,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> PartSummary:
    """Writes the part of shard `number`; UserError for a bad record unless those are skipped."""
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
    """(position, its documents) of the records that are not left out."""
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
            raise UserError(f"{position.spoken()}: the encoder gave neither document nor reason")
        yield position, made


def add(writer: TokenStoreWriter, encoded: Encoded, position: RecordPosition) -> None:
    """Appends a document; a UserError of the store says where the document came from."""
    try:
        writer.add(encoded.tokens, encoded.trained)
    except UserError as error:
        raise UserError(f"{position.spoken()}: {error}") from None


def find_part(job: PartJob, shard: int) -> PartSummary | None:
    """The summary of a part that is complete and matches its checksums; None if it must be made."""
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
    """Removes temporary files and folders of names that start with `prefix`, left by killed
    processes.
    """
    for entry in os.scandir(folder):
        if entry.name.startswith(f".{prefix}") and entry.name.endswith(".tmp"):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def draw(seed: int, name: str) -> float:
    """A number in [0, 1) that (seed, name) decides: below the fraction is held out."""
    data = f"{seed}\0{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big") / 2**48


def heldout_rows(names: Iterable[str], *, fraction: float, seed: int) -> BoolArray:
    """Mask of the held-out documents, bool [num_documents]; a single document is trained."""
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
    """(shard, side, rows) of the record that changes sides so that neither side is empty.

    It is the one nearest to the limit, with all its documents; None where both sides have documents
    or the only record is in the training store.
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
    """Writes the stores `prefixes` (train and held-out, or train alone) from the parts in order.

    about: keywords of `TokenStoreWriter` besides those that the job knows.
    """
    vocabulary = job.vocabulary
    about = {"vocab_size": vocabulary.size, "eos_id": job.choice.eos_id(vocabulary), **about}
    moved = moved_record(parts, fraction=job.heldout_fraction)
    total, done = sum(part.size for part in parts), 0
    # ExitStack closes the held-out store first, so that the training store appears last and marks a
    # complete pair.
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
    summaries: Sequence[PartSummary], listed: Mapping[str, int], unreadable: Sequence[str] = ()
) -> dict[str, Any]:
    """Sums over all shards: counts, unknown tokens, records left out with first examples.

    listed: how many files the listing of inputs left out, by reason. unreadable: the first ones of
    those that cannot be read.
    """
    skipped = Counter[str](listed)
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
