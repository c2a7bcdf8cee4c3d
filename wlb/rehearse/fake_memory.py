"""Memory of the fake GPU: living storages by kind, races on them, and requests to the allocator.

Two rules of CUDA streams are checked. A kernel on one stream may use what another stream's kernel
wrote only after waiting for it. Freed memory goes to the next request of the stream that allocated
it, which must have waited for other streams' kernels on it by then, unless the allocator was told
of them (Tensor.record_stream).
"""

import functools
import sys
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

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
"""The caching allocator rounds requests up to it, in bytes."""
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
"""Ending of a file and function ("" = any) -> kind of what it allocates; innermost first."""
_DEEPEST = 40


@dataclass(slots=True)
class _Storage:
    """number: of the allocator's request. writer, written: the stream of the last write, and how
    many kernels that stream had run then; done: its event behind a transfer that wrote. uses: by
    stream, likewise of the last use. known_to: streams by record_stream.
    """

    number: int
    size: int
    kind: str
    stream: FakeStream
    writer: int
    written: int
    where: str
    done: FakeEvent | None = None
    uses: dict[int, int] = field(default_factory=dict)
    known_to: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Footprint:
    """Bytes of the fake GPU. at_peak: by kind, when `peak` was reached. requests: in order."""

    now: int = 0
    peak: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    at_peak: dict[str, int] = field(default_factory=dict)
    requests: list[AllocatorRequest] = field(default_factory=list)
    parameter_shapes: set[tuple[int, ...]] = field(default_factory=set)
    is_backward: bool = False
    _known: Any = field(default_factory=weakref.WeakKeyDictionary)
    _numbers: int = 0
    _unfinished: dict[int, list[tuple[int, int, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, tensor: Any) -> _Storage:
        """The record of a tensor's storage, made if it is new; follows resizes."""
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
            if (
                size and record.number
            ):  # FSDP resizes what it made once; the request comes from here
                record.where = called_from(3)
            self._resize(record, size)
        return record

    def temporary(self, kind: str, size: int) -> None:
        """A workspace inside a kernel: allocated and freed at once."""
        if size:
            stream = GPU.current
            record = _Storage(0, 0, kind, stream, stream.id, 0, called_from(3))
            self._resize(record, -(-size // BLOCK) * BLOCK)
            self._resize(record, 0)

    def read(self, tensor: Any, stream: FakeStream) -> None:
        record = self.add(tensor)
        if record.writer != stream.id and stream.seen[record.writer] < record.written:
            raise RehearsalFault(
                f"{stream.name} uses {_text(tensor)}, which {GPU.streams[record.writer].name} "
                f"wrote (allocated at {record.where}), without waiting for it: record an event "
                f"there and wait for it here"
            )
        record.uses[stream.id] = stream.seen[stream.id] + 1

    def write(self, tensor: Any, stream: FakeStream) -> None:
        """Also checks that other streams have ended reading."""
        self.read(tensor, stream)
        record = self.add(tensor)
        for other, count in record.uses.items():
            if other != stream.id and stream.seen[other] < count:
                raise RehearsalFault(
                    f"{stream.name} writes {_text(tensor)} while {GPU.streams[other].name} may "
                    f"still use it (allocated at {record.where}): wait for that stream first"
                )
        record.writer, record.written, record.done = stream.id, stream.seen[stream.id] + 1, None

    def made(self, tensor: Any, stream: FakeStream) -> None:
        """`stream` fills a tensor that has no earlier content."""
        record = self.add(tensor)
        record.writer, record.written, record.done = stream.id, stream.seen[stream.id] + 1, None

    def landed(self, tensor: Any, stream: FakeStream) -> None:
        """Notes where on `stream` the transfer that fills the tensor ends, so that waiting for it
        does not wait for later ones.
        """
        self.add(tensor).done = FakeEvent().record(stream)

    def wait_for(self, tensor: Any, stream: FakeStream) -> None:
        """`stream` waits for the transfer that filled a tensor, not for later ones on its
        stream.
        """
        record = self.add(tensor)
        if record.done is not None:
            record.done.wait(stream)
        else:
            stream.wait_stream(GPU.streams[record.writer])

    def told(self, tensor: Any, stream: FakeStream) -> None:
        """Tensor.record_stream: the allocator waits for `stream` before reuse."""
        self.add(tensor).known_to.add(stream.id)

    def restart_peak(self) -> tuple[int, dict[str, int]]:
        """Count the peak from now on; returns the one before, for `keep_peak`."""
        before = self.peak, self.at_peak
        self.peak, self.at_peak = self.now, dict(self.by_kind)
        return before

    def keep_peak(self, peak: int, at_peak: dict[str, int]) -> None:
        """Count an earlier peak again if it was higher."""
        if peak > self.peak:
            self.peak, self.at_peak = peak, at_peak

    def _free(self, record: _Storage) -> None:
        if record.size:
            self._resize(record, 0)

    def _resize(self, record: _Storage, size: int) -> None:
        if record.size:
            self._note_uses(record)
            self._ask(record, FREED)
        change = size - record.size
        self.now += change
        self.by_kind[record.kind] += change
        record.size = size
        if size:
            self._numbers += 1
            record.number, record.stream = self._numbers, GPU.current
            self._ask(record, size)
            self._check_reuse(record.stream)
            if self.now > self.peak:
                self.peak, self.at_peak = self.now, dict(self.by_kind)

    def _ask(self, record: _Storage, size: int) -> None:
        at = (GPU.step, record.where)
        self.requests.append(AllocatorRequest(record.number, size, record.stream.id, *at))

    def _note_uses(self, record: _Storage) -> None:
        """A storage is freed: others of its stream may get its memory from now on."""
        own = record.stream
        for stream, count in record.uses.items():
            is_known = stream == own.id or stream in record.known_to or own.seen[stream] >= count
            if not is_known and not GPU.streams[stream].name.startswith("NCCL"):
                text = f"{record.kind} of {record.size:,} bytes (allocated at {record.where})"
                self._unfinished[own.id].append((stream, count, text))
        record.uses.clear()

    def _check_reuse(self, own: FakeStream) -> None:
        """A request on `own` may get memory that another stream still uses."""
        unfinished = self._unfinished.pop(own.id, ())
        for stream, count, text in unfinished:
            if own.seen[stream] < count:
                # Raised where the garbage collector frees, it would be printed and lost.
                error = (
                    f"{text} were freed while {GPU.streams[stream].name} may still use them, and "
                    f"{own.name} allocates without having waited for it: wait for that stream "
                    f"first, or call record_stream"
                )
                GPU.faults.append(StreamFault(GPU.step, GPU.op, called_from(3), error))

    def _kind_of(self, tensor: Any) -> str:
        frame = sys._getframe(3)
        for _ in range(_DEEPEST):
            kind = _kind_by_code(frame.f_code)
            if kind:
                is_reducing = kind == "gathered parameters" and _is_reducing(frame)
                return "gradients" if is_reducing else kind
            if frame.f_back is None:
                break
            frame = frame.f_back
        if self.is_backward:
            is_weight = tuple(tensor.shape) in self.parameter_shapes
            return "gradients" if is_weight else "backward"
        return "activations"


@functools.cache
def _kind_by_code(code: CodeType) -> str:
    """What a function allocates, empty if it is none of `_BY_FRAME`."""
    for ending, function, kind in _BY_FRAME:
        if code.co_filename.endswith(ending) and function in ("", code.co_name):
            return kind
    return ""


def _is_reducing(frame: Any) -> bool:
    """Whether FSDP reduces or accumulates gradients in a frame or its callers."""
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
"""Of this process's rank."""
