"""Record what each rank is doing at the moment, in a memory-mapped file for each node.

A position is, for example, "step 12, micro-batch 3 (backward, stage 1): computing". Each rank has
a slot of 512 bytes in its node's file, which it overwrites whenever it begins another activity.
That takes a few microseconds and needs no lock. The kernel keeps the contents even if the process
is killed, so a failure report can say what each rank was doing. On a network file system, the last
half minute of a lost node may be missing.
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
"""First word of a slot: the version of its layout. Slots of other versions are not read."""
_WHO = struct.Struct("<Iiiqd64s160s")
"""First part of a slot, which is written once.

Fields: layout version, rank, number of ranks, process id, start time of the process, host name,
the rank in words (`SlotOwner.words`)."""
_WHERE = struct.Struct("<I?qii16s96sdI")
"""Second part of a slot, which is written at every change.

Fields: number of changes, whether the rank has ended, step, stage, micro-batch, kind of pass,
activity, time of the change, number of changes. If the first and the last field differ, the rank
was just writing, so the reader reads the slot once more."""
_SLOT_BYTES = 512  # size of a slot: both parts and unused bytes
_REREADS = 5  # most attempts to read a slot that is being written
_NAME = "positions-"  # prefix of the files' names


class SlotOwner(NamedTuple):
    """The rank that writes a slot of the position file, and its description for reports."""

    rank: int
    world_size: int  # number of ranks of the run
    local_rank: int  # rank within the node
    local_world_size: int  # number of ranks of the node
    node_rank: int
    # The rank in words, for example "tp 0, cp 1, pp 0, dp 0; process 77 on gpu3, cuda:1".
    words: str


class SeenPosition(NamedTuple):
    """What a rank was doing (its position), as read from its slot of the position file."""

    rank: int
    world_size: int  # number of ranks of the run
    pid: int
    started: float  # start time of the process, in clock ticks since the machine booted
    host: str
    place: str  # the rank in words, see `SlotOwner.words`
    has_ended: bool  # whether the rank has finished its work
    step: int  # the step that the rank works on; -1 before the first step
    stage: int  # pipeline stage of the pass that the rank has begun most recently
    micro_batch: int  # micro-batch of the pass; -1 if no pass has begun in this step
    kind: str  # kind of pass, for example "backward"
    doing: str  # activity in a few words
    changed_s: float  # Unix time of the last change

    def describe(self) -> str:
        """Return the position in words: "step 12, micro-batch 3 (backward, stage 1): computing"."""
        if self.step < 0:
            return f"before the first step: {self.doing}"
        if self.micro_batch < 0:
            return f"step {self.step}: {self.doing}"
        return (
            f"step {self.step}, micro-batch {self.micro_batch} ({self.kind}, stage {self.stage}): "
            f"{self.doing}"
        )


class Position:
    """Records what this rank is doing, in its slot of the node's position file.

    The training thread calls the methods.

    Args:
        buffer: The mapped file, or other memory that contains the slot. None means memory of this
            process, which nobody else can read.
        offset: Byte at which the slot begins in the buffer.
    """

    __slots__ = ("_buffer", "_doing", "_has_ended", "_offset", "_pass", "_step", "num_changes")

    def __init__(self, buffer: "mmap.mmap | bytearray | None" = None, offset: int = 0) -> None:
        self._buffer = bytearray(_SLOT_BYTES) if buffer is None else buffer
        self._offset = offset
        self._step, self._doing, self._has_ended = -1, "starting", False
        self._pass = ("", 0, -1)
        # Number of changes of the position, modulo 2^32. A rank that works increases it.
        self.num_changes = 0

    @classmethod
    def opened(cls, folder: Path, owner: SlotOwner) -> "Position":
        """Open the part of its node's file that belongs to this rank; create the file if necessary.

        Args:
            folder: The folder of failure records (`wlb.launch.failure.new_records`).
            owner: This rank.

        Raises:
            OSError: The file cannot be created, or the disk is full.
        """
        host = socket.gethostname()
        name = re.sub("[^A-Za-z0-9.-]", "_", host)
        file = os.open(folder / f"{_NAME}{owner.node_rank}-{name}", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            num_bytes = owner.local_world_size * _SLOT_BYTES
            # Reserve disk space now. If the disk were full later, writing to the mapped file would
            # kill the process.
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
        """Record that this rank begins another activity.

        Args:
            doing: The activity in a few words, such as "saving".
            step: Number of the step that begins with this activity; None means the same step.
        """
        self._doing = doing
        if step is not None:
            self._step, self._pass = step, ("", 0, -1)
        self._change()

    def chunk(self, kind: str, stage: int, micro_batch: int) -> None:
        """Record that this rank begins a pass, such as "backward" of micro-batch 3 in stage 1."""
        self._pass = (kind, stage, micro_batch)
        self._change()

    def end(self) -> None:
        """Record that this rank has finished its work, so that nobody reports it as failed."""
        self._has_ended = True
        self._change()
        if isinstance(self._buffer, mmap.mmap):
            # Without this, a network file system may show the end to other machines only half a
            # minute later.
            with contextlib.suppress(OSError):
                self._buffer.flush()

    def now(self) -> SeenPosition:
        """Return what this rank is doing now, in the form in which `read_positions` returns it."""
        return _seen(bytes(self._buffer[self._offset : self._offset + _SLOT_BYTES]))

    def _change(self) -> None:
        self.num_changes = (self.num_changes + 1) & 0xFFFF_FFFF
        self._write()

    def _write(self) -> None:
        kind, stage, micro_batch = self._pass
        begin = self._offset + _WHO.size
        # Do not use `pack_into`: it first fills its target with zeros, which readers may see.
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
    """Return the positions of all ranks in a folder of failure records, by rank.

    The result is {} if the folder does not exist.
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
    """Return the bytes of a slot of the position file, in which one rank says what it is doing.

    If the rank is just writing the slot, read it again, a few times at most. Afterwards the fields
    may still be from two different moments, which only makes one line of a report inaccurate.

    Args:
        file: Descriptor of the position file.
        offset: Byte at which the slot begins.
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
