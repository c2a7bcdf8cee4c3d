"""Position of each rank in its work, in a memory-mapped file per node of the run's folder.

A rank writes its slot of the file whenever it begins something else. That takes a few microseconds
and needs no lock. The kernel keeps what was written even if the process is killed, so whoever ends
the run can read where each rank was. On a network file system, the last half minute of a lost node
may be missing.
"""

import contextlib
import mmap
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wlb.plan.processes import process_start

_FORMAT = 0x574C4231
"""First word of a slot. A new layout of slots gets a new number; other numbers are not read."""
_WHO = struct.Struct("<Iiiqd64s160s")
"""First part of a slot, written once: format, rank, number of ranks, process id, process start,
host, description of the rank."""
_WHERE = struct.Struct("<I?qii16s96sdI")
"""Second part of a slot, written at every change: number of changes, whether the rank has ended,
step, stage, micro-batch, kind of pass, activity, time of the change, number of changes.

The number of changes stands at both ends. If a reader finds two different numbers, the rank was
writing, and it reads the slot once more."""
_SLOT_BYTES = 512
_REREADS = 5  # attempts to read a slot while its rank writes it
_NAME = "positions-"  # beginning of the files' names


class SlotOwner(NamedTuple):
    """The rank that writes a slot."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    # The rank in words, for example "tp 0, cp 1, pp 0, dp 0; process 77 on gpu3, cuda:1".
    words: str


class SeenPosition(NamedTuple):
    """What a reader finds in a rank's slot."""

    rank: int
    world_size: int
    pid: int
    started: float  # start of the process, in clock ticks since the machine started
    host: str
    place: str  # the rank in words, as `SlotOwner.words`
    has_ended: bool  # whether the rank has finished its work
    step: int  # the planned step; -1 before the first
    stage: int
    micro_batch: int  # -1 if no pass has begun in this step
    kind: str  # kind of pass, for example "backward"
    doing: str  # activity in a few words
    changed_s: float  # Unix time of the last change

    def describe(self) -> str:
        """Return e.g. "step 12, micro-batch 3 (backward, stage 1): computing"."""
        if self.step < 0:
            return f"before the first step: {self.doing}"
        if self.micro_batch < 0:
            return f"step {self.step}: {self.doing}"
        return (
            f"step {self.step}, micro-batch {self.micro_batch} ({self.kind}, stage {self.stage}): "
            f"{self.doing}"
        )


class Position:
    """Position of this rank, set by its training thread.

    Args:
        buffer: Memory with the slot. By default, memory that no other process sees.
        offset: Where the slot begins in the buffer.
    """

    __slots__ = ("_buffer", "_doing", "_has_ended", "_offset", "_pass", "_step", "num_changes")

    def __init__(self, buffer: "mmap.mmap | bytearray | None" = None, offset: int = 0) -> None:
        self._buffer = bytearray(_SLOT_BYTES) if buffer is None else buffer
        self._offset = offset
        self._step, self._doing, self._has_ended = -1, "starting", False
        self._pass = ("", 0, -1)
        # A number that keeps growing shows that the rank is working.
        self.num_changes = 0

    @classmethod
    def opened(cls, folder: Path, owner: SlotOwner) -> "Position":
        """Return this rank's slot in its node's file, which is created if necessary.

        Args:
            folder: The start's folder of records.
            owner: This rank.

        Raises:
            OSError: The file cannot be created, or the disk is full.
        """
        host = socket.gethostname()
        name = re.sub("[^A-Za-z0-9.-]", "_", host)
        file = os.open(folder / f"{_NAME}{owner.node_rank}-{name}", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            num_bytes = owner.local_world_size * _SLOT_BYTES
            # Reserve the space now: writing a mapped page that the disk has no room for would kill
            # the process.
            os.posix_fallocate(file, 0, num_bytes)
            mapped = mmap.mmap(file, num_bytes)
        finally:
            os.close(file)
        offset = owner.local_rank * _SLOT_BYTES
        who = (owner.rank, owner.world_size, os.getpid(), process_start(os.getpid()))
        _WHO.pack_into(mapped, offset, _FORMAT, *who, host.encode(), owner.words.encode())
        position = cls(mapped, offset)
        position._write()
        return position

    def enter(self, doing: str, *, step: int | None = None) -> None:
        """Begin another activity.

        Args:
            doing: The activity in a few words.
            step: The step, if the activity begins a new one.
        """
        self._doing = doing
        if step is not None:
            self._step, self._pass = step, ("", 0, -1)
        self._change()

    def chunk(self, kind: str, stage: int, micro_batch: int) -> None:
        """Begin a pass of a micro-batch through a stage."""
        self._pass = (kind, stage, micro_batch)
        self._change()

    def end(self) -> None:
        """Record that this rank has finished its work, so that nobody reports it as failed."""
        self._has_ended = True
        self._change()
        if isinstance(self._buffer, mmap.mmap):
            # A network file system would otherwise show it to other machines half a minute later.
            with contextlib.suppress(OSError):
                self._buffer.flush()

    def now(self) -> SeenPosition:
        """Return the position as a reader sees it."""
        return _seen(bytes(self._buffer[self._offset : self._offset + _SLOT_BYTES]))

    def _change(self) -> None:
        self.num_changes = (self.num_changes + 1) & 0xFFFF_FFFF
        self._write()

    def _write(self) -> None:
        kind, stage, micro_batch = self._pass
        begin = self._offset + _WHO.size
        # Pack aside and copy once: `pack_into` zeroes its target first, which readers would see.
        self._buffer[begin : begin + _WHERE.size] = _WHERE.pack(
            self.num_changes,
            self._has_ended,
            self._step,
            stage,
            micro_batch,
            kind.encode(),
            self._doing.encode(),
            time.time(),
            self.num_changes,
        )


def read_positions(folder: Path) -> dict[int, SeenPosition]:
    """Return the positions in a folder of records, by rank.

    It is {} if the folder does not exist.
    """
    found: dict[int, SeenPosition] = {}
    for path in sorted(folder.glob(f"{_NAME}*")):
        with contextlib.suppress(OSError):
            for seen in _read_file(path):
                found[seen.rank] = seen
    return found


def _read_file(path: Path) -> Iterator[SeenPosition]:
    with path.open("rb", buffering=0) as file:
        for offset in range(0, os.fstat(file.fileno()).st_size, _SLOT_BYTES):
            slot = _read_slot(file.fileno(), offset)
            if len(slot) == _SLOT_BYTES and _WHO.unpack_from(slot)[0] == _FORMAT:
                yield _seen(slot)


def _read_slot(file: int, offset: int) -> bytes:
    """Return a slot, read once more if it is being written at the moment.

    After several attempts it may still mix fields of two moments, which only makes one line of a
    report inaccurate.
    """
    slot = b""
    for _ in range(_REREADS):
        slot = os.pread(file, _SLOT_BYTES, offset)
        if len(slot) < _SLOT_BYTES:
            break
        first, *_, last = _WHERE.unpack_from(slot, _WHO.size)
        if first == last:
            break
    return slot


def _seen(slot: bytes) -> SeenPosition:
    _, rank, size, pid, started, host, place = _WHO.unpack_from(slot)
    _, ended, step, stage, micro_batch, kind, doing, at_s, _ = _WHERE.unpack_from(slot, _WHO.size)
    return SeenPosition(
        rank=rank,
        world_size=size,
        pid=pid,
        started=started,
        host=_text(host),
        place=_text(place),
        has_ended=ended,
        step=step,
        stage=stage,
        micro_batch=micro_batch,
        kind=_text(kind),
        doing=_text(doing),
        changed_s=at_s,
    )


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")
