"""The watch of one node: receives its ranks' messages and summarises them for the root.

Positions wait for the next beat, and only those that changed are sent. Events that end a run (a
rank that died, is silent or failed), stacks and goodbyes are sent at once. If the root is lost, the
node connects to the standby and sends all its state.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from wlb.launch.root import STACKS_S, SuspensionCheck, WatchLimits
from wlb.launch.wire import (
    END,
    OK,
    STACK,
    WELCOME,
    FrameDecoder,
    FrameError,
    Member,
    introduction,
    pack,
)

_LINGER_S = 30.0
"""Time that an aggregator without living ranks waits for the root to end the run."""


class Uplink(asyncio.Protocol):
    """A node's connection to a root. heard_s: time of the last answer by the monotonic clock.
    changed: set whenever its state changes."""

    def __init__(
        self, first: bytes, on_message: Callable[[Any], None], changed: asyncio.Event
    ) -> None:
        self._first, self._on_message, self._changed = first, on_message, changed
        self._decoder = FrameDecoder()
        self.heard_s = time.monotonic()
        self.num_unanswered = 0
        self.welcomed, self.lost = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._first)

    def data_received(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        try:
            for message in self._decoder.feed(data):
                if message == WELCOME:
                    self.welcomed.set()
                elif message == OK:
                    self.num_unanswered -= 1
                    self._changed.set()
                else:
                    self._on_message(message)
        except FrameError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._changed.set()

    def send(self, updates: dict[int, Any]) -> None:
        """Send updates of ranks, unless the connection is lost."""
        if not self._transport.is_closing():
            self.num_unanswered += 1
            self._transport.write(pack(updates))

    def close(self) -> None:
        self._transport.close()


class NodeAggregator:
    """Receives the messages of a node's ranks and reports them to the root.

    ranks: of this node. roots: addresses of the root and its standby. name: this process, in words.
    on_root_lost: called before the node connects to the standby; its argument is whether the root
    fell silent.
    """

    def __init__(
        self,
        limits: WatchLimits,
        *,
        token: str,
        ranks: Sequence[int],
        roots: Sequence[tuple[str, int]],
        name: str,
        on_root_lost: Callable[[bool], None],
    ) -> None:
        self.limits, self.name = limits, name
        self._token, self._ranks, self._roots = token, ranks, list(roots)
        self._on_root_lost = on_root_lost
        self._members: dict[int, Member] = {}
        self._state: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
        self._moved: set[int] = set()
        self._uplink: Uplink | None = None
        self._changed = asyncio.Event()
        self._is_ended = self.is_parent_gone = False
        self._suspension = SuspensionCheck(limits.silence_s)

    def parent_gone(self) -> None:
        """Note that the process which started this one is gone: ranks that have not joined may
        never join."""
        self.is_parent_gone = True
        self._changed.set()

    def joined(self, member: Member) -> None:
        (rank,) = member.ranks
        self._members[rank] = member
        self._changed.set()

    def heard(self, member: Member, updates: dict[str, Any]) -> None:
        for key, update in updates.items():
            rank = int(key)
            self._state[rank].update(update)
            if update.keys() - {"at"}:
                self._tell(rank, update)
            elif update:
                self._moved.add(rank)
        member.send(OK)

    def lost(self, member: Member) -> None:
        for rank in member.ranks:
            if not self._state[rank].get("is_gone"):
                self._state[rank]["is_dead"] = True
                self._tell(rank, self._state[rank])
        self._changed.set()

    async def run(self) -> None:
        """Return when all ranks have said goodbye, the run was ended, or no root is left."""
        while not (len(self._members) == len(self._ranks) or self.is_parent_gone):
            await self._wait(self.limits.check_s)
        if not self._members:
            return
        if problem := await self._connect(self.limits.start_s / 2):
            for member in self._members.values():
                member.send({"problem": problem})
        else:
            for member in self._members.values():
                member.send(WELCOME)
            await self._work()
        for member in self._members.values():
            member.close()
        if self._uplink is not None:
            self._uplink.close()

    async def _work(self) -> None:
        limits = self.limits
        # The first beat is random, so that nodes which begin together do not all send at the same
        # moment.
        beat = time.monotonic() + limits.node_beat_s * random.random()
        lonely_s = time.monotonic()
        while not self._is_over():
            await self._wait(min(limits.check_s, max(0.0, beat - time.monotonic())))
            now = time.monotonic()
            if self._is_root_lost(now) and not await self._take_next_root():
                return
            self._note_silence(now)
            if now >= beat:
                beat = now + limits.node_beat_s
                self._send({rank: {"at": self._state[rank]["at"]} for rank in self._moved})
            if any(member.is_open for member in self._members.values()):
                lonely_s = now
            if self._is_ended or now - lonely_s > _LINGER_S:
                break
        # The ranks' connections stay open until the ranks have read the message and closed them.
        if self._is_ended:
            end = time.monotonic() + STACKS_S
            while any(m.is_open for m in self._members.values()) and time.monotonic() < end:
                await self._wait(end - time.monotonic())

    def _is_over(self) -> bool:
        """Whether the root has heard that all ranks said goodbye."""
        is_gone = all(state.get("is_gone") for state in self._state.values())
        return is_gone and (self._uplink is None or self._uplink.num_unanswered <= 0)

    def _is_root_lost(self, now_s: float) -> bool:
        assert self._uplink is not None
        if self._suspension.was_suspended(now_s):
            self._uplink.heard_s = now_s
            for member in self._members.values():
                member.heard_s = now_s
        is_silent = now_s - self._uplink.heard_s > self.limits.silence_s
        return not self._is_ended and (is_silent or self._uplink.lost.is_set())

    async def _take_next_root(self) -> bool:
        """Connect to the standby; False if none answers. The ranks notice that by closed
        connections."""
        assert self._uplink is not None
        self._roots.pop(0)
        is_silent = not self._uplink.lost.is_set()
        self._uplink.close()
        self._on_root_lost(is_silent)
        # The standby answers only after it has lost the root too, hence this patience.
        patience_s = self.limits.silence_s + self.limits.regroup_s
        return bool(self._roots) and not await self._connect(patience_s)

    async def _connect(self, patience_s: float) -> str:
        """Introduce this node to the first root; return the problem, or ""."""
        host, port = self._roots[0]
        places = {rank: place for m in self._members.values() for rank, place in m.ranks.items()}
        first = introduction(self._token, places, name=self.name)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience_s):
                _, self._uplink = await loop.create_connection(
                    lambda: Uplink(first, self._obey, self._changed), host, port
                )
                await _first_of(self._uplink.welcomed, self._uplink.lost)
            if not self._uplink.welcomed.is_set():
                return f"{self.name} was not accepted by the root at {host}:{port}"
        # TimeoutError is an OSError.
        except OSError as error:
            return f"{self.name} cannot reach the root at {host}:{port} ({error!r})"
        self._send({rank: state for rank, state in self._state.items() if state})
        return ""

    def _obey(self, message: Any) -> None:
        """Pass the root's message to the ranks."""
        if isinstance(message, dict):
            self._members[message["of"]].send(message)
        elif message in (STACK, END):
            self._is_ended = message == END
            for member in self._members.values():
                member.send(message)
        self._changed.set()

    def _note_silence(self, now_s: float) -> None:
        for rank, member in self._members.items():
            state = self._state[rank]
            is_silent = member.is_open and now_s - member.heard_s > self.limits.silence_s
            if is_silent and not (state.get("is_gone") or state.get("is_silent")):
                state["is_silent"] = True
                self._tell(rank, state)

    def _tell(self, rank: int, update: dict[str, Any]) -> None:
        """Send an update at once; a goodbye also ends this process's work."""
        self._send({rank: update})
        self._changed.set()

    def _send(self, updates: dict[int, Any]) -> None:
        self._moved -= {rank for rank, update in updates.items() if "at" in update}
        if self._uplink is not None:
            self._uplink.send(updates)

    async def _wait(self, most_s: float) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), most_s)
        except TimeoutError:
            return


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
