"""The events of a pipeline's step as a directed graph, built once for a layout.

Nodes are passes, messages and collectives over the data-parallel axis, in topological order; a node
starts when all its predecessors have ended. One walk over the nodes gives the times of any number
of steps and pipelines. Collectives start on all pipelines together, when the last one is ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb.plan import IntArray
from wlb.simulate.order import Action, PassKind


class NodeKind(StrEnum):
    PASS = "pass"
    MESSAGE = "message"
    GATHER = "gather"
    PREFETCH = "prefetch"
    REDUCE_AHEAD = "reduce ahead"
    REDUCE = "reduce"
    NORM = "norm"
    OPTIMIZER = "optimizer"
    OVERHEAD = "overhead"


JOINT = (
    NodeKind.GATHER,
    NodeKind.PREFETCH,
    NodeKind.REDUCE_AHEAD,
    NodeKind.REDUCE,
    NodeKind.NORM,
    NodeKind.OVERHEAD,
)


class Node(NamedTuple):
    """An event. rank: pipeline rank, a message's receiver. stage, rank: -1 where all ranks take
    part. action: the pass, or the pass whose output a message carries.
    """

    kind: NodeKind
    rank: int
    stage: int
    action: Action | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """Nodes in topological order; predecessors[i] are the nodes that node i waits for. meets:
    neighbouring pipelines that wait for each other in passes of `meeting_stages`, which start when
    the last of them is ready; weights' passes have nothing to wait for.
    """

    nodes: tuple[Node, ...]
    predecessors: tuple[tuple[int, ...], ...]
    meets: int = 1
    meeting_stages: frozenset[int] = frozenset()

    @property
    def num_ranks(self) -> int:
        return 1 + max(node.rank for node in self.nodes)

    def indices(self, kind: NodeKind) -> list[int]:
        return [i for i, node in enumerate(self.nodes) if node.kind == kind]

    def ends(self, durations_ns: IntArray) -> IntArray:
        """When each node ends, ns after the step's start.

        durations_ns and the result: shape [num_nodes, num_steps, dp].
        """
        if durations_ns.shape[0] != len(self.nodes):
            raise ValueError(f"{durations_ns.shape[0]} durations for {len(self.nodes)} nodes")
        out = np.zeros_like(durations_ns)
        for i, (node, before) in enumerate(zip(self.nodes, self.predecessors, strict=True)):
            if before:
                ready = out[before[0]]
                for j in before[1:]:
                    ready = np.maximum(ready, out[j])
                if is_joint(node):
                    ready = ready.max(axis=1, keepdims=True)
                elif self._meets(node):
                    grouped = ready.reshape(len(ready), -1, min(self.meets, ready.shape[1]))
                    last = np.broadcast_to(grouped.max(axis=2, keepdims=True), grouped.shape)
                    ready = last.reshape(ready.shape)
                np.add(ready, durations_ns[i], out=out[i])
            else:
                out[i] = durations_ns[i]
        return out

    def _meets(self, node: Node) -> bool:
        if self.meets == 1 or node.kind != NodeKind.PASS or node.action is None:
            return False
        is_of_weights = node.action.kind == PassKind.BACKWARD_WEIGHT
        return node.stage in self.meeting_stages and not is_of_weights

    def critical_path(
        self, ends_ns: IntArray, durations_ns: IntArray, *, step: int = 0
    ) -> list[tuple[int, int]]:
        """(node, pipeline) from the step's start to its end: each waits for the one before it."""
        last = ends_ns[:, step, :]
        node, pipeline = (int(x) for x in np.unravel_index(int(last.argmax()), last.shape))
        path = [(node, pipeline)]
        while before := self.predecessors[node]:
            if is_joint(self.nodes[node]):
                pipeline = int(last[list(before)].max(axis=0).argmax())
            elif self._meets(self.nodes[node]):
                meets = min(self.meets, last.shape[1])
                first = pipeline - pipeline % meets
                ready = last[list(before), first : first + meets].max(axis=0)
                pipeline = first + int(ready.argmax())
            # Ties go to the longer predecessor, because a pass explains the wait better than a
            # short message.
            node = max(before, key=lambda j: (last[j, pipeline], durations_ns[j, step, pipeline]))
            path.append((node, pipeline))
        return path[::-1]


def is_joint(node: Node) -> bool:
    """Whether all pipelines run it together: collectives over the dp axis."""
    return node.kind in JOINT


def sorted_graph(
    nodes: Sequence[Node], predecessors: Sequence[Sequence[int]]
) -> tuple[Graph, npt.NDArray[np.int64]]:
    """The graph in topological order, and each given node's place in it.

    ValueError naming nodes that wait for each other.
    """
    # Nodes that become ready together keep their order.
    sorter = TopologicalSorter[int]({i: () for i in range(len(nodes))})
    for i, before in enumerate(predecessors):
        sorter.add(i, *set(before))
    try:
        order = list(sorter.static_order())
    except CycleError as error:
        cycle: list[int] = error.args[1]
        stuck = [str(nodes[i].action or nodes[i].kind) for i in cycle]
        raise ValueError(f"these wait for each other: {', '.join(stuck[:8])}") from None
    place = np.empty(len(nodes), np.int64)
    place[order] = np.arange(len(order))
    graph = Graph(
        nodes=tuple(nodes[i] for i in order),
        predecessors=tuple(tuple(sorted({int(place[j]) for j in predecessors[i]})) for i in order),
    )
    return graph, place
