"""Ranks watch each other: one that dies, stops, hangs or raises ends all of them with one report.

A thread of every rank sends its position or failure to rank 0 each `beat_s`, over a TCP connection
that works while the main thread waits in a collective. README.md describes how rank 0 tells dead,
silent, failed and hanging ranks apart. All processes end within silence_s, or stuck_s for a rank
that hangs alive; rank 1 reports the loss of rank 0. Cost: one thread per rank that wakes once per
beat; rank 0 handles world_size small messages per beat.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from wlb.launch.failure import FailureReport, RankStatus, compose_report, rank_zero_gone
from wlb.launch.position import Position
from wlb.parallel.world import World
from wlb.plan import UserError

_SETTLE_S = 2.0
_STACKS_S = 2.0
_LAST_LINES = 20
_MOST_CHARACTERS = 4000
_MOST_BYTES = 1 << 22
"""Longest message: the lines of a failure and a stack, four bytes per character."""
_DEPUTY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """silence_s: a rank without a sign of life for this long counts as lost. stuck_s: a run without
    progress on any rank for this long counts as hung, unless a slow activity is under way. logs:
    folder of the logs `rank-<n>.log`. place: where this rank runs, in words."""

    silence_s: float
    stuck_s: float
    logs: Path
    place: str

    def beat_s(self, world_size: int) -> float:
        """Seconds between messages of a rank; rank 0 reads at most 1,000 messages per second."""
        return min(max(0.1, world_size / 1000), self.silence_s / 4)


class Watch:
    """The watch of one rank; all ranks construct it together after the process group is set up.

    end: called with the report on the one rank that reports and with None on others; it ends the
    process and does not return.
    """

    def __init__(
        self,
        world: World,
        position: Position,
        options: WatchOptions,
        end: Callable[[FailureReport | None], None],
    ) -> None:
        self.world, self.position, self.options = world, position, options
        self._end = end
        self._failure: dict[str, Any] | None = None
        self._main = threading.get_ident()
        self._wake = threading.Event()
        self._is_closing = False
        self._server = _WatchServer(world, options, end) if world.rank == 0 else None
        told: list[Any] = [self._server.address if self._server is not None else None]
        dist.broadcast_object_list(told, src=0)
        host, port, self._token = told[0]
        try:
            self._socket = socket.create_connection((host, port), timeout=options.silence_s)
            problem = ""
        except OSError as error:
            problem = f"rank {world.rank} cannot reach rank 0 at {host}:{port} ({error})"
        problems: list[Any] = [None] * world.world_size
        dist.all_gather_object(problems, problem)
        if found := [p for p in problems if p]:
            raise UserError(
                f"{found[0]}; ranks watch each other through a port of rank 0's node: open it, or "
                f"set training.heartbeat_s = 0 to train without a watch"
            )
        self._thread = threading.Thread(target=self._beat, name="watch", daemon=True)
        self._thread.start()

    def raised(self, error: BaseException) -> None:
        """Report this rank's failure to rank 0 and wait to be ended; return if that does not
        happen."""
        lines = traceback.format_exception(error)
        cause = error
        while cause.__cause__ is not None:  # torch's schedules wrap exceptions of a stage
            cause = cause.__cause__
        self._failure = {
            "error": _short(traceback.format_exception_only(cause)[0].strip()),
            "lines": [_short(line) for line in "".join(lines).splitlines()[-_LAST_LINES:]],
        }
        self._wake.set()
        self._thread.join(timeout=self.options.silence_s + _SETTLE_S + 2 * _STACKS_S + _DEPUTY_S)

    def close(self) -> None:
        """Say goodbye; all ranks close at the end of a run."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout=self.options.silence_s)
        self._socket.close()
        if self._server is not None:
            self._server.close()

    def _beat(self) -> None:
        """Send messages and read answers until the run ends."""
        file = self._socket.makefile("rw", encoding="utf-8", newline="\n")
        ask = "ok"
        while True:
            self._wake.clear()
            message = {
                "token": self._token,
                "rank": self.world.rank,
                "place": self.options.place,
                "at": self.position.to_json(),
                "failure": self._failure,
                "stack": self._stack() if ask == "stack" else None,
                "bye": self._is_closing,
            }
            try:
                file.write(json.dumps(message) + "\n")
                file.flush()
                answer = file.readline()
            except OSError as error:
                answer = "" if not isinstance(error, TimeoutError) else "late"
            if message["bye"]:
                return
            if answer in ("", "late"):
                self._rank_zero_gone(is_late=answer == "late")
                return
            ask = json.loads(answer)
            if ask == "end":
                if self._server is not None:
                    self._server.join()  # it reports; the failed main thread waits for this thread
                self._end(None)
                return
            if ask == "ok":
                self._wake.wait(self.options.beat_s(self.world.world_size))

    def _stack(self) -> list[str]:
        """Return the last lines of the main thread's stack."""
        frame = sys._current_frames().get(self._main)
        lines = traceback.format_stack(frame) if frame is not None else []
        return "".join(lines).splitlines()[-_LAST_LINES:]

    def _rank_zero_gone(self, *, is_late: bool) -> None:
        if self._is_closing or self.world.rank == 0:
            return
        if self.world.rank != 1:
            time.sleep(_DEPUTY_S)
            self._end(None)
            return
        log = self.options.logs / "rank-0.log"
        seen = RankStatus(rank=1, place=self.options.place, at=self.position.to_json())
        self._end(
            rank_zero_gone(
                self.world.world_size,
                silence_s=self.options.silence_s if is_late else 0.0,
                reporter=seen,
                lines=last_lines(log),
            )
        )


def _short(text: str) -> str:
    """Shorten a message of any length, e.g. a compiler's; rank 0 reads at most `_MOST_BYTES`."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


class _WatchServer:
    """Rank 0's server, which knows the state of all ranks; a thread with its own event loop."""

    def __init__(
        self, world: World, options: WatchOptions, end: Callable[[FailureReport | None], None]
    ) -> None:
        self.world, self.options, self._end = world, options, end
        self._token = secrets.token_hex(8)
        is_local = world.local_world_size == world.world_size
        self._socket = socket.create_server(("127.0.0.1" if is_local else "", 0), backlog=4096)
        host = "127.0.0.1" if is_local else world.master_address
        self.address = (host, self._socket.getsockname()[1], self._token)
        self._seen: dict[int, RankStatus] = {}
        self._heard_s: dict[int, float] = {}
        self._num_failed = 0
        self._changed_s = time.monotonic()
        self._ask = "ok"
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="watch-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until every rank has said goodbye, for at most silence_s."""
        self._is_closing = True
        self._thread.join(timeout=self.options.silence_s)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._listen, sock=self._socket, limit=_MOST_BYTES)
        async with server:
            while not await self._is_over():
                await asyncio.sleep(self.options.beat_s(self.world.world_size) / 2)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen: RankStatus | None = None
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                message = json.loads(line)
                if message["token"] != self._token:
                    break
                seen = self._hear(message)
                seen.is_told = self._ask == "end"
                writer.write((json.dumps(self._ask) + "\n").encode())
                await writer.drain()
        writer.close()
        if seen is not None and not seen.is_gone:
            seen.is_dead = True

    def _hear(self, message: dict[str, Any]) -> RankStatus:
        rank = message["rank"]
        self._heard_s[rank] = time.monotonic()
        seen = self._seen.setdefault(rank, RankStatus(rank=rank, place=message["place"]))
        if message["at"] != seen.at or seen.at["is_slow"]:
            self._changed_s = self._heard_s[rank]
        seen.at, seen.is_gone = message["at"], message["bye"]
        seen.stack = message["stack"] or seen.stack
        if message["failure"] is not None and not seen.failure:
            seen.failure, seen.lines = message["failure"]["error"], message["failure"]["lines"]
            self._num_failed += 1
            seen.order = self._num_failed
        return seen

    async def _is_over(self) -> bool:
        """Whether all ranks said goodbye; ends the run if a rank failed, died or hangs."""
        ranks = self._seen.values()
        if len(self._seen) == self.world.world_size and all(seen.is_gone for seen in ranks):
            return True
        is_stuck = time.monotonic() - self._changed_s > self.options.stuck_s
        late = await self._note_silence()
        found = any(seen.is_dead or seen.is_silent or seen.failure for seen in ranks)
        if late or not (found or is_stuck):
            return False
        if found:
            await self._settle()
        self._ask = "stack"
        await self._until(lambda: all(s.stack or s.failure for s in self._living()), _STACKS_S)
        for seen in ranks:
            seen.lines = seen.lines or last_lines(self.options.logs / f"rank-{seen.rank}.log")
        report = compose_report(
            list(ranks),
            self.world.world_size,
            silence_s=self.options.silence_s,
            stuck_s=self.options.stuck_s,
        )
        self._ask = "end"
        others = [seen for seen in self._living() if seen.rank]
        await self._until(lambda: all(seen.is_told for seen in others), _STACKS_S)
        self._end(report)
        return True

    async def _note_silence(self) -> bool:
        """Mark silent ranks; True if this process was itself suspended, so nothing is known yet."""
        now = time.monotonic()
        own = self._heard_s.get(0, now)
        if now - own > self.options.silence_s / 2:
            # We were suspended too; reset all timers.
            self._heard_s, self._changed_s = dict.fromkeys(self._heard_s, now), now
            return True
        for rank, heard_s in self._heard_s.items():
            self._seen[rank].is_silent = now - heard_s > self.options.silence_s
        return False

    async def _settle(self) -> None:
        """Wait for dead ranks to be found; their neighbours often fail first."""
        seen = self._seen.values()
        await self._until(lambda: all(s.is_dead or s.failure or s.is_gone for s in seen), _SETTLE_S)

    async def _until(self, holds: Callable[[], bool], most_s: float) -> None:
        end = time.monotonic() + most_s
        while not holds() and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def _living(self) -> list[RankStatus]:
        return [s for s in self._seen.values() if not (s.is_dead or s.is_silent or s.is_gone)]


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log, none if it cannot be read."""
    try:
        return log.read_text("utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    except OSError:
        return []
