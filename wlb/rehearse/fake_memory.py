"""Memory of the fake GPU: live storages by kind, data races, and requests to the allocator.

Two rules of CUDA streams are checked:

1. A kernel may use a tensor that another stream wrote only after its own stream has waited for the
   kernel that wrote it.
2. The stream that allocated memory may reuse it as soon as it is freed. Before its next allocation,
   this stream must therefore have waited for the kernels of other streams that used the memory,
   unless `Tensor.record_stream` has told the allocator about these streams.

Storages are tracked by weak references, so a storage counts as freed when Python frees it.
"""

import functools
import sys
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from wlb.rehearse.gpu import (
    FREED,
    GPU,
    AllocatorRequest,
    FakeEvent,
    FakeStream,
    RehearsalFault,
    StreamFault,
    called_from,
)

BLOCK = 512
"""The caching allocator rounds requests up to a multiple of this many bytes."""
_BY_FRAME = (
    ("_fsdp_collectives.py", "", "gathered parameters"),
    ("_fsdp_param.py", "", "gathered parameters"),
    ("optim/adam.py", "", "optimizer"),
    ("optim/adamw.py", "", "optimizer"),
    ("pipeline.py", "_allocate", "boundaries"),
    ("loss.py", "", "logits"),
    ("build.py", "", "weights"),
    ("execute.py", "load", "inputs"),
    ("reduce.py", "", "telemetry"),
    ("execute.py", "_sum", "telemetry"),
    ("data.py", "gradient_square", "telemetry"),
)
"""Which code allocates which kind of memory.

An entry is (end of a file name, name of a function or "" for any, kind of memory). The innermost
stack frame that matches an entry decides."""
_DEEPEST = 40
"""Most stack frames that are searched for an entry of _BY_FRAME."""


@dataclass(slots=True)
class _Storage:
    """A tensor's storage on the fake GPU."""

    number: int  # number of the storage's latest request to the allocator
    size: int  # bytes; 0 = freed
    kind: str  # kind of memory, such as "activations"
    stream: FakeStream  # stream that allocated the storage
    writer: int  # id of the stream that wrote the storage last
    written: int  # number of the kernel that wrote the storage last, counted on its stream
    where: str  # source file and line in wlb of the allocation
    # Event recorded after the transfer that wrote the storage last; None if a kernel wrote last.
    done: FakeEvent | None = None
    # Stream id -> number of the last kernel on this stream that used the storage.
    uses: dict[int, int] = field(default_factory=dict)
    # Ids of the streams for which Tensor.record_stream was called.
    recorded_streams: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Footprint:
    """Allocated memory of the fake GPU, in bytes, and every request to the allocator."""

    now: int = 0  # bytes that are allocated now
    peak: int = 0  # most bytes that were allocated at a time
    # bytes allocated now, by kind of memory, such as "activations" or "gradients"
    by_kind: Counter[str] = field(default_factory=Counter)
    at_peak: dict[str, int] = field(default_factory=dict)  # bytes by kind when `peak` was reached
    requests: list[AllocatorRequest] = field(default_factory=list)  # allocations and frees
    # Shapes of weights before FSDP shards them. In backward, tensors of such a shape are gradients.
    parameter_shapes: set[tuple[int, ...]] = field(default_factory=set)
    _known: Any = field(default_factory=weakref.WeakKeyDictionary)  # torch's storage -> its record
    _numbers: int = 0  # number of the latest request
    # Stream id -> kernels of other streams that may still use memory that this stream has freed.
    # Each is (id of the other stream, number of the kernel, text that describes the memory).
    _unfinished: dict[int, list[tuple[int, int, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, tensor: Any) -> _Storage:
        """Return the record of a tensor's storage. If necessary, make it or update its size."""
        raw = tensor.untyped_storage()
        size = -(-raw.nbytes() // BLOCK) * BLOCK
        record = self._known.get(raw)
        if record is None:
            stream = GPU.current
            kind = self._kind_of(tensor)
            record = _Storage(0, 0, kind, stream, stream.id, stream.seen[stream.id], called_from(3))
            self._known[raw] = record
            weakref.finalize(raw, self._free, record).atexit = False
        if record.size != size:
            # FSDP creates a storage once, and later resizes it to allocate or free its memory. So
            # record the line that resizes the storage instead of the line that created it.
            if size and record.number:
                record.where = called_from(3)
            self._resize(record, size)
        return record

    def temporary(self, kind: str, size: int) -> None:
        """Record that a kernel allocates a workspace and frees it at once.

        Args:
            kind: Kind of memory under which the workspace is counted.
            size: Bytes of the workspace.
        """
        if size:
            stream = GPU.current
            record = _Storage(0, 0, kind, stream, stream.id, 0, called_from(3))
            self._resize(record, -(-size // BLOCK) * BLOCK)
            self._resize(record, 0)

    def read(self, tensor: Any, stream: FakeStream) -> None:
        """Record that the next kernel of `stream` reads a tensor, and check for a race.

        Raises:
            RehearsalFault: If `stream` has not waited for the stream that wrote the tensor.
        """
        record = self.add(tensor)
        if record.writer != stream.id and stream.seen[record.writer] < record.written:
            raise RehearsalFault(
                f"{stream.name} uses {_text(tensor)} (allocated at {record.where}) without waiting "
                f"for {GPU.streams[record.writer].name}, which wrote it; record an event on "
                f"{GPU.streams[record.writer].name} after the write, and make {stream.name} wait "
                f"for this event"
            )
        record.uses[stream.id] = stream.seen[stream.id] + 1

    def write(self, tensor: Any, stream: FakeStream) -> None:
        """Record that the next kernel of `stream` writes a tensor, and check for a race.

        Raises:
            RehearsalFault: If `stream` has not waited for all other streams that use the tensor.
        """
        self.read(tensor, stream)
        record = self.add(tensor)
        for other, count in record.uses.items():
            if other != stream.id and stream.seen[other] < count:
                raise RehearsalFault(
                    f"{stream.name} writes {_text(tensor)} (allocated at {record.where}) while "
                    f"{GPU.streams[other].name} may still use it; make {stream.name} wait for "
                    f"{GPU.streams[other].name} before the write"
                )
        record.writer, record.written, record.done = stream.id, stream.seen[stream.id] + 1, None

    def made(self, tensor: Any, stream: FakeStream) -> None:
        """Record that the next kernel of `stream` writes the first content of a new tensor."""
        record = self.add(tensor)
        record.writer, record.written, record.done = stream.id, stream.seen[stream.id] + 1, None

    def landed(self, tensor: Any, stream: FakeStream) -> None:
        """Record that the latest transfer on `stream` fills a tensor, and record an event after it.

        With this event, `wait_for` waits for this transfer but not for later transfers.
        """
        self.add(tensor).done = FakeEvent().record(stream)

    def wait_for(self, tensor: Any, stream: FakeStream) -> None:
        """Make `stream` wait for the transfer that filled a tensor, but not for later transfers."""
        record = self.add(tensor)
        if record.done is not None:
            record.done.wait(stream)
        else:
            stream.wait_stream(GPU.streams[record.writer])

    def record_stream(self, tensor: Any, stream: FakeStream) -> None:
        """Record that a tensor's memory is not reused before the work of `stream` on it has ended.

        This replaces Tensor.record_stream.
        """
        self.add(tensor).recorded_streams.add(stream.id)

    def restart_peak(self) -> tuple[int, dict[str, int]]:
        """Start a new measurement of peak memory, and return the previous peak for `keep_peak`."""
        before = self.peak, self.at_peak
        self.peak, self.at_peak = self.now, dict(self.by_kind)
        return before

    def keep_peak(self, peak: int, at_peak: dict[str, int]) -> None:
        """Restore a peak that `restart_peak` returned, unless the present peak is higher.

        Args:
            peak: Most bytes that were allocated at a time.
            at_peak: Bytes of each kind of memory at that time.
        """
        if peak > self.peak:
            self.peak, self.at_peak = peak, at_peak

    def _free(self, record: _Storage) -> None:
        if record.size:
            self._resize(record, 0)

    def _resize(self, record: _Storage, size: int) -> None:
        if record.size:
            self._note_uses(record)
            self._request(record, FREED)
        change = size - record.size
        self.now += change
        self.by_kind[record.kind] += change
        record.size = size
        if size:
            self._numbers += 1
            record.number, record.stream = self._numbers, GPU.current
            self._request(record, size)
            self._check_reuse(record.stream)
            if self.now > self.peak:
                self.peak, self.at_peak = self.now, dict(self.by_kind)

    def _request(self, record: _Storage, size: int) -> None:
        at = (GPU.step, record.where)
        self.requests.append(AllocatorRequest(record.number, size, record.stream.id, *at))

    def _note_uses(self, record: _Storage) -> None:
        """Record which streams may still use a storage that is being freed.

        From now on, the stream that allocated the storage may reuse its memory.
        """
        owner = record.stream
        for stream, count in record.uses.items():
            has_ended = (
                stream == owner.id
                or stream in record.recorded_streams
                or owner.seen[stream] >= count
            )
            if not has_ended and not GPU.streams[stream].name.startswith("NCCL"):
                text = f"{record.kind} of {record.size:,} bytes (allocated at {record.where})"
                self._unfinished[owner.id].append((stream, count, text))
        record.uses.clear()

    def _check_reuse(self, owner: FakeStream) -> None:
        """Record a fault if `owner` may now reuse memory that other streams still use.

        Args:
            owner: Stream that allocates.
        """
        unfinished = self._unfinished.pop(owner.id, ())
        for stream, count, text in unfinished:
            if owner.seen[stream] < count:
                # Record the fault instead of raising it, because Python would only print an
                # exception that is raised in a callback of the garbage collector.
                error = (
                    f"{text} were freed while {GPU.streams[stream].name} may still use this "
                    f"memory, and {owner.name} now allocates and may get the same memory; make "
                    f"{owner.name} wait for {GPU.streams[stream].name} before that allocation, or "
                    f"call record_stream on the tensor"
                )
                GPU.faults.append(StreamFault(GPU.step, GPU.op, called_from(3), error))

    def _kind_of(self, tensor: Any) -> str:
        """Return which kind of memory a new tensor is, such as "gradients" or "activations".

        The functions on the Python call stack decide (`_BY_FRAME`). If none of them is listed, it
        depends on whether a backward pass runs.
        """
        frame = sys._getframe(3)
        for _ in range(_DEEPEST):
            kind = _kind_by_code(frame.f_code)
            if kind:
                is_reducing = kind == "gathered parameters" and _is_reducing(frame)
                return "gradients" if is_reducing else kind
            if frame.f_back is None:
                break
            frame = frame.f_back
        if torch._C._current_autograd_node() is not None:  # a backward pass runs
            is_weight = tuple(tensor.shape) in self.parameter_shapes
            return "gradients" if is_weight else "backward"
        return "activations"


@functools.cache
def _kind_by_code(code: CodeType) -> str:
    """Look up in _BY_FRAME which kind of memory a function allocates; "" if it has no entry."""
    for ending, function, kind in _BY_FRAME:
        if code.co_filename.endswith(ending) and function in ("", code.co_name):
            return kind
    return ""


def _is_reducing(frame: Any) -> bool:
    """Return whether the function of a frame, or of its 3 nearest callers, handles gradients.

    This is judged by the function's name: it contains "reduce" or "grad".
    """
    for _ in range(4):
        if "reduce" in frame.f_code.co_name or "grad" in frame.f_code.co_name:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _text(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


FOOTPRINT = Footprint()
"""The fake GPU memory of this process, which rehearses one rank."""
