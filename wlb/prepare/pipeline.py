"""Turn input files into a token store with several processes, which is what `wlb prepare` does.

1. List the inputs and divide them into shards (`records.py`).
2. Copy the tokenizer into `<out>.parts`, or train a BPE there on training records (`tokenizer.py`).
3. Encode every shard into a part, which is a small pair of stores (`parts.py`).
4. Merge the parts in order into the stores `<out>` and `<out>-heldout`.

Guarantees: the stores are the same for any number of processes. An interrupted call can be resumed,
and never leaves an incomplete store.
Cost: each process keeps one document in memory. Until the parts are removed at the end, the tokens
are on disk twice.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wlb.data.folder import refuse_nowhere
from wlb.data.store import TokenStore, store_path
from wlb.plan import UserError
from wlb.prepare.encode import BPE, EncoderChoice, TextChoice
from wlb.prepare.files import locked, locked_folder, write_text
from wlb.prepare.manifest import (
    MANIFEST,
    Manifest,
    check_unchanged,
    is_manifest,
    manifest_digest,
    manifest_of,
    open_manifest,
    remove_parts,
)
from wlb.prepare.parts import (
    PartJob,
    PartSummary,
    find_part,
    merge_parts,
    remove_unfinished,
    totals,
)
from wlb.prepare.records import (
    AnyShard,
    FileKind,
    InputFile,
    OnError,
    check_columns,
    list_inputs,
    list_shards,
)
from wlb.prepare.request import (
    TEXT_KEY,
    PrepareOptions,
    Status,
    StoreReport,
    arguments_of,
    report_of,
)
from wlb.prepare.text import Skip
from wlb.prepare.tokenizer import prepare_tokenizer
from wlb.prepare.workers import encode_shards

# The input is divided into about 256 shards, so that all workers have work and little work is lost
# if a call is interrupted. Each shard has from 1 to 64 MiB of input.
_SHARD_BYTES = (1 << 20, 1 << 26)
_NUM_SHARDS = 256

Progress = Callable[[Status], None]


def prepare_store(
    options: PrepareOptions,
    *,
    encoder: EncoderChoice | None = None,
    progress: Progress | None = None,
) -> StoreReport:
    """Write the store `options.out`, unless it exists already, and return its report.

    If an earlier call with equal arguments was interrupted, it is resumed.

    Args:
        options: The inputs, the store to write, and all settings.
        encoder: How to encode records that are not plain text, such as `ChatChoice`. The options
            policy, text_key and text_unit do not apply to such records. None means plain text.
        progress: Called with the progress after each step.

    Raises:
        UserError: An input is bad, an interrupted call had other arguments, or `options.out` is a
            store made with other arguments and overwrite is not set.
        RuntimeError: A worker process died. Another call resumes the work.
    """
    began = time.perf_counter()
    refuse_nowhere(Path(options.out).parent)
    for folder in filter(Path.is_dir, map(Path, options.inputs)):
        if folder.resolve() in Path(os.path.realpath(options.out)).parents:
            raise UserError(
                f"--out {options.out} is in the input folder {folder}, so the next call would read "
                f"the store as input; give --out a path outside of the input folders"
            )
    unit, out = options.text_unit, options.out
    files, skipped, unreadable = list_inputs(options.inputs, text_unit=unit, out=out)
    if options.on_error == OnError.FAIL and unreadable:
        raise _unreadable(unreadable, skipped[Skip.UNREADABLE])
    if not files:
        raise UserError(
            f"all files in {', '.join(options.inputs)} are empty; give files with text or records"
        )
    if encoder is None and options.text_key != TEXT_KEY and all(f.kind.is_text for f in files):
        raise UserError(
            f"--text-key {options.text_key} applies only to files of records (.jsonl, .ndjson, "
            f".json, .parquet), but all {len(files)} files in {', '.join(options.inputs)} are read "
            f"as plain text; leave out --text-key or, if the files have records, give them one of "
            "these suffixes"
        )
    arguments = arguments_of(options)
    if encoder is not None:
        arguments["encoder"] = encoder.arguments
    choice = encoder or TextChoice(
        policy=options.policy, text_key=options.text_key, in_pieces=options.tokenizer == BPE
    )
    check_columns(files, choice.columns)
    preparation = _Preparation(
        options=options,
        choice=choice,
        files=files,
        left_out={str(reason): count for reason, count in skipped.items()},
        unreadable=unreadable,
        manifest=manifest_of(arguments, files),
        report=progress or (lambda _: None),
    )
    with locked(store_path(options.out, ".lock")):
        found = preparation.finished()
        if found is None:
            preparation.check_heldout()
        if found is None or preparation.parts.exists():
            # Lock the folder of parts too. If somebody removed the lock file while another call was
            # running, this process has locked a new file.
            with locked_folder(preparation.parts):
                found = preparation.find_or_make()
    return replace(found, time_s=time.perf_counter() - began)


def _unreadable(examples: Sequence[str], num: int) -> UserError:
    more = f" and {num - len(examples)} more" if num > len(examples) else ""
    return UserError(
        f"cannot read {', '.join(examples)}{more}; correct or remove these files, or use "
        f"--on-error skip to skip and count them"
    )


def _mark_of(prefix: str) -> str | None:
    """Return the hash of the arguments and inputs of which a store was made; None if unknown."""
    try:
        info = TokenStore(prefix).info
    except UserError:
        return None
    return None if info is None else info.preparation.get("manifest")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preparation:
    """The settings and inputs of one call of `prepare_store`, and its steps as methods."""

    options: PrepareOptions
    choice: EncoderChoice
    files: Sequence[InputFile]
    left_out: dict[str, int]  # number of skipped files (such as empty ones), by reason
    unreadable: Sequence[str]  # the first files that cannot be read, each with the reason
    manifest: Manifest  # arguments and inputs, to recognise an equal call
    report: Progress  # called with the progress

    def check_heldout(self) -> None:
        """Raise UserError if there is a store `<out>-heldout` that was not made with `<out>`."""
        out, heldout = self.options.out, f"{self.options.out}-heldout"
        if not store_path(heldout, ".idx").exists():
            return
        ours = {_mark_of(out)} - {None}
        if self.options.heldout_fraction:
            ours.add(manifest_digest(self.manifest))
        if _mark_of(heldout) not in ours:
            raise UserError(
                f"a store at --out {out} would replace or remove the store {heldout}, which was "
                f"not made with it; give another --out, or move {heldout} away"
            )

    def finished(self) -> StoreReport | None:
        """Return the report of the finished store, or None if there is no store.

        Raises:
            UserError: There is a store that cannot be used or was made of other inputs or
                arguments, and overwrite is not set.
        """
        prefix = self.options.out
        if not store_path(prefix, ".idx").exists():
            return None
        heldout_prefix = f"{prefix}-heldout" if self.options.heldout_fraction else ""
        damage = ""
        try:
            stores = [TokenStore(p) for p in (prefix, heldout_prefix) if p]
        except UserError as error:
            stores, damage = [], str(error)
        mark = manifest_digest(self.manifest)
        infos = [store.info for store in stores if store.info is not None]
        if not infos or any(i.preparation.get("manifest") != mark for i in infos):
            if self.options.overwrite:
                return None
            what = (
                f"cannot be used ({damage})" if damage else "was made of other inputs or arguments"
            )
            raise UserError(
                f"the store {prefix} already exists and {what}; give another --out, or replace "
                f"the store with --overwrite"
            )
        size = sum(file.size for file in self.files)
        made = report_of(*stores, num_files=len(self.files), num_bytes=size)
        return replace(made, num_text_files=sum(file.kind.is_text for file in self.files))

    @property
    def parts(self) -> Path:
        """The folder `<out>.parts`, in which the encoded shards are kept until they are merged."""
        return store_path(self.options.out, ".parts")

    def find_or_make(self) -> StoreReport:
        """Return the store's report, after making the store unless another process just did."""
        if (found := self.finished()) is not None:
            self.tidy()
            return found
        num_shards, num_kept = self.make()
        if (found := self.finished()) is None:
            raise RuntimeError(
                f"another process removed or replaced the store {self.options.out} while wlb "
                f"prepared it; run the same command again"
            )
        return replace(found, num_shards=num_shards, num_kept=num_kept, reused=False)

    def tidy(self) -> None:
        """Remove the folder of parts, which is no longer needed once the store is finished.

        It is left over if a call was killed after finishing the store. A folder with another
        manifest belongs to other arguments or inputs, and stays.
        """
        folder = self.parts
        if is_manifest(folder / MANIFEST, self.manifest) or not any(folder.iterdir()):
            remove_parts(folder, with_manifest=True)

    def make(self) -> tuple[int, int]:
        """Encode each shard of the inputs into a part (`wlb.prepare.parts`), and merge the parts.

        Returns:
            The number of shards, and how many of them an interrupted call had already encoded.
        """
        # Step 1: empty or resume the folder of parts, and divide the input into shards.
        options, folder = self.options, self.parts
        is_begun = open_manifest(folder / MANIFEST, self.manifest, overwrite=options.overwrite)
        remove_unfinished(folder)
        for suffix in (".bin.", ".idx.", ".targets.", ".json.", "-heldout.", "-tokenizer."):
            remove_unfinished(folder.parent, prefix=f"{Path(options.out).name}{suffix}")
        size = sum(file.size for file in self.files)
        shard_bytes = options.shard_bytes or int(np.clip(size // _NUM_SHARDS, *_SHARD_BYTES))
        shards = list_shards(self.files, shard_bytes=shard_bytes)
        # Step 2: copy or train the tokenizer.
        self.report(Status(stage="tokenizer", size=size, done=0))
        try:
            tokenizer = prepare_tokenizer(options, self.choice, folder, shards)
            # Opening an encoder raises UserError if the tokenizer does not fit the records.
            self.choice.open(tokenizer.path, tokenizer.vocabulary)
            about = self.choice.about(tokenizer.path, tokenizer.vocabulary)
        except UserError:
            if not is_begun:
                # This call created the folder, so removing it loses no parts of an earlier call.
                remove_parts(folder, with_manifest=True)
            raise
        # Step 3: encode the parts. Step 4: merge them into the stores (`_publish`).
        job = PartJob(
            folder=str(folder),
            choice=self.choice,
            tokenizer=tokenizer.path,
            vocabulary=tokenizer.vocabulary,
            text_key=options.text_key,
            heldout_fraction=options.heldout_fraction,
            seed=options.seed,
            on_error=options.on_error,
        )
        made = encode_parts(job, shards, processes=options.processes, report=self.report)
        check_unchanged(self.files)
        about |= {"tokenizer_config": tokenizer.config} if tokenizer.config else {}
        about["tokenizer_checksum"] = tokenizer.checksum
        self._publish(job, [summary for summary, _ in made], about)
        remove_parts(folder, with_manifest=True)
        return len(shards), sum(existed for _, existed in made)

    def _publish(
        self, job: PartJob, parts: Sequence[PartSummary], tokenizer: dict[str, Any]
    ) -> None:
        """Write the tokenizer's file, and then merge the parts into the final stores.

        Args:
            job: Settings of the preparation.
            parts: Summaries of the parts, which are the stores that workers wrote; in order.
            tokenizer: Entries about the tokenizer for `StoreInfo.preparation`.
        """
        options, left_out = self.options, totals(parts, self.left_out, self.unreadable)
        inputs = ", ".join(options.inputs)
        if not any(sum(part.num_documents) for part in parts):
            if not left_out["skipped"]:
                is_table = all(file.kind == FileKind.PARQUET for file in self.files)
                what = "rows" if is_table else "records"
                raise UserError(f"{inputs} has no {what}; give files that have {what}")
            raise UserError(
                f"{inputs} has no document, because all records were skipped: "
                f"{left_out['skipped']}, for example {left_out['examples']}; correct the records"
            )
        name = None
        if job.tokenizer:
            path = store_path(options.out, "-tokenizer.json")
            write_text(path, Path(job.tokenizer).read_text("utf-8"))
            name = path.name
        preparation = {
            "manifest": manifest_digest(self.manifest),
            **tokenizer,
            "arguments": self.manifest["arguments"],
            "num_files": len(self.manifest["inputs"]),
            **left_out,
        }
        heldout = f"{options.out}-heldout"
        if not options.heldout_fraction:
            # Remove the held-out store that an older store with this prefix may have had.
            for suffix in (".idx", ".bin", ".json", ".targets"):
                store_path(heldout, suffix).unlink(missing_ok=True)
        prefixes = [options.out] + ([heldout] if options.heldout_fraction else [])
        about = {"tokenizer": name, "source": inputs, "preparation": preparation}
        merge_parts(job, parts, prefixes, about, report=self.report)


def encode_parts(
    job: PartJob,
    shards: Sequence[AnyShard],
    *,
    processes: int,
    in_threads: bool = False,
    report: Progress,
) -> list[tuple[PartSummary, bool]]:
    """Encode all shards whose parts do not exist yet.

    Args:
        job: Settings of all shards.
        shards: The shards, in order.
        processes: Number of worker processes or threads.
        in_threads: Whether the workers are threads instead of processes.
        report: Called with the progress after each shard.

    Returns:
        For each shard, in order, the summary of its part, and whether the part existed already.
    """
    made: dict[int, tuple[PartSummary, bool]] = {}
    at = Status(stage="encode", size=sum(shard.size for shard in shards), done=0)

    def done(summary: PartSummary, existed: bool) -> None:
        nonlocal at
        made[summary.shard] = (summary, existed)
        at = replace(
            at,
            done=at.done + summary.size,
            num_documents=at.num_documents + sum(summary.num_documents),
            skipped=at.skipped + sum(summary.skipped.values()),
        )
        report(at)

    for number in range(len(shards)):
        if (summary := find_part(job, number)) is not None:
            done(summary, True)
    missing = [number for number in range(len(shards)) if number not in made]
    encoding = encode_shards(job, shards, missing, processes=processes, in_threads=in_threads)
    # Closing the generator stops its workers if this loop ends with an exception.
    with closing(encoding) as summaries:
        for summary in summaries:
            done(summary, False)
    return [made[number] for number in range(len(shards))]
