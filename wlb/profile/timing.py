"""Times calls on a device: median, 10th and 90th percentile of repeats.

A buffer twice the size of L2 is written before each call, because training finds weights and rows
outside L2. CPU: thread CPU time, exact for work in one thread (`pinned_threads`). CUDA: events
around each call, after the device has spun for as long as the host needs to issue it, so that gaps
waiting for the host do not count (`Timing.host_ns` has them). Warm-up covers lazy initialisation,
allocator and autotuners; the first CUDA timing also waits SETTLE_S for clocks to rise.
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
"""A timed part of a repeat; its argument is the previous part's result (None for the first)."""
FloatArray = npt.NDArray[np.float64]
_Events = tuple[torch.cuda.Event, torch.cuda.Event]

WARM_UP_CALLS = 3
"""At most; one call is enough if it takes longer than the budget."""
HEAP_BYTES = 31 << 20
"""Size just below 32 MiB: freeing such a block raises glibc's mmap and trim thresholds
(mallopt(3))."""
USUAL_CPU_L2_BYTES = 2 << 20
"""Assumed where the system does not tell a core's L2."""
SETTLE_S = 1.0
MOST_SPIN_S = 0.01
SPIN_CYCLES_PER_S = 3e9
"""Above any GPU's clock, so that the device spins at least as long as the host needs."""
LEAST_FLUSH_BYTES = 1 << 26
"""Smallest flush buffer on CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median, 10th and 90th percentile of `count` repeats, in ns. host_ns: the host's time to issue
    a call on CUDA, usually hidden behind running kernels; 0 on CPU, where it is part of the
    time.
    """

    median_ns: float
    low_ns: float
    high_ns: float
    count: int
    host_ns: float = 0.0

    @classmethod
    def of(cls, samples_ns: FloatArray, host_ns: float = 0.0) -> Self:
        """Percentiles of the repeats' times, shape [count]."""
        low, median, high = np.percentile(samples_ns, (10, 50, 90)).tolist()
        num = int(samples_ns.size)
        return cls(median_ns=median, low_ns=low, high_ns=high, count=num, host_ns=host_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Repeats for about `budget_s`, but at least `least` and at most `most` of them."""

    budget_s: float
    least: int
    most: int

    def __post_init__(self) -> None:
        if not (1 <= self.least <= self.most and self.budget_s >= 0):
            raise ValueError(
                f"least = {self.least}, most = {self.most}, budget_s = {self.budget_s}: needs "
                f"1 <= least <= most and a budget of at least 0 s"
            )

    def count(self, repeat_s: float) -> int:
        """Their number if each takes `repeat_s`."""
        return max(self.least, min(self.most, int(self.budget_s / repeat_s)))


class KernelTimer(ABC):
    """Times calls on one device; `make_timer` gives the right kind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(
        self, call: Callable[[], Any], *, budget_s: float, least: int = 5, most: int = 1000
    ) -> Timing:
        """Repeats `call` for about `budget_s`, but at least `least` and at most `most` times."""
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
        """Times forward and backward in turns within one budget; `backward` gets the result of
        `forward`, so that each graph is used once, as in training.
        """
        repeats = Repeats(budget_s=budget_s, least=least, most=most)
        first, second = self._time([lambda _: forward(), backward], repeats)
        return first, second

    def _time(self, steps: Sequence[Step], repeats: Repeats) -> tuple[Timing, ...]:
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
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # After this, glibc keeps freed memory. Otherwise it would return blocks to the system after
        # each call and fault them in again, which costs more than a small operator.
        torch.empty(HEAP_BYTES, dtype=torch.uint8)
        flush_bytes = 2 * (cpu_l2_bytes() or USUAL_CPU_L2_BYTES)
        self._flush_buffer = torch.empty(flush_bytes, dtype=torch.uint8)
        # Reading the thread's clock is a system call and takes a tenth of a small operator.
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
        """CPU ns of each step; the previous result is freed outside the timed part."""
        took: list[int] = []
        value = None
        for step in steps:
            self._flush_buffer.zero_()
            start = time.thread_time_ns()
            result = step(value)
            took.append(time.thread_time_ns() - start)
            value = result
        return took


class CudaTimer(KernelTimer):
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
        """Keeps the device busy until clocks have settled; returns the buffer that flushes L2."""
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
        """Seconds of a repeat, and the host's ns in each step on an idle device (later the host may
        block because the device's queue is full).
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
        """Recorded events around each step, and the host's ns of each."""
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
    """Keeps the current stream busy for some clock cycles while the host gets ahead of it."""
    if cycles:
        torch.cuda._sleep(cycles)


def make_timer(device: torch.device) -> KernelTimer:
    timers = {"cpu": CpuTimer, "cuda": CudaTimer}
    if device.type not in timers:
        raise UserError(f"device {device.type!r} has no timer; profile cpu or cuda")
    return timers[device.type](device)


@contextmanager
def pinned_threads(device: torch.device) -> Iterator[None]:
    """Sets torch to one thread inside the block on CPU, as `CpuTimer` needs; no change on CUDA.

    The thread is not bound to a core, because ranks started inside the block would inherit the
    binding, and CPU time already excludes waiting for a core.
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
