"""The fake GPU of a rehearsed rank: streams with a clock, and a log of what each was asked to do.

A stream is a vector clock (what it has waited for) and a time, which kernels and transfers advance
by their price. The host is assumed to be ahead of the GPU, other ranks to arrive when this one
does.
"""

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE = 0
"""Id of the default stream, on which layers compute."""
_ROOM = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parent.parent)
_DEEPEST = 60


class Communicator(NamedTuple):
    """A process group: its axis of the mesh (or description) and its ranks."""

    axis: str
    ranks: tuple[int, ...]


class Splits(NamedTuple):
    """Rows that a rank receives from each member of its group in an all-to-all, and sends to
    each.
    """

    received: tuple[int, ...]
    sent: tuple[int, ...]


class RankMessage(NamedTuple):
    """What a rank asked of a communicator. kind: collective, send, recv or wait. op: name of the
    collective, or rank of the peer. what: shapes, dtypes and options, equal on all members (for
    `wait`: the index of the send or recv). where: file and line of wlb. batch: number of the batch
    whose transfers NCCL starts together, -1 if alone. splits: of an all-to-all.
    """

    communicator: Communicator | None
    kind: str
    op: Any
    what: Any
    where: str
    step: int
    batch: int = -1
    splits: Splits | None = None


class HostWait(NamedTuple):
    """The host waited for the device. what: the call. where: file and line of wlb. left_ns: priced
    work that the compute stream still had when the wait ended; without any it runs dry.
    """

    step: int
    what: str
    where: str
    left_ns: float = 0.0


class StreamFault(NamedTuple):
    """A stream was given memory that another one may still use. op: the operator that asked for it.
    where: file and line of wlb.
    """

    step: int
    op: str
    where: str
    error: str


FREED = -1
"""Size in an `AllocatorRequest` that gives memory back."""


class AllocatorRequest(NamedTuple):
    """What the caching allocator was asked for. size: bytes, or FREED. where: file and line of wlb
    that made the storage.
    """

    number: int
    size: int
    stream: int
    step: int = -1
    where: str = ""


class StreamSpan(NamedTuple):
    """A kernel or transfer on a stream, for traces; times in ns."""

    stream: int
    name: str
    part: str
    begin_ns: float
    time_ns: float
    where: str


class RehearsalFault(RuntimeError):
    """What would go wrong on a GPU: a race between streams, memory freed while in use, a kernel
    that mixes devices.
    """


@dataclass(slots=True)
class PartTotals:
    """Of one part of a step: kernels or transfers, bytes, FLOPs, and priced time in ns."""

    calls: int = 0
    num_bytes: float = 0.0
    flops: float = 0.0
    time_ns: float = 0.0


class FakeStream:
    """Stands for torch.cuda.Stream. seen: for each stream, how many of its kernels have ended
    before this stream's next one begins.
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
        self.join(other.seen, other.time_ns, other.part)

    def wait_event(self, event: "FakeEvent") -> None:
        event.wait(self)

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        GPU.host_waits("Stream.synchronize", self.time_ns)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def join(self, seen: Counter[int], time_ns: float, part: str) -> None:
        """Wait for work that ended at `time_ns`; what the compute stream waits for is exposed."""
        self.seen |= seen
        if time_ns > self.time_ns:
            if self.id == COMPUTE:
                GPU.exposed_ns[part] += time_ns - self.time_ns
            self.time_ns = time_ns

    def run(self, name: str, part: str, time_ns: float, where: str = "") -> None:
        """A kernel or transfer that takes `time_ns`."""
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
    """Stands for torch.cuda.Event and torch.Event. seen: of the stream where it was recorded."""

    def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
        self.seen: Counter[int] = Counter()
        self._time_ns, self._part = 0.0, "compute"

    def record(self, stream: FakeStream | None = None) -> "FakeEvent":
        stream = stream or GPU.current
        self.seen, self._time_ns, self._part = stream.seen.copy(), stream.time_ns, stream.part
        return self

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or GPU.current).join(self.seen, self._time_ns, self._part)

    def synchronize(self) -> None:
        GPU.host_waits("Event.synchronize", self._time_ns)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        return max(0.0, (end._time_ns - self._time_ns) * 1e-6)


@dataclass(slots=True)
class FakeGpu:
    """State of the rehearsed device. step: -1 before the first. op: the latest operator.
    is_counting: False while operators only infer shapes. failing: the innermost operator that
    raised, and where. faults: memory that was freed too early.
    """

    device: Any = None
    streams: list[FakeStream] = field(default_factory=list)
    stack: list[FakeStream] = field(default_factory=list)
    messages: list[RankMessage] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    faults: list[StreamFault] = field(default_factory=list)
    spans: list[StreamSpan] = field(default_factory=list)
    parts: dict[str, PartTotals] = field(default_factory=lambda: defaultdict(PartTotals))
    exposed_ns: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_ns: float = 0.0
    step: int = -1
    op: str = ""
    is_counting: bool = True
    traces: bool = False
    failing: tuple[str, str] | None = None

    @property
    def current(self) -> FakeStream:
        if self.stack:
            return self.stack[-1]
        if not self.streams:
            FakeStream(name="compute")
        return self.streams[COMPUTE]

    def count(self, part: str, *, num_bytes: float, flops: float, time_ns: float) -> None:
        totals = self.parts[part]
        totals.calls += 1
        totals.num_bytes += num_bytes
        totals.flops += flops
        totals.time_ns += time_ns

    def host_waits(self, what: str, until_ns: float | None = None) -> None:
        """The host waits for a stream (None: the current one)."""
        until_ns = self.current.time_ns if until_ns is None else until_ns
        left_ns = max(0.0, self.streams[COMPUTE].time_ns - until_ns)
        self.waits.append(HostWait(self.step, what, called_from(2), left_ns))
        self.host_ns = max(self.host_ns, until_ns)


def called_from(skip: int = 0) -> str:
    """File and line of the innermost frame of wlb outside this room, else of the caller."""
    frame = sys._getframe(skip + 1)
    outer = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    for _ in range(_DEEPEST):
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and not name.startswith(_ROOM):
            return f"{name[len(_PACKAGE) - 3 :]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return outer


GPU = FakeGpu()
"""One a process: a process rehearses one rank."""
