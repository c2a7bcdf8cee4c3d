"""Position of each rank in its work, in a memory-mapped file of the run's folder, one file a node.

A rank writes its own slot of the file, without a lock, each time it begins something else; that
takes a few microseconds. The kernel keeps what was written when the process is killed, so that
whoever ends the run reads where each rank was. Over a network file system, the last half minute of
a node that is lost may be missing.
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
"""Begins a slot; another version of the file has another number, and is not read."""
_WHO = struct.Struct("<Iiiqd64s160s")
"""Format, rank, ranks of the run, process id, start of the process, host, place."""
_WHERE = struct.Struct("<I?qii16s96sdI")
"""Number of changes, whether the rank has ended, step, stage, micro-batch, pass, activity, time of
the change, and the number of changes again: a reader that finds two numbers reads once more."""
_SLOT_BYTES = 512
_REREADS = 5
_NAME = "positions-"


class SlotOwner(NamedTuple):
    """Who writes a slot."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    words: str  # for example "tp 0, cp 1, pp 0, dp 0; process 77 on gpu3, cuda:1"


class SeenPosition(NamedTuple):
    """What a reader finds in a rank's slot."""

    rank: int
    world_size: int
    pid: int
    started: float  # of the process, in clock ticks since the machine's start
    host: str
    place: str
    has_ended: bool  # the rank has done its work and left
    step: int  # the planned step, -1 before the first
    stage: int
    micro_batch: int  # -1 if no pass has begun in this step
    kind: str  # of the pass
    doing: str  # activity in a few words
    changed_s: float  # Unix time of the last change

    def describe(self) -> str:
        """For example "step 12, micro-batch 3 (backward, stage 1): computing"."""
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

    buffer, offset: the slot, by default one that no other process sees.
    """

    __slots__ = ("_buffer", "_cell", "_doing", "_has_ended", "_offset", "_step", "num_changes")

    def __init__(self, buffer: "mmap.mmap | bytearray | None" = None, offset: int = 0) -> None:
        self._buffer = bytearray(_SLOT_BYTES) if buffer is None else buffer
        self._offset = offset
        self._step, self._doing, self._has_ended = -1, "starting", False
        self._cell = ("", 0, -1)
        self.num_changes = 0
        """Number of changes, which grows while the rank works."""

    @classmethod
    def opened(cls, folder: Path, owner: SlotOwner) -> "Position":
        """This rank's slot in its node's file, which is made if it is absent.

        Raises:
            OSError: The file cannot be made, or has no room.
        """
        host = socket.gethostname()
        name = re.sub("[^A-Za-z0-9.-]", "_", host)
        file = os.open(folder / f"{_NAME}{owner.node_rank}-{name}", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            num_bytes = owner.local_world_size * _SLOT_BYTES
            # A mapped page without room on the disk would kill the process when it is written.
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
        """Begin another activity; step: set when it begins a new step."""
        self._doing = doing
        if step is not None:
            self._step, self._cell = step, ("", 0, -1)
        self._change()

    def chunk(self, kind: str, stage: int, micro_batch: int) -> None:
        """Begin a pass of a micro-batch through a stage."""
        self._cell = (kind, stage, micro_batch)
        self._change()

    def end(self) -> None:
        """Say that this rank has done its work, so that nobody looks for a failure."""
        self._has_ended = True
        self._change()
        if isinstance(self._buffer, mmap.mmap):
            # Over a network file system other machines would see it half a minute later.
            with contextlib.suppress(OSError):
                self._buffer.flush()

    def now(self) -> SeenPosition:
        return _seen(bytes(self._buffer[self._offset : self._offset + _SLOT_BYTES]))

    def _change(self) -> None:
        self.num_changes = (self.num_changes + 1) & 0xFFFF_FFFF
        self._write()

    def _write(self) -> None:
        kind, stage, micro_batch = self._cell
        begin = self._offset + _WHO.size
        # One copy; packing into the slot would zero it first, and readers would see that.
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
    """Positions of all ranks that have left one, by rank; {} without a folder."""
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
    """A slot, read again while it is being written. One that is torn all the same has fields of two
    moments, which harms nothing but the line that shows them.
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
