"""Tests timers, on clocks that the tests move and once on the real ones."""

import gc
import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wlb.profile import timing
from wlb.profile.timing import CpuTimer, CudaTimer, Timing, make_timer, pinned_threads

CPU = torch.device("cpu")
HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU: none here")


class Clocks:
    """Has CPU time and wall time that move only when told, but for 40 ns per reading."""

    def __init__(self) -> None:
        self.cpu_ns, self.wall_ns = 0, 0

    def thread_time_ns(self) -> int:
        self.cpu_ns += 40
        return self.cpu_ns

    def perf_counter(self) -> float:
        return self.wall_ns * 1e-9

    def perf_counter_ns(self) -> int:
        return self.wall_ns

    def work(self, cpu_ns: int, waits_ns: int = 0) -> None:
        self.cpu_ns += cpu_ns
        self.wall_ns += cpu_ns + waits_ns


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(timing, "time", clocks)
    return clocks


def test_median_and_percentiles_without_warm_up_waiting_and_the_clock_itself(clocks: Clocks):
    costs = iter([90_000, 50_000, 50_000, *range(1000, 12_000, 1000)])
    took = make_timer(CPU).time(
        lambda: clocks.work(next(costs), waits_ns=5_000_000), budget_s=1.0, least=1, most=11
    )
    assert took == Timing(median_ns=6000, low_ns=2000, high_ns=10_000, count=11)


@pytest.mark.parametrize(
    ("budget_s", "least", "most", "count"), [(0.0, 5, 9, 5), (1.0, 5, 9, 9), (0.0065, 5, 9, 7)]
)
def test_repeats_until_the_budget_is_spent_or_most(
    clocks: Clocks, budget_s: float, least: int, most: int, count: int
):
    timer = make_timer(CPU)
    took = timer.time(lambda: clocks.work(1_000_000), budget_s=budget_s, least=least, most=most)
    assert took.count == count


def test_a_call_beyond_the_budget_is_warmed_up_once(clocks: Clocks):
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        clocks.work(2_000_000_000)

    make_timer(CPU).time(call, budget_s=1.0, least=2, most=9)
    assert len(calls) == 1 + 2


def test_passes_take_turns_and_each_graph_is_used_once(clocks: Clocks):
    made, used = [], []

    def forward() -> object:
        clocks.work(1000)
        made.append(object())
        return made[-1]

    def backward(out: object) -> None:
        clocks.work(3000)
        used.append(out)
        assert len(used) == len(made)

    first, second = make_timer(CPU).time_passes(forward, backward, budget_s=1.0, most=20)
    assert used == made
    assert (first.median_ns, second.median_ns, first.count, second.count) == (1000, 3000, 20, 20)


def test_caches_are_flushed_before_each_pass_outside_its_time(clocks: Clocks):
    log: list[str] = []

    class Flush:
        def zero_(self) -> None:
            clocks.work(500_000)
            log.append("flush")

    def step(name: str, cpu_ns: int) -> None:
        clocks.work(cpu_ns)
        log.append(name)

    timer = CpuTimer(CPU)
    timer._flush_buffer = Flush()
    first, second = timer.time_passes(
        lambda: step("forward", 100), lambda _: step("backward", 300), budget_s=0.0, least=2
    )
    assert (first.median_ns, second.median_ns) == (100, 300)
    assert log == ["flush", "forward", "flush", "backward"] * 3


def test_the_cpu_s_flush_is_twice_its_l2_or_of_a_usual_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "cpu_l2_bytes", lambda: 1 << 20)
    assert CpuTimer(CPU)._flush_buffer.nbytes == 2 << 20
    monkeypatch.setattr(timing, "cpu_l2_bytes", lambda: 0)
    assert CpuTimer(CPU)._flush_buffer.nbytes == 4 << 20


def test_autograd_runs_in_the_timed_thread():
    x = torch.ones(64, 64, requires_grad=True)
    grads: list[torch.Tensor] = []
    first, second = make_timer(CPU).time_passes(
        lambda: x @ x,
        lambda out: grads.extend(torch.autograd.grad(out.sum(), x)),
        budget_s=0.0,
        least=3,
    )
    assert first.count == second.count == 3
    assert 0 < first.low_ns <= first.median_ns <= first.high_ns
    assert 0 < second.low_ns <= second.median_ns <= second.high_ns
    assert all(torch.equal(grad, torch.full((64, 64), 128.0)) for grad in grads)


def test_collection_of_garbage_comes_back_even_after_an_interruption():
    seen: list[bool] = []

    def call() -> None:
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_timer(CPU).time(call, budget_s=1.0)
    assert seen == [False] * 3
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("budget_s", "least", "most"), [(1.0, 0, 5), (1.0, 6, 5), (-1.0, 1, 5), (float("nan"), 1, 5)]
)
def test_a_budget_that_makes_no_sense_is_refused(budget_s: float, least: int, most: int):
    with pytest.raises(ValueError, match=f"least = {least}, most = {most}"):
        make_timer(CPU).time(lambda: None, budget_s=budget_s, least=least, most=most)


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device 'meta' cannot be measured"):
        make_timer(torch.device("meta"))


def _fail_with_one_thread() -> None:
    cores = os.sched_getaffinity(0)
    with pinned_threads(CPU):
        assert torch.get_num_threads() == 1
        assert os.sched_getaffinity(0) == cores
        raise KeyError


def test_one_thread_inside_the_block_and_the_count_before_after_it():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError):
            _fail_with_one_thread()
        assert torch.get_num_threads() == 2
        with pinned_threads(torch.device("cuda")):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class FakeGpu(Clocks):
    """Runs what the host issued, in order and never before it was issued."""

    HZ = 1.5e9

    def __init__(self) -> None:
        super().__init__()
        self.device_ns = 0.0
        self.log: list[str] = []

    def run(self, name: str, device_ns: float, host_ns: int = 0) -> None:
        self.wall_ns += host_ns
        self.device_ns = max(self.device_ns, self.wall_ns) + device_ns
        self.log.append(name)

    def synchronize(self, *_: Any) -> None:
        self.wall_ns = max(self.wall_ns, int(self.device_ns))
        self.log.append("sync")

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at_ns=0.0)

        def record() -> None:
            self.log.append("event")
            event.at_ns = max(self.device_ns, self.wall_ns)

        event.record = record
        event.elapsed_time = lambda other: (other.at_ns - event.at_ns) * 1e-6
        return event

    def zero_(self) -> None:
        self.run("flush", 30_000, host_ns=5_000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(timing, "time", gpu)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.run("spin", cycles / gpu.HZ * 1e9))
    monkeypatch.setattr(CudaTimer, "_settle", lambda _: gpu)
    return gpu


def _kernels(gpu: FakeGpu, count: int) -> Callable[..., None]:
    """Issues this many kernels of 2 us each, which the host needs 20 us each to issue."""

    def call(*_: Any) -> None:
        for _ in range(count):
            gpu.run("kernel", 2_000, host_ns=20_000)

    return call


def test_a_gpu_time_has_neither_the_flush_nor_gaps_that_wait_for_the_host(gpu: FakeGpu):
    timer = make_timer(torch.device("cuda"))
    took = timer.time(_kernels(gpu, 10), budget_s=0.0, least=4)
    assert took.median_ns == took.low_ns == took.high_ns == pytest.approx(20_000)
    assert (took.host_ns, took.count) == (200_000, 4)


def test_a_gpu_is_waited_for_once_after_the_last_repeat(gpu: FakeGpu):
    make_timer(torch.device("cuda")).time(_kernels(gpu, 1), budget_s=0.0, least=2)
    repeat = ["flush", "spin", "event", "kernel", "event"]
    warm_up = ["flush", "event", "kernel", "event", "sync"]
    assert gpu.log == [*warm_up, *repeat, *repeat, "sync"]


def test_gpu_passes_apart_each_after_a_flush(gpu: FakeGpu):
    first, second = make_timer(torch.device("cuda")).time_passes(
        _kernels(gpu, 1), _kernels(gpu, 3), budget_s=1.0, most=7
    )
    assert (first.median_ns, second.median_ns) == (pytest.approx(2_000), pytest.approx(6_000))
    assert first.count == second.count == 7
    assert gpu.log.count("flush") == 2 * (7 + timing.WARM_UP_CALLS)


@pytest.mark.gpu
@needs_gpu
def test_events_on_a_gpu_see_the_device_s_time():
    timer = make_timer(torch.device("cuda", 0))
    short, long = (
        timer.time(lambda c=cycles: torch.cuda._sleep(c), budget_s=0.1, least=10)
        for cycles in (1_000_000, 20_000_000)
    )
    assert 0 < short.median_ns < long.median_ns
    assert long.host_ns > 0


@pytest.mark.gpu
@needs_gpu
def test_autograd_on_a_gpu():
    x = torch.ones(256, 256, device="cuda", requires_grad=True)
    gradient = torch.ones_like(x)
    first, second = make_timer(x.device).time_passes(
        lambda: x @ x, lambda out: torch.autograd.grad(out, x, gradient), budget_s=0.05
    )
    assert first.count == second.count >= 5
    assert min(first.low_ns, second.low_ns) > 0
