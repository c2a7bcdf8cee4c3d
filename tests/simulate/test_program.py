"""Tests what ranks do in a step: torch's own programs, and the graph against a clock."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulate.steps import LAYOUTS, random_durations
from tests.simulate.test_order import layouts as torch_layouts
from tests.simulate.test_order import torch_schedule
from wlb.simulate.graph import Node, NodeKind
from wlb.simulate.order import Action, PassKind, pipeline_order
from wlb.simulate.program import (
    Await,
    Drop,
    Gather,
    Instruction,
    Post,
    Prefetch,
    Program,
    Reduce,
    ReduceAhead,
    RunPass,
    Wires,
    rank_programs,
    step_graph,
)
from wlb.spec import PipelineSection, Schedule


def programs(schedule: Schedule, pp: int, v: int, n: int, *, has_fsdp: bool) -> list[Program]:
    order = pipeline_order(
        PipelineSection(schedule=schedule, virtual_stages=v), pp=pp, num_micro_batches=n
    )
    return rank_programs(schedule, order, has_fsdp=has_fsdp)


def word(instruction: Instruction) -> str:
    """Writes an instruction as torch does; "" for what torch does not write down."""
    match instruction:
        case RunPass(action):
            return str(action)
        case Post(sends, receives):
            return " ".join([*map(sent, sends), *map(received, receives)])
        case Gather(stage):
            return f"{stage}UNSHARD"
        case Drop(stage):
            return f"{stage}RESHARD"
        case Reduce(stage):
            return f"{stage}REDUCE_GRAD"
        case _:
            return ""


def sent(message: Action) -> str:
    stage, kind, i = message
    return f"{stage}SEND_{'F' if kind == PassKind.FORWARD else 'B'}{i}"


def received(message: Action) -> str:
    stage, kind, i = message
    return f"{stage + 1}RECV_F{i}" if kind == PassKind.FORWARD else f"{stage - 1}RECV_B{i}"


def words(program: Program) -> str:
    return " ".join(w for i in program if (w := word(i)))


def test_interleaved_programs_have_gathers_and_messages_between_passes() -> None:
    first, second = programs(Schedule.INTERLEAVED_1F1B, 2, 1, 2, has_fsdp=True)
    assert words(first) == (
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD"
    )
    assert words(second) == (
        "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD"
    )
    without = programs(Schedule.INTERLEAVED_1F1B, 2, 1, 2, has_fsdp=False)
    assert words(without[0]) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"


def test_1f1b_posts_both_directions_together_and_reduces_at_the_end() -> None:
    first, second = programs(Schedule.ONE_F_ONE_B, 2, 1, 2, has_fsdp=True)
    assert words(first) == (
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD"
    )
    assert words(second) == (
        "1RECV_F0 1UNSHARD 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
    )
    waits = [i.messages for i in second if isinstance(i, Await) and len(i.messages) == 2]
    assert [[str(m) for m in both] for both in waits] == [["1B0", "0F1"]]


def test_without_a_pipeline_layers_hide_behind_the_first_and_the_last_pass() -> None:
    (only,) = programs(Schedule.INTERLEAVED_1F1B, 1, 1, 2, has_fsdp=True)
    assert [type(i).__name__ for i in only] == (
        ["Gather", "Prefetch", "RunPass", "RunPass", "RunPass", "ReduceAhead", "RunPass", "Reduce"]
    )
    _, graph = step_graph(
        PipelineSection(schedule=Schedule.ONE_F_ONE_B), pp=1, num_micro_batches=1, has_fsdp=True
    )
    kinds = [node.kind for node in graph.nodes]
    # Gather 3, the rest 4 behind a forward pass of 1; 6 of 9 reduced behind a backward pass of 2.
    takes = {"gather": 3, "prefetch": 4, "pass": 0, "reduce ahead": 6, "reduce": 3}
    durations = np.array([[[takes.get(kind, 0)]] for kind in kinds])
    for i in graph.indices(NodeKind.PASS):
        durations[i] = 1 if graph.nodes[i].action.kind == PassKind.FORWARD else 2
    ends = graph.ends(durations)[:, 0, 0].tolist()
    assert dict(zip(kinds, ends, strict=True)) == {
        "gather": 3,
        "prefetch": 7,
        "pass": 9,
        "reduce ahead": 13,
        "reduce": 16,
        "norm": 16,
        "optimizer": 16,
        "overhead": 16,
    }


def test_a_fourth_stage_of_a_rank_is_gathered_again() -> None:
    first, _ = programs(Schedule.INTERLEAVED_1F1B, 2, 4, 2, has_fsdp=True)
    gathers = [i.stage for i in first if isinstance(i, Gather)]
    # The fourth takes the place of the first, which is needed again at the end.
    assert gathers == [0, 2, 4, 6, 0]
    assert [i.stage for i in first if isinstance(i, Reduce)] == [6, 4, 2, 0]


@pytest.mark.parametrize(
    ("schedule", "pp", "v", "n"),
    [layout for layout in sorted(torch_layouts()) if layout[0] != Schedule.ONE_F_ONE_B],
)
def test_interleaved_programs_are_torchs(schedule: Schedule, pp: int, v: int, n: int) -> None:
    theirs = torch_schedule(schedule, pp, v, n).pipeline_order_with_comms
    ours = programs(schedule, pp, v, n, has_fsdp=True)
    for rank, program in enumerate(ours):
        assert words(program) == " ".join(str(action) for action in theirs[rank]), rank


POSTED = {Gather: NodeKind.GATHER, Prefetch: NodeKind.PREFETCH, ReduceAhead: NodeKind.REDUCE_AHEAD}


@dataclass(slots=True, kw_only=True)
class Process:
    """Is a rank of a pipeline as the clock sees it.

    channel: collectives posted, oldest first; the first of them may have begun
    hidden: collectives behind the next pass
    awaited: collectives of the last pass
    wires: transfers posted on each communicator, oldest first; those of a `Post` start together
    """

    program: Program
    at: int = 0
    stops: int = -1
    begun: Node | None = None
    channel: list[Node] = field(default_factory=list)
    channel_stops: int = -1
    hidden: list[Node] = field(default_factory=list)
    awaited: list[Node] = field(default_factory=list)
    wires: dict[int, list[set[Action]]] = field(default_factory=dict)


class Clock:
    """Runs programs tick by tick, all pipelines: a reference for `Graph.ends`.

    Knows nothing of graphs: instructions one after the other, messages that move when both sides
    have posted them and have ended what they posted before on that communicator, gathers in a
    queue, collectives that begin when every pipeline is there.
    """

    def __init__(self, made: list[Program], dp: int, durations, wires: Wires) -> None:
        self.ranks = range(len(made))
        self.wires = wires
        self.all = [[Process(program=program) for program in made] for _ in range(dp)]
        self.durations = durations  # (node, how often it came before, pipeline) -> ticks
        self.ends: dict[tuple[Node, int, int], int] = {}
        self.sent = [{} for _ in range(dp)]
        self.received = [{} for _ in range(dp)]
        self.moving = [{} for _ in range(dp)]
        self.now = 0

    def run(self) -> None:
        while not all(self.is_over(p) for pipeline in self.all for p in pipeline):
            while self.tick():
                pass
            self.now += 1
            assert self.now < 10**6
        end = max(self.ends.values())
        for d, pipeline in enumerate(self.all):
            self.finish(Node(NodeKind.NORM, -1, -1), d, begin=end)
            after = self.ends[Node(NodeKind.NORM, -1, -1), 0, d]
            for rank in range(len(pipeline)):
                self.finish(Node(NodeKind.OPTIMIZER, rank, -1), d, begin=after)
        end = max(self.ends.values())
        for d in range(len(self.all)):
            self.finish(Node(NodeKind.OVERHEAD, -1, -1), d, begin=end)

    def is_over(self, p: Process) -> bool:
        return p.at == len(p.program) and not p.channel

    def takes(self, node: Node, d: int) -> int:
        return self.durations[node, self.count(node, d), d]

    def count(self, node: Node, d: int) -> int:
        return sum(1 for n, _, e in self.ends if (n, e) == (node, d))

    def finish(self, node: Node, d: int, *, begin: int) -> None:
        key = (node, self.count(node, d), d)
        self.ends[key] = begin + self.durations[key]

    def tick(self) -> bool:
        """Does whatever can happen now; returns whether anything did."""
        moved = [self.collectives()]
        for d, pipeline in enumerate(self.all):
            moved += [self.step(p, rank, d) for rank, p in enumerate(pipeline)]
            moved.append(self.messages(d))
        return any(moved)

    def step(self, p: Process, rank: int, d: int) -> bool:
        if p.begun is not None:
            if p.stops > self.now:
                return False
            if p.begun.kind == NodeKind.PASS:
                p.awaited, p.hidden = p.hidden, []
            p.begun, p.at = None, p.at + 1
            return True
        if p.at == len(p.program):
            return False
        if any(node in p.channel for node in p.awaited):
            return False
        return self.do(p, p.program[p.at], rank, d)

    def do(self, p: Process, instruction: Instruction, rank: int, d: int) -> bool:
        match instruction:
            case RunPass(action):
                if Node(NodeKind.GATHER, rank, action.stage) in p.channel:
                    return False
                self.begin(p, Node(NodeKind.PASS, rank, action.stage, action), d)
                return True
            case Await(messages):
                if not all(m in self.moving[d] and self.moving[d][m] <= self.now for m in messages):
                    return False
            case Post():
                self.post(p, instruction, rank, d)
            case Gather(stage) | Prefetch(stage) | ReduceAhead(stage):
                node = Node(POSTED[type(instruction)], rank, stage)
                p.channel.append(node)
                p.hidden += [] if isinstance(instruction, Gather) else [node]
            case Reduce():
                return False  # `collectives` begins it
            case Drop():
                pass
        p.at += 1
        return True

    def begin(self, p: Process, node: Node, d: int) -> None:
        p.begun, p.stops = node, self.now + self.takes(node, d)
        self.finish(node, d, begin=self.now)

    def post(self, p: Process, post: Post, rank: int, d: int) -> None:
        self.sent[d] |= dict.fromkeys(post.sends, rank)
        self.received[d] |= dict.fromkeys(post.receives, rank)
        together = {*post.sends, *post.receives}
        for wire in {self.wire(message) for message in together}:
            queue = p.wires.setdefault(wire, [])
            queue.append({message for message in together if self.wire(message) == wire})

    def wire(self, message: Action) -> int:
        """The communicator: stages s and s + 1 talk over that of rank s, whoever sends."""
        lower = message.stage - (message.kind != PassKind.FORWARD)
        return lower % len(self.ranks) if self.wires == Wires.LINKS else -1

    def is_first(self, message: Action, rank: int, d: int) -> bool:
        """Whether the rank has ended all that it posted before on that communicator."""
        for together in self.all[d][rank].wires[self.wire(message)]:
            if message in together:
                return True
            if any(self.moving[d].get(m, self.now + 1) > self.now for m in together):
                return False
        raise AssertionError(f"{message} was not posted by rank {rank}")

    def messages(self, d: int) -> bool:
        new = [
            m
            for m in self.sent[d]
            if m in self.received[d]
            and m not in self.moving[d]
            and all(self.is_first(m, side[d][m], d) for side in (self.sent, self.received))
        ]
        for m in new:
            node = Node(NodeKind.MESSAGE, self.received[d][m], m.stage, m)
            self.moving[d][m] = self.now + self.takes(node, d)
            self.finish(node, d, begin=self.now)
        return bool(new)

    def collectives(self) -> bool:
        moved = False
        for rank in self.ranks:
            group = [pipeline[rank] for pipeline in self.all]
            for p in group:
                if p.channel and 0 <= p.channel_stops <= self.now:
                    p.channel.pop(0)
                    p.channel_stops = -1
                    moved = True
            if all(p.channel and p.channel_stops < 0 for p in group):
                for d, p in enumerate(group):
                    node = p.channel[0]
                    p.channel_stops = self.now + self.takes(node, d)
                    self.finish(node, d, begin=self.now)
                moved = True
            if all(self.is_at_reduction(p) for p in group):
                for d, p in enumerate(group):
                    self.begin(p, Node(NodeKind.REDUCE, rank, p.program[p.at].stage), d)
                moved = True
        return moved

    def is_at_reduction(self, p: Process) -> bool:
        is_there = p.begun is None and p.at < len(p.program)
        return is_there and isinstance(p.program[p.at], Reduce) and not p.channel


@given(
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from((1, 5, 20)),
    st.sampled_from(Wires),
)
def test_graph_and_clock_agree(
    layout, has_fsdp: bool, dp: int, seed: int, longest: int, wires: Wires
) -> None:
    schedule, pp, v, n = layout
    _, graph = step_graph(
        PipelineSection(schedule=schedule, virtual_stages=v),
        pp=pp,
        num_micro_batches=n,
        has_fsdp=has_fsdp,
        wires=wires,
    )
    durations = random_durations(graph, seed, dp=dp) * longest // 50
    ends = graph.ends(durations)
    keys: list[tuple[Node, int]] = []
    seen: dict[Node, int] = {}
    for node in graph.nodes:
        keys.append((node, seen.get(node, 0)))
        seen[node] = seen.get(node, 0) + 1
    clock = Clock(
        programs(schedule, pp, v, n, has_fsdp=has_fsdp),
        dp,
        {(*key, d): int(durations[i, 0, d]) for i, key in enumerate(keys) for d in range(dp)},
        wires,
    )
    clock.run()
    assert len(clock.ends) == len(graph.nodes) * dp
    for i, key in enumerate(keys):
        for d in range(dp):
            assert clock.ends[(*key, d)] == ends[i, 0, d], (graph.nodes[i], d)
