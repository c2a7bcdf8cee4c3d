"""Reads a run's stores whole beside its first steps, and ends the run if one is not what it says.

A store's description is read at its opening, and its files only piece by piece while documents are
trained. So a flipped bit, or another `.bin` of equal size, would be trained without a word.
`stores.json` in the run's folder keeps what was read, so that a resumed run reads only what changed
since, and notices other tokens in stores that have no description. It reads on rank 0 alone.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from wlb.data import StoreName, TokenStore, check_store, stamps_of
from wlb.plan import UserError
from wlb.plan.read_file import read_object
from wlb.plan.schema import OTHERS, Schema, hold_schema
from wlb.spec.blend import parse_blend
from wlb.train.checkpoint.folder import write_json
from wlb.train.hooks import ExecutedStep, Hook, RunContext

RECORD = "stores.json"
_SUMS: Schema = {"tokens": str, "targets": (str, None), "stamps": {OTHERS: [int]}}
_WAITED_BYTES = 1 << 30
"""What a run that ends still waits to be read; about a second."""


class StoreCheck:
    """Reads stores one after the other, and keeps what was found in a file.

    stores: prefixes by what the run uses them for; each is opened when it is read. record: the
    file. on_block: is called after each block; what it raises ends `run`. Attributes: skipped, the
    stores that an earlier part of the run has read and that are unchanged; total_bytes, to be read;
    done_bytes.
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
        """Read all. UserError for the first store whose files are not what they should be."""
        before = 0
        for use, prefix in self.stores.items():
            # Opened here, so that its index is in memory no longer than it is read.
            store = TokenStore(prefix)
            sums = check_store(store, self._progress(before)).to_json()
            before = self.done_bytes
            known = self.known.get(use, {})
            # Without a description nothing else says which tokens earlier steps have trained.
            if store.info is None and known and known["tokens"] != sums["tokens"]:
                raise UserError(
                    f"the tokens of {prefix} are others than when the run began: checksum "
                    f"{sums['tokens'][:16]}..., then {known['tokens'][:16]}... ({self.record}); "
                    f"restore the store, or start a new run"
                )
            self.known[use] = sums
            # Renamed when it is whole, so that a kill leaves no half of it.
            written = self.record.with_name(f".{RECORD}.tmp")
            write_json(written, self.known)
            written.replace(self.record)

    def _progress(self, before: int) -> Callable[[int], None]:
        def count(done: int) -> None:
            self.done_bytes = before + done
            self._on_block()

        return count


class VerifyStores(Hook):
    """Runs a `StoreCheck` in a thread beside the first steps; a store
    that is found wrong ends the run before its next checkpoint. On rank 0.
    """

    def __init__(self, train: StoreName, heldout: str) -> None:
        self._uses = uses_of(train, heldout)
        self._check: StoreCheck | None = None
        self._closed = threading.Event()
        self._problem: Exception | None = None
        self._told = False
        self._thread = threading.Thread(target=self._read, name="read stores", daemon=True)

    def begin(self, run: RunContext) -> None:
        record = run.job.directory / RECORD
        self._check = StoreCheck(self._uses, record, self._end_if_closed)
        for use in self._check.skipped:
            run.report.say(f"token stores: {use} store unchanged since it was read ({RECORD})")
        if self._check.stores:
            size = decimal(self._check.total_bytes)
            run.report.say(f"token stores: reading {size} beside the first steps")
            self._thread.start()
        else:
            self._told = True

    def after_step(self, run: RunContext, step: ExecutedStep) -> None:
        self._tell(run)

    def end(self, run: RunContext) -> None:
        check = self._check
        if check is None or self._told:
            return
        if check.total_bytes - check.done_bytes <= _WAITED_BYTES:
            self._thread.join()
        self._tell(run)
        if not self._told:
            run.report.say(
                f"WARNING: token stores: training ended when {decimal(check.done_bytes)} of "
                f"{decimal(check.total_bytes)} were read; `wlb prepare --verify PREFIX` "
                f"reads a store whole"
            )

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _end_if_closed(self) -> None:
        if self._closed.is_set():
            raise InterruptedError

    def _tell(self, run: RunContext) -> None:
        if self._told or self._thread.is_alive():
            return
        self._told = True
        if self._problem is not None:
            raise UserError(
                f"token stores: {self._problem}; the steps of this run so far are not to be trusted"
            ) from self._problem
        run.report.say("token stores: they hold what their descriptions say")

    def _read(self) -> None:
        assert self._check is not None
        try:
            self._check.run()
        except InterruptedError:
            return
        # An error of a disk is the run's as well; it is raised where the loop asks.
        except (OSError, ValueError) as error:
            self._problem = error


def uses_of(train: StoreName, heldout: str) -> dict[str, str]:
    """Prefixes of a run's stores by what it uses them for: `train`, or one for each of a blend, and
    `held-out`.
    """
    prefixes = [train] if isinstance(train, str) else [prefix for prefix, _ in parse_blend(train)]
    names = ["train"] if len(prefixes) == 1 else [f"train {i}" for i in range(len(prefixes))]
    uses = dict(zip(names, prefixes, strict=True))
    return uses | {"held-out": heldout} if heldout else uses


def _read(record: Path) -> dict[str, Any]:
    """What an earlier part of the run found, nothing if there was none."""
    if not record.exists():
        return {}
    where, remedy = f"{record} is no record of token stores", "remove it, and they are read anew"
    known = read_object(record, remedy=remedy)
    hold_schema(known, {OTHERS: _SUMS}, where, remedy=remedy)
    return known
