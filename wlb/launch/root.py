"""The root of the watch: knows the state of all ranks, and ends the run when one is lost.

Its members are the nodes' aggregators, and ranks whose aggregator was lost. README.md describes how
it tells dead, silent, failed and hanging ranks apart. The standby on another node is idle until the
root is lost; then all members that are left connect to it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb.launch.failure import AggregatorLoss, RankStatus, compose_report
from wlb.launch.position import Snapshot
from wlb.launch.wire import END, OK, STACK, WELCOME, Member

SETTLE_S = 2.0
STACKS_S = 2.0
REGROUP_S = 10.0
"""Time for ranks of a lost aggregator to come to the root; those that do not are lost too."""
_RANKS_PER_S = 5000
"""The root waits one second longer for each this many ranks that send stacks."""
_REPORT_S = 5.0
_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """world_size: ranks of the run. silence_s, stuck_s, logs: see `WatchOptions`."""

    world_size: int
    silence_s: float
    stuck_s: float
    logs: Path

    @property
    def rank_beat_s(self) -> float:
        """Seconds between a rank's messages to its node's aggregator."""
        return min(1.0, self.silence_s / 20)

    @property
    def node_beat_s(self) -> float:
        """Seconds between an aggregator's messages to the root."""
        return min(5.0, self.silence_s / 5)

    @property
    def check_s(self) -> float:
        """Seconds between checks for members that have fallen silent."""
        return min(1.0, self.silence_s / 10)

    @property
    def start_s(self) -> float:
        """Time for a rank to be let in; processes that start may be slow."""
        return 2 * max(_START_S, self.silence_s)

    @property
    def regroup_s(self) -> float:
        return min(REGROUP_S, self.silence_s)


class SuspensionCheck:
    """Finds that this process was itself suspended, after which silence says nothing."""

    def __init__(self, silence_s: float) -> None:
        self._most_s = silence_s / 2
        self._last_s = time.monotonic()

    def was_suspended(self, now_s: float) -> bool:
        gap_s, self._last_s = now_s - self._last_s, now_s
        return gap_s > self._most_s


class RootAggregator:
    """State of all ranks, and the end of a run that fails."""

    def __init__(self, limits: WatchLimits, *, is_standby: bool = False) -> None:
        self.limits = limits
        self.members: set[Member] = set()
        self._is_first = self.is_active = not is_standby
        self._changed = asyncio.Event()
        self._seen: dict[int, RankStatus] = {}
        self._member_of: dict[int, Member] = {}
        self._slow: set[int] = set()
        self._losses: list[AggregatorLoss] = []
        self._num_failed = 0
        self._progress_s = time.monotonic()
        self._suspension = SuspensionCheck(limits.silence_s)

    def take_over(self, lost: AggregatorLoss) -> None:
        """Act as root from now on, because the root was lost."""
        self.is_active = True
        for rank in lost.ranks:
            self._seen.setdefault(rank, RankStatus(rank=rank, place="on the node of the lost root"))
        self._losses.append(lost)
        for member in self.members:
            member.send(WELCOME)
        self._changed.set()

    def joined(self, member: Member) -> None:
        self.members.add(member)
        for rank, place in member.ranks.items():
            self._seen.setdefault(rank, RankStatus(rank=rank, place=place)).place = place
            self._member_of[rank] = member
        self._progress_s = member.heard_s
        if self.is_active:
            member.send(WELCOME)
        self._changed.set()

    def heard(self, member: Member, updates: dict[str, Any]) -> None:
        for rank, update in updates.items():
            self._take(self._seen[int(rank)], update, member.heard_s)
        member.send(OK)

    def lost(self, member: Member) -> None:
        if member in self.members:
            self._lose(member, is_silent=False)

    async def run(self) -> None:
        """Return when all ranks have said goodbye, or the run was ended."""
        while not self._all_gone():
            if self._is_failed() and self.is_active:
                await self._end_run()
                break
            await self._wait(self.limits.check_s)
        for member in self.members:
            member.close()

    def _lose(self, member: Member, *, is_silent: bool) -> None:
        """Note that a member is gone; the ranks of an aggregator may still live and connect by
        themselves."""
        self.members.discard(member)
        if member.name and not all(self._seen[rank].is_gone for rank in member.ranks):
            # Ranks join in any order.
            ranks = tuple(sorted(member.ranks))
            self._losses.append(AggregatorLoss(ranks=ranks, name=member.name, is_silent=is_silent))
        for rank in member.ranks:
            if self._member_of.get(rank) is member:
                del self._member_of[rank]
                seen = self._seen[rank]
                if not (member.name or seen.is_gone):
                    seen.is_silent, seen.is_dead = is_silent, not is_silent
        self._changed.set()

    def _take(self, seen: RankStatus, update: dict[str, Any], now_s: float) -> None:
        if at := update.get("at"):
            seen.at = Snapshot(*at)
            self._progress_s = now_s
            (self._slow.add if seen.at.is_slow else self._slow.discard)(seen.rank)
        if failure := update.get("failure"):
            if not seen.failure:
                self._num_failed += 1
                seen.order = self._num_failed
            seen.failure, seen.lines = failure["error"], failure["lines"]
        seen.stack = update.get("stack") or seen.stack
        for name in ("is_dead", "is_silent", "is_gone", "has_report", "has_written"):
            if name in update:
                setattr(seen, name, update[name])
        if update.keys() - {"at"}:
            self._changed.set()

    def _all_gone(self) -> bool:
        ranks = self._seen.values()
        return len(ranks) == self.limits.world_size and all(seen.is_gone for seen in ranks)

    def _is_failed(self) -> bool:
        now = time.monotonic()
        if self._suspension.was_suspended(now):
            self._progress_s = now
            for member in self.members:
                member.heard_s = now
            return False
        for member in [m for m in self.members if now - m.heard_s > self.limits.silence_s]:
            self._lose(member, is_silent=True)
        ranks = self._seen.values()
        if any(not (self._seen[rank].is_lost or self._seen[rank].is_gone) for rank in self._slow):
            self._progress_s = now
        return (
            bool(self._losses)
            or any(seen.is_lost or seen.failure for seen in ranks)
            or now - self._progress_s > self.limits.stuck_s
        )

    async def _end_run(self) -> None:
        """Find the cause, ask for stacks, have one rank write the report, and end all ranks."""
        limits, ranks = self.limits, self._seen.values()
        if self._losses or any(seen.is_lost or seen.failure for seen in ranks):
            # Wait for dead ranks to be found: their neighbours often fail first.
            await self._until(
                lambda: all(s.is_dead or s.failure or s.is_gone for s in ranks), SETTLE_S
            )
        await self._regroup()
        self._send_all(STACK)
        await self._until(
            lambda: all(seen.stack or seen.failure for seen in self._living()),
            STACKS_S + limits.world_size / _RANKS_PER_S,
        )
        report = compose_report(
            sorted(ranks, key=lambda seen: seen.rank),
            limits.world_size,
            silence_s=limits.silence_s,
            stuck_s=limits.stuck_s,
            losses=self._losses,
            logs=limits.logs,
        )
        for seen in self._living():
            message = {"report": [report.rank, report.error, report.text], "of": seen.rank}
            if (member := self._member_of.get(seen.rank)) is None:
                continue  # It was lost while others were asked.
            member.send(message)
            if await self._is_written_by(seen):
                break
        self._send_all(END)
        await self._until(lambda: not self.members, STACKS_S)

    async def _regroup(self) -> None:
        """Wait for the ranks of lost aggregators to come by themselves: those that do are alive."""

        def missing() -> list[tuple[RankStatus, AggregatorLoss]]:
            seen = ((self._seen[rank], loss) for loss in self._losses for rank in loss.ranks)
            return [
                (s, loss)
                for s, loss in seen
                if not (s.is_lost or s.is_gone or s.rank in self._member_of)
            ]

        # A standby does not know in advance which ranks will connect to it.
        await self._until(
            lambda: not missing() and (self._is_first or len(self._seen) == self.limits.world_size),
            self.limits.regroup_s,
        )
        for seen, loss in missing():
            seen.is_silent, seen.is_dead = loss.is_silent, not loss.is_silent

    async def _is_written_by(self, seen: RankStatus) -> bool:
        """Whether a rank got the report; returns when it has written it, or ended after it."""
        await self._until(lambda: seen.has_written or seen.is_lost, _REPORT_S)
        return seen.has_report

    def _send_all(self, message: str) -> None:
        for member in self.members:
            member.send(message)

    async def _until(self, holds: Callable[[], bool], most_s: float) -> None:
        """Wait until `holds`, which is asked after every change, for at most `most_s`."""
        end = time.monotonic() + most_s
        while not holds() and (left := end - time.monotonic()) > 0:
            await self._wait(left)

    async def _wait(self, most_s: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), most_s)

    def _living(self) -> list[RankStatus]:
        return [
            seen
            for rank, seen in sorted(self._seen.items())
            if rank in self._member_of and not (seen.is_lost or seen.is_gone)
        ]
