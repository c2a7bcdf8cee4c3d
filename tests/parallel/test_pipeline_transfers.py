"""Tests that a pipeline's transfers may share one stream, as NCCL's do with `device_id`."""

import re

import pytest
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action

from wlb.simulate.order import pipeline_order
from wlb.spec import PipelineSection, Schedule

_OTHER_SIDE = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
"""Kind of the action that receives a transfer, and how many stages away it is."""


def _with_transfers(section: PipelineSection, pp: int, num: int) -> dict[int, list[str]]:
    """Returns the actions that torch's runtime executes, by rank, such as 0SEND_F3."""
    order = pipeline_order(section, pp=pp, num_micro_batches=num)
    actions = {
        rank: [found for a in order[rank] if (found := _Action.from_str(str(a))) is not None]
        for rank in range(pp)
    }
    made = schedules._add_send_recv(actions, lambda stage: stage % pp, pp * section.virtual_stages)
    return {rank: [str(action) for action in queue] for rank, queue in made.items()}


def _receiver(action: str) -> str:
    """Returns the action that receives what a send sends."""
    found = re.fullmatch(r"(\d+)(SEND_[FB])(\d+)", action)
    assert found
    kind, away = _OTHER_SIDE[found[2]]
    return f"{int(found[1]) + away}{kind}{found[3]}"


def _left_over(queues: dict[int, list[str]]) -> int:
    """Executes each rank's actions one after the other; a transfer ends only when its other side is
    next on another rank. Returns the number of actions that can never be executed.
    """
    left = {rank: queue[::-1] for rank, queue in queues.items()}
    moved = True
    while moved:
        moved = False
        for queue in left.values():
            while queue and "SEND" not in queue[-1] and "RECV" not in queue[-1]:
                queue.pop()
                moved = True
            if not (queue and "SEND" in queue[-1]):
                continue
            for other in left.values():
                if other and other[-1] == _receiver(queue[-1]):
                    queue.pop()
                    other.pop()
                    moved = True
                    break
    return sum(map(len, left.values()))


@pytest.mark.parametrize(
    "schedule", [Schedule.INTERLEAVED_1F1B, Schedule.INTERLEAVED_ZERO_BUBBLE], ids=str
)
@pytest.mark.parametrize(("pp", "virtual_stages", "num"), [(2, 1, 2), (2, 4, 4), (4, 2, 8)])
def test_transfers_in_one_order_per_rank_cannot_deadlock(
    schedule: Schedule, pp: int, virtual_stages: int, num: int
) -> None:
    for delay in (1, 3) if schedule == Schedule.INTERLEAVED_ZERO_BUBBLE else (1,):
        section = PipelineSection(
            schedule=schedule, virtual_stages=virtual_stages, weight_delay=delay
        )
        queues = _with_transfers(section, pp, num)
        num_sends = sum("SEND_F" in action for queue in queues.values() for action in queue)
        assert num_sends == num * (pp * virtual_stages - 1)
        assert _left_over(queues) == 0


def test_a_circle_of_transfers_is_found() -> None:
    """Both ranks send first: with one stream each, neither receives."""
    assert _left_over({0: ["0SEND_F0", "0RECV_B1"], 1: ["1SEND_B1", "1RECV_F0"]}) == 4
    assert _left_over({0: ["0SEND_F0", "0RECV_B1"], 1: ["1RECV_F0", "1SEND_B1"]}) == 0
