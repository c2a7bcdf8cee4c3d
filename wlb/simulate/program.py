"""The program of each pipeline rank, and the graph of events made from all programs.

A program is the list of instructions that a rank runs in a step: passes, sends and receives, waits,
and FSDP's all-gathers and reduce-scatters. wlb/simulate/README.md describes the programs of each
schedule. Programs of interleaved schedules equal torch's lowered schedules, action for action
(tests/simulate/test_program.py).

NCCL runs the operations of a communicator one after the other, in the order in which a rank posts
them. So while a receive waits for its sender, everything that the rank posts later on the same
communicator waits too. The graph therefore has an edge between consecutive transfers of a rank on
one communicator. `Wires` says which transfers share a communicator.

Collectives of TP, CP and EP need no such edges, because all members post them in the same order
from one stream. FSDP's collectives of a rank are chained by edges (`channel` in `_read`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from wlb.simulate.graph import Graph, Node, NodeKind, sorted_graph
from wlb.simulate.order import Action, Order, PassKind, pipeline_order
from wlb.spec import PipelineSection, Schedule

ACTIVE_STAGES = 3
"""Number of stages whose parameters torch's pipeline runtime keeps gathered at the same time."""


class RunPass(NamedTuple):
    """Instruction: run a pass."""

    action: Action


class Post(NamedTuple):
    """Instruction: start sends and receives, which NCCL runs together.

    A transfer is named by the pass whose output it moves.
    """

    sends: tuple[Action, ...] = ()  # passes of this rank whose outputs are sent
    receives: tuple[Action, ...] = ()  # passes of other ranks whose outputs are received


class Await(NamedTuple):
    """Instruction: wait until these transfers are done."""

    messages: tuple[Action, ...]  # passes whose outputs the transfers move


class Gather(NamedTuple):
    """Instruction: start to all-gather a stage's parameters; the stage's passes wait for it."""

    stage: int


class Prefetch(NamedTuple):
    """Instruction: all-gather the parameters of a stage's second and later layers.

    This runs during the next pass, which computes the first layer meanwhile and waits for the rest.
    """

    stage: int


class Drop(NamedTuple):
    """Instruction: free a stage's gathered parameters, which takes no time."""

    stage: int


class ReduceAhead(NamedTuple):
    """Instruction: reduce-scatter the gradients of a stage's second and later layers.

    This runs during the next pass, and instructions after that pass wait for it.
    """

    stage: int


class Reduce(NamedTuple):
    """Instruction: reduce-scatter a stage's gradients; later instructions wait for it.

    After a `ReduceAhead` of the stage, only the gradients of the first layer are left.
    """

    stage: int


Instruction = RunPass | Post | Await | Gather | Prefetch | Drop | ReduceAhead | Reduce
"""One thing that a pipeline rank does in a step, such as a pass or an all-gather."""
Program = list[Instruction]
"""The instructions that one pipeline rank runs in a step, in order."""


class Wires(StrEnum):
    """Which sends and receives of a pipeline rank share a communicator, and therefore a stream."""

    # Transfers between the same two ranks share a communicator, as in wlb (`wlb.parallel.mesh`).
    LINKS = "links"
    # All transfers share a communicator, as in torch if NCCL starts eagerly (with a device_id).
    ONE = "one"


def step_graph(
    pipeline: PipelineSection,
    *,
    pp: int,
    num_micro_batches: int,
    has_fsdp: bool,
    wires: Wires = Wires.LINKS,
) -> tuple[Order, Graph]:
    """Return the order of every rank's passes, and the graph of all events of a step.

    Args:
        pipeline: Schedule and number of virtual stages.
        pp: Number of pipeline ranks.
        num_micro_batches: Number of micro-batches of a pipeline.
        has_fsdp: Whether parameters are sharded over dp x cp.
        wires: Which transfers share a communicator.
    """
    order = pipeline_order(pipeline, pp=pp, num_micro_batches=num_micro_batches)
    return order, _graph(rank_programs(pipeline.schedule, order, has_fsdp=has_fsdp), wires)


def rank_programs(schedule: Schedule, order: Order, *, has_fsdp: bool) -> list[Program]:
    """Return the instructions that each pipeline rank runs in a step, up to the gradient norm.

    Args:
        schedule: The pipeline schedule.
        order: Passes of each rank.
        has_fsdp: Whether parameters are sharded over dp x cp.
    """
    pp = len(order)
    if looks_ahead(schedule, pp=pp):
        programs = _posted_early([list(_with_stages_ahead(passes)) for passes in order])
        if not has_fsdp:
            programs = [
                [i for i in program if not isinstance(i, Gather | Drop | Reduce)]
                for program in programs
            ]
        return programs
    programs: list[Program]
    if pp == 1:
        passes: Program = [RunPass(action) for action in order[0]]
        reductions: Program = [ReduceAhead(0)] if has_fsdp else []
        programs = [[*passes[:-1], *reductions, passes[-1]]]
    else:
        programs = [list(_one_f_one_b(passes, num_stages=pp)) for passes in order]
    return [_with_layers_ahead(p, rank) if has_fsdp else p for rank, p in enumerate(programs)]


def looks_ahead(schedule: Schedule, *, pp: int) -> bool:
    """Return whether FSDP gathers whole stages in advance, rather than layer by layer.

    This is so in interleaved schedules with pp > 1, because torch's runtime of these schedules
    gathers all parameters of a stage before its passes.
    """
    return pp > 1 and schedule != Schedule.ONE_F_ONE_B


def _input_of(action: Action, num_stages: int) -> Action | None:
    """Return the pass of another stage whose output this pass needs; None if it needs none."""
    stage, kind, i = action
    if kind == PassKind.FORWARD and stage > 0:
        return Action(stage - 1, PassKind.FORWARD, i)
    if kind.sends_gradient and stage < num_stages - 1:
        return Action(stage + 1, kind, i)
    return None


def _receiver_of(action: Action, num_stages: int) -> int | None:
    """Return the stage to which a pass sends its output; None if it sends none."""
    if action.kind == PassKind.FORWARD and action.stage < num_stages - 1:
        return action.stage + 1
    if action.kind.sends_gradient and action.stage > 0:
        return action.stage - 1
    return None


def _posted_early(programs: Sequence[Program]) -> list[Program]:
    """Add sends, receives and waits to the instructions of an interleaved schedule.

    torch adds them in the same way: The ranks are simulated in turns, one instruction a turn. A
    rank skips its turn while the input of its next pass has not been sent. When a pass sends its
    output, the send is added to this rank's instructions, and the receive to the peer's. So a peer
    may post a receive long before the pass that needs it.

    Args:
        programs: The instructions of each rank, in order.
    """
    pp = len(programs)
    num_stages = 1 + max(i.action.stage for p in programs for i in p if isinstance(i, RunPass))
    out: list[Program] = [[] for _ in programs]
    sent: set[Action] = set()
    left = [deque(program) for program in programs]
    while any(left):
        moved = False
        for rank, coming in enumerate(left):
            if not coming or not (ready := _ready(coming[0], sent, num_stages)):
                continue
            out[rank] += ready
            moved = True
            instruction = coming.popleft()
            if not isinstance(instruction, RunPass):
                continue
            message = instruction.action
            if (to_stage := _receiver_of(message, num_stages)) is not None:
                out[rank].append(Post(sends=(message,)))
                out[to_stage % pp].append(Post(receives=(message,)))
                sent.add(message)
        # Every rank waits for an input that no rank sends, so this order of passes is a deadlock.
        if not moved:
            stuck = [str(c[0].action) for c in left if c and isinstance(c[0], RunPass)]
            raise ValueError(
                "the order of passes is a deadlock: these passes wait for inputs that no rank "
                f"sends: {', '.join(stuck)}"
            )
    return out


def _ready(instruction: Instruction, sent: set[Action], num_stages: int) -> Program:
    """Return [wait for the input, instruction]; [] if the input is not sent yet.

    An instruction that needs no input from another stage is returned alone, without the wait.

    Args:
        instruction: The next instruction of a rank.
        sent: Passes whose outputs have been sent so far.
        num_stages: Number of stages of the model.
    """
    if not isinstance(instruction, RunPass):
        return [instruction]
    needed = _input_of(instruction.action, num_stages)
    if needed is None:
        return [instruction]
    return [Await((needed,)), instruction] if needed in sent else []


def _one_f_one_b(passes: Sequence[Action], num_stages: int) -> Iterable[Instruction]:
    """Yield the instructions of a rank with one stage, as in torch's `Schedule1F1B`.

    Where forward and backward passes alternate, the rank posts the send of a pass's output together
    with the receive of the next pass's input, and waits for both. Elsewhere it posts the send
    alone, and waits for it after the next pass.
    """

    def sent_by(action: Action | None) -> tuple[Action, ...]:
        if action is None or _receiver_of(action, num_stages) is None:
            return ()
        return (action,)

    sent_alone: tuple[Action, ...] = ()
    for before, action, after in zip([None, *passes], passes, [*passes[1:], None], strict=False):
        # Where forward and backward alternate, the output of the pass before and the input of this
        # pass travel between the same two ranks, so they are posted together.
        takes_turns = before is not None and before.kind != action.kind
        send = sent_by(before) if takes_turns else ()
        needed = _input_of(action, num_stages)
        receive = () if needed is None else (needed,)
        if send or receive:
            yield Post(send, receive)
        yield Await(send + receive)
        yield RunPass(action)
        if not takes_turns:
            yield Await(sent_alone)
            sent_alone = ()
        if after is None or after.kind == action.kind:
            sent_alone = sent_by(action)
            if sent_alone:
                yield Post(sent_alone)
    yield Await(sent_alone)


def _with_stages_ahead(passes: Sequence[Action]) -> Iterable[Instruction]:
    """Yield a rank's passes with the FSDP instructions that torch's pipeline runtime adds.

    The parameters of the next `ACTIVE_STAGES` stages are kept gathered.
    """
    # A stage's gradients are reduced after its last backward or weight-gradient pass. An
    # input-gradient pass does not complete any.
    last = {a.stage: k for k, a in enumerate(passes) if a.kind != PassKind.BACKWARD_INPUT}
    active: list[int] = []
    for k, action in enumerate(passes):
        # Free the stages that are not needed soon, and gather the next ones.
        wanted = _next_stages(passes[k:], ACTIVE_STAGES)
        yield from (Drop(stage) for stage in sorted(set(active) - set(wanted)))
        yield from (Gather(stage) for stage in wanted if stage not in active)
        active = [*(s for s in active if s in wanted), *(s for s in wanted if s not in active)]
        yield RunPass(action)
        if last[action.stage] == k:
            yield Reduce(action.stage)
    yield from (Drop(stage) for stage in sorted(active))


def _with_layers_ahead(program: Program, stage: int) -> Program:
    """Add FSDP's collectives to the instructions of a rank that has a single stage.

    Parameters are gathered before the first pass, and gradients are reduced at the end.

    Args:
        program: Instructions of the rank.
        stage: Number of its stage.
    """
    first = next(k for k, i in enumerate(program) if isinstance(i, RunPass))
    return [*program[:first], Gather(stage), Prefetch(stage), *program[first:], Reduce(stage)]


def _next_stages(passes: Sequence[Action], count: int) -> list[int]:
    """Return the first `count` different stages that occur in `passes`."""
    out: list[int] = []
    for action in passes:
        if action.stage not in out:
            out.append(action.stage)
            if len(out) == count:
                break
    return out


@dataclass(slots=True)
class _Builder:
    """Collects the nodes of a graph and their predecessors from the ranks' instructions."""

    nodes: list[Node] = field(default_factory=list[Node])  # the nodes so far
    # Indices of the predecessors of each node.
    before: list[set[int]] = field(default_factory=list[set[int]])
    # Index of each message's node, by the pass whose output it carries.
    messages: dict[Action, int] = field(default_factory=dict[Action, int])
    # By (rank, communicator), the nodes of the transfers that the rank posted there last.
    busy: dict[tuple[int, int], set[int]] = field(default_factory=dict[tuple[int, int], set[int]])

    def add(self, node: Node, before: Iterable[int]) -> int:
        """Add a node that waits for the nodes with indices `before`, and return its index."""
        self.nodes.append(node)
        self.before.append(set(before))
        return len(self.nodes) - 1

    def message(self, message: Action) -> int:
        """Return the index of a message's node; the first call for a message adds the node.

        Args:
            message: The pass whose output the message carries.
        """
        if message not in self.messages:
            node = Node(NodeKind.MESSAGE, -1, message.stage, message)
            self.messages[message] = self.add(node, ())
        return self.messages[message]

    def post(
        self, post: Post, rank: int, ready: set[int], wire_of: Callable[[Action], int]
    ) -> None:
        """Add graph edges so that transfers start when a rank posts them.

        The transfers also wait for those that the rank posted earlier on the same communicator.

        Args:
            post: The transfers.
            rank: The pipeline rank that posts them.
            ready: Nodes that end before the rank posts them.
            wire_of: Returns the communicator of a transfer.
        """
        started: dict[tuple[int, int], set[int]] = {}
        for message in (*post.sends, *post.receives):
            index = self.message(message)
            if message in post.receives:
                self.nodes[index] = self.nodes[index]._replace(rank=rank)
            wire = rank, wire_of(message)
            self.before[index] |= ready | self.busy.get(wire, set())
            started.setdefault(wire, set()).add(index)
        self.busy |= started


def _graph(programs: Sequence[Sequence[Instruction]], wires: Wires) -> Graph:
    """Return the graph of a step's events.

    These are all ranks' instructions, then the gradient norm, AdamW and the overhead of the step.

    Args:
        programs: The instructions of each pipeline rank.
        wires: Which transfers share a communicator.
    """
    builder, pp = _Builder(), len(programs)

    def wire_of(message: Action) -> int:
        return _link_of(message, pp) if wires == Wires.LINKS else 0

    ends = [_read(builder, rank, program, wire_of) for rank, program in enumerate(programs)]
    norm = builder.add(Node(NodeKind.NORM, -1, -1), set[int]().union(*ends))
    updates = {
        builder.add(Node(NodeKind.OPTIMIZER, rank, -1), {norm}) for rank in range(len(programs))
    }
    builder.add(Node(NodeKind.OVERHEAD, -1, -1), updates)
    graph, _ = sorted_graph(builder.nodes, [sorted(b) for b in builder.before])
    return graph


def _read(
    builder: _Builder, rank: int, program: Sequence[Instruction], wire_of: Callable[[Action], int]
) -> set[int]:
    """Add the events of one rank's instructions to the graph.

    The result has the indices of the nodes for which the end of the step waits.

    Args:
        builder: Collects the nodes.
        rank: The pipeline rank.
        program: The rank's instructions, in order.
        wire_of: Returns the communicator of a transfer.
    """
    # State while the program is read:
    # - point: nodes that must end before the next instruction starts
    # - gathered: for each stage, the node that gathered the stage's parameters
    # - channel: the latest FSDP collective, for which the next FSDP collective waits
    # - hidden: collectives that run during the next pass
    point: set[int] = set()
    gathered: dict[int, int] = {}
    channel: set[int] = set()
    hidden: set[int] = set()
    for instruction in program:
        match instruction:
            case RunPass(action):
                before = point | ({gathered[action.stage]} if gathered else set[int]())
                node = Node(NodeKind.PASS, rank, action.stage, action)
                point = {builder.add(node, before)} | hidden
                hidden = set()
            case Post():
                builder.post(instruction, rank, point, wire_of)
            case Await(messages):
                point = point | {builder.message(m) for m in messages}
            case Gather(stage):
                node = Node(NodeKind.GATHER, rank, stage)
                channel = {builder.add(node, point | channel)}
                gathered[stage] = next(iter(channel))
            case Prefetch(stage) | ReduceAhead(stage):
                is_gather = isinstance(instruction, Prefetch)
                kind = NodeKind.PREFETCH if is_gather else NodeKind.REDUCE_AHEAD
                hidden = channel = {builder.add(Node(kind, rank, stage), point | channel)}
            case Drop():
                pass
            case Reduce(stage):
                point = {builder.add(Node(NodeKind.REDUCE, rank, stage), point | channel)}
    return point | channel


def _link_of(message: Action, pp: int) -> int:
    """Return which pair of ranks a message uses; pair i is pipeline ranks i and (i + 1) % pp."""
    first_stage = message.stage if message.kind == PassKind.FORWARD else message.stage - 1
    return first_stage % pp
