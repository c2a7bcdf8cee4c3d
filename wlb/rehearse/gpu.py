"""The fake GPU of a rehearsed rank: streams with clocks, and a log of what was issued to them.

Each stream has a vector clock and a time. The vector clock says, for each other stream, how many
kernels of that stream have certainly ended. The time advances by the predicted duration of each
kernel and transfer.

Two assumptions simplify the times: the host always issues work ahead of the GPU, and the other
ranks of a collective start it at the same time as this rank.
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
    """A process group, identified by its axis and its ranks."""

    axis: str  # axis of the mesh; for a group that is not an axis, torch's description of the group
    ranks: tuple[int, ...]  # global ranks of its members


class Splits(NamedTuple):
    """Numbers of rows that a rank exchanges with each member of its group in an all-to-all."""

    received: tuple[int, ...]  # number of rows from each member
    sent: tuple[int, ...]  # number of rows to each member


class RankMessage(NamedTuple):
    """A collective, send, receive or wait that the host of a rank issued."""

    communicator: Communicator | None  # None for a wait
    kind: str  # "collective", "send", "recv" or "wait"
    op: Any  # name of the collective; rank of the peer for a send or receive; None for a wait
    # A wait has the index of the awaited send or receive among the messages of the rank. All other
    # kinds have shapes, dtypes and options, which must be equal on all members.
    what: Any
    where: str  # source file and line in wlb
    step: int  # -1 before the first step
    batch: int = -1  # transfers that NCCL starts together have the same number; -1 = no batch
    splits: Splits | None = None  # rows that an all-to-all exchanges; None for other messages


class HostWait(NamedTuple):
    """A place where the host waited for the GPU."""

    step: int
    what: str  # the call that waited, such as item()
    where: str  # source file and line in wlb
    # Predicted time of the work that was still queued on the compute stream when the wait ended.
    # If it is 0, the GPU is idle until the host issues more work.
    left_ns: float = 0.0


class StreamFault(NamedTuple):
    """The fault that an allocation may reuse memory which another stream still uses."""

    step: int
    op: str  # the operator that allocated
    where: str  # source file and line in wlb
    error: str  # what happened and how to fix it


FREED = -1
"""`AllocatorRequest.size` of a request that frees its memory."""


class AllocatorRequest(NamedTuple):
    """An allocation or a free of torch's caching allocator."""

    number: int  # identifies the memory; its allocation and its free have the same number
    size: int  # bytes to allocate, or FREED
    stream: int  # id of the stream that allocates
    step: int = -1  # -1 before the first step
    where: str = ""  # source file and line in wlb of the allocation


class StreamSpan(NamedTuple):
    """A kernel or transfer on a stream, for traces."""

    stream: int  # id of the stream
    name: str  # the operator
    part: str  # part of the step to which its time is added, such as "GEMM" or "cp"
    begin_ns: float
    time_ns: float  # duration
    where: str  # source file and line in wlb


class RehearsalFault(RuntimeError):
    """An error that a real GPU might not report, such as a race between streams."""


@dataclass(slots=True)
class PartTotals:
    """Totals of one part of a step, such as matrix products or TP's collectives."""

    calls: int = 0  # number of kernels or transfers
    num_bytes: float = 0.0  # bytes read and written by kernels, or transferred
    flops: float = 0.0
    time_ns: float = 0.0  # predicted time


class FakeStream:
    """Replaces torch.cuda.Stream.

    Attributes:
        id: Index in `FakeGpu.streams`; 0 (COMPUTE) is the default stream.
        seen: Vector clock: stream id -> how many kernels of that stream have certainly ended
            before the next kernel of this stream begins.
        time_ns: Predicted time at which the work issued so far ends.
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
        """Make later work of this stream wait for all work issued to `other` so far."""
        self.join(other.seen, other.time_ns, other.part)

    def wait_event(self, event: "FakeEvent") -> None:
        """Make later work of this stream wait for `event`."""
        event.wait(self)

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        """Record an event after the work issued so far, and return this event.

        Args:
            event: The event to record; None makes a new event.
        """
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Record that the host waits for this stream."""
        GPU.host_waits("Stream.synchronize", self.time_ns)

    def query(self) -> bool:
        """Return True (all work has ended), because a rehearsal runs nothing in the background."""
        return True

    def is_capturing(self) -> bool:
        """Return False, because a rehearsal captures no CUDA graphs."""
        return False

    def join(self, seen: Counter[int], time_ns: float, part: str) -> None:
        """Make later work of this stream wait for work of another stream.

        If this is the compute stream, the time that it waits counts as exposed time of `part`.

        Args:
            seen: Vector clock of the other stream after the awaited work.
            time_ns: Predicted time at which the awaited work ends.
            part: Part of the step to which the awaited work belongs.
        """
        self.seen |= seen
        if time_ns > self.time_ns:
            if self.id == COMPUTE:
                GPU.exposed_ns[part] += time_ns - self.time_ns
            self.time_ns = time_ns

    def run(self, name: str, part: str, time_ns: float, where: str = "") -> None:
        """Issue a kernel or transfer to this stream, and advance the stream's clocks.

        Args:
            name: Name of the kernel or transfer.
            part: Part of the step that it belongs to.
            time_ns: Predicted time that it takes.
            where: File and line of wlb that issued it, for traces.
        """
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
    """Replaces torch.cuda.Event and torch.Event.

    An event keeps a copy of the vector clock and the time that a stream had when the event was
    recorded.
    """

    def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
        self.seen: Counter[int] = Counter()
        self._time_ns, self._part = 0.0, "compute"

    def record(self, stream: FakeStream | None = None) -> "FakeEvent":
        """Keep a copy of a stream's vector clock and time, and return self.

        Args:
            stream: The stream to record. Defaults to the current stream.
        """
        stream = stream or GPU.current
        self.seen, self._time_ns, self._part = stream.seen.copy(), stream.time_ns, stream.part
        return self

    def wait(self, stream: FakeStream | None = None) -> None:
        """Make later work of a stream wait for this event.

        Args:
            stream: The stream that waits. Defaults to the current stream.
        """
        (stream or GPU.current).join(self.seen, self._time_ns, self._part)

    def synchronize(self) -> None:
        """Record that the host waits for this event."""
        GPU.host_waits("Event.synchronize", self._time_ns)

    def query(self) -> bool:
        """Return True (all work has ended), because a rehearsal runs nothing in the background."""
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Return the predicted time from this event to the event `end`, in milliseconds."""
        return max(0.0, (end._time_ns - self._time_ns) * 1e-6)


@dataclass(slots=True)
class FakeGpu:
    """State of the rehearsed GPU, and a log of what was issued to it."""

    device: Any = None  # torch.device of the GPU
    streams: list[FakeStream] = field(default_factory=list)
    # Streams of the open `with torch.cuda.stream(...)` blocks, the innermost last.
    stack: list[FakeStream] = field(default_factory=list)
    # Messages of this rank in the order in which the host issued them.
    messages: list[RankMessage] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    faults: list[StreamFault] = field(default_factory=list)
    spans: list[StreamSpan] = field(default_factory=list)
    # Part of the current step, such as "GEMM" or "cp" -> its totals.
    parts: dict[str, PartTotals] = field(default_factory=lambda: defaultdict(PartTotals))
    # Part -> time of the current step in which the compute stream waited for transfers of the part.
    exposed_ns: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_ns: float = 0.0  # predicted time at which the host's latest wait ended
    step: int = -1  # -1 before the first step
    op: str = ""  # the latest operator
    is_counting: bool = True  # False while operators run only to infer shapes
    traces: bool = False  # whether `spans` are recorded
    # The operator that raised an error, and the file and line of wlb that called it. None if there
    # was no error.
    failing: tuple[str, str] | None = None

    @property
    def current(self) -> FakeStream:
        """The stream to which operators are issued now."""
        if self.stack:
            return self.stack[-1]
        if not self.streams:
            FakeStream(name="compute")
        return self.streams[COMPUTE]

    def count(self, part: str, *, num_bytes: float, flops: float, time_ns: float) -> None:
        """Add a kernel or transfer to the totals of a part of the step.

        Args:
            part: Name of the part, such as "GEMM" or "cp".
            num_bytes: Bytes that are read and written, or transferred.
            flops: Floating-point operations.
            time_ns: Predicted time.
        """
        totals = self.parts[part]
        totals.calls += 1
        totals.num_bytes += num_bytes
        totals.flops += flops
        totals.time_ns += time_ns

    def host_waits(self, what: str, until_ns: float | None = None) -> None:
        """Record that the host waits for the GPU.

        Args:
            what: The call that waits, such as "item()".
            until_ns: Predicted time at which the wait ends; None means that the host waits for all
                work of the current stream.
        """
        until_ns = self.current.time_ns if until_ns is None else until_ns
        left_ns = max(0.0, self.streams[COMPUTE].time_ns - until_ns)
        self.waits.append(HostWait(self.step, what, called_from(2), left_ns))
        self.host_ns = max(self.host_ns, until_ns)


def called_from(skip: int = 0) -> str:
    """Return file and line of the innermost stack frame of wlb outside this folder.

    Args:
        skip: Number of frames above the caller to skip before the search.

    Returns:
        Text such as "wlb/train/loop.py:120". If no frame is of wlb, file and line of the first
        frame that was searched.
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
"""The fake GPU of this process, which rehearses one rank."""
