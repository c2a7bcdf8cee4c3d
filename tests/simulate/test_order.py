"""Tests that the orders are torch's own, and that small ones are what the papers draw."""

import itertools
import re

import pytest

from wlb.simulate.order import pipeline_order
from wlb.spec import PipelineSection, Schedule


def words(order, rank):
    return " ".join(str(action) for action in order[rank])


def test_1f1b_of_two_ranks():
    order = pipeline_order(
        PipelineSection(schedule=Schedule.ONE_F_ONE_B), pp=2, num_micro_batches=3
    )
    assert words(order, 0) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert words(order, 1) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_interleaving_runs_a_group_on_one_chunk_then_on_the_next():
    order = pipeline_order(
        PipelineSection(schedule=Schedule.INTERLEAVED_1F1B, virtual_stages=2),
        pp=2,
        num_micro_batches=2,
    )
    assert words(order, 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert words(order, 1) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"


def test_zero_bubble_splits_backward_and_delays_weights():
    order = pipeline_order(
        PipelineSection(schedule=Schedule.INTERLEAVED_ZERO_BUBBLE), pp=2, num_micro_batches=3
    )
    assert words(order, 0) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    assert words(order, 1) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"


def test_weights_can_wait_longer():
    order = pipeline_order(
        PipelineSection(schedule=Schedule.INTERLEAVED_ZERO_BUBBLE, weight_delay=2),
        pp=2,
        num_micro_batches=3,
    )
    assert words(order, 0) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    assert words(order, 1) == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"


def test_without_a_pipeline_micro_batches_follow_each_other():
    order = pipeline_order(
        PipelineSection(schedule=Schedule.INTERLEAVED_1F1B), pp=1, num_micro_batches=2
    )
    assert words(order, 0) == "0F0 0B0 0F1 0B1"


def _one_less(word):
    stage, kind, micro_batch = re.fullmatch(r"(\d+)(\w)(\d+)", word).groups()
    return f"{stage}F{int(micro_batch) - 1}" if kind == "F" else word


def layouts():
    for schedule, pp, v in itertools.product(Schedule, (2, 3, 4, 8), (1, 2, 4)):
        if schedule == Schedule.ONE_F_ONE_B and v > 1:
            continue
        for n in {2, pp - 1, pp, pp + 1, 2 * pp, 3 * pp, 2 * pp + 2}:
            is_plain = schedule == Schedule.ONE_F_ONE_B
            if n >= pp if is_plain else n % max(1, n // pp) == 0:
                yield schedule, pp, v, n


class _Stage:
    """Has as much of a torch stage as its schedules look at when they are made."""

    def __init__(self, index, num_stages, rank, pp):
        self.stage_index, self.num_stages = index, num_stages
        self.group_rank, self.group_size, self.group = rank, pp, None
        self.stage_index_to_group_rank = {}
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.has_backward, self.submod, self.submodule = True, None, None


@pytest.mark.parametrize("delay", [1, 2, 3, 20])
@pytest.mark.parametrize(("pp", "v", "n"), [(2, 1, 3), (2, 2, 4), (4, 2, 4), (4, 4, 8), (3, 2, 2)])
def test_what_is_executed_waits_as_long(pp, v, n, delay):
    from wlb.parallel.pipeline import LateWeights

    stages = [_Stage(c * pp, pp * v, 0, pp) for c in range(v)]
    made = LateWeights(stages, n, loss_fn=lambda output, target: output, weight_delay=delay)
    ours = pipeline_order(
        PipelineSection(
            schedule=Schedule.INTERLEAVED_ZERO_BUBBLE, virtual_stages=v, weight_delay=delay
        ),
        pp=pp,
        num_micro_batches=n,
    )
    for rank in range(pp):
        theirs = [repr(action) for action in made.pipeline_order[rank] if action is not None]
        assert theirs == [str(action) for action in ours[rank]], rank


def torch_schedule(schedule, pp, v, n):
    """Returns torch's own schedule, as rank 0 makes it."""
    from torch.distributed.pipelining import schedules

    name = {
        Schedule.ONE_F_ONE_B: "Schedule1F1B",
        Schedule.INTERLEAVED_1F1B: "ScheduleInterleaved1F1B",
        Schedule.INTERLEAVED_ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    }[schedule]
    stages = [_Stage(c * pp, pp * v, 0, pp) for c in range(v)]
    return getattr(schedules, name)(
        stages[0] if v == 1 and schedule == Schedule.ONE_F_ONE_B else stages,
        n,
        loss_fn=lambda output, target: output,
    )


@pytest.mark.parametrize(("schedule", "pp", "v", "n"), sorted(layouts()))
def test_equal_to_torch(schedule, pp, v, n):
    ours = pipeline_order(
        PipelineSection(schedule=schedule, virtual_stages=v), pp=pp, num_micro_batches=n
    )
    made = torch_schedule(schedule, pp, v, n)
    theirs = made._get_pipeline_order() if schedule == Schedule.ONE_F_ONE_B else made.pipeline_order
    for rank in range(pp):
        listed = [repr(action) for action in theirs[rank] if action is not None]
        computed = [word for word in listed if re.fullmatch(r"\d+[FBIW]\d+", word)]
        if schedule == Schedule.ONE_F_ONE_B and rank == pp - 1:
            # What torch prints of 1F1B numbers the last rank's forward passes from 1; what it runs
            # does not (tests/validation/test_replay.py has the order that was run).
            computed = [_one_less(word) for word in computed]
        assert computed == [str(action) for action in ours[rank]], rank


@pytest.mark.parametrize(
    ("schedule", "pp", "v", "n", "words"),
    [
        (Schedule.ONE_F_ONE_B, 2, 2, 2, "virtual_stages = 2"),
        (Schedule.ONE_F_ONE_B, 4, 1, 3, "at least parallel.pp = 4"),
        (Schedule.INTERLEAVED_1F1B, 4, 2, 9, "in 2 rounds, which must have equal numbers"),
        (Schedule.INTERLEAVED_1F1B, 0, 2, 9, "pp = 0"),
        (Schedule.INTERLEAVED_1F1B, 2, 1, 0, "num_micro_batches = 0"),
    ],
)
def test_refused(schedule, pp, v, n, words):
    with pytest.raises(ValueError, match=words):
        pipeline_order(
            PipelineSection(schedule=schedule, virtual_stages=v), pp=pp, num_micro_batches=n
        )
