"""Time repeated calls on a device, and return the median, 10th and 90th percentile.

- Before each call, a buffer twice the size of the L2 cache is written, because in training, weights
  and activations are rarely in L2.
- On a CPU, time is CPU time of the thread. It is exact if all work is in one thread
  (`pinned_threads`).
- On CUDA, time is measured between events around the call. Before the first event the device spins
  for as long as the host needs to issue the call, so the device never waits for the host between
  the events. `Timing.host_ns` is the time that the host needs.
- Warm-up calls absorb the time of lazy initialisation, the allocator and autotuners. Before its
  first timing a CUDA device also works for SETTLE_S, so that its clocks rise.
"""

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from wlb.plan import UserError
from wlb.profile.device import cpu_l2_bytes

Step = Callable[[Any], Any]
"""A part of a call that is timed separately, such as forward or backward.

Its argument is the result of the previous part; the first part gets None."""
FloatArray = npt.NDArray[np.float64]
_Events = tuple[torch.cuda.Event, torch.cuda.Event]

WARM_UP_CALLS = 3
"""Most warm-up calls. Warm-up ends early when it has taken as long as all repeats may take."""
HEAP_BYTES = 31 << 20
"""Bytes of a block that is allocated and freed so that glibc no longer returns memory.

Freeing it raises glibc's mmap and trim thresholds (mallopt(3)), if it is below 32 MiB."""
USUAL_CPU_L2_BYTES = 2 << 20
"""Bytes of a core's L2 cache that are assumed if the system does not report them."""
SETTLE_S = 1.0
"""Time that a GPU works before its first timing, in seconds."""
MOST_SPIN_S = 0.01
"""Longest spin before a call, in seconds."""
SPIN_CYCLES_PER_S = 3e9
"""Clock rate by which seconds of spinning are converted to cycles.

It is above the clock rate of any GPU, so that the device spins at least as long as it should."""
LEAST_FLUSH_BYTES = 1 << 26
"""Least bytes of the buffer that is written to flush L2 on CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Statistics of the repeats of a call."""

    median_ns: float
    low_ns: float  # 10th percentile
    high_ns: float  # 90th percentile
    count: int  # number of repeats
    # On CUDA, time that the host needs to issue the call. In training this time usually overlaps
    # with kernels. On a CPU it is 0, because the other times contain it.
    host_ns: float = 0.0

    @classmethod
    def of(cls, samples_ns: FloatArray, host_ns: float = 0.0) -> Self:
        """Return the statistics of repeats.

        Args:
            samples_ns: Time of each repeat, shape [count].
            host_ns: The host's time to issue a call.
        """
        low, median, high = np.percentile(samples_ns, (10, 50, 90)).tolist()
        num = int(samples_ns.size)
        return cls(median_ns=median, low_ns=low, high_ns=high, count=num, host_ns=host_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often a call is repeated: for about `budget_s` seconds, from `least` to `most` times."""

    budget_s: float  # seconds for all repeats together
    least: int  # fewest repeats
    most: int  # most repeats

    def __post_init__(self) -> None:
        if not (1 <= self.least <= self.most and self.budget_s >= 0):
            raise ValueError(
                f"least = {self.least}, most = {self.most} and budget_s = {self.budget_s} must "
                f"satisfy 1 <= least <= most and budget_s >= 0"
            )

    def count(self, repeat_s: float) -> int:
        """Return the number of repeats that `budget_s` allows if each takes `repeat_s` seconds."""
        return max(self.least, min(self.most, int(self.budget_s / repeat_s)))


class KernelTimer(ABC):
    """Times calls on one device. `make_timer` returns the right kind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(
        self, call: Callable[[], Any], *, budget_s: float, least: int = 5, most: int = 1000
    ) -> Timing:
        """Time a call, which is repeated for about `budget_s` seconds.

        Args:
            call: The call.
            budget_s: Seconds for all repeats together.
            least: Fewest repeats, even if they take more than `budget_s`.
            most: Most repeats, even if they take less than `budget_s`.
        """
        repeats = Repeats(budget_s=budget_s, least=least, most=most)
        return self._time([lambda _: call()], repeats)[0]

    def time_passes(
        self,
        forward: Callable[[], Any],
        backward: Callable[[Any], Any],
        *,
        budget_s: float,
        least: int = 5,
        most: int = 1000,
    ) -> tuple[Timing, Timing]:
        """Time a forward and a backward pass, which are repeated in turn.

        Each backward gets the result of the forward before it, so that each autograd graph is used
        once, as in training.

        Args:
            forward: Forward pass.
            backward: Backward pass, called with the result of `forward`.
            budget_s: Seconds for all repeats of both passes.
            least: Fewest repeats.
            most: Most repeats.

        Returns:
            Statistics of forward and of backward.
        """
        repeats = Repeats(budget_s=budget_s, least=least, most=most)
        first, second = self._time([lambda _: forward(), backward], repeats)
        return first, second

    def _time(self, steps: Sequence[Step], repeats: Repeats) -> tuple[Timing, ...]:
        # Switch garbage collection off, because a collection during a repeat would lengthen it.
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._repeat(steps, repeats)
        finally:
            if collects:
                gc.enable()

    @abstractmethod
    def _repeat(self, steps: Sequence[Step], repeats: Repeats) -> tuple[Timing, ...]: ...


class CpuTimer(KernelTimer):
    """Measures the CPU time that this thread spends in calls."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # Allocate and free a large block, so that glibc keeps the memory that later calls free.
        # Otherwise glibc would return this memory to the system and get it back with page faults,
        # which take longer than a small operator.
        torch.empty(HEAP_BYTES, dtype=torch.uint8)
        flush_bytes = 2 * (cpu_l2_bytes() or USUAL_CPU_L2_BYTES)
        self._flush_buffer = torch.empty(flush_bytes, dtype=torch.uint8)
        # Reading the thread's clock is a system call that takes a tenth of a small operator's time.
        # Measure how long this call takes, in order to subtract its time.
        empty = [self._once([lambda _: None])[0] for _ in range(50)]
        self.clock_ns = float(np.median(empty))

    def _repeat(self, steps: Sequence[Step], repeats: Repeats) -> tuple[Timing, ...]:
        start, budget_s = time.perf_counter(), repeats.budget_s
        for _ in range(WARM_UP_CALLS):
            self._once(steps)
            if time.perf_counter() - start > budget_s:
                break
        start = time.perf_counter()
        samples: list[list[int]] = []
        for i in range(repeats.most):
            if i >= repeats.least and time.perf_counter() - start >= budget_s:
                break
            samples.append(self._once(steps))
        times = np.maximum(np.array(samples, np.float64) - self.clock_ns, 1.0)
        return tuple(Timing.of(column) for column in times.T)

    def _once(self, steps: Sequence[Step]) -> list[int]:
        """Run the parts of a call (such as forward, backward) once; return CPU ns of each part."""
        took: list[int] = []
        value = None
        for step in steps:
            self._flush_buffer.zero_()
            start = time.thread_time_ns()
            result = step(value)
            took.append(time.thread_time_ns() - start)
            # The previous result is freed here, outside the timed part.
            value = result
        return took


class CudaTimer(KernelTimer):
    """Measures the time of calls between CUDA events before and after them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._flush_buffer: torch.Tensor | None = None

    def _repeat(self, steps: Sequence[Step], repeats: Repeats) -> tuple[Timing, ...]:
        with torch.cuda.device(self.device):
            if self._flush_buffer is None:
                self._flush_buffer = self._settle()
            round_s, hosts_ns = self._warm_up(steps, repeats.budget_s)
            spins_s = [min(MOST_SPIN_S, 1.5e-9 * host_ns) for host_ns in hosts_ns]
            spins = [int(s * SPIN_CYCLES_PER_S) for s in spins_s]
            rounds = [self._once(steps, spins)[0] for _ in range(repeats.count(round_s))]
            torch.cuda.synchronize()
            return tuple(
                Timing.of(np.array([a.elapsed_time(b) * 1e6 for a, b in column]), host_ns)
                for column, host_ns in zip(zip(*rounds, strict=True), hosts_ns, strict=True)
            )

    def _settle(self) -> torch.Tensor:
        """Keep the device busy until its clocks settle, and return a buffer for flushing L2."""
        size = 2 * torch.cuda.get_device_properties(self.device).L2_cache_size
        buffer = torch.empty(max(LEAST_FLUSH_BYTES, size), dtype=torch.uint8, device=self.device)
        a = torch.ones(2048, 2048, device=self.device)
        end = time.perf_counter() + SETTLE_S
        while time.perf_counter() < end:
            for _ in range(10):
                torch.mm(a, a)
            torch.cuda.synchronize()
        return buffer

    def _warm_up(self, steps: Sequence[Step], budget_s: float) -> tuple[float, list[float]]:
        """Warm up, and measure how long the host needs to issue each part of the timed call.

        The host's time is measured here, on an idle device, because later the host may have to wait
        when the device's queue is full.

        Args:
            steps: Parts of the timed call, such as forward and backward.
            budget_s: Seconds after which warm-up ends.

        Returns:
            The seconds that the call takes once, and the nanoseconds that the host needs to issue
            each part.
        """
        round_s, hosts_ns = 0.0, [float("inf")] * len(steps)
        spins, start = [0] * len(steps), time.perf_counter()
        for _ in range(WARM_UP_CALLS):
            begin = time.perf_counter()
            _, took = self._once(steps, spins)
            torch.cuda.synchronize()
            round_s = time.perf_counter() - begin
            hosts_ns = [min(pair) for pair in zip(hosts_ns, took, strict=True)]
            if time.perf_counter() - start > budget_s:
                break
        return round_s, hosts_ns

    def _once(
        self, steps: Sequence[Step], spins: Sequence[int]
    ) -> tuple[list[_Events], list[float]]:
        """Run all parts of a call once, such as forward and then backward.

        Args:
            steps: Parts of the call.
            spins: Clock cycles for which the device spins before each part.

        Returns:
            The events before and after each part, and the host's nanoseconds to issue each part.
        """
        assert self._flush_buffer is not None
        events: list[_Events] = []
        hosts_ns: list[float] = []
        value = None
        for step, cycles in zip(steps, spins, strict=True):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush_buffer.zero_()
            spin(cycles)
            before.record()
            start = time.perf_counter_ns()
            result = step(value)
            hosts_ns.append(time.perf_counter_ns() - start)
            after.record()
            value = result
            events.append((before, after))
        return events, hosts_ns


def spin(cycles: int) -> None:
    """Keep the current stream busy for `cycles` clock cycles, so that the host gets ahead."""
    if cycles:
        torch.cuda._sleep(cycles)


def make_timer(device: torch.device) -> KernelTimer:
    """Return the timer for a device, or raise UserError if there is none for its type."""
    timers = {"cpu": CpuTimer, "cuda": CudaTimer}
    if device.type not in timers:
        raise UserError(f"device {device.type!r} cannot be measured; use cpu or cuda")
    return timers[device.type](device)


@contextmanager
def pinned_threads(device: torch.device) -> Iterator[None]:
    """Make torch use a single thread inside the block if `device` is a CPU, as `CpuTimer` requires.

    The thread is not bound to a core. A binding is not necessary, because CPU time does not include
    waiting for a core, and ranks that are started inside the block would inherit it.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
