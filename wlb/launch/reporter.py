"""A rank's part of the watch: a thread that reports its position and obeys the root."""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wlb.launch.failure import LAST_LINES, AggregatorLoss, FailureReport, RankStatus, report_alone
from wlb.launch.position import Position
from wlb.launch.root import REGROUP_S, SETTLE_S, STACKS_S, WatchLimits
from wlb.launch.told import in_words
from wlb.launch.wire import END, OK, STACK, Line, introduction

_MOST_CHARACTERS = 4000
_DEPUTY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """Who reports and to whom. place: where the rank runs, in words. aggregator: address of its
    node's aggregator, which hears `node_ranks` on `host`. others: addresses of the root and its
    standby, as far as they are other processes. failure_id: of the run's one report.
    """

    rank: int
    place: str
    token: str
    failure_id: str
    aggregator: tuple[str, int]
    host: str
    node_ranks: Sequence[int]
    others: Sequence[tuple[str, int]] = ()

    @property
    def is_first_alone(self) -> bool:
        """Whether this rank reports first if nobody hears the ranks of its node any more."""
        return self.rank == self.node_ranks[0] and not self.others


@dataclass(slots=True)
class _Told:
    """News that a connection has carried, and the number of messages without an answer."""

    unanswered: int = 0
    num_changes: int = -1
    failure: bool = False
    is_gone: bool = False


class Reporter:
    """Reports for a rank, from a thread that `start` begins. The constructor joins the watch:
    OSError if the aggregator cannot be reached or does not let it in. end: see `Watch`."""

    def __init__(
        self,
        reporting: Reporting,
        position: Position,
        limits: WatchLimits,
        end: Callable[[FailureReport | None], None],
    ) -> None:
        self.reporting, self.position, self.limits = reporting, position, limits
        self._end = end
        self._failure: dict[str, Any] | None = None
        self._main = threading.get_ident()
        self._is_closing = self._is_dropped = self._has_report = False
        self._others = list(reporting.others)
        self._told = _Told()
        self._line = self._connect(reporting.aggregator, limits.start_s)
        self._thread = threading.Thread(target=self._live, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def raised(self, error: BaseException) -> None:
        """Report this rank's failure and wait to be ended; return if nobody does."""
        line, trace = in_words(error)
        # torch's schedules wrap exceptions of a stage.
        while trace and error.__cause__ is not None:
            error = error.__cause__
            line = in_words(error)[0]
        self._failure = {
            "error": _short(line),
            "lines": [_short(line) for line in trace.splitlines()[-LAST_LINES:]],
        }
        self._line.wake()
        self._thread.join(
            timeout=self.limits.silence_s + SETTLE_S + REGROUP_S + 2 * STACKS_S + _DEPUTY_S
        )

    def goodbye(self) -> None:
        """Say goodbye, and wait until that was heard."""
        self._is_closing = True
        self._line.wake()
        self._thread.join(timeout=self.limits.silence_s)

    def drop(self) -> None:
        """Leave without a goodbye, as a process that dies."""
        self._is_dropped = True
        self._line.shut()
        if not self._thread.is_alive():
            self._line.close()

    def _connect(self, address: tuple[str, int], patience_s: float) -> Line:
        """A connection to an aggregator that has let this rank in."""
        line = Line(address, timeout_s=patience_s)
        try:
            places = {self.reporting.rank: self.reporting.place}
            line.send_bytes(introduction(self.reporting.token, places, name=""))
            line.await_welcome(patience_s)
        except OSError:
            line.close()
            raise
        return line

    def _live(self) -> None:
        """Send messages and obey until the run ends, to the root if the aggregator is lost."""
        is_over = False
        while not is_over:
            is_over, is_silent = True, False
            try:
                self._talk()
            except OSError as error:
                is_over = self._is_closing or self._is_dropped
                is_silent = isinstance(error, TimeoutError)
            self._line.close()
            if not is_over and not self._is_regrouped():
                self._report_alone(is_silent=is_silent)
                return

    def _talk(self) -> None:
        """Report to one aggregator until the run ends; OSError if it is lost."""
        self._told = _Told()
        heard = now = time.monotonic()
        beat = 0.0
        while not (self._told.is_gone and self._told.unanswered <= 0):
            update = self._update()
            if now >= beat or update.keys() - {"at"}:
                self._send(update)
                beat = now + self.limits.rank_beat_s
            messages = self._line.receive(beat - now)
            before, now = now, time.monotonic()
            # A wait that took so long means that this rank was suspended itself.
            if messages or now - before > self.limits.silence_s / 2:
                heard = now
            if now - heard > self.limits.silence_s:
                raise TimeoutError("the aggregator is silent")
            for message in messages:
                if message == OK:
                    self._told.unanswered -= 1
                elif self._obey(message):
                    return

    def _update(self) -> dict[str, Any]:
        """News that this connection has not carried yet."""
        told, at, update = self._told, self.position.now(), dict[str, Any]()
        if at.num_changes != told.num_changes:
            update["at"] = at
        if self._failure is not None and not told.failure:
            update["failure"] = self._failure
        if self._is_closing and not told.is_gone:
            update["is_gone"] = True
        return update

    def _send(self, update: dict[str, Any]) -> None:
        self._line.send({self.reporting.rank: update})
        self._told.unanswered += 1
        if "at" in update:
            self._told.num_changes = update["at"].num_changes
        self._told.failure |= "failure" in update
        self._told.is_gone |= "is_gone" in update

    def _obey(self, message: Any) -> bool:
        """Obey a message of the root; True if the run ends."""
        if message == STACK:
            self._send({"at": self.position.now(), "stack": self._stack()})
        elif message == END:
            if not self._has_report:
                self._end(None)
            return True
        else:
            self._send({"has_report": True})
            rank, error, text = message["report"]
            self._report(FailureReport(rank=rank, error=error, text=text))
            self._send({"has_written": True})
        return False

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._main)
        lines = traceback.format_stack(frame) if frame is not None else []
        return "".join(lines).splitlines()[-LAST_LINES:]

    def _report(self, report: FailureReport) -> None:
        """End with the report, or without it if another rank was faster."""
        self._has_report = True
        self._end(report if self._is_first_to_report() else None)

    def _is_first_to_report(self) -> bool:
        """Whether no other rank reports; parts of a broken network would each report otherwise."""
        try:
            (self.limits.logs / f".reported-{self.reporting.failure_id}").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            # A full disk may be the cause of the failure, so the report is printed without the
            # file.
            return True
        return True

    def _is_regrouped(self) -> bool:
        """Whether the root, or its standby, took this rank in after its aggregator was lost."""
        while self._others:
            address = self._others.pop(0)
            try:
                self._line = self._connect(address, self.limits.silence_s + self.limits.regroup_s)
            except OSError:
                continue
            return True
        return False

    def _report_alone(self, *, is_silent: bool) -> None:
        """Report that no aggregator is left; on a single node its first rank reports."""
        told = self.reporting
        if not told.is_first_alone:
            time.sleep(_DEPUTY_S)
        name = f"a process on {told.host}"
        loss = AggregatorLoss(ranks=tuple(told.node_ranks), name=name, is_silent=is_silent)
        seen = RankStatus(rank=told.rank, place=told.place, at=self.position.now())
        self._report(report_alone(loss, seen, silence_s=self.limits.silence_s))


def _short(text: str) -> str:
    """Shorten a message of any length, e.g. a compiler's; frames have a limit."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
