"""Tests what transfers cost that wait for each other in a communicator.

The reference knows nothing of our programs or graphs: it executes torch's lowered actions, with one
queue of transfers for each communicator of a rank. A transfer runs once both of its ranks have it
at the head of their queues.
"""

import re
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.test_order import torch_schedule
from wlb.simulate import program
from wlb.simulate.graph import NodeKind
from wlb.simulate.program import Wires, step_graph
from wlb.spec import PipelineSection, Schedule

I1F1B, ZB = Schedule.INTERLEAVED_1F1B, Schedule.INTERLEAVED_ZERO_BUBBLE
TAKES = {"F": 10, "B": 20, "I": 12, "W": 8}
"""Ticks of a pass of work 1."""
MOVES = 3
"""Ticks of a transfer."""
ACTION = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|F|B|I|W)(\d+)")

# Schedule, pp, virtual stages, work of each micro-batch -> ticks of a step with a communicator for
# each link, and with one for the pipeline.
CASES: dict[tuple[Schedule, int, int, tuple[int, ...]], tuple[int, int]] = {
    (I1F1B, 4, 4, (1,) * 4): (660, 1207),
    (I1F1B, 4, 2, (1,) * 8): (612, 816),
    (I1F1B, 4, 1, (1,) * 8): (348, 358),
    (I1F1B, 3, 2, (1,) * 6): (450, 558),
    (I1F1B, 2, 4, (1,) * 4): (558, 576),
    (I1F1B, 8, 2, (1,) * 16): (1260, 2093),
    (I1F1B, 4, 4, (3, 1, 2, 1)): (1619, 2257),
    (I1F1B, 5, 2, (1, 2, 1, 1, 4)): (1308, 1604),
    (ZB, 4, 2, (1,) * 8): (582, 700),
    (ZB, 3, 2, (2, 1, 3)): (530, 628),
    (ZB, 2, 2, (1,) * 4): (278, 284),
}


Word = tuple[str, int, int]
"""Kind, stage and micro-batch of an action."""


def lowered(schedule: Schedule, pp: int, v: int, n: int) -> dict[int, deque[Word]]:
    """Torch's passes, sends and receives of each rank."""
    actions = torch_schedule(schedule, pp, v, n).pipeline_order_with_comms
    out: dict[int, deque[Word]] = {}
    for rank in range(pp):
        found = (ACTION.fullmatch(str(action)) for action in actions[rank])
        out[rank] = deque((m[2], int(m[1]), int(m[3])) for m in found if m)
    return out


def executed(schedule: Schedule, pp: int, v: int, work: tuple[int, ...], wires: Wires) -> int:
    """Ticks of a step of torch's own lowered actions."""
    todo = lowered(schedule, pp, v, len(work))
    now = dict.fromkeys(range(pp), 0)
    queues: dict[tuple[int, int], deque[Word]] = defaultdict(deque)
    free: dict[tuple[int, int], int] = defaultdict(int)  # when a communicator's last transfer ends
    posted: dict[Word, dict[int, int]] = defaultdict(dict)
    arrived: dict[Word, int] = {}

    def wire(transfer: Word) -> int:
        way, sender, _ = transfer
        return 0 if wires == Wires.ONE else (sender if way == "F" else sender - 1) % pp

    def act(rank: int) -> bool:
        """Does the next action of a rank, unless its input has not arrived."""
        kind, stage, i = todo[rank][0]
        if kind in TAKES:
            way = "F" if kind == "F" else "B"
            sender = stage - 1 if way == "F" else stage + 1
            needs_input = kind != "W" and 0 <= sender < pp * v
            if needs_input and (way, sender, i) not in arrived:
                return False
            begin = max(now[rank], arrived[way, sender, i] if needs_input else 0)
            now[rank] = begin + TAKES[kind] * work[i]
        else:
            sends, way = kind.startswith("SEND"), kind[-1]
            transfer = (way, stage if sends else stage - 1 if way == "F" else stage + 1, i)
            posted[transfer][rank] = now[rank]
            queues[rank, wire(transfer)].append(transfer)
        todo[rank].popleft()
        return True

    def move(transfer: Word) -> bool:
        """Runs a transfer that is at the head of both ranks' queues."""
        ranks, w = posted[transfer], wire(transfer)
        if len(ranks) < 2 or any(queues[rank, w][0] != transfer for rank in ranks):
            return False
        begin = max(*ranks.values(), *(free[rank, w] for rank in ranks))
        arrived[transfer] = begin + MOVES
        for rank in ranks:
            free[rank, w] = arrived[transfer]
            queues[rank, w].popleft()
        return True

    moved = True
    while moved:
        acted = [act(rank) for rank in range(pp) if todo[rank]]
        moved = any([*acted, *[move(t) for t in list(posted) if t not in arrived]])
    assert not any(todo.values()), "torch's actions wait for each other"
    return max(*now.values(), *arrived.values())


def simulated(schedule: Schedule, pp: int, v: int, work: tuple[int, ...], wires: Wires) -> int:
    section = PipelineSection(schedule=schedule, virtual_stages=v)
    _, graph = step_graph(section, pp=pp, num_micro_batches=len(work), has_fsdp=False, wires=wires)
    durations = np.zeros((len(graph.nodes), 1, 1), np.int64)
    for i, node in enumerate(graph.nodes):
        if node.kind == NodeKind.MESSAGE:
            durations[i] = MOVES
        if node.kind == NodeKind.PASS:
            durations[i] = TAKES[node.action.kind] * work[node.action.micro_batch]
    return int(graph.ends(durations).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_takes_as_long_as_an_independent_simulation_says(case: Any) -> None:
    ticks = tuple(simulated(*case, wires) for wires in (Wires.LINKS, Wires.ONE))
    assert ticks == CASES[case]
    assert tuple(executed(*case, wires) for wires in (Wires.LINKS, Wires.ONE)) == CASES[case]


@given(
    st.sampled_from((I1F1B, ZB)),
    st.integers(2, 5),
    st.integers(1, 3),
    st.lists(st.integers(0, 9), min_size=2, max_size=8),
    st.sampled_from(Wires),
)
def test_steps_of_any_micro_batches_agree(
    schedule: Schedule, pp: int, v: int, work: list[int], wires: Wires
) -> None:
    work = work[: len(work) // pp * pp] if len(work) >= pp else work
    case = (schedule, pp, v, tuple(work), wires)
    assert simulated(*case) == executed(*case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_communicator_for_each_link_holds_nothing_up(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transfers that take no time need no communicator of their own beside the link's."""
    monkeypatch.setitem(globals(), "MOVES", 0)
    with_links = simulated(*case, Wires.LINKS)
    monkeypatch.setattr(program, "_link_of", lambda message, _: message)
    assert simulated(*case, Wires.LINKS) == with_links


def test_1f1b_waits_for_each_receive_at_once_so_that_nothing_stands_behind_it() -> None:
    case = (Schedule.ONE_F_ONE_B, 4, 1, (3, 1, 2, 1, 4, 1, 1, 2))
    assert [simulated(*case, wires) for wires in Wires] == [1031, 1031]
