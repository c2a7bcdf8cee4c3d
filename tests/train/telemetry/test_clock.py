"""Tests the step clock: literal timelines on a counted clock, what each layout's steps leave."""

import threading
import time
from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests.parity.case import Case, Reader, packing, pipeline_plan, spec_of
from tests.sets import full
from wlb.kernels import Segments, attend, observing
from wlb.kernels.op import observed
from wlb.launch.local import run_local
from wlb.launch.position import Position
from wlb.parallel.execute import Executor
from wlb.parallel.mesh import build_mesh
from wlb.parallel.observe import Cell, Part, Pass
from wlb.parallel.world import World
from wlb.spec import Schedule
from wlb.train.telemetry.clock import StepClock, StepTimes, ThreadMarks, WallMarks


class Counted(WallMarks):
    """Provides marks of a clock that a test moves by hand."""

    time_ns = 0

    def now(self) -> int:
        return self.time_ns

    wall_now = now


@pytest.fixture
def marks() -> Counted:
    return Counted()


@pytest.fixture
def clock(marks: Counted) -> StepClock:
    return StepClock(marks)


def kernel(marks: Counted, ns: int, *, is_backward: bool) -> None:
    with observed(is_backward=is_backward):
        marks.time_ns += ns


def test_where_chunks_lie_in_a_step(clock: StepClock, marks: Counted) -> None:
    marks.time_ns = 5
    with clock.step():
        marks.time_ns += 100
        with clock.chunk(Pass.FORWARD, stage=0, micro_batch=1):
            marks.time_ns += 7
        marks.time_ns += 10
        with clock.chunk(Pass.BACKWARD, stage=0, micro_batch=1):
            marks.time_ns += 20
        marks.time_ns += 3
    made = clock.spans()
    assert made.wall_ns == 140
    assert made.spans == ((Cell(Pass.FORWARD, 0, 1), 100, 7), (Cell(Pass.BACKWARD, 0, 1), 117, 20))
    with clock.step():
        pass
    assert clock.spans().spans == ()


def test_parts_of_a_chunk_add_up_to_it(clock: StepClock, marks: Counted) -> None:
    with clock.step():
        marks.time_ns += 1000  # waiting
        with clock.chunk(Pass.FORWARD, stage=2, micro_batch=1, first=Part.EMBEDDING):
            marks.time_ns += 1
            clock.switch(Part.LAYERS)
            marks.time_ns += 20
            kernel(marks, 300, is_backward=False)
            marks.time_ns += 40
            kernel(marks, 500, is_backward=False)
            clock.switch(Part.HEAD)
            marks.time_ns += 6
        marks.time_ns += 2000
        with clock.chunk(Pass.BACKWARD, stage=2, micro_batch=1):
            kernel(marks, 7, is_backward=True)
    forward, backward = Cell(Pass.FORWARD, 2, 1), Cell(Pass.BACKWARD, 2, 1)
    times = clock.take()
    assert {key: ns for key, ns in times.parts_ns.items() if ns} == {
        (forward, Part.EMBEDDING): 1,
        (forward, Part.LAYERS): 60,
        (forward, Part.ATTENTION): 800,
        (forward, Part.HEAD): 6,
        (backward, Part.ATTENTION): 7,
    }
    assert (times.wall_ns, times.compute_ns, times.bubble_ns) == (3874, 874, 3000)
    assert times.part_ns(forward, Part.LAYERS, Part.ATTENTION) == 860
    assert times.total_ns(Part.ATTENTION) == 807


def test_a_forward_kernel_in_a_backward_pass_is_not_its_backward(
    clock: StepClock, marks: Counted
) -> None:
    with clock.step(), clock.chunk(Pass.BACKWARD, stage=0, micro_batch=0):
        kernel(marks, 3, is_backward=False)
        kernel(marks, 5, is_backward=True)
    times = clock.take()
    assert times.total_ns(Part.RECOMPUTE) == 3
    assert times.total_ns(Part.ATTENTION) == 5


def test_a_chunk_that_runs_twice_is_refused(clock: StepClock) -> None:
    with clock.step():
        with clock.chunk(Pass.FORWARD, stage=0, micro_batch=0):
            pass
        with (
            pytest.raises(RuntimeError, match=r"micro_batch=0\) ran twice in one step"),
            clock.chunk(Pass.FORWARD, stage=0, micro_batch=0),
        ):
            pass
    with clock.step(), clock.chunk(Pass.FORWARD, stage=0, micro_batch=0):
        pass  # the next step may


def test_a_chunk_inside_another_is_refused(clock: StepClock) -> None:
    with (
        clock.step(),
        clock.chunk(Pass.FORWARD, stage=0, micro_batch=0),
        pytest.raises(RuntimeError, match=r"began inside Cell\(kind=<Pass.FORWARD"),
        clock.chunk(Pass.FORWARD, stage=0, micro_batch=1),
    ):
        pass


def test_outside_a_step_nothing_is_recorded(clock: StepClock, marks: Counted) -> None:
    with clock.step(), clock.chunk(Pass.FORWARD, stage=0, micro_batch=0):
        marks.time_ns += 4
    with clock.chunk(Pass.FORWARD, stage=0, micro_batch=0):  # as an evaluation does
        clock.switch(Part.HEAD)
        kernel(marks, 9, is_backward=False)
    assert clock.take().compute_ns == 4


def test_a_step_that_fails_leaves_the_clock_usable(clock: StepClock, marks: Counted) -> None:
    with (
        pytest.raises(ValueError, match="no"),
        clock.step(),
        clock.chunk(Pass.FORWARD, stage=0, micro_batch=0),
    ):
        raise ValueError("no")
    with clock.step(), clock.chunk(Pass.FORWARD, stage=0, micro_batch=0):
        marks.time_ns += 2
    assert clock.take().compute_ns == 2


def test_one_observer_at_a_time(clock: StepClock) -> None:
    with clock.step(), pytest.raises(RuntimeError, match="already observed by"), observing(clock):
        pass


def test_attention_calls_of_the_op_are_observed(clock: StepClock, marks: Counted) -> None:
    """Both passes of a real call are observed; the marks' count of calls stands for time."""
    seen: list[bool] = []

    class Watch:
        def attention(self, *, is_backward: bool):
            seen.append(is_backward)
            return clock.attention(is_backward=is_backward)

    segments = Segments.from_offsets([0, 3], [0, 3], device="cpu")
    q, k, v = (torch.randn(3, 2, 8, requires_grad=True) for _ in range(3))
    with observing(Watch()):
        attend(q, k, v, segments, backend="sdpa").sum().backward()
    assert seen == [False, True]


def in_a_thread(call: Callable[[], object]) -> BaseException | None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


def test_thread_time_leaves_waiting_out_and_refuses_another_thread() -> None:
    marks = ThreadMarks()
    clock = StepClock(marks)
    with clock.step(), clock.chunk(Pass.FORWARD, stage=0, micro_batch=0):
        time.sleep(0.02)
    times = clock.take()
    assert times.wall_ns >= 20_000_000
    assert 0 < times.compute_ns < times.wall_ns
    assert "ran in another thread" in str(in_a_thread(marks.now))
    assert in_a_thread(ThreadMarks().wall_now) is None


LAYOUTS = [
    Case(),
    Case(cp=2),
    Case(pp=2, schedule=Schedule.ONE_F_ONE_B),
    Case(tp=2, pp=2, v=2),
    Case(pp=2, v=2, schedule=Schedule.INTERLEAVED_ZERO_BUBBLE),
]


def two_steps(world: World, case: Case) -> tuple[StepTimes, StepTimes]:
    """Returns a rank's clock after two steps, and after an evaluation."""
    spec, progress = spec_of(case), Position()
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    clock = StepClock.of(mesh.device)
    executor = Executor(spec, mesh, progress=progress, timer=clock)
    plan = pipeline_plan(packing(4), spec, executor.mesh.at.dp, "per_document")
    for _ in range(2):
        executor.train_step(plan, Reader(), loss_scale=1.0)
    before, position = clock.take(), progress.num_changes
    executor.evaluate(plan, Reader())
    # A rank that stood still for `training.timeout_s` would be ended.
    assert progress.num_changes >= position + 4
    return before, clock.take()


@pytest.mark.dist
@pytest.mark.parametrize("case", [*LAYOUTS[:2], *full(*LAYOUTS[2:])], ids=str)
def test_every_chunk_of_a_step_is_timed_once(case: Case) -> None:
    results = run_local(two_steps, case.world, case, start_group=True, timeout_s=600)
    last = case.pp * case.v - 1
    for rank, result in enumerate(results):
        times, after = result
        assert after.parts_ns == times.parts_ns
        pp_rank = rank // (case.tp * case.cp)
        stages = [pp_rank + case.pp * v for v in range(case.v)]
        found = {cell for cell, _ in times.parts_ns}
        expected = set(product((Pass.FORWARD, Pass.BACKWARD), stages, range(4)))
        weights = set(product((Pass.WEIGHT,), stages, range(4)))
        # Zero bubble computes some chunks' weight gradients with their backward.
        assert expected <= found <= expected | weights
        assert bool(found & weights) == (case.schedule == Schedule.INTERLEAVED_ZERO_BUBBLE)
        for part, stage in ((Part.EMBEDDING, 0), (Part.HEAD, last)):
            at = {cell.stage for cell, p in times.parts_ns if p == part}
            assert at == ({stage} & set(stages))
        timed = {cell for cell, p in times.parts_ns if p == Part.ATTENTION}
        assert {cell.kind for cell in timed} == {Pass.FORWARD, Pass.BACKWARD}
        # One of the four micro-batches is empty: padding has a kernel call too.
        assert len(timed) == 2 * len(stages) * 4
        assert 0 < times.compute_ns <= times.wall_ns


class Pooled(WallMarks):
    """Makes 1,000 ns pass for a mark that is new, and 10 ns for one that is used again."""

    def __init__(self) -> None:
        self.time_ns = self._made = self._used = 0

    def reset(self) -> None:
        self._used = 0

    def now(self) -> int:
        self._used += 1
        self.time_ns += 1000 if self._used > self._made else 10
        self._made = max(self._made, self._used)
        return self.time_ns

    wall_now = now


def test_a_marks_cost_is_that_of_one_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA events are made once and used in all steps."""
    marks = Pooled()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: marks.time_ns)
    clock = StepClock(marks)
    with clock.step(), clock.chunk(Pass.FORWARD, stage=0, micro_batch=0):
        pass
    assert 0 < clock.marks_ns < 200
