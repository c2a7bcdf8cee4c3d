"""Times a rank's passes by stage and micro-batch, without waiting for the device.

During a step the clock makes a list of marks, which are points in time. The time from each mark to
the next one belongs either to no pass or to one part of one pass, such as the attention in the
forward pass of micro-batch 0 in stage 0. So the parts of a pass add up to the time of the pass, and
no time is counted twice. A pass of a micro-batch in a stage is called a cell.

    cell:    [   forward, stage 0, micro-batch 0   ] (none) [   forward, ...
    part:    [layers][attention][layers][attention]         [layers] ...
    mark:    ^       ^          ^       ^          ^        ^

On a GPU a mark is a CUDA event. The events are read after the host has waited for the device, which
the host does once in each step anyway. On a CPU a mark is the CPU time of the thread, which takes
3 us to read, or wall time if operators compute in several threads. README.md says what the time
between two marks of each kind includes.
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
    """Computing times of a step on one rank."""

    # Computing time (ns) of each part of each pass. A `Cell` is a pass of a micro-batch in a stage.
    parts_ns: dict[tuple[Cell, Part], int]
    wall_ns: int  # wall time (ns) of the whole step

    def part_ns(self, cell: Cell, *parts: Part) -> int:
        """Return the sum of the times (ns) of the given parts of the pass `cell`.

        A part that did not run in this pass counts as 0.
        """
        return sum(self.parts_ns.get((cell, part), 0) for part in parts)

    def total_ns(self, part: Part) -> int:
        """Return the total time (ns) of one part, such as attention, in all passes of the step."""
        return sum(ns for (_, at), ns in self.parts_ns.items() if at == part)

    @cached_property
    def compute_ns(self) -> int:
        """Total time (ns) of all passes of the step."""
        return sum(self.parts_ns.values())

    @property
    def bubble_ns(self) -> int:
        """Time (ns) of the step outside of passes: pipeline bubbles and waits for transfers.

        On a CPU, this also includes waits for cores that several ranks share.
        """
        return max(0, self.wall_ns - self.compute_ns)


class StepSpans(NamedTuple):
    """When the passes of a step ran on one rank, in wall time."""

    began_ns: int  # Unix time at which the step began
    wall_ns: int  # wall time (ns) of the step
    # For each pass: the pass, the time (ns) from the step's beginning to the pass's, and the wall
    # time (ns) of the pass.
    spans: tuple[tuple[Cell, int, int], ...]


class WallMarks:
    """Reads the clock that times the passes of a step. This class reads wall time.

    A reading is called a mark, and `between_ns` returns the time between two marks. Subclasses read
    the CPU time of a thread, or record CUDA events. Wall time is read on a CPU if operators compute
    in several threads, because the CPU time of one thread does not include the work of the others.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Prepare to time a new step. What `now` returned in earlier steps becomes invalid."""
        self._thread = threading.get_ident()

    def now(self) -> Any:
        """Read the clock that times passes. In this class it shows wall time, in ns."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a part of a step ran in another thread than the one whose time is measured; this "
                "is a bug of wlb"
            )
        return time.perf_counter_ns()

    def wall_now(self) -> Any:
        """Read the clock that times the whole step. It shows wall time in all subclasses."""
        return time.perf_counter_ns()

    def wall_of(self, point: Any) -> Any:
        """Convert `point`, which `now` has just returned, to a point in wall time."""
        return point

    def between_ns(self, start: Any, stop: Any) -> int:
        """Return the ns from `start` to `stop`, which are two readings of the same clock."""
        return stop - start


class ThreadMarks(WallMarks):
    """Times passes by the CPU time of the thread that runs them, and whole steps by wall time."""

    def now(self) -> int:
        """Return the CPU time of this thread, in ns."""
        super().now()
        return time.thread_time_ns()

    def wall_of(self, point: int) -> int:
        """Return the wall time now: CPU times such as `point` cannot be converted to wall time."""
        return time.perf_counter_ns()


class EventMarks(WallMarks):
    """Times passes and steps with CUDA events on the current stream.

    Every step reuses the events of earlier steps. New events are created only if a step needs more.
    """

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []
        self._num_used = 0

    def reset(self) -> None:
        """Prepare to time a new step, which reuses the CUDA events of earlier steps."""
        self._num_used = 0

    def now(self) -> torch.cuda.Event:
        """Record a CUDA event on the current stream, and return it."""
        if self._num_used == len(self._pool):
            self._pool.append(torch.cuda.Event(enable_timing=True))
        event = self._pool[self._num_used]
        self._num_used += 1
        event.record()
        return event

    wall_now = now

    def between_ns(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> int:
        """Return the ns between two CUDA events, which the device must have reached already."""
        return round(start.elapsed_time(stop) * 1e6)


_NUM_TRIED = 100
"""Number of marks that are made at the start to measure how long making a mark takes."""


class StepClock:
    """Times the passes of each step on one rank.

    Only passes inside `with step()` are timed. So evaluations, which run the same code, are not.

    Args:
        marks: Reads the time, in the way that suits this rank's device.
    """

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
        # Time only the second loop, because the first loop creates CUDA events, which the second
        # loop and all steps reuse.
        for _ in range(_NUM_TRIED):
            marks.now()
        marks.reset()
        begin = time.perf_counter_ns()
        for _ in range(_NUM_TRIED):
            marks.now()
        self._mark_ns = (time.perf_counter_ns() - begin) / _NUM_TRIED

    @classmethod
    def of(cls, device: torch.device) -> "StepClock":
        """Return a clock that times passes by CUDA events on a GPU.

        On a CPU it times them by the thread's CPU time if operators compute in one thread, and
        otherwise by wall time.
        """
        if device.type == "cuda":
            return cls(EventMarks())
        # If operators compute in several threads, the CPU time of one thread says neither how much
        # work all threads did nor how long it took. So wall time is used then.
        return cls(ThreadMarks() if torch.get_num_threads() == 1 else WallMarks())

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the block, which is one step. Times of the previous step are dropped."""
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
        """Return a context manager that times one pass of a micro-batch in a stage.

        Args:
            kind: Forward, backward or weight-gradient pass.
            stage: Number of the stage.
            micro_batch: Index of the micro-batch in the pipeline's step.
            first: The part to which the time belongs until `switch` is called.

        Raises:
            RuntimeError: If this pass has run already in this step, or begins inside another pass.
        """
        return self._chunk(Cell(kind, stage, micro_batch), first) if self._is_running else _OFF

    @contextmanager
    def _chunk(self, cell: Cell, first: Part) -> Iterator[None]:
        if self._cell is not None or cell in self._seen:
            problem = "ran twice" if cell in self._seen else f"began inside {self._cell}"
            raise RuntimeError(
                f"{cell} {problem} in one step, so its time would be counted twice; this is a bug "
                "of wlb"
            )
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
        """From now on, attribute time to `part` of the current pass, if any pass is running."""
        if self._cell is not None:
            self._part = part
            self._points.append(((self._cell, part), self._marks.now()))

    @contextmanager
    def attention(self, *, is_backward: bool) -> Iterator[None]:
        """Attribute the time of the block to attention.

        Forward attention inside a backward pass is attributed to recomputation. The attention
        kernels call this function (`wlb.kernels.AttentionObserver`).

        Args:
            is_backward: Whether the block computes the backward pass of attention.
        """
        before = self._part
        is_recomputed = (
            self._cell is not None and self._cell.kind != Pass.FORWARD and not is_backward
        )
        self.switch(Part.RECOMPUTE if is_recomputed else Part.ATTENTION)
        try:
            yield
        finally:
            self.switch(before)

    @property
    def marks_ns(self) -> int:
        """Estimated CPU time (ns) that the clock itself needed to time the last step."""
        return round(len(self._points) * self._mark_ns)

    def take(self) -> StepTimes:
        """Return how long the passes of the most recent step took.

        On CUDA, the host must have waited for the end of the step before this call.
        """
        times: dict[tuple[Cell, Part], int] = {}
        for (key, start), (_, stop) in zip(self._points, self._points[1:], strict=False):
            if key is not None:
                times[key] = times.get(key, 0) + self._marks.between_ns(start, stop)
        return StepTimes(times, self._marks.between_ns(*self._wall))

    def spans(self) -> StepSpans:
        """Return when the passes of the most recent step ran.

        On CUDA, the host must have waited for the end of the step before this call.
        """
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
