"""Reads a run's token stores completely during the first steps. A damaged store ends the run.

Opening a store does not read its tokens, and training reads them document by document. So without
this check, a flipped bit would go unnoticed, and so would a `.bin` file that was replaced by
another of equal size. Stores that wlb wrote have a description with checksums, which are compared
with the tokens.

The run also records the checksums in the file `stores.json` of its folder. When the run is resumed,
it reads only the stores whose files have changed since. Their tokens are compared with this record,
so that changes are noticed even in stores without a description. Only rank 0 reads.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from wlb.data import StoreName, TokenStore, check_store, stamps_of
from wlb.plan import UserError
from wlb.plan.read_file import read_object
from wlb.plan.schema import OTHERS, Schema, check_schema
from wlb.spec.blend import parse_blend
from wlb.train.checkpoint.folder import write_json
from wlb.train.hooks import ExecutedStep, Hook, RunContext

RECORD = "stores.json"
# Format of an entry of stores.json. It has the checksums of a store's tokens and targets, and the
# size and the time of the last change of each of the store's files.
_SUMS: Schema = {"tokens": str, "targets": (str, None), "stamps": {OTHERS: [int]}}
_AWAITED_BYTES = 1 << 30
"""If at most this many bytes are unread when a run ends, the run waits until they are read.

Reading 1 GiB takes about a second."""


class StoreCheck:
    """Reads token stores one after the other, checks them, and records their checksums in a file.

    Args:
        stores: Prefixes of the stores, by the store's use in the run, such as "train" (`uses_of`).
            A store is opened only when it is read.
        record: The file in which checksums are recorded.
        on_block: Function that is called after each block that was read. If it raises an exception,
            `run` ends.

    Attributes:
        skipped: Uses of the stores that an earlier start of the run has read and that have not
            changed since.
        total_bytes: Number of bytes to read in all stores.
        done_bytes: Number of bytes read so far.
    """

    def __init__(
        self, stores: dict[str, str], record: Path, on_block: Callable[[], None] = lambda: None
    ) -> None:
        self.record, self._on_block = record, on_block
        self.known: dict[str, Any] = _read(record)
        now = {use: stamps_of(prefix) for use, prefix in stores.items()}
        self.skipped = [u for u in stores if self.known.get(u, {}).get("stamps") == now[u]]
        self.stores = {u: prefix for u, prefix in stores.items() if u not in self.skipped}
        self.total_bytes = sum(now[use][".bin"][0] for use in self.stores)
        self.done_bytes = 0

    def run(self) -> None:
        """Read and check all stores, and record their checksums.

        Raises:
            UserError: If a store is damaged or has changed since the run began. The message names
                the first such store.
        """
        before = 0
        for use, prefix in self.stores.items():
            # Open each store only now, so that at most one index is in memory.
            store = TokenStore(prefix)
            sums = check_store(store, self._progress(before)).to_json()
            before = self.done_bytes
            known = self.known.get(use, {})
            # `check_store` can only compare with checksums in the store's description. For a store
            # without a description, compare with the checksum that the run recorded.
            if store.info is None and known and known["tokens"] != sums["tokens"]:
                raise UserError(
                    f"the tokens of {prefix} have changed since the run began: their "
                    f"checksum is {sums['tokens'][:16]}..., but {self.record} records "
                    f"{known['tokens'][:16]}...; restore the store, or start a new run"
                )
            self.known[use] = sums
            # Write another file and rename it, so that a killed process leaves no incomplete
            # record.
            written = self.record.with_name(f".{RECORD}.tmp")
            write_json(written, self.known)
            written.replace(self.record)

    def _progress(self, before: int) -> Callable[[int], None]:
        def count(done: int) -> None:
            self.done_bytes = before + done
            self._on_block()

        return count


class VerifyStores(Hook):
    """Checks the run's token stores in a thread during the first steps. Only rank 0 has this hook.

    If the thread has found a damaged store, the run ends before it saves its next checkpoint.
    """

    def __init__(self, train: StoreName, heldout: str) -> None:
        self._uses = uses_of(train, heldout)
        self._check: StoreCheck | None = None
        self._closed = threading.Event()
        self._problem: Exception | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._read, name="read stores", daemon=True)

    def begin(self, run: RunContext) -> None:
        """Start the thread that reads all stores that have changed since they were last read."""
        record = run.job.directory / RECORD
        self._check = StoreCheck(self._uses, record, self._end_if_closed)
        for use in self._check.skipped:
            run.report.say(
                f"token stores: the {use} store is unchanged since it was last read, as {RECORD} "
                "records, so it is not read again"
            )
        if self._check.stores:
            size = decimal(self._check.total_bytes)
            run.report.say(f"token stores: checking {size} while the first steps run")
            self._thread.start()
        else:
            self._is_reported = True

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        """When all stores are read, say that they are intact; raise UserError if one is damaged."""
        self._report_if_done(run)

    def end(self, run: RunContext) -> None:
        """Say that all stores are intact, or warn that not all are read yet.

        Raises:
            UserError: If a store is damaged.
        """
        check = self._check
        if check is None or self._is_reported:
            return
        if check.total_bytes - check.done_bytes <= _AWAITED_BYTES:
            self._thread.join()
        self._report_if_done(run)
        if not self._is_reported:
            run.report.say(
                "WARNING: token stores: training ended after only "
                f"{decimal(check.done_bytes)} of {decimal(check.total_bytes)} were "
                "checked; run `wlb prepare --verify PREFIX` to check a whole store"
            )

    def close(self) -> None:
        """End the reading thread."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _end_if_closed(self) -> None:
        """Raise InterruptedError, which ends the reading thread, if the run has ended."""
        if self._closed.is_set():
            raise InterruptedError

    def _report_if_done(self, run: RunContext) -> None:
        """If the reading thread has ended, say that all stores are intact, or raise UserError."""
        if self._is_reported or self._thread.is_alive():
            return
        self._is_reported = True
        if self._problem is not None:
            raise UserError(
                f"token stores: {self._problem}. The steps trained so far "
                "may have used damaged data. Restore the store, then start the run "
                "again from the beginning or from a checkpoint that you trust"
            ) from self._problem
        run.report.say("token stores: all are read, and none is damaged")

    def _read(self) -> None:
        """Read and check all stores. The reading thread runs this function."""
        assert self._check is not None
        try:
            self._check.run()
        except InterruptedError:
            return
        # Store the error, because the thread that trains must raise it (`_report_if_done`).
        except (OSError, ValueError) as error:
            self._problem = error


def uses_of(train: StoreName, heldout: str) -> dict[str, str]:
    """Return the prefixes of a run's token stores, by the use of each store.

    The uses are "train" and "held-out". The stores of a blend are "train 0", "train 1" and so on.

    Args:
        train: Name of the token store, or of a blend of stores.
        heldout: Prefix of the held-out store; "" without one.
    """
    prefixes = [train] if isinstance(train, str) else [prefix for prefix, _ in parse_blend(train)]
    names = ["train"] if len(prefixes) == 1 else [f"train {i}" for i in range(len(prefixes))]
    uses = dict(zip(names, prefixes, strict=True))
    return uses | {"held-out": heldout} if heldout else uses


def _read(record: Path) -> dict[str, Any]:
    """Read the record of checksums that earlier starts of the run made; {} if there is none."""
    if not record.exists():
        return {}
    where, remedy = (
        f"{record} does not have the format of a record of token stores",
        "remove this file, so that the stores are read and checked again",
    )
    known = read_object(record, remedy=remedy)
    check_schema(known, {OTHERS: _SUMS}, where, remedy=remedy)
    return known
