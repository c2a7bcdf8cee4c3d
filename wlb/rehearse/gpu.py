"""The fake GPU of a rehearsed rank: streams with clocks, and a log of what was issued to them.

A stream has a vector clock, which says for each other stream how many of its kernels have
certainly ended, and a time, which advances by the price of each kernel and transfer.

Two assumptions simplify the times: the host always issues work ahead of the GPU, and the other
ranks of a collective arrive when this rank does.
"""

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE = 0
"""Id of the default stream, on which layers compute."""
_THIS_FOLDER = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parent.parent)
_DEEPEST = 60
"""Most stack frames that `called_from` looks at."""


class Communicator(NamedTuple):
    """A process group."""

    axis: str  # axis of the mesh, or the group's description if it belongs to none
    ranks: tuple[int, ...]  # global ranks of its members


class Splits(NamedTuple):
    """Rows that a rank exchanges with each member of its group in an all-to-all."""

    received: tuple[int, ...]  # rows from each member
    sent: tuple[int, ...]  # rows to each member


class RankMessage(NamedTuple):
    """A collective, send, receive or wait that the host of a rank issued."""

    communicator: Communicator | None  # None for a wait
    kind: str  # "collective", "send", "recv" or "wait"
    op: Any  # name of the collective, or rank of the peer
    # Shapes, dtypes and options, which all members must agree on. For a wait: the index of the
    # awaited send or receive in the rank's messages.
    what: Any
    where: str  # file and line of wlb
    step: int  # -1 before the first step
    batch: int = -1  # number of the batch of transfers that NCCL starts together; -1 = none
    splits: Splits | None = None  # rows of an all-to-all; None for others


class HostWait(NamedTuple):
    """A place where the host waited for the GPU."""

    step: int
    what: str  # the call that waited, such as item()
    where: str  # file and line of wlb
    # Priced work still queued on the compute stream when the wait ended. With 0 the GPU is idle
    # until the host issues more.
    left_ns: float = 0.0


class StreamFault(NamedTuple):
    """An allocation that reused memory which another stream may still use."""

    step: int
    op: str  # the operator that allocated
    where: str  # file and line of wlb
    error: str  # what happened and how to fix it


FREED = -1
"""`AllocatorRequest.size` of a request that frees its memory."""


class AllocatorRequest(NamedTuple):
    """An allocation or a free of torch's caching allocator."""

    number: int  # identifies the memory; its allocation and its free have the same number
    size: int  # bytes to allocate, or FREED
    stream: int  # id of the stream that allocates
    step: int = -1
    where: str = ""  # file and line of wlb that allocated


class StreamSpan(NamedTuple):
    """A kernel or transfer on a stream, for traces."""

    stream: int  # id of the stream
    name: str  # the operator
    part: str  # part of the step that it counts for, such as "GEMM" or "cp"
    begin_ns: float
    time_ns: float  # duration
    where: str  # file and line of wlb


class RehearsalFault(RuntimeError):
    """An error that a real GPU might not report, such as a race between streams."""


@dataclass(slots=True)
class PartTotals:
    """Totals of one part of a step, such as matrix products or TP's collectives."""

    calls: int = 0  # kernels or transfers
    num_bytes: float = 0.0  # read and written by kernels, or transferred
    flops: float = 0.0
    time_ns: float = 0.0  # priced


class FakeStream:
    """Stands in for torch.cuda.Stream.

    Attributes:
        id: Index in `FakeGpu.streams`; COMPUTE is 0.
        seen: Vector clock: for each stream id, the number of its kernels that have certainly ended
            before the next kernel of this stream begins.
        time_ns: Priced time at which the work issued so far ends.
        part: Part of the step that the latest kernel or transfer belongs to.
    """

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **_: Any) -> None:
        self.device, self.device_index, self.priority = GPU.device, 0, priority
        self.id = self.stream_id = self.cuda_stream = len(GPU.streams)
        self.name = name or f"stream {self.id} ({called_from(1)})"
        self.seen: Counter[int] = Counter({self.id: 0})
        self.time_ns = 0.0
        self.part = "compute"
        GPU.streams.append(self)

    def wait_stream(self, other: "FakeStream") -> None:
        """Let later work of this stream wait for all work issued to `other` so far."""
        self.join(other.seen, other.time_ns, other.part)

    def wait_event(self, event: "FakeEvent") -> None:
        """Let later work of this stream wait for `event`."""
        event.wait(self)

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        """Record `event`, or a new event, behind the work issued so far, and return it."""
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Note that the host waits for this stream."""
        GPU.host_waits("Stream.synchronize", self.time_ns)

    def query(self) -> bool:
        """Return True: nothing runs in the background."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no CUDA graph is captured."""
        return False

    def join(self, seen: Counter[int], time_ns: float, part: str) -> None:
        """Wait for work of another stream.

        Time that the compute stream waits for a transfer is counted as exposed.

        Args:
            seen: Vector clock of the work.
            time_ns: When the work ends.
            part: Part of the step that the work belongs to.
        """
        self.seen |= seen
        if time_ns > self.time_ns:
            if self.id == COMPUTE:
                GPU.exposed_ns[part] += time_ns - self.time_ns
            self.time_ns = time_ns

    def run(self, name: str, part: str, time_ns: float, where: str = "") -> None:
        """Append a kernel or transfer that takes `time_ns` to the stream."""
        begin = max(self.time_ns, GPU.host_ns)
        self.time_ns, self.part = begin + time_ns, part
        self.seen[self.id] += 1
        if GPU.traces:
            GPU.spans.append(StreamSpan(self.id, name, part, begin, time_ns, where))

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return self.id


class FakeEvent:
    """Stands in for torch.cuda.Event and torch.Event: a copy of a stream's clocks."""

    def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
        self.seen: Counter[int] = Counter()
        self._time_ns, self._part = 0.0, "compute"

    def record(self, stream: FakeStream | None = None) -> "FakeEvent":
        """Copy the clocks of `stream` (None: the current stream), and return this event."""
        stream = stream or GPU.current
        self.seen, self._time_ns, self._part = stream.seen.copy(), stream.time_ns, stream.part
        return self

    def wait(self, stream: FakeStream | None = None) -> None:
        """Let later work of `stream` (None: the current stream) wait for this event."""
        (stream or GPU.current).join(self.seen, self._time_ns, self._part)

    def synchronize(self) -> None:
        """Note that the host waits for this event."""
        GPU.host_waits("Event.synchronize", self._time_ns)

    def query(self) -> bool:
        """Return True: nothing runs in the background."""
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Return the priced time from this event to `end` in milliseconds."""
        return max(0.0, (end._time_ns - self._time_ns) * 1e-6)


@dataclass(slots=True)
class FakeGpu:
    """State and log of the rehearsed GPU."""

    device: Any = None
    streams: list[FakeStream] = field(default_factory=list)
    # Streams of the `torch.cuda.stream` blocks that are open, innermost last.
    stack: list[FakeStream] = field(default_factory=list)
    # Messages of this rank in the order in which the host issued them.
    messages: list[RankMessage] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    faults: list[StreamFault] = field(default_factory=list)
    spans: list[StreamSpan] = field(default_factory=list)
    # Totals of the current step by part, such as "GEMM" or "cp".
    parts: dict[str, PartTotals] = field(default_factory=lambda: defaultdict(PartTotals))
    # Time of the current step that the compute stream waited for transfers, by part.
    exposed_ns: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_ns: float = 0.0  # time until which the host has waited for the GPU
    step: int = -1  # -1 before the first step
    op: str = ""  # the latest operator
    is_counting: bool = True  # False while operators run only to infer shapes
    traces: bool = False  # whether spans are recorded
    failing: tuple[str, str] | None = None  # the operator that raised an error, and where

    @property
    def current(self) -> FakeStream:
        """The stream to which operators are issued now."""
        if self.stack:
            return self.stack[-1]
        if not self.streams:
            FakeStream(name="compute")
        return self.streams[COMPUTE]

    def count(self, part: str, *, num_bytes: float, flops: float, time_ns: float) -> None:
        """Add a kernel or transfer to the totals of `part`."""
        totals = self.parts[part]
        totals.calls += 1
        totals.num_bytes += num_bytes
        totals.flops += flops
        totals.time_ns += time_ns

    def host_waits(self, what: str, until_ns: float | None = None) -> None:
        """Note that the host waits.

        Args:
            what: The call that waits.
            until_ns: When the awaited work ends; None means all work of the current stream.
        """
        until_ns = self.current.time_ns if until_ns is None else until_ns
        left_ns = max(0.0, self.streams[COMPUTE].time_ns - until_ns)
        self.waits.append(HostWait(self.step, what, called_from(2), left_ns))
        self.host_ns = max(self.host_ns, until_ns)


def called_from(skip: int = 0) -> str:
    """Return file and line of the innermost frame of wlb outside this folder.

    Args:
        skip: Frames between the caller and the frame to start from.

    Returns:
        "wlb/...:line", or file and line of the first frame if none is of wlb.
    """
    frame = sys._getframe(skip + 1)
    outer = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    for _ in range(_DEEPEST):
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and not name.startswith(_THIS_FOLDER):
            return f"{name[len(_PACKAGE) - 3 :]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return outer


GPU = FakeGpu()
"""The GPU of this process, which rehearses one rank."""
