"""Makes small pipelines with given times of passes."""

import numpy as np

from wlb.plan import IntArray
from wlb.simulate.graph import JOINT, Graph, NodeKind
from wlb.simulate.order import PassKind
from wlb.simulate.program import step_graph
from wlb.spec import PipelineSection, Schedule

TIMES = {
    PassKind.FORWARD: 1,
    PassKind.BACKWARD: 2,
    PassKind.BACKWARD_INPUT: 1,
    PassKind.BACKWARD_WEIGHT: 1,
}
"""Time of each pass. Backward takes twice as long as forward; each half of a split one, as long."""

LAYOUTS = (
    (Schedule.ONE_F_ONE_B, 1, 1, 3),
    (Schedule.ONE_F_ONE_B, 2, 1, 2),
    (Schedule.ONE_F_ONE_B, 3, 1, 5),
    (Schedule.ONE_F_ONE_B, 4, 1, 8),
    (Schedule.INTERLEAVED_1F1B, 2, 1, 3),
    (Schedule.INTERLEAVED_1F1B, 2, 2, 4),
    (Schedule.INTERLEAVED_1F1B, 3, 2, 3),
    (Schedule.INTERLEAVED_1F1B, 2, 4, 4),
    (Schedule.INTERLEAVED_1F1B, 4, 2, 2),
    (Schedule.INTERLEAVED_ZERO_BUBBLE, 2, 1, 3),
    (Schedule.INTERLEAVED_ZERO_BUBBLE, 2, 2, 4),
    (Schedule.INTERLEAVED_ZERO_BUBBLE, 3, 2, 6),
)
"""(schedule, pp, virtual stages, micro-batches)."""


def durations_of(graph: Graph, *, message: int = 0, other: int = 0) -> IntArray:
    """Returns the durations of one step of one pipeline, shape [nodes, 1, 1].

    Passes take TIMES.
    """
    out = np.full((len(graph.nodes), 1, 1), other, np.int64)
    for i, node in enumerate(graph.nodes):
        if node.kind == NodeKind.PASS:
            out[i] = TIMES[node.action.kind]
        elif node.kind == NodeKind.MESSAGE:
            out[i] = message
    return out


def random_durations(graph: Graph, seed: int, *, steps: int = 1, dp: int = 1) -> IntArray:
    """Returns random durations, shape [nodes, steps, dp]: whole numbers below 50, often 0.

    Nodes in which all pipelines take part, such as collectives, have equal durations on all
    pipelines. Some of them take 20 times as long, so that passes wait for them.
    """
    rng = np.random.default_rng(seed)
    shape = (len(graph.nodes), steps, dp)
    out = rng.integers(0, 50, shape) * (rng.random(shape) < 0.8)
    for kind in JOINT:
        for i in graph.indices(kind):
            out[i] = out[i, :, :1] * rng.choice((1, 20))
    return out.astype(np.int64)


def times_of(graph: Graph, ends: IntArray, durations: IntArray, rank: int) -> str:
    """Formats the passes of a rank as "0F0 0-1, 0B0 5-7": name, start and end of each pass."""
    words: list[str] = []
    for i in graph.indices(NodeKind.PASS):
        if graph.nodes[i].rank == rank:
            stop = int(ends[i, 0, 0])
            words.append(f"{graph.nodes[i].action} {stop - int(durations[i, 0, 0])}-{stop}")
    return ", ".join(sorted(words, key=lambda w: int(w.split()[1].split("-")[0])))


def graph_of(schedule: Schedule, pp: int, v: int, n: int, *, has_fsdp: bool = False) -> Graph:
    _, graph = step_graph(
        PipelineSection(schedule=schedule, virtual_stages=v),
        pp=pp,
        num_micro_batches=n,
        has_fsdp=has_fsdp,
    )
    return graph
