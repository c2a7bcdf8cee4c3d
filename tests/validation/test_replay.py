"""Tests replayed steps: how long they must take by hand, their order, bad waits."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from tests.sets import full
from wlb.simulate import PassKind
from wlb.spec import PipelineSection, Schedule
from wlb.validation.replay import MIN_WAIT_S, Replayed, StepWaits, TimedWait, replay

ROWS = [5, 17, 3, 40, 8, 11]


def waits(
    forward: object = 0.03,
    backward: object = 0.06,
    weight: object = 0.0,
    *,
    shape: tuple[int, int, int, int],
) -> StepWaits:
    """Returns waits of seconds that broadcast to [dp, n, num_stages, cp].

    Every micro-batch has rows of its own.
    """
    arrays = [np.broadcast_to(np.asarray(w, float), shape) for w in (forward, backward, weight)]
    rows = np.array([ROWS[: shape[1]]] * shape[0])
    return StepWaits(forward=arrays[0], backward=arrays[1], weight=arrays[2], rows=rows)


def texts(spans: list[TimedWait]) -> str:
    return " ".join(f"{s.stage}{s.kind}{s.micro_batch}" for s in spans)


def assert_takes(runs: list[Replayed], expected_s: float) -> None:
    """Asserts that a replay takes no less than the waits one after another.

    How much more it takes depends on the machine, and `python -m experiments.beyond.validation`
    measures it.
    """
    steps_s = [run.step_s for run in runs]
    assert min(steps_s) >= expected_s, steps_s


# Two micro-batches on two pipeline ranks, F 30 ms. The critical paths, each compute waiting for the
# one before it on its rank or for a message:
# - 1F1B, B 60 ms: 0F0 | 1F0 1B0 1F1 1B1 | 0B1 = 2 x 30 + 3 x 60 + 30 ms.
# - Interleaved, B 60 ms: 0F0 | 1F0 | 2F0 | 3F0 3B0 3F1 3B1 1B0 1B1 | 0B1 = 5 x 30 + 5 x 60 ms.
# - Zero bubble, I and W 30 ms: 0F0 | 1F0 | 2F0 | 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1 =
#   13 x 30 ms.
LITERAL = {
    Schedule.ONE_F_ONE_B: (0.27, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"),
    Schedule.INTERLEAVED_1F1B: (
        0.45,
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ),
    Schedule.INTERLEAVED_ZERO_BUBBLE: (
        0.39,
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1",
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, *full(*list(Schedule)[1:])])
def test_a_step_takes_its_critical_path(schedule: Schedule) -> None:
    expected_s, *orders = LITERAL[schedule]
    splits = schedule == Schedule.INTERLEAVED_ZERO_BUBBLE
    v = 1 if schedule == Schedule.ONE_F_ONE_B else 2
    of_slowest = np.array([0.6, 1.0])  # the first CP rank would be ready much earlier
    step = waits(
        0.03 * of_slowest,
        0.03 * of_slowest if splits else 0.06 * of_slowest,
        0.03 * of_slowest if splits else 0.0,
        shape=(1, 2, 2 * v, 2),
    )
    (runs,) = replay([step], PipelineSection(schedule=schedule, virtual_stages=v), pp=2, repeats=3)
    assert len(runs) == 3
    assert_takes(runs, expected_s)
    for run in runs:
        assert sorted(run.spans) == [(0, pp, cp) for pp in range(2) for cp in range(2)]
        for (_, pp, _), spans in run.spans.items():
            assert texts(spans) == orders[pp]
        assert run.step_s >= max(spans[-1].stop_s for spans in run.spans.values())


def torch_order(schedule: type, *, rank: int, pp: int, v: int, n: int) -> str:
    """Returns a rank's computes as torch lists them."""
    described = SimpleNamespace(
        n_local_stages=v,
        pp_group_size=pp,
        _n_microbatches=n,
        microbatches_per_round=n // max(1, n // pp),
    )
    actions = schedule._calculate_single_rank_operations(described, rank)
    return " ".join(
        f"{a.stage_index}{a.computation_type.value}{a.microbatch_index}" for a in actions if a
    )


def starts_and_stops(run: Replayed) -> tuple[dict[str, float], dict[str, float]]:
    spans = [span for rank in run.spans.values() for span in rank]
    return {texts([s]): s.start_s for s in spans}, {texts([s]): s.stop_s for s in spans}


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.parametrize(
    ("schedule", "made"),
    [
        (Schedule.INTERLEAVED_1F1B, ScheduleInterleaved1F1B),
        (Schedule.INTERLEAVED_ZERO_BUBBLE, ScheduleInterleavedZeroBubble),
    ],
)
def test_ranks_compute_in_torchs_order(schedule: Schedule, made: type) -> None:
    """Steps may have different numbers of micro-batches; nothing begins before its message."""
    steps = [waits(0.0, 0.0, shape=(1, n, 8, 1)) for n in (4, 6)]
    for step, (run,) in zip(
        steps,
        replay(steps, PipelineSection(schedule=schedule, virtual_stages=2), pp=4, repeats=1),
        strict=True,
    ):
        n = step.shape[1]
        for (_, pp, _), spans in run.spans.items():
            assert texts(spans) == torch_order(made, rank=pp, pp=4, v=2, n=n)
        start, stop = starts_and_stops(run)
        back = (
            PassKind.BACKWARD_INPUT
            if schedule == Schedule.INTERLEAVED_ZERO_BUBBLE
            else PassKind.BACKWARD
        )
        for i in range(n):
            for stage in range(7):
                assert start[f"{stage + 1}F{i}"] >= stop[f"{stage}F{i}"]
                assert start[f"{stage}{back}{i}"] >= stop[f"{stage + 1}{back}{i}"]


@pytest.mark.full
@pytest.mark.dist
def test_a_stage_takes_its_slowest_cp_rank_and_a_step_its_slowest_pipeline() -> None:
    """There are no pipeline ranks: F and B take turns. B is both parts of the backward pass."""
    forward = np.zeros((2, 2, 1, 2))
    forward[0, :, 0] = [[0.06, 0.02], [0.02, 0.06]]  # 80 ms on each CP rank, 120 ms together
    forward[1] = 0.02
    step = waits(forward, 0.02, 0.01, shape=(2, 2, 1, 2))
    (runs,) = replay([step], PipelineSection(schedule=Schedule.INTERLEAVED_1F1B), pp=1, repeats=3)
    assert_takes(runs, 0.12 + 2 * 0.03)
    for spans in runs[0].spans.values():
        assert texts(spans) == "0F0 0B0 0F1 0B1"
    slow, quick = runs[0].spans[0, 0, 0], runs[0].spans[1, 0, 0]
    assert quick[-1].stop_s >= 0.1  # both pipelines' own time, though the all-reduce waits
    assert slow[-1].stop_s >= 0.18


@pytest.mark.full
@pytest.mark.dist
def test_1f1b_waits_until_its_sends_are_received() -> None:
    """A send ends when its receiver asks for it, and 1F1B waits for that after the next forward.

    Stage 0 has computed 0F2 after 60 ms, but stage 1 asks for micro-batch 1 only after 1F0, at
    170 ms; so 0F3 ends at 370 instead of 260 ms. Then 1F3 2F3 3F3 3B3 2B3 1B3 0B3, 20 ms each.
    """
    forward = np.full((1, 4, 4, 1), 0.02)
    forward[0, 0, 1] = 0.15
    forward[0, 3, 0] = 0.2
    step = waits(forward, 0.02, shape=(1, 4, 4, 1))
    (runs,) = replay([step], PipelineSection(schedule=Schedule.ONE_F_ONE_B), pp=4, repeats=3)
    assert_takes(runs, 0.02 + 0.15 + 0.2 + 7 * 0.02)


def test_no_steps_and_no_repeats() -> None:
    assert replay([], PipelineSection(schedule=Schedule.ONE_F_ONE_B), pp=2) == []
    with pytest.raises(ValueError, match="repeats = 0 must be at least 1"):
        replay([], PipelineSection(schedule=Schedule.ONE_F_ONE_B), pp=2, repeats=0)


SHAPE = (1, 2, 2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"forward": np.zeros((2, 2))},
            r"forward has shape \(2, 2\), but must have shape \[dp, n, num_stages, cp",
        ),
        (
            {"weight": np.zeros((1, 2, 3, 1))},
            r"weight has shape \(1, 2, 3, 1\), but must have the shape of forward, \(1, 2",
        ),
        (
            {"rows": np.array([[4, 4, 4]])},
            r"rows has shape \(1, 3\), but must have shape \[dp, n\] = \(1, 2\)",
        ),
        ({"rows": np.array([[4, 0]])}, "smallest value of rows is 0"),
        ({"rows": np.array([[4.0, 5.0]])}, r"smallest value of rows is 4\.0 \(float64\)"),
        ({"backward": np.full(SHAPE, -0.1)}, r"backward\[0, 0, 0, 0\] = -0\.1: .* at least 0"),
        ({"backward": np.full(SHAPE, np.nan)}, "= nan: a sleeping time must be a finite number"),
        ({"weight": np.full(SHAPE, np.inf)}, "= inf: a sleeping time must be a finite number"),
        (
            {"forward": np.full(SHAPE, 0.004)},
            r"= 0\.004: a sleeping time below 0\.005 s .* multiply",
        ),
    ],
)
def test_bad_waits(change: dict[str, np.ndarray], message: str) -> None:
    good = {name: np.full(SHAPE, MIN_WAIT_S) for name in ("forward", "backward", "weight")}
    with pytest.raises(ValueError, match=message):
        StepWaits(**{**good, "rows": np.array([[4, 7]]), **change})


@pytest.mark.parametrize(
    ("schedule", "pp", "v", "shapes", "message"),
    [
        (
            "1f1b",
            4,
            1,
            [(1, 4, 2, 1)],
            "sleeping times of 2 stages do not fit pp x virtual_stages = 4 x 1",
        ),
        ("1f1b", 2, 2, [(1, 4, 4, 1)], "virtual_stages = 2 needs .* pp = 2 and schedule = 1f1b"),
        ("interleaved_1f1b", 1, 2, [(1, 4, 2, 1)], "virtual_stages = 2 needs .* pp = 1"),
        ("interleaved_1f1b", 0, 1, [(1, 4, 2, 1)], "pp = 0 and virtual_stages = 1 must be at"),
        (
            "1f1b",
            4,
            1,
            [(1, 3, 4, 1)],
            "step 0: the schedule 1f1b needs at least parallel.pp = 4 micro-batches per pipe",
        ),
        (
            "interleaved_zero_bubble",
            2,
            1,
            [(1, 4, 2, 1), (1, 5, 2, 1)],
            "step 1: an interleaved schedule with parallel.pp = 2 processes the 5 micro-batches",
        ),
        ("1f1b", 2, 1, [(1, 4, 2, 1), (1, 4, 2, 2)], "dp = 1, cp = 2 and with dp = 1, cp = 1"),
    ],
)
def test_what_cannot_be_scheduled(
    schedule: str, pp: int, v: int, shapes: list[tuple[int, int, int, int]], message: str
) -> None:
    steps = [waits(shape=shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        replay(steps, PipelineSection(schedule=Schedule(schedule), virtual_stages=v), pp=pp)
