"""What each pipeline rank does besides its passes, as the executor does it, and the graph of it.

Messages: interleaved schedules post a send after a pass and the peer's receive at that place of the
peer's list, and wait for a receive when its pass begins, never for a send (torch's
`_PipelineScheduleRuntime`). 1F1B posts by hand: a send of one direction and a receive of the other
go together, and it waits for both, so for the peer too (`Schedule1F1B`). A message moves once both
sides have posted it.

Parameters (FSDP2 over dp x cp): with several stages a rank, the gathers of the next three stages
that will be needed are posted before each pass and others are dropped; with one stage a rank its
layers are gathered one ahead of the other, so that the first pass waits for the first layer and
what follows it for the rest. Gathers of a rank go one after the other. Gradients are reduced where
a stage's last backward has run, and the rank waits for it. At the end all ranks meet for the
gradient norm, then run the optimiser, then do what nothing here explains (`cluster.overhead`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wlb.simulate.graph import Graph, Node, NodeKind, sorted_graph
from wlb.simulate.order import Action, Kind, Order, pipeline_order
from wlb.spec import Schedule

ACTIVE_STAGES = 3
"""Stages whose parameters torch's pipeline runtime keeps gathered."""


class Pass(NamedTuple):
    action: Action


class Send(NamedTuple):
    message: Action


class Receive(NamedTuple):
    message: Action


class Await(NamedTuple):
    messages: tuple[Action, ...]


class Gather(NamedTuple):
    """Asynchronous; passes of the stage wait for it."""

    stage: int


class Prefetch(NamedTuple):
    """The layers of a stage after its first, while the first is computed; then it is awaited."""

    stage: int


class Reduce(NamedTuple):
    stage: int


Instruction = Pass | Send | Receive | Await | Gather | Prefetch | Reduce


def step_graph(
    schedule: Schedule, *, pp: int, virtual_stages: int, num_micro_batches: int, has_fsdp: bool
) -> tuple[Order, Graph]:
    """The passes of every rank, and the graph of a step.

    has_fsdp: whether parameters are gathered and gradients reduced over other ranks.
    """
    order = pipeline_order(
        schedule, pp=pp, virtual_stages=virtual_stages, num_micro_batches=num_micro_batches
    )
    num_stages = pp * virtual_stages
    if schedule == Schedule.ONE_F_ONE_B and pp > 1:
        programs = [
            _OneFOneB(rank=rank, pp=pp, n=num_micro_batches).program() for rank in range(pp)
        ]
    else:
        programs = _posted_early(order, num_stages)
    if has_fsdp:
        look_ahead = pp > 1 and schedule != Schedule.ONE_F_ONE_B
        programs = [list(_with_collectives(p, look_ahead=look_ahead)) for p in programs]
    return order, _graph(programs)


def _input_of(action: Action, num_stages: int) -> Action | None:
    """The pass on another rank whose output this pass waits for, as the message's name."""
    stage, kind, i = action
    if kind == Kind.FORWARD and stage > 0:
        return Action(stage - 1, Kind.FORWARD, i)
    if kind.sends_gradient and stage < num_stages - 1:
        return Action(stage + 1, kind, i)
    return None


def _output_of(action: Action, num_stages: int) -> tuple[Action, int] | None:
    """The message a pass sends, and the stage that receives it."""
    if action.kind == Kind.FORWARD and action.stage < num_stages - 1:
        return action, action.stage + 1
    if action.kind.sends_gradient and action.stage > 0:
        return action, action.stage - 1
    return None


def _posted_early(order: Order, num_stages: int) -> list[list[Instruction]]:
    """Ranks take turns, in rank order, at their next pass; one whose input nobody has sent skips
    its turn. A pass's send and the peer's receive are written down at once."""
    pp = len(order)
    programs: list[list[Instruction]] = [[] for _ in order]
    sent: set[Action] = set()
    at = [0] * pp
    if pp == 1:
        return [[Pass(action) for action in order[0]]]
    while any(at[rank] < len(order[rank]) for rank in range(pp)):
        moved = False
        for rank, actions in enumerate(order):
            if at[rank] == len(actions):
                continue
            action = actions[at[rank]]
            needed = _input_of(action, num_stages)
            if needed is not None and needed not in sent:
                continue
            if needed is not None:
                programs[rank].append(Await((needed,)))
            programs[rank].append(Pass(action))
            if (output := _output_of(action, num_stages)) is not None:
                message, to_stage = output
                programs[rank].append(Send(message))
                programs[to_stage % pp].append(Receive(message))
                sent.add(message)
            at[rank] += 1
            moved = True
        if not moved:
            stuck = [str(actions[at[r]]) for r, actions in enumerate(order) if at[r] < len(actions)]
            raise ValueError(f"these passes wait for inputs that nobody sends: {', '.join(stuck)}")
    return programs


@dataclass(slots=True, kw_only=True)
class _OneFOneB:
    """One stage a rank; `Schedule1F1B` as it runs."""

    rank: int
    pp: int
    n: int
    out: list[Instruction] = field(default_factory=list[Instruction])
    unfinished: list[Action] = field(default_factory=list[Action])
    """Sends posted and not waited for."""

    def program(self) -> list[Instruction]:
        warmup = min(self.n, self.pp - self.rank)
        for i in range(warmup):
            self.exchange(None, self.incoming(Kind.FORWARD, i))
            self.run(Kind.FORWARD, i)
            self.finish_sends()
            if i < warmup - 1:
                self.send_alone(self.outgoing(Kind.FORWARD, i))
        backward = 0
        for forward in range(warmup, self.n + 1):
            sent = self.outgoing(Kind.FORWARD, forward - 1)
            self.exchange(sent, self.incoming(Kind.BACKWARD, backward))
            self.run(Kind.BACKWARD, backward)
            if forward < self.n:
                sent = self.outgoing(Kind.BACKWARD, backward)
                self.exchange(sent, self.incoming(Kind.FORWARD, forward))
                self.run(Kind.FORWARD, forward)
            backward += 1
        self.send_alone(self.outgoing(Kind.BACKWARD, backward - 1))
        for i in range(backward, self.n):
            self.exchange(None, self.incoming(Kind.BACKWARD, i))
            self.run(Kind.BACKWARD, i)
            self.finish_sends()
            self.send_alone(self.outgoing(Kind.BACKWARD, i))
        self.finish_sends()
        return self.out

    def run(self, kind: Kind, i: int) -> None:
        self.out.append(Pass(Action(self.rank, kind, i)))

    def incoming(self, kind: Kind, i: int) -> Action | None:
        return _input_of(Action(self.rank, kind, i), self.pp)

    def outgoing(self, kind: Kind, i: int) -> Action | None:
        output = _output_of(Action(self.rank, kind, i), self.pp)
        return None if output is None else output[0]

    def exchange(self, send: Action | None, receive: Action | None) -> None:
        """Both directions are posted together and waited for."""
        if send is not None:
            self.out.append(Send(send))
        if receive is not None:
            self.out.append(Receive(receive))
        self.out.append(Await(tuple(m for m in (send, receive) if m is not None)))

    def send_alone(self, message: Action | None) -> None:
        if message is not None:
            self.out.append(Send(message))
            self.unfinished.append(message)

    def finish_sends(self) -> None:
        self.out.append(Await(tuple(self.unfinished)))
        self.unfinished.clear()


def _with_collectives(program: Sequence[Instruction], *, look_ahead: bool) -> Iterable[Instruction]:
    passes = [i.action for i in program if isinstance(i, Pass)]
    reduced_after = {a.stage: k for k, a in enumerate(passes) if a.kind != Kind.BACKWARD_INPUT}
    active: list[int] = []
    k = 0
    for instruction in program:
        if not isinstance(instruction, Pass):
            yield instruction
            continue
        wanted = _next_stages(passes[k:], ACTIVE_STAGES if look_ahead else len(passes))
        kept = [stage for stage in active if stage in wanted]
        for stage in wanted:
            if stage not in kept:
                yield Gather(stage)
            if stage not in kept and not look_ahead:
                yield Prefetch(stage)
        active = kept + [stage for stage in wanted if stage not in kept]
        yield instruction
        if reduced_after[instruction.action.stage] == k:
            yield Reduce(instruction.action.stage)
        k += 1


def _next_stages(passes: Sequence[Action], count: int) -> list[int]:
    """The first `count` different stages of what is to come."""
    out: list[int] = []
    for action in passes:
        if action.stage not in out:
            out.append(action.stage)
            if len(out) == count:
                break
    return out


@dataclass(slots=True)
class _Builder:
    """Nodes and what they wait for, while programs are read."""

    nodes: list[Node] = field(default_factory=list[Node])
    before: list[set[int]] = field(default_factory=list[set[int]])
    messages: dict[Action, int] = field(default_factory=dict[Action, int])

    def add(self, node: Node, before: Iterable[int]) -> int:
        self.nodes.append(node)
        self.before.append(set(before))
        return len(self.nodes) - 1

    def message(self, message: Action) -> int:
        if message not in self.messages:
            node = Node(NodeKind.MESSAGE, -1, message.stage, message)
            self.messages[message] = self.add(node, ())
        return self.messages[message]


def _graph(programs: Sequence[Sequence[Instruction]]) -> Graph:
    made = _Builder()
    ends = [_read(made, rank, program) for rank, program in enumerate(programs)]
    norm = made.add(Node(NodeKind.NORM, -1, -1), set[int]().union(*ends))
    updates = {
        made.add(Node(NodeKind.OPTIMIZER, rank, -1), {norm}) for rank in range(len(programs))
    }
    made.add(Node(NodeKind.OVERHEAD, -1, -1), updates)
    graph, _ = sorted_graph(made.nodes, [sorted(b) for b in made.before])
    return graph


def _read(made: _Builder, rank: int, program: Sequence[Instruction]) -> set[int]:
    """Nodes of one rank's program; what has to be over at its end."""
    point: set[int] = set()  # what has to be over for the program to have come here
    gathered: dict[int, int] = {}
    channel: set[int] = set()  # the last gather
    prefetched: set[int] = set()
    for instruction in program:
        match instruction:
            case Pass(action):
                before = point | ({gathered[action.stage]} if gathered else set[int]())
                node = Node(NodeKind.PASS, rank, action.stage, action)
                point = {made.add(node, before)} | prefetched
                prefetched = set()
            case Send(message):
                made.before[made.message(message)] |= point
            case Receive(message):
                index = made.message(message)
                made.nodes[index] = made.nodes[index]._replace(rank=rank)
                made.before[index] |= point
            case Await(messages):
                point = point | {made.message(m) for m in messages}
            case Gather(stage):
                node = Node(NodeKind.GATHER, rank, stage)
                channel = {made.add(node, point | channel)}
                gathered[stage] = next(iter(channel))
            case Prefetch(stage):
                node = Node(NodeKind.PREFETCH, rank, stage)
                prefetched = channel = {made.add(node, point | channel)}
            case Reduce(stage):
                point = {made.add(Node(NodeKind.REDUCE, rank, stage), point | channel)}
    return point | channel
