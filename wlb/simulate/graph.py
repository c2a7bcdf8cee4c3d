"""The events of a pipeline's step as a directed graph, which is built once for a layout.

Nodes are passes, messages and collectives over the data-parallel axis, in topological order. A node
starts when all its predecessors have ended. One walk over the nodes gives the times of any number
of steps and pipelines. Collectives start on all pipelines at the same time, when the last one is
ready.
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
    """Kinds of events."""

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
"""Kinds of nodes that all pipelines run together: collectives over the data-parallel axis."""


class Node(NamedTuple):
    """One event of a step."""

    kind: NodeKind  # the kind of event
    rank: int  # pipeline rank, for a message the receiver; -1: all ranks
    stage: int  # stage, for a message the sender's; -1: all stages
    action: Action | None = None  # the pass, or the pass whose output a message carries


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """The events of a step in topological order."""

    nodes: tuple[Node, ...]  # the events
    predecessors: tuple[tuple[int, ...], ...]  # nodes for which each node waits
    # Neighbouring pipelines that share an EP group. In stages with experts they start each pass
    # together, when the last of them is ready; weight-gradient passes do not wait.
    pipelines_per_ep_group: int = 1
    stages_with_experts: frozenset[int] = frozenset()

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return 1 + max(node.rank for node in self.nodes)

    def indices(self, kind: NodeKind) -> list[int]:
        """Return the indices of all nodes of a kind."""
        return [i for i, node in enumerate(self.nodes) if node.kind == kind]

    def ends(self, durations_ns: IntArray) -> IntArray:
        """Return when each node ends, in ns after the start of the step.

        Args:
            durations_ns: Duration of each node, shape [num_nodes, num_steps, dp].

        Returns:
            Times of the same shape.
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
                elif self._waits_for_ep_group(node):
                    grouped = ready.reshape(
                        len(ready), -1, min(self.pipelines_per_ep_group, ready.shape[1])
                    )
                    last = np.broadcast_to(grouped.max(axis=2, keepdims=True), grouped.shape)
                    ready = last.reshape(ready.shape)
                np.add(ready, durations_ns[i], out=out[i])
            else:
                out[i] = durations_ns[i]
        return out

    def _waits_for_ep_group(self, node: Node) -> bool:
        """Return whether the pipelines of an EP group start this node together."""
        if self.pipelines_per_ep_group == 1 or node.kind != NodeKind.PASS or node.action is None:
            return False
        is_of_weights = node.action.kind == PassKind.BACKWARD_WEIGHT
        return node.stage in self.stages_with_experts and not is_of_weights

    def critical_path(
        self, ends_ns: IntArray, durations_ns: IntArray, *, step: int = 0
    ) -> list[tuple[int, int]]:
        """Return the chain of events that decides the time of a step.

        Args:
            ends_ns: Ends of all nodes (`ends`).
            durations_ns: Durations of all nodes.
            step: Index of the step.

        Returns:
            (node, pipeline) pairs from the start of the step to its end, each of which waits for
            the one before it.
        """
        last = ends_ns[:, step, :]
        node, pipeline = (int(x) for x in np.unravel_index(int(last.argmax()), last.shape))
        path = [(node, pipeline)]
        while before := self.predecessors[node]:
            if is_joint(self.nodes[node]):
                pipeline = int(last[list(before)].max(axis=0).argmax())
            elif self._waits_for_ep_group(self.nodes[node]):
                group = min(self.pipelines_per_ep_group, last.shape[1])
                first = pipeline - pipeline % group
                ready = last[list(before), first : first + group].max(axis=0)
                pipeline = first + int(ready.argmax())
            # Ties go to the longer predecessor, because a pass explains the delay better than a
            # short message.
            node = max(before, key=lambda j: (last[j, pipeline], durations_ns[j, step, pipeline]))
            path.append((node, pipeline))
        return path[::-1]


def is_joint(node: Node) -> bool:
    """Return whether all pipelines run a node together, as a collective over the dp axis."""
    return node.kind in JOINT


def sorted_graph(
    nodes: Sequence[Node], predecessors: Sequence[Sequence[int]]
) -> tuple[Graph, npt.NDArray[np.int64]]:
    """Return a graph in topological order, and the place of each given node in it.

    Raises:
        ValueError: Some nodes wait for each other; the message names them.
    """
    # Nodes that become ready at the same time keep their order.
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
