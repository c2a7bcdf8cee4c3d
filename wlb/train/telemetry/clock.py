"""How long a rank computes in each pass, stage and micro-batch of a step, without a host sync.

A rank's clock is a list of marks. From each mark on, time belongs to one part of one cell (or to
none, between passes), so parts add up to their pass and nothing is counted twice. Marks are CUDA
events, read after the step's one wait for the device, or the launching thread's CPU time (3 us
each). README.md says what each kind of mark holds.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from wlb.kernels import observing
from wlb.parallel.observe import Cell, Part, Pass


@dataclass(frozen=True, eq=False)
class StepTimes:
    """A rank's step. parts_ns: computing time by cell and part. wall_ns: of the whole step."""

    parts_ns: dict[tuple[Cell, Part], int]
    wall_ns: int

    def part_ns(self, cell: Cell, *parts: Part) -> int:
        return sum(self.parts_ns.get((cell, part), 0) for part in parts)

    def total_ns(self, part: Part) -> int:
        return sum(ns for (_, at), ns in self.parts_ns.items() if at == part)

    @cached_property
    def compute_ns(self) -> int:
        return sum(self.parts_ns.values())

    @property
    def bubble_ns(self) -> int:
        """Step less computing: pipeline bubbles, waiting for transfers (and, on CPU, for cores)."""
        return max(0, self.wall_ns - self.compute_ns)


class StepSpans(NamedTuple):
    """Wall times of a rank's step, which began at the Unix time began_ns. spans: each chunk's cell,
    its begin since the step's, and its duration, in ns.
    """

    began_ns: int
    wall_ns: int
    spans: tuple[tuple[Cell, int, int], ...]


class WallMarks:
    """Timestamps whose differences are read after the step, and the base of other kinds. These
    are of wall time, for operators on several threads. Wall points time the whole step.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a step: the last step's points will not be read any more."""
        self._thread = threading.get_ident()

    def now(self) -> Any:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "part of a step ran on another thread than the one whose CPU time is measured"
            )
        return time.perf_counter_ns()

    def wall_now(self) -> Any:
        return time.perf_counter_ns()

    def wall_of(self, point: Any) -> Any:
        """The wall point that belongs to `point`, which was made just now."""
        return point

    def between_ns(self, start: Any, stop: Any) -> int:
        return stop - start


class ThreadMarks(WallMarks):
    """CPU time of the thread that runs the step; wall time for the whole step."""

    def now(self) -> int:
        super().now()
        return time.thread_time_ns()

    def wall_of(self, point: int) -> int:
        return time.perf_counter_ns()


class EventMarks(WallMarks):
    """CUDA events on the current stream, from a pool that grows to the number that a step needs."""

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []
        self._num_used = 0

    def reset(self) -> None:
        self._num_used = 0

    def now(self) -> torch.cuda.Event:
        if self._num_used == len(self._pool):
            self._pool.append(torch.cuda.Event(enable_timing=True))
        event = self._pool[self._num_used]
        self._num_used += 1
        event.record()
        return event

    wall_now = now

    def between_ns(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> int:
        return round(start.elapsed_time(stop) * 1e6)


_NUM_TRIED = 100
"""Number of marks that are made once, to measure the cost of a mark."""


class StepClock:
    """Times the steps of one rank. Off outside of `step`, so that evaluations leave no record."""

    def __init__(self, marks: WallMarks) -> None:
        self._marks = marks
        self._points: list[tuple[tuple[Cell, Part] | None, Any]] = []
        self._seen: set[Cell] = set()
        self._spans: list[tuple[Cell, Any, Any]] = []
        self._began_ns = 0
        self._cell: Cell | None = None
        self._part = Part.LAYERS
        self._wall: list[Any] = []
        self._is_running = False
        # The first round makes events, which all later steps use again.
        for _ in range(_NUM_TRIED):
            marks.now()
        marks.reset()
        begin = time.perf_counter_ns()
        for _ in range(_NUM_TRIED):
            marks.now()
        self._mark_ns = (time.perf_counter_ns() - begin) / _NUM_TRIED

    @classmethod
    def of(cls, device: torch.device) -> "StepClock":
        if device.type == "cuda":
            return cls(EventMarks())
        # With several threads, one thread's CPU time measures neither the work nor its duration.
        return cls(ThreadMarks() if torch.get_num_threads() == 1 else WallMarks())

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the block; forget the last step if `take` was not called."""
        self._marks.reset()
        self._points, self._seen, self._spans = [], set(), []
        with observing(self):
            self._began_ns = time.time_ns()
            self._wall = [self._marks.wall_now()]
            self._is_running = True
            try:
                yield
            finally:
                self._is_running, self._cell = False, None
            self._wall.append(self._marks.wall_now())

    def chunk(
        self, kind: Pass, *, stage: int, micro_batch: int, first: Part = Part.LAYERS
    ) -> AbstractContextManager[None]:
        """Time a chunk, as `first` until `switch` is called. RuntimeError if it ran before."""
        return self._chunk(Cell(kind, stage, micro_batch), first) if self._is_running else _OFF

    @contextmanager
    def _chunk(self, cell: Cell, first: Part) -> Iterator[None]:
        if self._cell is not None or cell in self._seen:
            problem = "ran twice" if cell in self._seen else f"began inside {self._cell}"
            raise RuntimeError(f"{cell} {problem} in one step; its time would be counted twice")
        self._seen.add(cell)
        self._cell = cell
        self.switch(first)
        begin = self._marks.wall_of(self._points[-1][1])
        try:
            yield
        finally:
            self._points.append((None, self._marks.now()))
            self._spans.append((cell, begin, self._marks.wall_of(self._points[-1][1])))
            self._cell = None

    def switch(self, part: Part) -> None:
        """Attribute time from now on to `part` of the current chunk; outside chunks do nothing."""
        if self._cell is not None:
            self._part = part
            self._points.append(((self._cell, part), self._marks.now()))

    @contextmanager
    def attention(self, *, is_backward: bool) -> Iterator[None]:
        """`wlb.kernels.AttentionObserver`."""
        before = self._part
        is_again = self._cell is not None and self._cell.kind != Pass.FORWARD and not is_backward
        self.switch(Part.RECOMPUTE if is_again else Part.ATTENTION)
        try:
            yield
        finally:
            self.switch(before)

    @property
    def marks_ns(self) -> int:
        """Estimated thread time of the last step's marks: their number times the cost of one."""
        return round(len(self._points) * self._mark_ns)

    def take(self) -> StepTimes:
        """The last step's times. On CUDA, call it after the host has waited for the step's end."""
        times: dict[tuple[Cell, Part], int] = {}
        for (key, start), (_, stop) in zip(self._points, self._points[1:], strict=False):
            if key is not None:
                times[key] = times.get(key, 0) + self._marks.between_ns(start, stop)
        return StepTimes(times, self._marks.between_ns(*self._wall))

    def spans(self) -> StepSpans:
        """Where the last step's chunks lie in it; may be called when `take` may."""
        origin = self._wall[0]
        return StepSpans(
            began_ns=self._began_ns,
            wall_ns=self._marks.between_ns(*self._wall),
            spans=tuple(
                (cell, self._marks.between_ns(origin, begin), self._marks.between_ns(begin, end))
                for cell, begin, end in self._spans
            ),
        )


_OFF = nullcontext()
